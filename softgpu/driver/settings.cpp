#include "settings.h"

#include <cstdlib>

namespace softgpu {
namespace {

long number(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atol(text) : otherwise;
}

Settings read() {
  Settings s;
  s.devices = static_cast<int>(number("SOFTGPU_DEVICES", 1));
  s.capability = static_cast<int>(number("SOFTGPU_CAPABILITY", 90));
  s.multiprocessors = static_cast<int>(number("SOFTGPU_MULTIPROCESSORS", 2));
  s.memory = static_cast<std::size_t>(number("SOFTGPU_MEMORY_MIB", 2048)) << 20;
  s.seed = static_cast<std::uint64_t>(number("SOFTGPU_SEED", 0));
  return s;
}

}  // namespace

Faults faults;

const Settings& settings() {
  static const Settings all = read();
  return all;
}

}  // namespace softgpu
