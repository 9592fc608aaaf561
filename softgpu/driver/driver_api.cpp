// libcuda.so.1: the functions of the CUDA Driver API that CuPy and this project call. Each group names the section of
// NVIDIA's "CUDA Driver API" reference that it follows. A function that is not here does not exist in this driver.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

#include "device.h"
#include "driver_api.h"
#include "finding.h"
#include "launch.h"
#include "memory.h"
#include "module.h"
#include "settings.h"
#include "stream.h"
#include "tensor_map.h"

namespace softgpu {

// A context is a device's primary context: a pointer that is the device's number plus one.
struct Context;

namespace {

Context* context_of(int device) { return reinterpret_cast<Context*>(static_cast<std::intptr_t>(device + 1)); }
int device_of(const Context* context) { return static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1; }

// The first check of every call: a context must be current, and the device must not have failed for good.
Status entry_status() {
  if (current_device() < 0) return invalid_context;
  return sticky(current_device());
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

#define CUDA extern "C" __attribute__((visibility("default")))

// ---- Initialization, Version Management, Error Handling

CUDA int cuInit(unsigned flags) { return flags ? invalid_value : success; }

CUDA int cuDriverGetVersion(int* version) {
  *version = 13000;
  return success;
}

CUDA int cuGetErrorName(int status, const char** name) {
  *name = name_of(status);
  return success;
}
CUDA int cuGetErrorString(int status, const char** text) { return cuGetErrorName(status, text); }

// ---- Device Management

CUDA int cuDeviceGetCount(int* count) {
  *count = device_count();
  return success;
}
CUDA int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return invalid_device;
  *device = ordinal;
  return success;
}
CUDA int cuDeviceGetName(char* name, int room, int device) {
  std::snprintf(name, static_cast<std::size_t>(room), "%s", device_name(device).c_str());
  return success;
}
CUDA int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = settings().memory;
  return success;
}
CUDA int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device < 0 || device >= device_count()) return invalid_device;
  *value = device_attribute(attribute);
  return success;
}

// ---- Primary Context Management, Context Management

CUDA int cuDevicePrimaryCtxRetain(Context** context, int device) {
  if (device < 0 || device >= device_count()) return invalid_device;
  *context = context_of(device);
  return success;
}
CUDA int cuDevicePrimaryCtxRelease_v2(int) { return success; }
CUDA int cuCtxGetCurrent(Context** context) {
  *context = current_device() < 0 ? nullptr : context_of(current_device());
  return success;
}
CUDA int cuCtxSetCurrent(Context* context) {
  set_current_device(device_of(context));
  return success;
}
CUDA int cuCtxGetDevice(int* device) {
  *device = current_device();
  return current_device() < 0 ? invalid_context : success;
}
CUDA int cuCtxSynchronize() {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  return synchronize_device(held, current_device());
}

// ---- Memory Management

CUDA int cuMemAlloc_v2(Address* address, std::size_t bytes) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  if (const Status status = refuse_in_capture()) return status;
  if (strikes(faults.allocation)) return out_of_memory;
  return allocate(current_device(), bytes, address);
}

// Waits for the device, as the runtime's "Implicit Synchronization" has it.
CUDA int cuMemFree_v2(Address address) {
  Held held(state_lock);
  Range block;
  int device;
  if (!find_block(address, &block, &device) || block.begin != address) return invalid_value;
  if (const Status status = sticky(device)) return status;
  if (const Status status = synchronize_device(held, device)) return status;
  forget_accesses(block);
  return release(address, &device);
}

CUDA int cuMemGetInfo_v2(std::size_t* available, std::size_t* total) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  *total = settings().memory;
  *available = *total - used_bytes(current_device());
  return success;
}

CUDA int cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  if (const Status status = refuse_in_capture()) return status;
  if (strikes(faults.pinned)) return out_of_memory;
  return allocate_pinned(bytes, address);
}

CUDA int cuMemFreeHost(void* address) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  if (const Status status = synchronize_device(held, current_device())) return status;
  const auto begin = reinterpret_cast<Address>(address);
  forget_accesses({begin, begin + 1});
  return release_pinned(address);
}

