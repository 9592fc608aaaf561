// Results of calls. CUDA Driver API, "Data types used by CUDA driver" (CUresult); cudaError_t has the same numbers.
#pragma once

namespace softgpu {

enum Status : int {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  no_device = 100,
  invalid_device = 101,
  invalid_image = 200,
  invalid_context = 201,
  no_binary_for_device = 209,
  file_not_found = 301,
  invalid_handle = 400,
  illegal_state = 401,
  not_found = 500,
  not_ready = 600,
  illegal_address = 700,
  out_of_resources = 701,
  launch_timeout = 702,
  misaligned_address = 716,
  launch_failed = 719,
  not_permitted = 800,
  not_supported = 801,
  capture_unsupported = 900,
  capture_invalidated = 901,
  capture_unmatched = 903,
  capture_unjoined = 904,
  capture_isolation = 905,
  capture_implicit = 906,
  captured_event = 907,
  capture_wrong_thread = 908,
  unknown = 999,
};

// "cudaErrorIllegalAddress" for 700; "cudaErrorUnknown" for a number that is not known.
const char* name_of(int status);

}  // namespace softgpu
