"""Spawning: the program's side of the zygote."""

from __future__ import annotations

import atexit
import contextlib
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

from gpu_actors.errors import GpuActorsError

__all__ = ["Process", "spawn"]

# Seconds for a zygote to start and fork, on a machine with much else to do.
_PATIENCE = 120.0


class Process(NamedTuple):
    """A context's process. pidfd: readable once it has ended; the owner closes it."""

    pid: int
    pidfd: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after so many seconds at most."""
        return bool(select.select([self.pidfd], [], [], seconds)[0])


class _Zygote:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def spawn(self, descriptors: Sequence[int], order: bytes) -> Process:
        with self._lock:
            for last in (False, True):
                if self._process is None or self._process.poll() is not None:
                    self._start()
                try:
                    return self._ask(descriptors, order)
                except OSError as error:
                    self._end()
                    if last:
                        raise GpuActorsError(f"the context's process cannot be started: {error}") from error
        raise AssertionError

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from gpu_actors.isolation.zygote import main; main({theirs.fileno()}, {os.getpid()})"
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            # In a session of its own: the terminal's Ctrl-C is for the program.
            self._process = subprocess.Popen(
                [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
                env=environ,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.settimeout(_PATIENCE)
        self._socket = ours

    def _ask(self, descriptors: Sequence[int], order: bytes) -> Process:
        assert self._socket is not None
        paper = os.memfd_create("gpu_actors_order", os.MFD_CLOEXEC)
        try:
            with open(paper, "wb", closefd=False) as file:
                file.write(pickle.dumps((dict(os.environ), list(sys.path), _folder())) + order)
            socket.send_fds(self._socket, [b"fork"], [*descriptors, paper])
            message, pidfds, _, _ = socket.recv_fds(self._socket, 16, 1)
        finally:
            os.close(paper)
        if not message:
            raise ConnectionResetError("the process that forks contexts has ended")
        return Process(int.from_bytes(message, "little"), pidfds[0])

    def _end(self) -> None:
        sock, self._socket = self._socket, None
        process, self._process = self._process, None
        if sock is not None:
            sock.close()
        if process is not None:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """End the zygote, and with it every child that there still is."""
        with self._lock:
            self._end()

    def after_fork(self) -> None:
        """In a forked child of the program, which starts a zygote of its own."""
        self._lock = threading.Lock()
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.returncode = 0  # it is not this process's child
        self._socket = self._process = None


_zygote = _Zygote()


def spawn(descriptors: Sequence[int], order: Any) -> Process:
    """Start the process of a context. Blocks; raises `GpuActorsError` where it cannot be started.

    descriptors: for `gpu_actors.isolation.child.main`, which get copies. order: what it is told, pickled.
    """
    return _zygote.spawn(descriptors, pickle.dumps(order))


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "/"


os.register_at_fork(after_in_child=_zygote.after_fork)
# Contexts are closed before: by a hook of `gpu_context` that runs earlier than these.
atexit.register(_zygote.close)