namespace softgpu {
namespace {

enum class Side { device, pinned, pageable };

// Where the bytes lie. `valid` is false if they reach past their block of device memory, or if the block was freed.
Side side_of(Address address, std::size_t bytes, bool* valid) {
  Range block;
  int device;
  *valid = true;
  if (find_block(address, &block, &device)) {
    *valid = address + bytes <= block.end;
    return Side::device;
  }
  if (was_freed(address)) *valid = false;
  if (is_pinned(reinterpret_cast<void*>(address), bytes)) return Side::pinned;
  return Side::pageable;
}

Status slow_copy(void* to, const void* from, std::size_t bytes, double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  std::memcpy(to, from, bytes);
  return success;
}

const char* copy_name(Side to, Side from) {
  if (to == Side::device) return from == Side::device ? "the copy on the device" : "the copy to the device";
  return from == Side::device ? "the copy to the host" : "the copy on the host";
}

Range range_of(Address address, std::size_t bytes) { return {address, address + bytes}; }

}  // namespace

// Runtime API, "API synchronization behavior": pageable sources are staged before the call returns, pageable
// destinations are written before it does, and pinned memory is read and written when the copy runs.
Status copy_async(Address to, Address from, std::size_t bytes, void* handle) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  const auto stream = find_stream(handle);
  if (!stream) return invalid_handle;
  if (!bytes) return success;
  bool to_valid, from_valid;
  const Side to_side = side_of(to, bytes, &to_valid), from_side = side_of(from, bytes, &from_valid);
  if (!to_valid || !from_valid) {
    report(format("%s reaches memory that is not allocated: %zu bytes from 0x%llx to 0x%llx",
                  copy_name(to_side, from_side), bytes, static_cast<unsigned long long>(from),
                  static_cast<unsigned long long>(to)));
    return invalid_value;
  }
  Step step{copy_name(to_side, from_side), {}, {}, {}};
  step.name += " of " + std::to_string(bytes) + " bytes";
  if (to_side != Side::pageable) step.accesses.push_back({range_of(to, bytes), true});
  if (from_side != Side::pageable) step.accesses.push_back({range_of(from, bytes), false});
  const double seconds = strikes(faults.copy) ? faults.copy_seconds.load() : 0;
  void* target = host_view(to);
  if (from_side == Side::pageable && !stream->capture) {
    const char* source = reinterpret_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(source, source + bytes);
    step.work = [=](std::vector<Access>&) { return slow_copy(target, staged->data(), bytes, seconds); };
  } else {
    const void* source = host_view(from);
    step.work = [=](std::vector<Access>&) { return slow_copy(target, source, bytes, seconds); };
  }
  if (const Status status = enqueue(*stream, std::move(step))) return status;
  return to_side == Side::pageable && !stream->capture ? synchronize(held, *stream) : success;
}

Status fill_async(Address at, unsigned char value, std::size_t bytes, void* handle) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  const auto stream = find_stream(handle);
  if (!stream) return invalid_handle;
  if (!bytes) return success;
  bool valid;
  if (side_of(at, bytes, &valid) != Side::device || !valid) {
    report(format("a fill of %zu bytes at 0x%llx reaches memory that is not allocated", bytes,
                  static_cast<unsigned long long>(at)));
    return invalid_value;
  }
  void* target = host_view(at);
  return enqueue(*stream, {"the fill of " + std::to_string(bytes) + " bytes",
                           {{range_of(at, bytes), true}},
                           {},
                           [=](std::vector<Access>&) {
                             std::memset(target, value, bytes);
                             return success;
                           }});
}

}  // namespace softgpu

CUDA int cuMemcpyAsync(Address to, Address from, std::size_t bytes, void* stream) {
  return copy_async(to, from, bytes, stream);
}
CUDA int cuMemsetD8Async(Address at, unsigned char value, std::size_t bytes, void* stream) {
  return fill_async(at, value, bytes, stream);
}

// ---- Stream Management

CUDA int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  if (flags > 1) return invalid_value;
  *stream = create_stream(current_device(), flags, priority).get();
  return success;
}
CUDA int cuStreamCreate(Stream** stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
CUDA int cuStreamDestroy_v2(Stream* stream) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  return destroy_stream(stream);
}

namespace softgpu {
namespace {

template <class Call>
int on_stream(void* handle, Call call) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  const auto stream = find_stream(handle);
  return stream ? static_cast<int>(call(held, *stream)) : invalid_handle;
}

}  // namespace
}  // namespace softgpu

CUDA int cuStreamSynchronize(void* stream) {
  return on_stream(stream, [](Held& held, Stream& s) { return synchronize(held, s); });
}
CUDA int cuStreamQuery(void* stream) {
  return on_stream(stream, [](Held&, Stream& s) { return query(s); });
}
CUDA int cuStreamWaitEvent(void* stream, Event* event, unsigned) {
  return on_stream(stream, [&](Held&, Stream& s) { return wait_for(s, *event); });
}
CUDA int cuThreadExchangeStreamCaptureMode(int* mode) {
  *mode = exchange_capture_mode(*mode);
  return success;
}
CUDA int cuStreamIsCapturing(void* stream, int* state) {
  return on_stream(stream, [&](Held&, Stream& s) { return capture_status(s, state); });
}
CUDA int cuStreamGetFlags(void* stream, unsigned* flags) {
  return on_stream(stream, [&](Held&, Stream& s) {
    *flags = s.flags;
    return success;
  });
}
CUDA int cuStreamGetPriority(void* stream, int* priority) {
  return on_stream(stream, [&](Held&, Stream& s) {
    *priority = s.priority;
    return success;
  });
}
CUDA int cuStreamBeginCapture_v2(void* stream, int mode) {
  return on_stream(stream, [&](Held&, Stream& s) { return begin_capture(s, mode); });
}
CUDA int cuStreamEndCapture(void* stream, Graph** graph) {
  return on_stream(stream, [&](Held&, Stream& s) { return end_capture(s, graph); });
}

