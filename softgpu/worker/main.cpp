// softgpu-worker BEGIN BYTES: runs kernels one after another, as the driver asks for them on file 3. File 4 is the
// device's memory. Ends when the driver's end of the socket is closed.
#include <dlfcn.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../driver/message.h"
#include "emulation/state.cuh"  // of kernels_cu
#include "tracker.h"

namespace {

constexpr int SOCKET = 3, MEMORY = 4;
constexpr double NO_LIMIT = 1e6;  // seconds: a driver without a display has no watchdog

void receive(void* data, std::size_t bytes) {
  if (bytes && recv(SOCKET, data, bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) std::exit(0);
}

template <class T>
std::vector<T> receive(std::size_t count) {
  std::vector<T> all(count);
  receive(all.data(), count * sizeof(T));
  return all;
}

void send(const void* data, std::size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes) {
    const ssize_t n = ::send(SOCKET, at, bytes, MSG_NOSIGNAL);
    if (n <= 0) std::exit(0);
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

// ---- memory that each launch lends to its threads: kernels_cu/emulation/state.cuh, Arena

constexpr std::size_t PAGE = 4096, GUARD = 64 << 20;

char* map_between_guards(std::size_t bytes) {
  void* map = mmap(nullptr, bytes + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED || mprotect(static_cast<char*>(map) + GUARD, bytes, PROT_READ | PROT_WRITE)) {
    std::perror("softgpu-worker: no memory for stacks");
    std::exit(1);
  }
  return static_cast<char*>(map) + GUARD;
}

emulation::Arena make_arena() {
  constexpr std::size_t stacks = (emulation::MAX_THREADS + 1) * emulation::STACK_BYTES;
  constexpr std::size_t window = (emulation::MAX_SHARED_BYTES + 2048 + PAGE - 1) / PAGE * PAGE;
  char* first = map_between_guards(stacks);
  first += (emulation::STACK_BYTES - reinterpret_cast<std::uintptr_t>(first) % emulation::STACK_BYTES) %
           emulation::STACK_BYTES;
  for (std::uint32_t i = 0; i < emulation::MAX_THREADS; i++)
    mprotect(first + i * emulation::STACK_BYTES, emulation::STACK_GUARD, PROT_NONE);
  char* shared = map_between_guards(window);
  constexpr std::size_t touched = (sizeof(emulation::TouchedMemory) + PAGE - 1) / PAGE * PAGE;
  return {first, shared + window, shared, map_between_guards(window),
          reinterpret_cast<emulation::TouchedMemory*>(map_between_guards(touched))};
}

// ---- launches

using Entry = int (*)(emulation::Request*);

Entry find(const std::string& library, const std::string& entry, std::string& error) {
  static std::map<std::string, void*> loaded;
  void*& handle = loaded[library];
  if (!handle) handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* function = handle ? dlsym(handle, ("gpu_actors_launch_" + entry).c_str()) : nullptr;
  if (!function) error = dlerror();
  return reinterpret_cast<Entry>(function);
}

// Copies of the arguments, aligned to 64 bytes because one may be a tensor map.
struct Arguments {
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<std::vector<Line>> copies;
  std::vector<void*> addresses;

  Arguments(const std::vector<std::uint64_t>& sizes, const char* from) {
    for (const std::uint64_t bytes : sizes) {
      copies.emplace_back((bytes + 63) / 64 + 1);
      std::memcpy(copies.back().data(), from, bytes);
      from += bytes;
    }
    for (auto& copy : copies) addresses.push_back(copy.data());
    addresses.push_back(nullptr);
  }
};

void run(const softgpu::LaunchMessage& message, softgpu::LaunchReply& reply, std::vector<softgpu::TouchedRange>& touched) {
  static std::vector<emulation::Arena> arenas;
  while (arenas.size() < message.threads) arenas.push_back(make_arena());
  const auto text = receive<char>(message.library_length + message.entry_length);
  const std::string library(text.data(), message.library_length);
  const std::string entry(text.data() + message.library_length, message.entry_length);
  auto sizes = receive<std::uint64_t>(message.argument_count);
  const auto bytes = receive<char>(message.argument_bytes);
  const auto blocks = receive<std::uint64_t>(2 * std::size_t{message.block_count});
  std::string error;
  const Entry function = find(library, entry, error);
  if (!function) {
    reply.failed = 1;
    std::snprintf(reply.kind, sizeof reply.kind, "worker");
    std::snprintf(reply.text, sizeof reply.text, "%s", error.c_str());
    return;
  }
  Arguments arguments(sizes, bytes.data());
  sizes.push_back(0);
  std::vector<emulation::BufferRange> buffers;
  for (std::size_t i = 0; i < blocks.size(); i += 2)
    buffers.push_back({blocks[i], blocks[i + 1], blocks[i] / PAGE * PAGE, (blocks[i + 1] + PAGE - 1) / PAGE * PAGE});
  auto fault = std::make_unique<emulation::Fault>();
  emulation::Request request{};
  std::memcpy(request.grid, message.grid, sizeof request.grid);
  std::memcpy(request.block, message.block, sizeof request.block);
  request.shared_bytes = message.shared_bytes;
  request.delivery = static_cast<emulation::Delivery>(message.delivery);
  request.schedule = static_cast<emulation::Schedule>(message.schedule);
  request.workers = message.threads;
  request.argument_count = message.argument_count;
  request.buffer_count = message.block_count;
  request.seed = message.seed;
  request.limit_seconds = NO_LIMIT;
  request.arguments = arguments.addresses.data();
  request.argument_bytes = sizes.data();
  request.buffers = buffers.data();
  request.arenas = arenas.data();
  request.fault = fault.get();
  softgpu::start_tracking(blocks);
  reply.failed = function(&request);
  touched = softgpu::stop_tracking();
  if (!reply.failed) return;
  std::memcpy(reply.kind, fault->kind, sizeof reply.kind);
  std::memcpy(reply.block, fault->block, sizeof reply.block);
  reply.thread = fault->thread;
  reply.address = fault->address;
  reply.frame_count = fault->frame_count;
  static_assert(sizeof reply.frames == sizeof fault->frames);
  std::memcpy(reply.frames, fault->frames, sizeof reply.frames);
  reply.issued = fault->issued;
  std::memcpy(reply.text, fault->text, sizeof reply.text);
}

// A kernel that does not end must not outlive the program.
void end_with_the_driver() {
  for (;;) {
    pollfd end{SOCKET, POLLRDHUP, 0};
    if (poll(&end, 1, -1) > 0 && end.revents & (POLLRDHUP | POLLHUP | POLLERR)) _exit(0);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  softgpu::map_device(MEMORY, std::stoull(arguments[1]), std::stoull(arguments[2]));
  std::thread(end_with_the_driver).detach();
  for (;;) {
    softgpu::LaunchMessage message;
    receive(&message, sizeof message);
    softgpu::LaunchReply reply{};
    reply.thread = -1;
    std::vector<softgpu::TouchedRange> touched;
    run(message, reply, touched);
    reply.range_count = static_cast<std::uint32_t>(touched.size());
    send(&reply, sizeof reply);
    send(touched.data(), touched.size() * sizeof touched[0]);
  }
}
