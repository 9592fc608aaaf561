"""ChildProcess: the launcher whose generations are child processes."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

from gpu_actors.catching import undo_on_error
from gpu_actors.errors import GpuActorsError
from gpu_actors.isolation.arena import Arena, Host
from gpu_actors.isolation.launcher import Received, WorkerSpec
from gpu_actors.isolation.pipe import PipeChannel
from gpu_actors.isolation.spawning import Process, spawn

__all__ = ["ChildProcess"]

# Seconds in which a killed process must end. If it takes longer, its shared memory is not used again.
_DYING = 10.0


class ChildProcess:
    """Each generation is a child process with a socket pair and two memfds: see docs/isolation.md. Linux only."""

    noun: str = "process"
    patience: float = 5.0

    def __init__(self) -> None:
        """Raises `GpuActorsError` if there is no room for shared memory."""
        try:
            self.arena: Arena = Arena()
        except OSError as error:
            hint = "the limits of this process (ulimit -a) leave too little"
            raise GpuActorsError(f"no shared memory for a context's process: {error}; {hint}") from error

    def start(self, order: WorkerSpec, received: Received) -> _Child:
        answers = Arena()
        ours, theirs = socket.socketpair()
        channel = PipeChannel(ours, True, self.arena, answers, received)
        with closing(answers), theirs, undo_on_error(answers.unmap), undo_on_error(channel.close):
            process = spawn((theirs.fileno(), self.arena.fd, answers.fd), tuple(order))
        return _Child(self, channel, process, answers)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Host:
        return self.arena.empty(shape, dtype)

    def close(self) -> None:
        self.arena.close()

    def after_fork(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.arena.fd)


class _Child:
    def __init__(self, launcher: ChildProcess, channel: PipeChannel, process: Process, answers: Arena) -> None:
        self.channel: PipeChannel = channel
        self.pid: int = process.pid
        self.name: str = f"its process, {process.pid},"
        self._launcher = launcher
        self._process = process
        self._answers = answers
        self._reaped = False

    def serve(self, tick: Callable[[], float]) -> None:
        self.channel.serve(tick, self._process.pidfd)

    def wake(self) -> None:
        self.channel.wake()

    def kill(self) -> None:
        if not self._reaped:
            self._process.kill()

    def bury(self, kill: bool) -> None:
        process = self._process
        if kill:
            process.kill()
        gone = process.wait(_DYING)
        if not gone:
            process.kill()
            gone = process.wait(_DYING)
        self._reaped = True
        os.close(process.pidfd)
        self.channel.close()
        if gone:
            self.channel.reclaim()
        else:
            self._launcher.arena.close()
            self._launcher.arena = Arena()
        self._answers.unmap()

    def after_fork(self) -> None:
        for descriptor in (*self.channel.descriptors(), self._process.pidfd):
            with contextlib.suppress(OSError):
                os.close(descriptor)
