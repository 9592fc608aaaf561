// Devices: how many there are, their attributes, and which one a thread uses.
#pragma once

#include <string>

#include "status.h"

namespace softgpu {

int device_count();
std::string device_name(int device);

// CUdevice_attribute; cudaDeviceAttr has the same numbers for what is used here. 0 for one that this device lacks.
int device_attribute(int attribute);

// The device of the calling thread, whose primary context is current, or -1.
int current_device();
void set_current_device(int device);

// Limits of a launch. Programming Guide, "Technical Specifications per Compute Capability".
constexpr int MAX_THREADS = 1024, MAX_BLOCK_Z = 64, MAX_GRID_YZ = 65535, MAX_GRID_X = 0x7FFFFFFF;
constexpr int REGISTERS = 65536, STATIC_SHARED_BYTES = 48 << 10;
int shared_bytes_opt_in();  // the most dynamic and static shared memory of a block that asks for it

}  // namespace softgpu
