// The part of the CUDA Runtime API that CuPy calls, on top of the driver's functions. Each group names the section of
// NVIDIA's "CUDA Runtime API" reference. The toolkit's headers check the signatures. softgpu/build.py makes the
// functions that CuPy links and that are missing here; they return cudaErrorNotSupported.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>

#include "device.h"
#include "driver_api.h"
#include "finding.h"
#include "status.h"
#include "stream.h"

extern "C" {
int cuDeviceGetCount(int*);
int cuDeviceGetName(char*, int, int);
int cuDeviceTotalMem_v2(std::size_t*, int);
int cuDeviceGetAttribute(int*, int, int);
int cuCtxSynchronize();
int cuMemAlloc_v2(std::uint64_t*, std::size_t);
int cuMemFree_v2(std::uint64_t);
int cuMemGetInfo_v2(std::size_t*, std::size_t*);
int cuMemHostAlloc(void**, std::size_t, unsigned);
int cuMemFreeHost(void*);
int cuStreamCreateWithPriority(void**, unsigned, int);
int cuStreamDestroy_v2(void*);
int cuStreamSynchronize(void*);
int cuStreamQuery(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
int cuStreamIsCapturing(void*, int*);
int cuStreamGetFlags(void*, unsigned*);
int cuStreamGetPriority(void*, int*);
int cuStreamBeginCapture_v2(void*, int);
int cuStreamEndCapture(void*, void**);
int cuGraphInstantiateWithFlags(void**, void*, unsigned long long);
int cuGraphLaunch(void*, void*);
int cuGraphDestroy(void*);
int cuGraphExecDestroy(void*);
int cuEventCreate(void**, unsigned);
int cuEventDestroy_v2(void*);
int cuEventRecord(void*, void*);
int cuEventQuery(void*);
int cuEventSynchronize(void*);
int cuEventElapsedTime(float*, void*, void*);
}

namespace {

using namespace softgpu;

thread_local cudaError_t last = cudaSuccess;

cudaError_t result(int status) {
  const auto error = static_cast<cudaError_t>(status);
  if (error != cudaSuccess && error != cudaErrorNotReady) last = error;
  return error;
}

// "Interactions with the CUDA Driver API": the runtime makes device 0's primary context current in a thread that has
// none.
void need_context() {
  if (current_device() < 0) set_current_device(0);
}

std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

}  // namespace

#define IN_CONTEXT(call) (need_context(), result(call))
#pragma GCC visibility push(default)
extern "C" {

// ---- Error Handling, Version Management

const char* cudaGetErrorName(cudaError_t error) { return name_of(error); }
const char* cudaGetErrorString(cudaError_t error) { return name_of(error); }
cudaError_t cudaGetLastError() {
  const cudaError_t error = last;
  last = cudaSuccess;
  return error;
}
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

// Called by a function that CuPy links and this driver lacks.
cudaError_t softgpu_missing(const char* name) {
  report(std::string(name) + " is called, which this driver does not have");
  return result(cudaErrorNotSupported);
}

// ---- Device Management

cudaError_t cudaGetDeviceCount(int* count) { return result(cuDeviceGetCount(count)); }
cudaError_t cudaGetDevice(int* device) {
  need_context();
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
  set_current_device(device);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return IN_CONTEXT(cuCtxSynchronize()); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return result(cuDeviceGetAttribute(value, static_cast<int>(attribute), device));
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  std::snprintf(text, static_cast<std::size_t>(room), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
  std::memset(p, 0, sizeof *p);
  cuDeviceGetName(p->name, sizeof p->name, device);
  cuDeviceTotalMem_v2(&p->totalGlobalMem, device);
  p->major = device_attribute(cudaDevAttrComputeCapabilityMajor);
  p->minor = device_attribute(cudaDevAttrComputeCapabilityMinor);
  p->multiProcessorCount = device_attribute(cudaDevAttrMultiProcessorCount);
  p->warpSize = device_attribute(cudaDevAttrWarpSize);
  p->maxThreadsPerBlock = device_attribute(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = device_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->regsPerBlock = device_attribute(cudaDevAttrMaxRegistersPerBlock);
  p->sharedMemPerBlock = static_cast<std::size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlock));
  p->sharedMemPerBlockOptin = static_cast<std::size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  return cudaSuccess;
}

// ---- Memory Management

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  std::uint64_t at = 0;
  const cudaError_t error = IN_CONTEXT(cuMemAlloc_v2(&at, bytes));
  *address = reinterpret_cast<void*>(at);
  return error;
}
cudaError_t cudaFree(void* address) { return address ? IN_CONTEXT(cuMemFree_v2(number(address))) : cudaSuccess; }
cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  return IN_CONTEXT(cuMemGetInfo_v2(available, total));
}
cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned flags) {
  return IN_CONTEXT(cuMemHostAlloc(address, bytes, flags));
}
cudaError_t cudaFreeHost(void* address) { return IN_CONTEXT(cuMemFreeHost(address)); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return IN_CONTEXT(copy_async(number(to), number(from), bytes, stream));
}
// Synchronous with respect to the host, on the legacy default stream.
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (const cudaError_t error = IN_CONTEXT(copy_async(number(to), number(from), bytes, nullptr))) return error;
  return result(cuStreamSynchronize(nullptr));
}
cudaError_t cudaMemsetAsync(void* at, int value, std::size_t bytes, cudaStream_t stream) {
  return IN_CONTEXT(fill_async(number(at), static_cast<unsigned char>(value), bytes, stream));
}
cudaError_t cudaMemset(void* at, int value, std::size_t bytes) { return cudaMemsetAsync(at, value, bytes, nullptr); }

