"""The size of each parameter of a compiled kernel, which ptxas writes into the cubin for the driver.

A section ".nv.info.KERNEL" is a list of attributes: format, number, and a value of two bytes or, in format 4, of the
length that precedes it. Number 0x17 describes one parameter: its index, its offset, and in the upper 14 bits of the
last word its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from gpu_actors.compiling.compiler import elf_sections

__all__ = ["parameter_sizes"]

_SIZED, _PARAMETER = 4, 0x17
_DESCRIPTION = struct.Struct("<IHHI")  # index, ordinal, offset, flags with the size


def parameter_sizes(cubin: bytes, entry: str) -> tuple[int, ...] | None:
    """The bytes of each parameter of the kernel, in order. None if the cubin has no such section."""
    try:
        for name, data in elf_sections(cubin):
            if name == f".nv.info.{entry}":
                return _sizes(data)
    except (struct.error, ValueError, IndexError):
        pass  # a test's cubin may be no ELF image
    return None


def _sizes(data: bytes) -> tuple[int, ...] | None:
    sizes = {ordinal: flags >> 18 for _, ordinal, _, flags in map(_DESCRIPTION.unpack, _descriptions(data))}
    if sorted(sizes) != list(range(len(sizes))):
        return None
    return tuple(sizes[ordinal] for ordinal in range(len(sizes)))


def _descriptions(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        kind, number = data[at], data[at + 1]
        length = struct.unpack_from("<H", data, at + 2)[0] if kind == _SIZED else 0
        if kind == _SIZED and number == _PARAMETER:
            yield data[at + 4 : at + 4 + length]
        at += 4 + length