// ---- Event Management

CUDA int cuEventCreate(Event** event, unsigned flags) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  *event = new Event;
  (*event)->device = current_device();
  (*event)->timed = !(flags & 2);  // CU_EVENT_DISABLE_TIMING
  return success;
}
// "An event may be destroyed before it is complete": its waiters hold its position.
CUDA int cuEventDestroy_v2(Event* event) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  delete event;
  return success;
}
CUDA int cuEventRecord(Event* event, void* stream) {
  return on_stream(stream, [&](Held&, Stream& s) { return record(*event, s); });
}
CUDA int cuEventQuery(Event* event) {
  Held held(state_lock);
  return query(*event);
}
CUDA int cuEventSynchronize(Event* event) {
  Held held(state_lock);
  return synchronize(held, *event);
}
CUDA int cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
  Held held(state_lock);
  for (Event* event : {from, to}) {
    if (!event->recorded || !event->timed) return invalid_handle;
    if (const Status status = query(*event)) return status;
  }
  *milliseconds = static_cast<float>(1e3 * (*to->time - *from->time));
  return success;
}

// ---- Graph Management

CUDA int cuGraphInstantiateWithFlags(Graph** run, Graph* graph, unsigned long long) {
  Held held(state_lock);
  *run = new Graph(*graph);
  return success;
}
CUDA int cuGraphLaunch(Graph* run, void* stream) {
  return on_stream(stream, [&](Held&, Stream& s) {
    for (const Step& step : run->steps)
      if (const Status status = enqueue(s, step)) return status;
    return success;
  });
}
CUDA int cuGraphDestroy(Graph* graph) {
  Held held(state_lock);
  delete graph;
  return success;
}
CUDA int cuGraphExecDestroy(Graph* run) {
  Held held(state_lock);
  delete run;
  return success;
}

// ---- Module Management

CUDA int cuModuleLoadData(Module** module, const void* image) {
  {
    Held held(state_lock);
    if (const Status status = entry_status()) return status;
  }
  if (const Status status = load(image, module)) return status;
  Held held(state_lock);
  return adopt(*module);
}
CUDA int cuModuleLoad(Module** module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return file_not_found;
  const std::vector<char> image{std::istreambuf_iterator<char>(file), {}};
  return image.size() < 64 ? int{invalid_image} : cuModuleLoadData(module, image.data());
}
CUDA int cuModuleUnload(Module* module) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  return unload(module);
}
CUDA int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  return find_function(module, name, function);
}

// ---- Execution Control

namespace {
// cuda.h, CUfunction_attribute
enum FunctionAttribute : int { MAX_THREADS_OF = 0, STATIC_SHARED = 1, CONST_BYTES = 2, LOCAL_BYTES = 3, REGISTERS_OF = 4, MAX_DYNAMIC_SHARED = 8 };
}  // namespace

CUDA int cuFuncSetAttribute(Function* function, int attribute, int value) {
  Held held(state_lock);
  if (const Status status = entry_status()) return status;
  if (!is_function(function)) return invalid_handle;
  return attribute == MAX_DYNAMIC_SHARED ? allow_shared(*function, value) : success;
}
CUDA int cuFuncGetAttribute(int* value, int attribute, Function* function) {
  Held held(state_lock);
  if (!is_function(function)) return invalid_handle;
  switch (attribute) {
    case MAX_THREADS_OF: *value = MAX_THREADS; break;
    case STATIC_SHARED: *value = function->kernel.static_shared_bytes; break;
    case REGISTERS_OF: *value = function->kernel.registers; break;
    case MAX_DYNAMIC_SHARED: *value = function->dynamic_shared_limit; break;
    default: *value = 0;
  }
  return success;
}
// The arguments are copied before the call returns.
CUDA int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared_bytes, void* handle, void** arguments, void** extra) {
  return on_stream(handle, [&](Held&, Stream& stream) -> Status {
    if (!is_function(function)) return invalid_handle;
    if (extra) return not_supported;
    // Programming Guide, "Stream and Event Behavior": a launch on a stream of a device that is not current fails.
    if (function->module->device != stream.device || current_device() != stream.device) return invalid_handle;
    const std::uint32_t grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    if (const Status status = check_launch(*function, grid, block, shared_bytes)) return status;
    return enqueue(stream, launch_step(*function, grid, block, shared_bytes, arguments));
  });
}

// ---- Tensor Map Object Management

CUDA int cuTensorMapEncodeTiled(void* map, int type, std::uint32_t rank, Address address, const std::uint64_t* extent,
                                const std::uint64_t* stride, const std::uint32_t* box, const std::uint32_t* step,
                                int interleave, int swizzle, int promotion, int fill) {
  return encode_tensor_map(map, type, rank, address, extent, stride, box, step, interleave, swizzle, promotion, fill);
}
