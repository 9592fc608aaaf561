"""Reads the length and the kernels' parameter sizes of a cubin, which is a 64-bit ELF image."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from gpu_actors.errors import CompileError

__all__ = ["parameter_sizes", "whole_cubin"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, -, -, offset, size, ...
_NOBITS, _FIRST_VENDOR_TYPE = 8, 0x70000000

# A section ".nv.info.KERNEL" is a list of attributes: format, number, and two bytes, the value. In format 4 these are
# the length of the value that follows. Number 0x17 describes one parameter: its index, its offset, and its size in the
# upper 14 bits of the last word.
_SIZED, _PARAMETER = 4, 0x17
_DESCRIPTION = struct.Struct("<IHHI")  # index, ordinal, offset, flags with the size


def whole_cubin(data: bytes) -> bytes:
    """``data`` with its last byte, which CuPy 14's getCUBIN may cut off.

    The ELF headers give the length: a byte is added only if exactly one is missing. It is zero, because every table and
    section that can end a cubin ends in a zero byte. Raises CompileError for anything shorter or not ELF.
    """
    if data[:5] != b"\x7fELF\x02" or len(data) < _HEADER.size:
        raise CompileError(f"NVRTC returned {len(data)} bytes that are no 64-bit ELF image")
    padded = data + b"\0"
    length = _length(padded)
    if length <= len(data):
        return data
    if length == len(padded):
        return padded
    raise CompileError(f"NVRTC returned {len(data)} bytes of a cubin of {length}")


def parameter_sizes(cubin: bytes, entry: str) -> tuple[int, ...] | None:
    """The bytes of each parameter of the kernel, in order. None if the cubin has no such section."""
    try:
        sections = list(_sections(cubin))
        names = sections[_HEADER.unpack_from(cubin)[13]][4]
        for name, _, _, _, offset, size, *_ in sections:
            start = names + name
            if cubin[start : cubin.index(b"\0", start)] == f".nv.info.{entry}".encode():
                return _sizes(cubin[offset : offset + size])
    except (struct.error, ValueError, IndexError):
        pass  # a test's cubin may be no ELF image
    return None


def _sections(image: bytes) -> Iterator[tuple[int, ...]]:
    """The fields of `_SECTION` for each section. Raises struct.error after the end of the image."""
    header = _HEADER.unpack_from(image)
    for index in range(header[12]):
        yield _SECTION.unpack_from(image, header[6] + index * header[11])


def _length(image: bytes) -> int:
    """The end of the last table or section, in bytes from the start."""
    header = _HEADER.unpack_from(image)
    segments, sections = header[5], header[6]
    segment_size, segment_count, section_size, section_count = header[9:13]
    length: int = max(segments + segment_size * segment_count, sections + section_size * section_count)
    try:
        for _, kind, _, _, offset, size, *_ in _sections(image):
            if kind != _NOBITS and kind < _FIRST_VENDOR_TYPE:
                length = max(length, offset + size)
    except struct.error:
        pass  # the image ends inside the table, whose end is already counted
    return length


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
