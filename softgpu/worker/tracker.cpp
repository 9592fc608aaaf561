#include "tracker.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace softgpu {
namespace {

constexpr std::uint64_t PAGE = 4096, LARGE = 4 << 20;

enum : std::uint8_t { untouched, read_only, written };

struct Tracked {
  std::uint64_t begin, end;        // the block
  std::uint64_t first, last;       // its pages
  std::uint64_t unit;              // bytes that become accessible at once
  std::unique_ptr<std::uint8_t[]> state;  // of each unit; handlers of several threads may write the same value

  std::uint64_t units() const { return (last - first + unit - 1) / unit; }
};

std::vector<Tracked> blocks;  // in order; only changed while no kernel runs

// Makes the unit with that address accessible. False if it is in no block.
bool touch(std::uint64_t address, bool writes) {
  auto after = std::upper_bound(blocks.begin(), blocks.end(), address,
                                [](std::uint64_t a, const Tracked& block) { return a < block.first; });
  if (after == blocks.begin()) return false;
  Tracked& block = *std::prev(after);
  if (address >= block.last) return false;
  const std::uint64_t index = (address - block.first) / block.unit;
  const std::uint64_t first = block.first + index * block.unit, bytes = std::min(block.unit, block.last - first);
  // Another thread may have made it accessible meanwhile. Then the access is only tried again.
  if (writes || block.state[index] == written) {
    block.state[index] = written;
    mprotect(reinterpret_cast<void*>(first), bytes, PROT_READ | PROT_WRITE);
  } else {
    block.state[index] = read_only;
    mprotect(reinterpret_cast<void*>(first), bytes, PROT_READ);
  }
  return true;
}

// ---- signals: ours first, then the emulation's

struct sigaction emulations[2];  // its actions for SIGSEGV and SIGBUS

int real_sigaction(int number, const struct sigaction* action, struct sigaction* before) {
  using Function = int (*)(int, const struct sigaction*, struct sigaction*);
  static const auto function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "sigaction"));
  return function(number, action, before);
}

void on_fault(int number, siginfo_t* info, void* context) {
  // Bit 1 of the error code says that it was a write: Intel SDM, "Interrupt 14, Page-Fault Exception".
  const bool writes = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
  if (number == SIGSEGV && touch(reinterpret_cast<std::uint64_t>(info->si_addr), writes)) return;
  const struct sigaction& theirs = emulations[number == SIGBUS];
  if (theirs.sa_flags & SA_SIGINFO) {
    theirs.sa_sigaction(number, info, context);
    return;
  }
  struct sigaction none{};
  none.sa_handler = SIG_DFL;
  real_sigaction(number, &none, nullptr);
}

void catch_faults() {
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // as the emulation's
  for (const int number : {SIGSEGV, SIGBUS}) real_sigaction(number, &action, nullptr);
}

}  // namespace

void map_device(int file, std::uint64_t begin, std::uint64_t bytes) {
  void* map = mmap(reinterpret_cast<void*>(begin), bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
                   file, 0);
  if (map == MAP_FAILED) {
    std::perror("softgpu-worker: the device memory cannot be mapped");
    std::exit(1);
  }
  catch_faults();
}

void start_tracking(const std::vector<std::uint64_t>& wanted) {
  blocks.clear();
  for (std::size_t i = 0; i + 1 < wanted.size(); i += 2) {
    Tracked block{wanted[i], wanted[i + 1], wanted[i] / PAGE * PAGE, (wanted[i + 1] + PAGE - 1) / PAGE * PAGE, PAGE, {}};
    // Pages of large blocks are taken together: the system bounds how many pieces a mapping has.
    if (block.last - block.first > LARGE) block.unit = 16 * PAGE;
    block.state = std::make_unique<std::uint8_t[]>(block.units());
    blocks.push_back(std::move(block));
  }
  std::sort(blocks.begin(), blocks.end(), [](const Tracked& a, const Tracked& b) { return a.first < b.first; });
}

std::vector<TouchedRange> stop_tracking() {
  std::vector<TouchedRange> touched;
  for (const Tracked& block : blocks) {
    bool any = false;
    for (std::uint64_t i = 0; i < block.units(); i++) {
      if (block.state[i] == untouched) continue;
      any = true;
      const std::uint64_t first = std::max(block.begin, block.first + i * block.unit);
      const std::uint64_t last = std::min(block.end, block.first + (i + 1) * block.unit);
      const bool write = block.state[i] == written;
      if (!touched.empty() && touched.back().end == first && (touched.back().written != 0) == write)
        touched.back().end = last;
      else touched.push_back({first, last, !write, write});
    }
    if (any) mprotect(reinterpret_cast<void*>(block.first), block.last - block.first, PROT_NONE);
  }
  blocks.clear();
  return touched;
}

}  // namespace softgpu

// Libraries that this program loads, such as the emulation, set their handlers through this function.
extern "C" __attribute__((visibility("default"))) int sigaction(int number, const struct sigaction* action,
                                                                struct sigaction* before) noexcept {
  using namespace softgpu;
  if (number != SIGSEGV && number != SIGBUS) return real_sigaction(number, action, before);
  struct sigaction& theirs = emulations[number == SIGBUS];
  if (before) *before = theirs;
  if (action) theirs = *action;
  return 0;
}
