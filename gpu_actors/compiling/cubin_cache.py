"""CubinCache: compiled kernels in memory, in a folder that processes share, and in read-only folders.

A lookup asks memory, then the read-only folders, then the user's own. A variant that is in none is compiled once for
all threads and processes that ask for it. A fault of the disk costs a compile at most.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpu_actors.compiling.cubin_entry import CorruptEntry, EntryName, decode_entry, encode_entry, entry_name
from gpu_actors.compiling.cubin_folder import CacheFolder, user_cache_folder
from gpu_actors.compiling.source import Cubin, KernelSource
from gpu_actors.compiling.toolchain import FindToolchain, find_toolchain
from gpu_actors.compiling.variant import Variant
from gpu_actors.errors import CompileError, InvalidRequest
from gpu_actors.tracing.events import log_record

__all__ = ["CacheStats", "CubinCache", "default_cache_dir", "traced_compile"]

Compile = Callable[[KernelSource, str], Cubin]
T = TypeVar("T")
Entry = tuple[Cubin, bool]  # the cubin, and whether it was found rather than compiled
OnEvent = Callable[[str, dict[str, object]], None]

_log = logging.getLogger("gpu_actors")
_MAX_KEYS = 8192


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was made.

    hits: lookups answered from memory or a folder.
    misses: other lookups. Each of several callers that wait for one compile counts.
    compiles: compiles begun.
    corrupt: entries refused.
    evicted: entries removed to keep to the size bound.
    entries, bytes: the current size of the folder, or of the memory if there is no folder.
    """

    hits: int = 0
    misses: int = 0
    compiles: int = 0
    corrupt: int = 0
    evicted: int = 0
    entries: int = 0
    bytes: int = 0


def default_cache_dir() -> Path:
    """The user's cubin folder: the environment's GPU_ACTORS_CACHE_DIR, or the platform's folder for caches.

    Raises InvalidRequest if GPU_ACTORS_CACHE_DIR begins with "~" and the home folder is unknown.
    """
    if setting := os.environ.get("GPU_ACTORS_CACHE_DIR"):
        try:
            return Path(setting).expanduser().absolute()
        except RuntimeError as error:
            raise InvalidRequest("GPU_ACTORS_CACHE_DIR", setting, f"must name a folder: {error}") from None
    return user_cache_folder() / "cubins"


