"""One folder of cache entries on disk, shared by processes that may die at any instruction.

Code is loaded from the folder into the GPU, so only its owner may write to it. Every operation opens the folder without
following links, checks it, and opens files relative to that handle, not by path.

A user may name a folder that has other files too. So every file here has a name that no other program uses, and only
files with such names are listed or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from gpu_actors.errors import InvalidRequest

__all__ = ["CacheFolder", "StoredEntry", "user_cache_folder"]

ENTRY = ".cubin"
MAX_QUARANTINED = 8
MAX_ENTRY_BYTES = 1 << 28
LEFTOVER_AGE = 24 * 3600.0  # seconds

_QUARANTINED = ".corrupt"
_LOCK_POLL = 0.02  # seconds
# The name of an entry without its suffix: "gpu-actors" or the digest of its variant, then the digest of its build.
_STEM = r"(?:gpu-actors|[0-9a-f]{64})-[0-9a-f]{64}"
_LOCK = re.compile(r"gpu-actors-[0-9a-f]{64}\.lock")

_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


def user_cache_folder() -> Path:
    """The platform's folder for this package's caches.

    A user without a home, as in a container that runs under a bare user id, gets a temporary folder of this user.
    """
    import platformdirs

    try:
        path = platformdirs.user_cache_path("gpu-actors")
    except RuntimeError:
        path = Path()
    return path if path.is_absolute() else Path(tempfile.gettempdir()) / f"gpu-actors-{os.geteuid()}"


class StoredEntry(NamedTuple):
    """An entry as read.

    inode: the inode of the file that was read, so that only this file is quarantined.
    fault: why the data were not read, or "".
    """

    data: bytes
    inode: int
    fault: str = ""


class CacheFolder:
    """A folder of entries.

    writable: whether this process may add entries. A read-only folder may also belong to root, as in an image.
    field: the name of the setting that gives the folder, for errors.
    suffix: the end of an entry's name.

    A folder that does not exist is empty. The first `publish` creates it.
    Raises InvalidRequest(field, ...) for a folder that is a link, that another user owns, that others can write to or
    could replace, and OSError if the disk fails.
    """

    def __init__(self, path: Path, *, writable: bool, field: str = "cache_dir", suffix: str = ENTRY) -> None:
        self.path = path
        self.writable = writable
        self.field = field
        self._entry = re.compile(_STEM + re.escape(suffix))
        self._temporary = re.compile(rf"{self._entry.pattern}\.[0-9]+\.[0-9a-f]{{16}}\.tmp")
        self._quarantined = re.compile(self._entry.pattern + re.escape(_QUARANTINED))

    def check(self) -> bool:
        """Whether the folder exists. Raises InvalidRequest also for a path that is not a folder."""
        try:
            with self._opened():
                return True
        except NotADirectoryError:
            self._refuse("is not a folder, nor can one be made there")
        except OSError:
            return os.path.exists(self.path)

    def make(self) -> None:
        """Create the folder if it does not exist. Raises OSError if the disk fails."""
        with self._created():
            pass

    def read(self, name: str) -> StoredEntry | None:
        """The entry, or None if there is none. In a writable folder its access time is set to now."""
        try:
            with self._opened() as folder:
                handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OPEN, dir_fd=folder)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(handle)
            if fault := self._fault(status):
                return StoredEntry(b"", status.st_ino, fault)
            with os.fdopen(handle, "rb", closefd=False) as file:
                data = file.read()
            if self.writable:
                # The access time is set here, because many file systems are mounted with noatime.
                with contextlib.suppress(OSError):
                    os.utime(handle, ns=(time.time_ns(), status.st_mtime_ns))
        finally:
            os.close(handle)
        return StoredEntry(data, status.st_ino)

    def names(self, prefix: str) -> list[str]:
        """The entries whose names begin with ``prefix``, the newest first."""
        try:
            with self._opened() as folder:
                entries = _listing(folder, self._entry)
        except FileNotFoundError:
            return []
        entries.sort(key=lambda entry: entry[1].st_mtime_ns, reverse=True)
        return [name for name, _ in entries if name.startswith(prefix)]

    def publish(self, name: str, data: bytes) -> None:
        """Write an entry so that readers find it whole or not at all, even if this process dies."""
        with self._created() as folder:
            handle, temporary = self._new_temporary(name, folder)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
                os.fsync(handle)
                # The file is renamed while it is open and thus locked, so that no other process sweeps it in between.
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                _remove(temporary, folder)
                raise
            finally:
                os.close(handle)
            os.fsync(folder)

    def quarantine(self, name: str, inode: int) -> None:
        """Rename a corrupt entry, so that it is not read again but can be examined."""
        with self._opened() as folder:
            # Another process may have replaced it with a valid entry since it was read.
            if os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino == inode:
                os.replace(name, name + _QUARANTINED, src_dir_fd=folder, dst_dir_fd=folder)

    def usage(self) -> tuple[int, int]:
        """(number of entries, their bytes). (0, 0) for a folder that cannot be used."""
        try:
            with self._opened() as folder:
                sizes = [status.st_size for _, status in _listing(folder, self._entry)]
        except (OSError, InvalidRequest):
            return 0, 0
        return len(sizes), sum(sizes)

    def prune(self, max_bytes: int, keep: str = "") -> int:
        """Remove files of dead writers and old corrupt entries, then the least recently used entries until the rest
        fits ``max_bytes``. Returns how many entries were evicted.

        A reader that has opened an entry can go on reading, since removal only unlinks its name. ``keep`` is never
        removed.
        """
        with self._opened() as folder:
            for name, status in _listing(folder, self._temporary):
                _sweep(name, status, folder)
            for name, status in _listing(folder, _LOCK):
                if _is_old(status):
                    _sweep(name, status, folder)
            quarantined = sorted(_listing(folder, self._quarantined), key=lambda item: item[1].st_ctime_ns)
            for name, _ in quarantined[: max(0, len(quarantined) - MAX_QUARANTINED)]:
                _remove(name, folder)
            return _evict(folder, self._entry, max_bytes, keep)

    @contextlib.contextmanager
    def locked(self, build: str, timeout: float) -> Iterator[None]:
        """Hold the lock of ``build`` (64 hexadecimal digits), which excludes all other threads and processes.

        timeout: seconds to wait for another holder. The operating system frees the lock of a process that dies.
        Raises TimeoutError, and OSError if the disk fails or the file system has no locks.
        """
        name, owner = f"gpu-actors-{build}.lock", os.getpid()
        with self._created() as folder:
            handle = _acquire(name, folder, time.monotonic() + timeout)
            try:
                yield
            finally:
                if os.getpid() == owner:  # a forked child shares its parent's lock
                    # A process that waits for this file sees that its name is gone and opens the next one.
                    _remove(name, folder)
                    # Closing alone would leave the lock with a child that was forked meanwhile.
                    with contextlib.suppress(OSError):
                        fcntl.flock(handle, fcntl.LOCK_UN)
                os.close(handle)

    def _created(self) -> contextlib.AbstractContextManager[int]:
        # Parent folders get this mode too: if a lax umask let others write to one, the next check would refuse it.
        for place in (*reversed(self.path.parents), self.path):
            with contextlib.suppress(FileExistsError):
                if not place.exists():
                    place.mkdir(mode=0o700)
        return self._opened()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        except OSError:
            if self.path.is_symlink():
                self._refuse("it is a symbolic link: name the folder itself")
            raise
        try:
            self._check_owner(os.fstat(folder))
            self._check_above()
            yield folder
        finally:
            os.close(folder)

    def _check_owner(self, status: os.stat_result) -> None:
        if status.st_uid not in self._owners():
            self._refuse(f"user {status.st_uid} owns it: it must belong to user {os.geteuid()}, who runs this")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            self._refuse(f"others can write to it (mode {mode:04o}): chmod 700 it, or name another folder")

    def _check_above(self) -> None:
        """Check the parent folders, as ssh does: a user who can rename the folder can replace it."""
        parent = self.path.absolute().parent
        for place in dict.fromkeys(folder for path in (parent, parent.resolve()) for folder in (path, *path.parents)):
            status = place.stat()
            if status.st_uid not in (os.geteuid(), 0) and status.st_uid != _nobody_here():
                self._refuse(f"user {status.st_uid} owns the folder above it, {place}, and could replace it")
            if _others_write(status) and not status.st_mode & stat.S_ISVTX:
                mode = stat.S_IMODE(status.st_mode)
                self._refuse(
                    f"others can write to the folder above it, {place} (mode {mode:04o}), and could replace it"
                )

    def _fault(self, status: os.stat_result) -> str:
        """Why a file must not be read, or "": another user may have put it there before the folder was private."""
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ENTRY_BYTES:
            return f"it is no regular file of at most {MAX_ENTRY_BYTES} bytes"
        if status.st_uid not in self._owners() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "another user owns it or can write to it"
        return ""

    def _owners(self) -> set[int]:
        return {os.geteuid()} if self.writable else {os.geteuid(), 0}

    def _refuse(self, reason: str) -> NoReturn:
        raise InvalidRequest(self.field, str(self.path), reason)

    def _new_temporary(self, name: str, folder: int) -> tuple[int, str]:
        """Open a new file and lock it until it is closed: `prune` takes a free lock as a sign that the writer died."""
        while True:
            temporary = f"{name}.{os.getpid()}.{secrets.token_hex(8)}.tmp"
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle).st_nlink:
                return handle, temporary
            os.close(handle)  # `prune` removed the file before it was locked


def _acquire(name: str, folder: int, deadline: float) -> int:
    """Open and lock a file until ``deadline``, by `time.monotonic`. Returns its handle."""
    while True:
        handle = os.open(name, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=folder)
        try:
            while not _try_lock(handle):
                if time.monotonic() >= deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", name)
                time.sleep(_LOCK_POLL)
            with contextlib.suppress(FileNotFoundError):
                # If they differ, the last holder has removed the file, and its lock excludes no other process.
                if os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(handle)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _listing(folder: int, names: re.Pattern[str]) -> list[tuple[str, os.stat_result]]:
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if names.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    files.append((entry.name, entry.stat(follow_symlinks=False)))
    return files


def _evict(folder: int, names: re.Pattern[str], max_bytes: int, keep: str) -> int:
    entries = sorted(_listing(folder, names), key=lambda item: item[1].st_atime_ns)
    excess = sum(status.st_size for _, status in entries) - max_bytes
    removed = 0
    for name, status in entries:
        if excess <= 0:
            break
        if name != keep and _remove(name, folder):
            excess -= status.st_size
            removed += 1
    return removed


def _remove(name: str, folder: int) -> bool:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


def _others_write(status: os.stat_result) -> bool:
    """Whether users besides the owner may write. A group with only the owner in it does not count (umask 002)."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _nobody_here(proc: Path = Path("/proc")) -> int | None:
    """The user id that stands for all users outside of this container, root included. None outside of a container.

    A container that was started without privileges maps only its own user, and "/" belongs to the returned user id.
    """
    try:
        nobody = int((proc / "sys/kernel/overflowuid").read_text())
        spans = [list(map(int, line.split())) for line in (proc / "self/uid_map").read_text().splitlines()]
        mapped = any(first <= nobody < first + count for first, _, count in spans)
    except (OSError, ValueError):
        return None
    return None if mapped else nobody


def _is_own_group(gid: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _is_old(status: os.stat_result) -> bool:
    return time.time() - status.st_mtime > LEFTOVER_AGE


def _sweep(name: str, status: os.stat_result, folder: int) -> None:
    """Remove a file whose lock is free, because its writer has died. If there are no locks, remove old files."""
    try:
        handle = os.open(name, os.O_RDWR | os.O_NONBLOCK | _OPEN, dir_fd=folder)
    except OSError:
        return
    try:
        if _try_lock(handle):
            _remove(name, folder)
    except OSError:
        if _is_old(status):
            _remove(name, folder)
    finally:
        os.close(handle)
