#include "worker.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "settings.h"

extern char** environ;

namespace softgpu {
namespace {

class Worker {
 public:
  Worker(int memory_file, Range span) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) return;
    socket_ = ends[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    // The copies made by dup2 are inherited. The high numbers keep it from replacing one file with the other.
    const int high = fcntl(ends[1], F_DUPFD_CLOEXEC, 100), memory = fcntl(memory_file, F_DUPFD_CLOEXEC, 100);
    posix_spawn_file_actions_adddup2(&actions, high, 3);
    posix_spawn_file_actions_adddup2(&actions, memory, 4);
    const std::string path = program(), begin = std::to_string(span.begin), bytes = std::to_string(span.end - span.begin);
    const char* arguments[] = {path.c_str(), begin.c_str(), bytes.c_str(), nullptr};
    pid_t process;
    if (posix_spawn(&process, path.c_str(), &actions, nullptr, const_cast<char**>(arguments), environ)) {
      std::perror("softgpu: the worker does not start");
      close(socket_);
      socket_ = -1;
    }
    posix_spawn_file_actions_destroy(&actions);
    for (const int file : {ends[1], high, memory}) close(file);
  }
  ~Worker() {
    if (socket_ >= 0) close(socket_);  // the worker ends with it
  }
  Worker(const Worker&) = delete;

  bool send(const void* data, std::size_t bytes) const {
    const char* at = static_cast<const char*>(data);
    while (bytes) {
      const ssize_t n = ::send(socket_, at, bytes, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += n;
      bytes -= static_cast<std::size_t>(n);
    }
    return true;
  }
  bool receive(void* data, std::size_t bytes) const {
    char* at = static_cast<char*>(data);
    while (bytes) {
      const ssize_t n = recv(socket_, at, bytes, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += n;
      bytes -= static_cast<std::size_t>(n);
    }
    return true;
  }

 private:
  // Beside this library.
  static std::string program() {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&run), &info);
    const std::string library = info.dli_fname;
    return library.substr(0, library.rfind('/') + 1) + "softgpu-worker";
  }

  int socket_ = -1;
};

struct Pool {
  std::mutex lock;
  std::multimap<int, std::unique_ptr<Worker>> idle;  // by device
};

Pool& pool() {
  static auto* all = new Pool;
  return *all;
}

bool ask(const Worker& worker, const Launch& launch, const std::vector<Range>& blocks, std::uint64_t seed,
         Outcome& outcome) {
  LaunchMessage message{};
  std::memcpy(message.grid, launch.grid, sizeof message.grid);
  std::memcpy(message.block, launch.block, sizeof message.block);
  message.shared_bytes = launch.shared_bytes;
  message.delivery = 0;  // copies land as late as the kernel's waits allow
  message.schedule = 1;  // a warp runs as far as it can
  message.threads = static_cast<std::uint32_t>(settings().multiprocessors);
  message.seed = seed;
  message.library_length = static_cast<std::uint32_t>(launch.library.size());
  message.entry_length = static_cast<std::uint32_t>(launch.entry.size());
  message.argument_count = static_cast<std::uint32_t>(launch.argument_sizes.size());
  message.argument_bytes = static_cast<std::uint32_t>(launch.arguments.size());
  message.block_count = static_cast<std::uint32_t>(blocks.size());
  if (!worker.send(&message, sizeof message) || !worker.send(launch.library.data(), launch.library.size()) ||
      !worker.send(launch.entry.data(), launch.entry.size()) ||
      !worker.send(launch.argument_sizes.data(), 8 * launch.argument_sizes.size()) ||
      !worker.send(launch.arguments.data(), launch.arguments.size()) ||
      !worker.send(blocks.data(), sizeof(Range) * blocks.size()))
    return false;
  if (!worker.receive(&outcome.reply, sizeof outcome.reply)) return false;
  outcome.touched.resize(outcome.reply.range_count);
  return worker.receive(outcome.touched.data(), sizeof(TouchedRange) * outcome.touched.size());
}

}  // namespace

Outcome run(int device, int memory_file, Range span, const Launch& launch, const std::vector<Range>& blocks,
            std::uint64_t seed) {
  static_assert(sizeof(Range) == 16, "ranges are sent as they lie");
  std::unique_ptr<Worker> worker;
  {
    std::lock_guard held(pool().lock);
    const auto found = pool().idle.find(device);
    if (found != pool().idle.end()) {
      worker = std::move(found->second);
      pool().idle.erase(found);
    }
  }
  if (!worker) worker = std::make_unique<Worker>(memory_file, span);
  Outcome outcome{};
  if (ask(*worker, launch, blocks, seed, outcome)) {
    std::lock_guard held(pool().lock);
    pool().idle.emplace(device, std::move(worker));
  } else {
    outcome = {};
    outcome.reply.failed = 1;
    outcome.reply.thread = -1;
    std::snprintf(outcome.reply.kind, sizeof outcome.reply.kind, "worker");
    std::snprintf(outcome.reply.text, sizeof outcome.reply.text, "the process that ran the kernel has ended");
  }
  return outcome;
}

}  // namespace softgpu
