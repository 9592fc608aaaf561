"""The key of a compiled variant, and the bytes of its entry in a cache folder.

A key is SHA-256 over length-prefixed parts. It contains no path and no time, so that it is equal on every machine. The
parts are schema version, NVRTC version, exact architecture, ordered options, sorted macros, source (a user's snippet is
part of it or a header), every reachable header by name and contents, and entry names.

An entry is magic, key, payload length, SHA-256 of the payload, payload. The payload is a JSON header and the cubin.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from gpu_actors.compiling.compiler import compile_inputs
from gpu_actors.compiling.source import Cubin, KernelResources, KernelSource
from gpu_actors.compiling.toolchain import Toolchain

__all__ = [
    "CorruptEntry",
    "EntryName",
    "decode_entry",
    "digest_of",
    "encode_entry",
    "entry_name",
    "seal",
    "unseal",
]

# Increase it when the key's parts, the entry's layout or the meaning of the cubins change.
SCHEMA = 1

_MAGIC = b"GACUBIN\x01"
_HEADER = struct.Struct("<8s32sQ32s")  # magic, key, payload length, SHA-256 of the payload
_JSON_LENGTH = struct.Struct("<I")


class CorruptEntry(Exception):
    """The bytes are not a whole entry of the requested key. The cache catches it."""


class EntryName(NamedTuple):
    """The name of a cubin's entry: the digests of its variant, 64 hexadecimal digits each.

    variant: the digest of the source's own parts.
    build: the digest of these and the compiler, its options and the toolkit's headers. None without a compiler.
    """

    variant: str
    build: str | None

    @property
    def file_name(self) -> str:
        return f"{self.prefix}{self.build}.cubin"

    def build_of(self, file_name: str) -> str:
        return file_name.removeprefix(self.prefix).removesuffix(".cubin")

    @property
    def prefix(self) -> str:
        """The beginning of the file names of all builds of the variant."""
        return f"{self.variant}-"


def entry_name(source: KernelSource, arch: str, toolchain: Toolchain | None) -> EntryName:
    """The entry's name of ``source`` compiled for ``arch`` by ``toolchain``. A process hashes each header once."""
    inputs = compile_inputs(source, arch, toolchain)
    variant = _digest(source, arch, "", source.options, inputs.own_headers.items())
    if toolchain is None:
        return EntryName(variant, None)
    build = _digest(source, arch, toolchain.version, inputs.options, inputs.headers.items())
    return EntryName(variant, build)


def _digest(
    source: KernelSource, arch: str, nvrtc: str, options: Iterable[str], headers: Iterable[tuple[str, str]]
) -> str:
    groups: tuple[list[str], ...] = (
        [str(SCHEMA)],
        [nvrtc],
        [arch],
        list(options),
        [part for name, value in source.macros.items() for part in (name, str(value))],
        [source.source],
        [part for name, text in sorted(headers) for part in (name, _text_digest(text))],
        list(source.entry_points),
    )
    return digest_of(groups)


def digest_of(groups: Iterable[Collection[str]]) -> str:
    """SHA-256 over groups of texts, 64 hexadecimal digits. Each text and group is preceded by its length."""
    digest = hashlib.sha256()
    for group in groups:
        digest.update(struct.pack("<Q", len(group)))
        for part in group:
            data = part.encode()
            digest.update(struct.pack("<Q", len(data)))
            digest.update(data)
    return digest.hexdigest()


@functools.lru_cache(maxsize=1024)
def _text_digest(text: str) -> str:
    # A header's digest stands for its contents: the toolkit's are megabytes, and every key covers them.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def encode_entry(build: str, cubin: Cubin, nvrtc: str) -> bytes:
    """The entry of ``cubin``, made by NVRTC version ``nvrtc``, under the key ``build``."""
    about = {
        "arch": cubin.arch,
        "entry_points": cubin.entry_points,
        "log": cubin.log,
        "nvrtc": nvrtc,
        "resources": dict(cubin.resources),
    }
    text = json.dumps(about, sort_keys=True).encode()
    return seal(_MAGIC, build, _JSON_LENGTH.pack(len(text)) + text + cubin.data)


def decode_entry(build: str, entry: bytes, arch: str, entry_points: tuple[str, ...]) -> tuple[Cubin, str]:
    """(cubin, version of the NVRTC that made it).

    Raises CorruptEntry unless every byte is as `encode_entry` wrote it for this architecture and these kernels.
    """
    payload = unseal(_MAGIC, build, entry)
    try:
        end = _JSON_LENGTH.size + _JSON_LENGTH.unpack_from(payload)[0]
        about = json.loads(bytes(payload[_JSON_LENGTH.size : end]))
        cubin = Cubin(
            bytes(payload[end:]), about["arch"], tuple(about["entry_points"]), about["log"], _resources(about)
        )
        nvrtc = about["nvrtc"]
    except (ValueError, LookupError, TypeError, AttributeError, struct.error, RecursionError) as error:
        # The checksum proves that the bytes are unchanged, but not that `encode_entry` wrote them.
        raise CorruptEntry(f"what it says of its cubin cannot be read: {type(error).__name__}: {error}") from error
    if cubin.arch != arch:
        raise CorruptEntry(f"it is for {cubin.arch!r} instead of {arch}")
    if cubin.entry_points != entry_points:
        raise CorruptEntry(f"it holds the kernels {cubin.entry_points} instead of {entry_points}")
    if not (isinstance(cubin.log, str) and isinstance(nvrtc, str) and cubin.data):
        raise CorruptEntry("its log, its compiler's version or its cubin is missing")
    return cubin, nvrtc


def seal(magic: bytes, build: str, payload: bytes) -> bytes:
    """An entry of a cache folder. magic: 8 bytes that name its kind. build: its key, 64 hexadecimal digits."""
    return _HEADER.pack(magic, bytes.fromhex(build), len(payload), hashlib.sha256(payload).digest()) + payload


def unseal(kind: bytes, build: str, entry: bytes) -> memoryview:
    """The payload of an entry of this kind and key. Raises CorruptEntry unless every byte is as `seal` wrote it."""
    if len(entry) < _HEADER.size:
        raise CorruptEntry(f"{len(entry)} bytes are less than an entry's header")
    magic, key, length, checksum = _HEADER.unpack_from(entry)
    if magic != kind:
        raise CorruptEntry("the magic number is another")
    if key.hex() != build:
        raise CorruptEntry("the entry is of another key")
    payload = memoryview(entry)[_HEADER.size :]
    if len(payload) != length:
        raise CorruptEntry(f"the payload has {len(payload)} bytes instead of {length}")
    if hashlib.sha256(payload).digest() != checksum:
        raise CorruptEntry("the checksum does not match")
    return payload


def _resources(about: dict[str, Any]) -> dict[str, KernelResources]:
    by_kernel = {name: KernelResources(*values) for name, values in about["resources"].items()}
    for name, resources in by_kernel.items():
        if not all(type(count) is int and count >= 0 for count in resources):
            raise ValueError(f"the resources of {name} are {tuple(resources)}")
    return by_kernel
