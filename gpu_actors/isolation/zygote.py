"""The zygote: a process that has the package imported, and forks a child for each context.

The zygote has one thread and never touches a device, so its children may. It watches the program's process and ends
with it. If the program closes its socket, the zygote ends with the last of its children. A child ends with the zygote.
Both ignore the signals that a supervisor sends to every process of a service: only the program handles them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import warnings
from typing import Any

from gpu_actors.process import SERVICE_SIGNALS

__all__ = ["ANSWER", "GO", "STARTED_BY", "main"]

ANSWER = struct.Struct("<iq")
"""The errno of a fork that failed, or 0, and the child's process id."""

GO = b"go"
"""Tells the child that the program has its descriptor. Without this message the child ends at once."""

STARTED_BY = "GPU_ACTORS_ZYGOTE_OF"
"""An environment variable of the zygote. The processes that it forks do not have it."""

_PR_SET_PDEATHSIG = 1

# The package, and the modules that a context imports when it opens.
_PRELOADED = (
    "gpu_actors",
    "gpu_actors.isolation.child",
    "gpu_actors.compiling.compiler",
    "gpu_actors.reference",
    "gpu_actors.reference.append",
    "gpu_actors.reference.graph",
    "platformdirs",
)


def main(descriptor: int, program: int) -> None:
    """Serve until the program has ended. descriptor: of the socket to the program. program: its process id."""
    for number in SERVICE_SIGNALS:
        signal.signal(number, _ignore_signal)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the program may ignore it, and then no child could be waited for
    try:
        watched = os.pidfd_open(program)
    except ProcessLookupError:
        return
    if os.getppid() != program:  # the program ended before it could be watched, and its id may be another's
        return
    for name in _PRELOADED:
        importlib.import_module(name)
    _Zygote(socket.socket(fileno=descriptor), watched).serve()


def _ignore_signal(number: int, frame: object) -> None:
    # A function, not SIG_IGN: programs that an actor starts would inherit SIG_IGN.
    return


class _Zygote:
    def __init__(self, sock: socket.socket, watched: int) -> None:
        self._socket: socket.socket | None = sock
        self._watched = watched
        self._children: dict[int, int] = {}  # process ids by pidfd
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(watched, select.POLLIN)

    def serve(self) -> None:
        while self._socket is not None or self._children:
            ready = dict(self._poll.poll())
            if self._watched in ready:
                return
            for pidfd in ready.keys() & self._children.keys():
                self._poll.unregister(pidfd)
                os.close(pidfd)
                os.waitpid(self._children.pop(pidfd), 0)
            if self._socket is not None and self._socket.fileno() in ready:
                self._handle_request(self._socket)

    def _handle_request(self, sock: socket.socket) -> None:
        message, descriptors, flags, _ = socket.recv_fds(sock, 16, 5)
        if not message:
            self._poll.unregister(sock)
            sock.close()
            self._socket = None
            return
        if not descriptors:  # no room for one, so no answer can be sent: the program sees the end of its socket
            return
        with socket.socket(fileno=descriptors[0]) as answers:
            try:
                if flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "")
                self._fork(answers, descriptors[1:])
            except OSError as error:
                _answer(answers, error.errno or errno.EAGAIN, 0)
            finally:
                for descriptor in descriptors[1:]:
                    os.close(descriptor)

    def _fork(self, answers: socket.socket, descriptors: list[int]) -> None:
        zygote = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's linear algebra library has threads, and handles forks itself
            child = os.fork()
        if child == 0:
            status = 1
            try:
                # Before anything that may take long. If the parent ends after this line, the signal comes. The check
                # after it notices a parent that ended before.
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == zygote and self._leave(answers):
                    _begin(descriptors)
                    status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        # The child has not been reaped yet, so its process id is still its own.
        try:
            pidfd = os.pidfd_open(child)
        except OSError:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        self._children[pidfd] = child
        self._poll.register(pidfd, select.POLLIN)
        _answer(answers, 0, child, pidfd)

    def _leave(self, answers: socket.socket) -> bool:
        """Close the zygote's descriptors in a child. Returns whether the program wants the child."""
        if self._socket is not None:
            self._socket.close()
        for descriptor in (self._watched, *self._children):
            os.close(descriptor)
        wanted = answers.recv(len(GO)) == GO
        answers.close()
        return wanted


def _answer(answers: socket.socket, number: int, child: int, *pidfd: int) -> None:
    with contextlib.suppress(OSError):  # the program no longer waits, and the child notices that too
        socket.send_fds(answers, [ANSWER.pack(number, child)], pidfd)


def _begin(descriptors: list[int]) -> None:
    with open(descriptors[-1], "rb") as file:
        file.seek(0)
        environ, path, folder = pickle.load(file)
        rest = file.read()
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = path
    with contextlib.suppress(OSError):
        os.chdir(folder)
    child: Any = importlib.import_module("gpu_actors.isolation.child")
    child.main(descriptors[:-1], rest)
