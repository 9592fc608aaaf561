"""The zygote: a process that has the package imported, and forks a child for each context.

A fork takes milliseconds, an interpreter with the package about a second. The zygote has one thread and never touches a
device, so its children may. It ends with the program: it sees the end of its socket, and of the program's process.
A child ends with the zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import warnings
from typing import Any

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1

# What a context imports when it opens, besides the package itself.
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
    """Serve until the program is gone. descriptor: of the socket to it. program: its process id."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's
    sock = socket.socket(fileno=descriptor)
    try:
        watched = os.pidfd_open(program)
    except ProcessLookupError:
        return
    if os.getppid() != program:  # it ended before it could be watched, and its number may be another's
        return
    for name in _PRELOADED:
        importlib.import_module(name)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(watched, select.POLLIN)
    children: dict[int, int] = {}
    while True:
        ready = dict(poll.poll())
        if watched in ready:
            return
        for pidfd in ready.keys() & children.keys():
            poll.unregister(pidfd)
            os.close(pidfd)
            os.waitpid(children.pop(pidfd), 0)
        if sock.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(sock, 16, 4)
        if not message:
            return
        child, pidfd = _fork(sock, (watched, *children), descriptors)
        children[pidfd] = child
        poll.register(pidfd, select.POLLIN)


def _fork(sock: socket.socket, watched: tuple[int, ...], descriptors: list[int]) -> tuple[int, int]:
    zygote = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's library of linear algebra has threads, and sees to forks itself
        child = os.fork()
    if child == 0:
        status = 1
        try:
            # Before anything that may take its time: the signal comes for a parent that ends after this line, and the
            # question after it is for one that ended before.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == zygote:
                sock.close()
                for descriptor in watched:
                    os.close(descriptor)
                _begin(descriptors)
                status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    for descriptor in descriptors:
        os.close(descriptor)
    # The child is not reaped before this is sent, so its number is still its own.
    pidfd = os.pidfd_open(child)
    with contextlib.suppress(OSError):
        socket.send_fds(sock, [child.to_bytes(8, "little")], [pidfd])
    return child, pidfd


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
