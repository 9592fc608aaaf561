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
    """The context that a worker opens. generation: the number of the worker's generation, from 1."""

    device: str
    options: ContextOptions
    generation: int


class Connection(Protocol):
    """One generation of a worker. `serve` returns when it has ended. `bury` is always called after that, once.

    channel: carries records to the worker.
    name: the worker's name in messages, such as "its process, 17,".
    pid: the id of its process, None if it has no process of its own.
    """

    @property
    def channel(self) -> Channel: ...

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    def serve(self, tick: Callable[[], float]) -> None:
        """Deliver records until the worker has ended or ``tick`` returns a negative number.

        tick: called now and then. Returns the seconds until the next call.
        """
        ...

    def wake(self) -> None:
        """Make the thread in `serve` call its ``tick`` soon. Safe in finalizers and signal handlers."""
        ...

    def kill(self) -> None:
        """End the worker by force."""
        ...

    def bury(self, kill: bool) -> None:
        """Wait until the worker has ended, and free its resources. kill: whether to end it by force first."""
        ...

    def after_fork(self) -> None:
        """Called in a forked child of the program. Must keep nothing open."""
        ...


class Launcher(Protocol):
    """Starts the generations of one worker. A launcher that shares nothing with its worker inherits all but `start`.

    noun: the word for a generation in messages.
    patience: seconds for which a record may be missing from its channel.
    """

    noun: str
    patience: float

    def start(self, order: WorkerSpec, received: Received) -> Connection:
        """Start a generation. Blocks; raises `GpuActorsError` if it cannot be started.

        received: called with each sequence number and record that arrive, on the thread in `Connection.serve`.
        """
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Host:
        """An array that a generation can use in requests without a copy. Here: an ordinary array."""
        return np.empty(shape, dtype)

    def close(self) -> None:
        """Called when no generation follows."""
        return

    def after_fork(self) -> None:
        """Called in a forked child of the program. Must keep nothing open."""
        return
