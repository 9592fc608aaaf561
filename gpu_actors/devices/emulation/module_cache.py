"""Built modules on disk. Their folder has the cubin cache's rules, because its files are executed.

An entry is the shared object, followed by a trailer that proves that the entry is whole. The loader ignores the
trailer: it reads only what the object's own headers name.
Entry = object, seconds that the compiler took, key, SHA-256 of all of these, magic.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpu_actors.compiling.cubin_entry import CorruptEntry
from gpu_actors.compiling.cubin_folder import CacheFolder, user_cache_folder
from gpu_actors.errors import InvalidRequest
from gpu_actors.process import process_folder

__all__ = ["BuiltModule", "ModuleCache"]

_LOCK_SECONDS = 120.0
_MAX_BYTES = 256 << 20
_MAGIC = b"GAMODUL\x01"
_FACTS = struct.Struct("<d32s")  # seconds, key
_SEAL = struct.Struct("<32s8s")  # SHA-256 of the object and the facts, magic
_log = logging.getLogger(__name__)


class BuiltModule(NamedTuple):
    """A shared object, and how long the compiler took."""

    library: Path
    build_seconds: float

    def content(self) -> bytes:
        """The object's own bytes, without the trailer."""
        return self.library.read_bytes()[: -_FACTS.size - _SEAL.size]


Compile = Callable[[Path], tuple[bytes, float]]
"""Returns a shared object and the seconds that compiling took. Called with a folder for the compiler's own cache."""


class ModuleCache:
    """The modules in `folder` (default: the user's cache folder), each in a file named after the key, with a suffix.

    The constructor and the methods raise InvalidRequest as `CacheFolder` does. If the folder cannot be created or
    written, or is mounted noexec, modules are kept in a temporary folder until the process ends.
    """

    def __init__(self, folder: Path | None = None, suffix: str = ".so") -> None:
        self._suffix = suffix
        path = folder or user_cache_folder() / "emulated"
        self._folder = CacheFolder(path, writable=True, suffix=suffix)
        try:
            self._folder.make()
            if _is_noexec(path):
                raise OSError(errno.EACCES, "its file system is mounted noexec", str(path))
        except OSError as error:
            self._use_temporary_folder(error)

    def load(self, key: str) -> BuiltModule | None:
        """The module with this key, or None if it is missing or damaged."""
        name = self._name(key)
        try:
            stored = self._folder.read(name)
        except OSError as error:  # a link, or a file that cannot be read
            _log.warning("emulation cache: %s cannot be read (%s), it is built anew", key[:12], error)
            return None
        if stored is None:
            return None
        try:
            if stored.fault:
                raise CorruptEntry(stored.fault)
            return BuiltModule(self._folder.path / name, _seconds_of(key, stored.data))
        except CorruptEntry as error:
            _log.warning("emulation cache: %s is refused (%s), it is built anew", key[:12], error)
            return None

    def build(self, key: str, compile_module: Compile) -> BuiltModule:
        """Compile and publish the module with this key. Processes that need it at the same time compile it once."""
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(self._folder.locked(key, _LOCK_SECONDS))
            except TimeoutError:
                _log.warning("emulation cache: %s is being built elsewhere for over %g s", key[:12], _LOCK_SECONDS)
            except OSError as error:
                self._use_temporary_folder(error)
            return self.load(key) or self._publish(key, compile_module)

    def _publish(self, key: str, compile_module: Compile) -> BuiltModule:
        library, seconds = compile_module(self._folder.path)
        name, entry = self._name(key), _encode(key, library, seconds)
        try:
            self._folder.publish(name, entry)
        except OSError as error:
            self._use_temporary_folder(error)
            self._folder.publish(name, entry)
        self._folder.prune(_MAX_BYTES, keep=name)
        return BuiltModule(self._folder.path / name, seconds)

    def _name(self, key: str) -> str:
        return f"gpu-actors-{key}{self._suffix}"

    def _use_temporary_folder(self, error: OSError) -> None:
        _log.warning("emulation cache: %s (%s), modules are kept for this process only", self._folder.path, error)
        temporary = process_folder("emulated")
        if _is_noexec(temporary):
            reason = f"cannot be used ({error}), and {temporary} is mounted noexec: set TMPDIR or name another folder"
            raise InvalidRequest("cache_dir", str(self._folder.path), reason)
        self._folder = CacheFolder(temporary, writable=True, suffix=self._suffix)


def _is_noexec(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def _encode(key: str, library: bytes, seconds: float) -> bytes:
    body = library + _FACTS.pack(seconds, bytes.fromhex(key))
    return body + _SEAL.pack(hashlib.sha256(body).digest(), _MAGIC)


def _seconds_of(key: str, entry: bytes) -> float:
    """How many seconds building the entry took. Raises CorruptEntry if it is not whole or has another key."""
    if len(entry) < _FACTS.size + _SEAL.size:
        raise CorruptEntry(f"{len(entry)} bytes are no entry")
    body = memoryview(entry)[: -_SEAL.size]
    digest, magic = _SEAL.unpack_from(entry, len(body))
    if magic != _MAGIC or hashlib.sha256(body).digest() != digest:
        raise CorruptEntry("the checksum does not match")
    seconds, stored = _FACTS.unpack_from(body, len(body) - _FACTS.size)
    if stored.hex() != key:
        raise CorruptEntry("the entry is of another key")
    return float(seconds)