// ---- Unified Addressing

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  Held held(state_lock);
  std::memset(attributes, 0, sizeof *attributes);
  Range block;
  int device = -2;  // cudaInvalidDeviceId
  attributes->type = cudaMemoryTypeUnregistered;
  if (find_block(number(pointer), &block, &device)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = const_cast<void*>(pointer);
  } else if (is_pinned(pointer, 1)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = const_cast<void*>(pointer);
    device = 0;
  }
  attributes->device = device;
  return cudaSuccess;
}

// ---- Stream Management

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return IN_CONTEXT(cuStreamCreateWithPriority(reinterpret_cast<void**>(stream), flags, priority));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return IN_CONTEXT(cuStreamDestroy_v2(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return IN_CONTEXT(cuStreamSynchronize(stream)); }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return IN_CONTEXT(cuStreamQuery(stream)); }
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return IN_CONTEXT(cuStreamGetFlags(stream, flags));
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return IN_CONTEXT(cuStreamGetPriority(stream, priority));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return IN_CONTEXT(cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  int state = 0;
  const cudaError_t error = IN_CONTEXT(cuStreamIsCapturing(stream, &state));
  *status = static_cast<cudaStreamCaptureStatus>(state);
  return error;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return IN_CONTEXT(cuStreamBeginCapture_v2(stream, mode));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return IN_CONTEXT(cuStreamEndCapture(stream, reinterpret_cast<void**>(graph)));
}

// ---- Graph Management

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* run, cudaGraph_t graph, unsigned long long flags) {
  return IN_CONTEXT(cuGraphInstantiateWithFlags(reinterpret_cast<void**>(run), graph, flags));
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t run, cudaStream_t stream) { return IN_CONTEXT(cuGraphLaunch(run, stream)); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return IN_CONTEXT(cuGraphDestroy(graph)); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t run) { return IN_CONTEXT(cuGraphExecDestroy(run)); }

// ---- Event Management

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return IN_CONTEXT(cuEventCreate(reinterpret_cast<void**>(event), flags));
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return IN_CONTEXT(cuEventDestroy_v2(event)); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return IN_CONTEXT(cuEventRecord(event, stream)); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return IN_CONTEXT(cuEventQuery(event)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return IN_CONTEXT(cuEventSynchronize(event)); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return IN_CONTEXT(cuEventElapsedTime(milliseconds, from, to));
}

}  // extern "C"
#pragma GCC visibility pop
