"""How large each parameter of a compiled kernel is, from what ptxas notes in the cubin for the driver.

A section ".nv.info.KERNEL" is a list of attributes: format, number, and a value of two bytes or, in format 4, of the
length that stands before it. Number 0x17 describes one parameter: its place in the list, its offset, and in the upper
14 bits of the last word its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from gpu_actors.compiling.compiler import elf_sections

__all__ = ["parameter_sizes"]

_SIZED, _PARAMETER = 4, 0x17
_DESCRIPTION = struct.Struct("<IHHI")  # index, ordinal, offset, flags with the size


def parameter_sizes(cubin: bytes, entry: str) -> tuple[int, ...] | None:
    """Bytes of each parameter of the kernel, in order; None where the cubin does not say what this can read."""
    try:
        for name, data in elf_sections(cubin):
            if name == f".nv.info.{entry}":
                return _sizes(data)
    except (struct.error, ValueError, IndexError):
        pass  # as the cubins of a test, which are none
    return None


def _sizes(data: bytes) -> tuple[int, ...] | None:
    found = {ordinal: flags >> 18 for _, ordinal, _, flags in map(_DESCRIPTION.unpack, _descriptions(data))}
    if sorted(found) != list(range(len(found))):
        return None
    return tuple(found[ordinal] for ordinal in range(len(found)))


def _descriptions(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        kind, number = data[at], data[at + 1]
        length = struct.unpack_from("<H", data, at + 2)[0] if kind == _SIZED else 0
        if kind == _SIZED and number == _PARAMETER:
            yield data[at + 4 : at + 4 + length]
        at += 4 + length
