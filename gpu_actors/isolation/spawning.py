"""Spawning: the program's side of the zygote.

Each request to a zygote brings a socket for its answer, so an abandoned request disturbs no other. A zygote that does
not answer in time is retired: another one takes its place, and its children live on.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpu_actors.catching import undo_on_error
from gpu_actors.errors import GpuActorsError, Unsupported
from gpu_actors.isolation.zygote import ANSWER, GO, STARTED_BY

__all__ = ["Process", "spawn"]

# Seconds for a new zygote to start and fork on a busy machine, and for a zygote that has answered before to fork.
_STARTING = 60.0
_ANSWERING = 5.0


class Process(NamedTuple):
    """A context's process. pidfd: a descriptor that is readable once it has ended. The owner closes it."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait for the process, at most this many seconds. Whether it has ended."""
        return _readable(self.pidfd, seconds)


class _NoAnswer(Exception):
    """The zygote has ended, or does not answer. str(self) says which."""


class _Zygote:
    """A zygote, from its start. Safe to use from any thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from gpu_actors.isolation.zygote import main; main({theirs.fileno()}, {os.getpid()})"
        path = os.pathsep.join(path or _folder() for path in _search_path())
        environ = {**os.environ, "PYTHONPATH": path, STARTED_BY: str(os.getpid())}
        with theirs, undo_on_error(ours.close):
            # In a session of its own: the terminal's Ctrl-C is for the program.
            self.process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
                env=environ,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=_folder() if _is_deleted() else None,
                start_new_session=True,
            )
        ours.setblocking(False)
        self.socket = ours
        self._limit = _STARTING

    def fork(self, descriptors: Sequence[int], spec: bytes) -> Process:
        """Fork a child. Raises OSError if the system refuses to, and `_NoAnswer`."""
        file_descriptor = os.memfd_create("gpu_actors_order", os.MFD_CLOEXEC)
        with open(file_descriptor, "wb") as file:
            file.write(pickle.dumps((dict(os.environ), _search_path(), _folder())) + spec)
            file.flush()
            answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with answers:
                with theirs:
                    self._send([theirs.fileno(), *descriptors, file_descriptor])
                return self._answer(answers)

    def _send(self, descriptors: Sequence[int]) -> None:
        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)
        try:
            self.socket.sendmsg([b"fork"], [rights], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise _NoAnswer("does not read what it is asked") from None
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None
        except OSError as error:
            if error.errno != errno.EBADF:  # retired meanwhile
                raise
            raise _NoAnswer("did not answer") from None

    def _answer(self, answers: socket.socket) -> Process:
        if not _readable(answers.fileno(), self._limit):
            raise _NoAnswer(f"has not answered for {self._limit:g} s")
        message, pidfds, _, _ = socket.recv_fds(answers, ANSWER.size, 1)
        if not message:
            raise self._ended()
        self._limit = _ANSWERING
        number, pid = ANSWER.unpack(message)
        if not number and not pidfds:
            number = errno.EMFILE  # in this process: it had no room for the descriptor
        if number:
            raise OSError(number, os.strerror(number))
        with contextlib.suppress(OSError):  # the child has ended already: its descriptor shows that
            answers.send(GO, socket.MSG_NOSIGNAL)
        return Process(pid, pidfds[0])

    def _ended(self) -> _NoAnswer:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _NoAnswer(f"has ended with status {self.process.wait(1.0)}")
        return _NoAnswer("has closed its socket")

    def retire(self) -> None:
        """Send no more requests. The zygote ends with the last of its children."""
        self.socket.close()

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


class _Zygotes:
    """The current zygote, and those before it that did not answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: _Zygote | None = None
        self._retired: list[_Zygote] = []

    def spawn(self, descriptors: Sequence[int], spec: bytes) -> Process:
        for last in (False, True):
            zygote = self._running()
            try:
                return zygote.fork(descriptors, spec)
            except _NoAnswer as silence:
                self._retire(zygote)
                if last:
                    reason = f"the process that forks contexts {silence}"
                    raise GpuActorsError(f"the context's process cannot be started: {reason}") from None
        raise AssertionError

    def _running(self) -> _Zygote:
        with self._lock:
            if self._now is not None and self._now.process.poll() is not None:
                self._now.retire()
                self._now = None
            if self._now is None:
                self._now = _Zygote()
            return self._now

    def _retire(self, zygote: _Zygote) -> None:
        with self._lock:
            self._retired = [earlier for earlier in self._retired if earlier.process.poll() is None]
            if self._now is zygote:
                self._now = None
                zygote.retire()
                self._retired.append(zygote)

    def close(self) -> None:
        with self._lock:
            zygotes, self._now, self._retired = [*self._retired, self._now], None, []
        for zygote in zygotes:
            if zygote is not None:
                zygote.end()

    def after_fork(self) -> None:
        """Forget the zygotes in a forked child of the program. It starts a zygote of its own."""
        self._lock = threading.Lock()
        for zygote in (*self._retired, self._now):
            if zygote is not None:
                zygote.socket.close()
                zygote.process.returncode = 0  # it is not this process's child
        self._now, self._retired = None, []


_zygotes = _Zygotes()


def spawn(descriptors: Sequence[int], spec: Any) -> Process:
    """Start the process of a context. Blocks.

    Raises `GpuActorsError` if none can be started (`Unsupported` if there is no interpreter to start), and
    OSError if the system refuses a resource that it may grant later.

    descriptors: `gpu_actors.isolation.child.main` gets copies of them. spec: that function's argument, not yet pickled.
    """
    _check_interpreter()
    return _zygotes.spawn(descriptors, pickle.dumps(spec))


def _check_interpreter() -> None:
    reason = ""
    if getattr(sys, "frozen", False):
        reason = "a frozen program has no Python interpreter: its executable would start the program again"
    elif not sys.executable:
        reason = f"sys.executable is {sys.executable!r}: set it to the path of this Python's interpreter"
    elif STARTED_BY in os.environ:
        reason = (
            "this process was to fork those of contexts, and has started the program again: sys.executable of the "
            "program that began it is no Python interpreter"
        )
    if reason:
        raise Unsupported("isolation", "process", reason)


def _search_path() -> list[str]:
    """The strings of ``sys.path``: imports skip other entries too."""
    return [path for path in sys.path if isinstance(path, str)]


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()  # not select, which takes no descriptors beyond 1024
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _folder() -> str:
    """The working directory. If it has been deleted, the root: an interpreter may not start in a deleted one."""
    return "/" if _is_deleted() else os.getcwd()


def _is_deleted() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


os.register_at_fork(after_in_child=_zygotes.after_fork)
# Contexts are closed before this, by a hook of `handles.gpu_context` that runs earlier.
atexit.register(_zygotes.close)
