"""Launcher and Connection: starts the generations of a worker, and connects to one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpu_actors.isolation.arena import Host
from gpu_actors.isolation.channel import Channel
from gpu_actors.options import ContextOptions

__all__ = ["Connection", "Launcher", "Received", "WorkerSpec"]

Received = Callable[[int, Any], None]


class WorkerSpec(NamedTuple):
    """The context that a worker opens. generation: the number of this one, from 1."""

    device: str
    options: ContextOptions
    generation: int


class Connection(Protocol):
    """One generation of a worker. `serve` returns at its end; `bury` always follows, once.

    channel: carries records to the worker.
    name: of the worker in messages, as "its process, 17,".
    pid: of its process, None if it has none of its own.
    """

    @property
    def channel(self) -> Channel: ...

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    def serve(self, tick: Callable[[], float]) -> None:
        """Deliver records until the worker has ended or ``tick`` gives a negative number.

        tick: called now and then; gives the seconds until the next call.
        """
        ...

    def wake(self) -> None:
        """Have the thread in `serve` call its ``tick`` soon. Safe in finalizers and signal handlers."""
        ...

    def kill(self) -> None:
        """End the worker without its help."""
        ...

    def bury(self, kill: bool) -> None:
        """Wait for the end of the worker, and free what it held. kill: end it, as it does not end by itself."""
        ...

    def after_fork(self) -> None:
        """In a forked child of the program: keep nothing open."""
        ...


class Launcher(Protocol):
    """Starts the generations of one worker. Those that share nothing with their worker inherit all but `start`.

    noun: what a generation is called in messages.
    patience: seconds that a record may be missing from its channel.
    """

    noun: str
    patience: float

    def start(self, order: WorkerSpec, received: Received) -> Connection:
        """Start a generation. Blocks; raises `GpuActorsError` if it cannot be started.

        received: called with each sequence number and record that arrive, on the thread in `Connection.serve`.
        """
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Host:
        """An array that requests and their generation may use without a copy, or an ordinary one."""
        return np.empty(shape, dtype)

    def close(self) -> None:
        """No generation follows."""
        return

    def after_fork(self) -> None:
        """In a forked child of the program: keep nothing open."""
        return
