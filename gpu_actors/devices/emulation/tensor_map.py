"""Tensor maps for the emulated TMA, with the rules of cuTensorMapEncodeTiled."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import one_of

__all__ = ["Swizzle", "encode_tensor_map"]

Swizzle = Literal["none", "32B", "64B", "128B"]

_MAGIC = 0x70616D726F736E65
_SWIZZLES: dict[str, tuple[int, int]] = {  # number in a wgmma descriptor, longest inner box in bytes
    "none": (0, 1 << 20),
    "128B": (1, 128),
    "64B": (2, 64),
    "32B": (3, 32),
}
_ELEMENTS: dict[str, tuple[int, int]] = {  # bytes, how a reduction adds (state.cuh: TensorMapFields::number)
    "uint8": (1, 0),
    "int8": (1, 0),
    "float8_e4m3fn": (1, 0),
    "float8_e5m2": (1, 0),
    "uint16": (2, 0),
    "float16": (2, 2),
    "bfloat16": (2, 3),
    "int32": (4, 4),
    "uint32": (4, 4),
    "float32": (4, 1),
}


def encode_tensor_map(
    address: int,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: Swizzle = "none",
) -> bytes:
    """The 128 bytes of a tensor map.

    address: the address of element 0, a multiple of 16.
    dtype: NumPy or ml_dtypes name.
    shape: elements, innermost first, 1 to 5 dimensions.
    strides: bytes, for every dimension but the innermost, multiples of 16.
    box: elements of each dimension that one copy moves, 1 to 256. Its innermost row is a multiple of 16 bytes and no
        longer than the swizzle.
    Raises InvalidRequest for arguments that cuTensorMapEncodeTiled would refuse.
    """
    _check_element(address, dtype, swizzle)
    _check_geometry(dtype, shape, strides, box, swizzle)
    element_bytes, number = _ELEMENTS[dtype]
    rank = len(shape)
    fields = struct.pack(
        "<QQ5Q4Q5H4B",
        _MAGIC,
        address,
        *shape,
        *[0] * (5 - rank),
        *strides,
        *[0] * (5 - rank),
        *box,
        *[1] * (5 - rank),
        rank,
        element_bytes,
        _SWIZZLES[swizzle][0],
        number,
    )
    return fields.ljust(128, b"\0")


def _check_element(address: int, dtype: str, swizzle: str) -> None:
    one_of("dtype", dtype, tuple(_ELEMENTS))
    one_of("swizzle", swizzle, tuple(_SWIZZLES))
    if address % 16:
        raise InvalidRequest("address", address, "a tensor map's address is a multiple of 16")


def _check_geometry(dtype: str, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: str) -> None:
    rank, element_bytes = len(shape), _ELEMENTS[dtype][0]
    if not 1 <= rank <= 5:
        raise InvalidRequest("shape", tuple(shape), "a tensor map has 1 to 5 dimensions")
    if len(strides) != rank - 1 or len(box) != rank:
        raise InvalidRequest(
            "strides", tuple(strides), f"{rank} dimensions take {rank - 1} strides and {rank} box sizes"
        )
    if any(not 1 <= n <= 1 << 32 for n in shape):
        raise InvalidRequest("shape", tuple(shape), "every dimension is 1 to 2**32")
    if any(not 1 <= n <= 256 for n in box):
        raise InvalidRequest("box", tuple(box), "every box size is 1 to 256")
    if any(n % 16 or not 0 <= n < 1 << 40 for n in strides):
        raise InvalidRequest("strides", tuple(strides), "every stride is a multiple of 16 below 2**40")
    row = box[0] * element_bytes
    if row % 16:
        raise InvalidRequest("box", tuple(box), f"the innermost row has {row} bytes, not a multiple of 16")
    if row > _SWIZZLES[swizzle][1]:
        raise InvalidRequest("box", tuple(box), f"the innermost row has {row} bytes, more than the {swizzle} swizzle")
