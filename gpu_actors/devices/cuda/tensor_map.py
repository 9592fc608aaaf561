"""Tensor maps made by the driver. CuPy lacks the call, so this module calls the driver's library directly."""

from __future__ import annotations

import ctypes
import functools

from gpu_actors.devices.cuda.errors import CudaFailure
from gpu_actors.devices.cuda.library import library
from gpu_actors.devices.interface import TensorMap

__all__ = ["encode_tensor_map"]

_CALL = "cuTensorMapEncodeTiled"
_BYTES, _ALIGNMENT = 128, 64
# The values of the enumerations, from the CUDA Driver API, "Tensor Map Object Management".
_ELEMENTS = {
    "uint8": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "float16": 6,
    "float32": 7,
    "bfloat16": 9,
}
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_NO_INTERLEAVE, _PROMOTE_TO_256_BYTES, _ZEROS_OUT_OF_BOUNDS = 0, 3, 0


@functools.lru_cache(maxsize=4096)
def encode_tensor_map(tensor_map: TensorMap) -> bytes:
    """The map's 128 bytes for kernels. Raises CudaFailure if the driver refuses the map.

    The results are cached, because allocators reuse addresses and a call costs microseconds.
    """
    encode = getattr(library(), _CALL)
    rank = len(tensor_map.shape)
    memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    place = ctypes.addressof(memory) + -ctypes.addressof(memory) % _ALIGNMENT
    status = encode(
        ctypes.c_void_p(place),
        ctypes.c_int(_ELEMENTS[tensor_map.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(tensor_map.address),
        (ctypes.c_uint64 * rank)(*tensor_map.shape),
        (ctypes.c_uint64 * rank)(*tensor_map.strides),
        (ctypes.c_uint32 * rank)(*tensor_map.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLES[tensor_map.swizzle]),
        ctypes.c_int(_PROMOTE_TO_256_BYTES),
        ctypes.c_int(_ZEROS_OUT_OF_BOUNDS),
    )
    if status != 0:
        raise CudaFailure(status, _CALL, f"the driver refuses {tensor_map}")
    return ctypes.string_at(place, _BYTES)