class CubinCache:
    """Cubins by variant. Every method may be called from any thread.

    directory: the user's folder (see `default_cache_dir`), or None to cache cubins in memory alone. Its least recently
        read entries are evicted first.
    readonly_paths: folders that are searched first and never written.
    lock_timeout: seconds to wait for another process that compiles the variant, before it is compiled here too.
    on_event: called with (name, fields) for the events cache.hit (fields variant, digest, layer), cache.miss,
        cache.corrupt (path, reason), compile.started (arch) and compile.completed (seconds, error). By default they go
        to the logger "gpu_actors".
    toolchain: finds the compiler whose version is in the keys.
    explicit: whether the user named the directory. The default directory is opened when it is first needed.

    Raises InvalidRequest("cache_dir" or "prewarmed", ...) for a folder from which another user's code could be loaded,
    and for a path that is not a folder. For the default directory, each lookup that needs it raises this instead.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        max_bytes: int = 1 << 30,
        readonly_paths: Sequence[str | os.PathLike[str]] = (),
        offline: bool = False,
        max_memory_bytes: int = 1 << 28,
        lock_timeout: float = 60.0,
        on_event: OnEvent | None = None,
        toolchain: FindToolchain = find_toolchain,
        explicit: bool = True,
    ) -> None:
        if max_bytes <= 0:
            raise InvalidRequest("max_bytes", max_bytes, "must be positive")
        self._offline = offline
        self._max_bytes = max_bytes
        self._max_memory_bytes = max_memory_bytes
        self._lock_timeout = lock_timeout
        self._on_event = on_event
        self._toolchain = toolchain
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("hits", "misses", "compiles", "corrupt", "evicted"), 0)
        self._keys: dict[Variant, EntryName] = {}
        self._memory: OrderedDict[EntryName, Cubin] = OrderedDict()
        self._memory_bytes = 0
        self._warned: set[tuple[str, int | None]] = set()
        self._flights: dict[EntryName, Future[Entry]] = {}
        self._folder = CacheFolder(Path(directory), writable=True) if directory is not None else None
        self._folders = [CacheFolder(Path(path), writable=False, field="prewarmed") for path in readonly_paths]
        for folder in self._folders:
            if not folder.check():
                _log.warning("prewarmed folder %s does not exist", folder.path)
        if self._folder is not None:
            self._folders.append(self._folder)
            if explicit:
                self._folder.check()
            with contextlib.suppress(OSError, InvalidRequest):
                self._prune(self._folder)

    def key(self, variant: Variant) -> EntryName:
        """The name of the variant's entry. Raises the errors of `Variant.source` and `entry_name`."""
        key = self._keys.get(variant)
        if key is None:
            if len(self._keys) >= _MAX_KEYS:
                self._keys.clear()
            key = self._keys[variant] = entry_name(variant.source, variant.arch, self._toolchain())
        return key

    def peek(self, variant: Variant) -> Cubin | None:
        """The cubin if it is in memory. Reads no disk and computes no key: for threads that must not wait."""
        key = self._keys.get(variant)
        return None if key is None else self._from_memory(key, variant)

    def get(self, variant: Variant) -> Cubin | None:
        """The cubin, or None if neither memory nor a folder has it. Compiles nothing and does not wait."""
        key = self.key(variant)
        cubin = self._from_memory(key, variant) or self._from_folders(key, variant)
        if cubin is None:
            self._miss(key, variant)
        return cubin

    def get_or_compile(self, variant: Variant, compile: Compile) -> Cubin:
        """The cubin. ``compile(source, arch)`` runs at most once for all threads and processes that need the variant.

        Every waiter gets the CompileError of ``compile``. Offline, it raises one that names the missing variant.
        """
        key = self.key(variant)
        cubin = self._from_memory(key, variant)
        if cubin is not None:
            return cubin
        while True:
            with self._lock:
                joined = self._flights.get(key)
                if joined is None:
                    flight = self._flights[key] = Future()
            if joined is None:
                return self._lead(flight, key, variant, compile)
            try:
                cubin, at_once = joined.result()
            except Exception:
                if joined.cancelled():  # the leading thread was interrupted; the kernel may still compile
                    continue
                self._miss(key, variant)
                raise
            if at_once:
                self._hit(key, variant, "another thread")
            else:
                self._miss(key, variant)
            return cubin

    def stats(self) -> CacheStats:
        """The current counts. It lists the folder, so do not call it on a hot path."""
        if self._folder is not None:
            entries, size = self._folder.usage()
        else:
            entries, size = len(self._memory), self._memory_bytes
        # Read without the lock: the caller may be a signal handler that interrupted its holder, or a forked child.
        return CacheStats(**self._counts, entries=entries, bytes=size)

    # One compile for many callers

    def _lead(self, flight: Future[Entry], key: EntryName, variant: Variant, compile: Compile) -> Cubin:
        """Find or compile the cubin for all threads that joined the flight. A later thread starts a new one."""
        try:
            try:
                result = self._find_or_compile(key, variant, compile)
            finally:
                with self._lock:
                    del self._flights[key]
        except Exception as error:
            flight.set_exception(error)
            raise
        except BaseException:
            flight.cancel()
            raise
        flight.set_result(result)
        return result[0]

    def _find_or_compile(self, key: EntryName, variant: Variant, compile: Compile) -> Entry:
        cubin = self._from_memory(key, variant) or self._from_folders(key, variant)
        if cubin is not None:
            return cubin, True
        compiled = self._compiled_key(key, variant)
        if compiled != key:
            return self._find_or_compile(compiled, variant, compile)
        self._miss(key, variant)
        cubin = self._compile_locked(key, variant, compile)
        self._store_in_memory(key, cubin)
        return cubin, False

    def _compiled_key(self, key: EntryName, variant: Variant) -> EntryName:
        """The key of a cubin that is compiled here: the loaded compiler may not be the installed one."""
        if self._offline or key.build is None:
            return key
        try:
            toolchain = self._toolchain(load=True)
        except CompileError:  # the compile that follows raises it too
            return key
        compiled = entry_name(variant.source, variant.arch, toolchain)
        if compiled != key:
            self._keys.clear()
        return compiled

    def _compile_locked(self, key: EntryName, variant: Variant, compile: Compile) -> Cubin:
        if self._offline:
            raise self._missing(key, variant)
        with contextlib.ExitStack() as lock:
            locked = self._locked(lock, key, variant)
            # Another process may have compiled it while this one waited.
            cubin = self._from_folders(key, variant, counted=False) if locked else None
            if cubin is None:
                cubin = self._compile(key, variant, compile)
                if locked:
                    self._publish(key, variant, cubin)
            return cubin

    def _compile(self, key: EntryName, variant: Variant, compile: Compile) -> Cubin:
        self._count("compiles")
        emit = functools.partial(self._emit, logging.INFO, key=key, variant=variant, arch=variant.arch)
        return traced_compile(emit, lambda: compile(variant.source, variant.arch))

    def _locked(self, lock: contextlib.ExitStack, key: EntryName, variant: Variant) -> bool:
        """Take the lock that keeps other processes from compiling the variant. Without it nothing is published."""
        if self._folder is None or key.build is None:
            return False
        try:
            lock.enter_context(self._folder.locked(key.build, self._lock_timeout))
        except TimeoutError:
            text = "%s is compiled elsewhere for %g s now: compiled here too, not published"
            _log.warning(text, variant.source.name, self._lock_timeout)
            return False
        except OSError as error:
            self._warn_unwritable(variant, error)
            return False
        return True

    def _missing(self, key: EntryName, variant: Variant) -> CompileError:
        macros = " ".join(f"{name}={value}" for name, value in variant.macros.items()) or "none"
        folders = [str(folder.path) for folder in self._folders] or ["no folder at all"]
        others = sorted({nvrtc for folder in self._folders for nvrtc in _builds(folder, key, variant)})
        hint = f"; it is there built by NVRTC {', '.join(others)}, not the one installed" if others else ""
        return CompileError(
            f"offline, and kernel {variant.source.name!r} for {variant.arch} (macros {macros}) is not in "
            f"{', '.join(folders)}: no entry {key.prefix}{key.build or '*'}.cubin{hint}"
        )

    # Memory and folders

    def _from_memory(self, key: EntryName, variant: Variant) -> Cubin | None:
        with self._lock:
            cubin = self._memory.get(key)
            if cubin is None:
                return None
            self._memory.move_to_end(key)
        self._hit(key, variant, "memory")
        return cubin

    def _store_in_memory(self, key: EntryName, cubin: Cubin) -> None:
        with self._lock:
            if key not in self._memory:
                self._memory[key] = cubin
                self._memory_bytes += len(cubin.data)
            while self._memory_bytes > self._max_memory_bytes:
                self._memory_bytes -= len(self._memory.popitem(last=False)[1].data)

    def _from_folders(self, key: EntryName, variant: Variant, *, counted: bool = True) -> Cubin | None:
        for folder in self._folders:
            try:
                names = [key.file_name] if key.build is not None else folder.names(key.prefix)
                for name in names:
                    cubin = self._read(folder, name, key, variant)
                    if cubin is not None:
                        self._store_in_memory(key, cubin)
                        if counted:
                            self._hit(key, variant, str(folder.path))
                        return cubin
            except OSError as error:
                self._warn_once(error, "cubin cache %s cannot be read: %s", folder.path, error)
        return None

    def _read(self, folder: CacheFolder, name: str, key: EntryName, variant: Variant) -> Cubin | None:
        stored = folder.read(name)
        if stored is None:
            return None
        try:
            if stored.fault:
                raise CorruptEntry(stored.fault)
            return decode_entry(key.build_of(name), stored.data, variant.arch, variant.source.entry_points)[0]
        except CorruptEntry as error:
            self._count("corrupt")
            path = folder.path / name
            self._emit(logging.DEBUG, "cache.corrupt", key, variant, path=str(path), reason=str(error))
            _log.warning("cubin cache entry %s is refused: %s", path, error)
        if folder.writable:
            with contextlib.suppress(OSError):  # the lookup is a miss in any case
                folder.quarantine(name, stored.inode)
        return None

    def _publish(self, key: EntryName, variant: Variant, cubin: Cubin) -> None:
        toolchain = self._toolchain()
        if self._folder is None or key.build is None or toolchain is None:
            return
        entry = encode_entry(key.build, cubin, toolchain.version)
        if len(entry) > self._max_bytes:
            _log.warning("%s has %d bytes, more than the whole cubin cache may hold", variant.source.name, len(entry))
            return
        try:
            self._folder.publish(key.file_name, entry)
            self._prune(self._folder, keep=key.file_name)
        except (OSError, InvalidRequest) as error:
            self._warn_unwritable(variant, error)

    def _prune(self, folder: CacheFolder, keep: str = "") -> None:
        evicted = folder.prune(self._max_bytes, keep)
        if evicted:
            self._count("evicted", evicted)
            _log.debug("cubin cache %s: %d entries evicted", folder.path, evicted)

    def _warn_unwritable(self, variant: Variant, error: Exception) -> None:
        folder = self._folder.path if self._folder is not None else None
        text = "cubin cache %s cannot be written, %s stays in memory: %s"
        self._warn_once(error, text, folder, variant.source.name, error)

    def _warn_once(self, error: Exception, text: str, *values: object) -> None:
        """Warn only of the first failure of a kind, because a read-only disk fails for every kernel."""
        kind = (text, error.errno if isinstance(error, OSError) else None)
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        _log.log(level, text, *values)

    # Counts and events

    def _hit(self, key: EntryName, variant: Variant, layer: str) -> None:
        self._count("hits")
        if self._on_event is not None or _log.isEnabledFor(logging.DEBUG):
            self._emit(logging.DEBUG, "cache.hit", key, variant, layer=layer)

    def _miss(self, key: EntryName, variant: Variant) -> None:
        self._count("misses")
        self._emit(logging.DEBUG, "cache.miss", key, variant)

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self._counts[what] += by

    def _emit(self, level: int, event: str, key: EntryName, variant: Variant, **fields: object) -> None:
        digest = key.build or key.variant
        fields = {"variant": f"{variant.source.name}:{digest[:12]}", "digest": digest, **fields}
        if self._on_event is None:
            if _log.isEnabledFor(level):
                log_record(_log, level, "%s %s", (event, fields), {"event": event, "fields": fields})
            return
        try:
            self._on_event(event, fields)
        except Exception:  # a listener's error must not fail the lookup
            _log.exception("on_event raised at %s", event)


def traced_compile(emit: Callable[..., None], make: Callable[[], T]) -> T:
    """Call ``make`` between the events compile.started and compile.completed."""
    emit("compile.started")
    start = time.perf_counter()
    failure: str | None = None
    try:
        return make()
    except BaseException as error:
        failure = str(error)
        raise
    finally:
        emit("compile.completed", seconds=time.perf_counter() - start, error=failure)


def _builds(folder: CacheFolder, key: EntryName, variant: Variant) -> Iterator[str]:
    """The NVRTC versions whose builds of the variant are in the folder."""
    with contextlib.suppress(OSError):
        for name in folder.names(key.prefix):
            stored = folder.read(name)
            if stored is not None:
                with contextlib.suppress(CorruptEntry):
                    yield decode_entry(key.build_of(name), stored.data, variant.arch, variant.source.entry_points)[1]
