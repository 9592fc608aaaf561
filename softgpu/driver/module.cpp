#include "module.h"

#include <elf.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <sstream>

#include "device.h"
#include "finding.h"
#include "memory.h"
#include "stream.h"

namespace softgpu {
namespace {

std::atomic<Finder> finder{nullptr};

std::set<const Module*>& modules() {
  static auto* all = new std::set<const Module*>;
  return *all;
}

// ELF-64 object file format: the tables at the end of the file.
std::uint64_t length_of(const void* image) {
  Elf64_Ehdr header;
  std::memcpy(&header, image, sizeof header);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64) return 0;
  return std::max(header.e_shoff + std::uint64_t{header.e_shentsize} * header.e_shnum,
                  header.e_phoff + std::uint64_t{header.e_phentsize} * header.e_phnum);
}

Status parse(const char* answer, Module& module) {
  std::istringstream lines(answer);
  std::string library;
  std::getline(lines, library);
  const std::size_t tab = library.find('\t');
  const std::string source = tab == std::string::npos ? "" : library.substr(tab + 1);
  library.resize(std::min(tab, library.size()));
  if (library.rfind("error ", 0) == 0) {
    std::string what;
    std::getline(lines, what);
    report(what);
    return static_cast<Status>(std::stoi(library.substr(6)));
  }
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    Kernel kernel;
    kernel.library = library;
    kernel.source = source;
    words >> kernel.name >> kernel.registers >> kernel.static_shared_bytes;
    for (std::uint64_t bytes; words >> bytes;) kernel.argument_sizes.push_back(bytes);
    module.kernels.push_back(kernel);
  }
  return success;
}

}  // namespace

void set_finder(Finder function) { finder = function; }

Status load(const void* image, Module** module) {
  const std::uint64_t bytes = length_of(image);
  if (!bytes) return invalid_image;
  const Finder find = finder;
  if (!find) {
    report("an image is loaded and no one says what it was made from: import softgpu first");
    return invalid_image;
  }
  auto made = std::make_unique<Module>();
  if (const Status status = parse(find(image, bytes), *made)) return status;
  *module = made.release();
  return success;
}

Status adopt(Module* module) {
  module->device = current_device();
  modules().insert(module);
  return success;
}

Status unload(Module* module) {
  if (!modules().erase(module)) return invalid_handle;
  delete module;
  return success;
}

Status find_function(Module* module, const char* name, Function** function) {
  if (!modules().count(module)) return invalid_handle;
  for (const Kernel& kernel : module->kernels) {
    if (kernel.name != name) continue;
    auto& made = module->functions[name];
    if (!made) made = std::make_unique<Function>(Function{kernel, module});
    *function = made.get();
    return success;
  }
  return not_found;
}

std::size_t module_count() { return modules().size(); }

bool is_function(const Function* function) {
  for (const Module* module : modules())
    for (const auto& [name, made] : module->functions)
      if (made.get() == function) return true;
  return false;
}

Status check_launch(const Function& function, const std::uint32_t grid[3], const std::uint32_t block[3],
                    std::uint32_t shared_bytes) {
  for (int i = 0; i < 3; i++)
    if (!grid[i] || !block[i]) return invalid_value;
  if (grid[0] > unsigned{MAX_GRID_X} || grid[1] > MAX_GRID_YZ || grid[2] > MAX_GRID_YZ || block[2] > MAX_BLOCK_Z)
    return invalid_value;
  const std::uint64_t threads = std::uint64_t{block[0]} * block[1] * block[2];
  if (threads > MAX_THREADS) return invalid_value;
  if (shared_bytes > static_cast<std::uint32_t>(function.dynamic_shared_limit)) return invalid_value;
  if (static_cast<int>(shared_bytes) + function.kernel.static_shared_bytes > shared_bytes_opt_in()) return invalid_value;
  // Registers are given to warps in units of 256: Programming Guide, "Multiprocessor Level".
  const std::uint64_t warps = (threads + 31) / 32, registers = (function.kernel.registers + 7) / 8 * 8;
  return warps * 32 * registers > REGISTERS ? out_of_resources : success;
}

Status allow_shared(Function& function, int bytes) {
  if (bytes < 0 || bytes + function.kernel.static_shared_bytes > shared_bytes_opt_in()) return invalid_value;
  function.dynamic_shared_limit = bytes;
  return success;
}

}  // namespace softgpu
