// Modules: from an image that the driver is given to a library that runs its kernels on the CPU.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "status.h"

namespace softgpu {

struct Kernel {
  std::string library, name;
  std::string source;            // what findings call its file
  int registers = 0;             // a thread
  int static_shared_bytes = 0;   // a block
  std::vector<std::uint64_t> argument_sizes;
};

struct Module;

struct Function {
  Kernel kernel;
  Module* module = nullptr;
  int dynamic_shared_limit = 48 << 10;
};

struct Module {
  int device = 0;
  std::vector<Kernel> kernels;
  std::map<std::string, std::unique_ptr<Function>> functions;
};

// Finds what an image with these bytes was made from. Answers with lines of text: first the library's path, a tab and
// the source's name, then for each kernel: name, registers, static shared bytes, sizes of the arguments. Or "error
// STATUS" and a line that says what is wrong. The text must live until the thread's next call.
using Finder = const char* (*)(const void* image, std::uint64_t bytes);
void set_finder(Finder finder);

// image: an ELF file, whose headers tell its length. Waits for a compiler, so nothing is locked.
Status load(const void* image, Module** module);
// Those that expect `state_lock`:
Status adopt(Module* module);
Status unload(Module* module);
Status find_function(Module* module, const char* name, Function** function);
std::size_t module_count();
bool is_function(const Function* function);

// CUDA Driver API, "Execution Control": what a launch may ask for.
Status check_launch(const Function& function, const std::uint32_t grid[3], const std::uint32_t block[3],
                    std::uint32_t shared_bytes);
Status allow_shared(Function& function, int bytes);

}  // namespace softgpu
