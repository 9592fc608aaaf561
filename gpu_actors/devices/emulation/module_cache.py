"""Built modules on disk: a folder that only its user can write to, since what lies there is run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import filelock

from gpu_actors.errors import InvalidRequest

__all__ = ["BuiltModule", "ModuleCache"]

_LOCK_SECONDS = 120.0
_MAX_BYTES = 256 << 20
_log = logging.getLogger(__name__)


class BuiltModule(NamedTuple):
    """A shared object, the kernels in it, and how long the compiler took."""

    library: Path
    entries: tuple[str, ...]
    build_seconds: float


Compile = Callable[[Path], AbstractContextManager[BuiltModule]]  # given the folder to work below


class ModuleCache:
    """The modules in `folder` (default: the user's cache folder), each in two files: KEY.so and KEY.json.

    Raises InvalidRequest for a folder that is a link, that another user owns or that others can write to. Where the
    folder cannot be made or written, modules are kept in a temporary one until the process ends.
    """

    def __init__(self, folder: Path | None = None) -> None:
        wanted = folder or _default_folder()
        try:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
            usable = os.access(wanted, os.W_OK | os.X_OK)
        except OSError:
            usable = False
        if not usable:
            _log.warning("emulation cache: %s cannot be written, modules are kept for this process only", wanted)
            wanted = _temporary_folder()
        _check_owner(wanted)
        self.folder = wanted

    def load(self, key: str) -> BuiltModule | None:
        """The module of that key, or None where it is missing or damaged."""
        library, record = self._files(key)
        try:
            facts = json.loads(record.read_bytes())
            digest = hashlib.sha256(library.read_bytes()).hexdigest()
            module = BuiltModule(library, tuple(facts["entries"]), float(facts["build_seconds"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("emulation cache: %s cannot be read (%s), it is built anew", key[:12], error)
            return None
        if digest != facts.get("sha256"):
            _log.warning("emulation cache: %s is damaged, it is built anew", key[:12])
            return None
        with contextlib.suppress(OSError):
            os.utime(record)  # when it was last used
        return module

    def build(self, key: str, compile_module: Compile) -> BuiltModule:
        """Compiles and publishes the module of that key, once for all processes that want it at the same time."""
        lock = filelock.FileLock(self.folder / f"{key}.lock")
        try:
            with lock.acquire(timeout=_LOCK_SECONDS):
                return self.load(key) or self._publish(key, compile_module)
        except filelock.Timeout:
            _log.warning("emulation cache: %s is being built elsewhere for over %g s", key[:12], _LOCK_SECONDS)
            return self._publish(key, compile_module)

    def _publish(self, key: str, compile_module: Compile) -> BuiltModule:
        library, record = self._files(key)
        with compile_module(self.folder) as built:
            facts = {
                "sha256": hashlib.sha256(built.library.read_bytes()).hexdigest(),
                "entries": list(built.entries),
                "build_seconds": built.build_seconds,
            }
            description = built.library.with_suffix(".json")
            description.write_text(json.dumps(facts), encoding="utf-8")
            for made, kept in ((built.library, library), (description, record)):
                with open(made, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(made, kept)
            self._tidy(keep=key)
            return built._replace(library=library)

    def _files(self, key: str) -> tuple[Path, Path]:
        return self.folder / f"{key}.so", self.folder / f"{key}.json"

    def _tidy(self, keep: str) -> None:
        """Removes the modules used longest ago until the rest fits. A loaded one stays usable: only its name goes."""
        used: list[tuple[float, int, str]] = []
        for record in self.folder.glob("*.json"):
            library = record.with_suffix(".so")
            with contextlib.suppress(OSError):
                used.append((record.stat().st_mtime, library.stat().st_size, record.stem))
        excess = sum(size for _, size, _ in used) - _MAX_BYTES
        for _, size, key in sorted(used):
            if excess <= 0:
                return
            if key != keep:
                for path in (*self._files(key), self.folder / f"{key}.lock"):
                    path.unlink(missing_ok=True)
                excess -= size


def _default_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("gpu-actors")) / "emulated"


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="gpu-actors-emulated-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _check_owner(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise InvalidRequest(
            "cache_dir", str(folder), "it holds code that will be run: name the folder itself, no link"
        )
    if state.st_uid != os.getuid():
        raise InvalidRequest("cache_dir", str(folder), "it holds code that will be run: it must belong to this user")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequest("cache_dir", str(folder), "others can write to it, and what it holds is run: chmod 700 it")
