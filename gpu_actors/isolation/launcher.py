"""Workplace and Connection: where the generations of a worker run, and the way to one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gpu_actors.isolation.arena import Host
from gpu_actors.isolation.channel import Channel
from gpu_actors.options import ContextOptions

__all__ = ["Connection", "Order", "Received", "Workplace"]

Received = Callable[[int, Any], None]


class Order(NamedTuple):
    """What a worker is told to open. generation: the number of this one, from 1."""

    device: str
    options: ContextOptions
    generation: int


class Connection(Protocol):
    """One generation of a worker. Its end is seen in `serve`; `bury` follows always, and once.

    channel: carries records to the worker. name: of the worker in messages, as "its process, 17,". pid: of its process,
    None where it has none of its own.
    """

    @property
    def channel(self) -> Channel: ...

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    def serve(self, tick: Callable[[], float]) -> None:
        """Hand on what comes, until the worker has ended or ``tick`` gives a negative number.

        tick: called now and then; gives the seconds until it is to be called again.
        """
        ...

    def wake(self) -> None:
        """Have the thread in `serve` call its ``tick`` soon. Safe in finalizers and signal handlers."""
        ...

    def kill(self) -> None:
        """End the worker without its help."""
        ...

    def bury(self, kill: bool) -> None:
        """See the worker end, and take back what it held. kill: it is not about to end by itself."""
        ...

    def after_fork(self) -> None:
        """In a forked child of the program: keep nothing open."""
        ...


class Workplace(Protocol):
    """Starts the generations of one worker. noun: what a generation is called in messages. patience: seconds that a
    record may be missing from its channel."""

    noun: str
    patience: float

    def start(self, order: Order, received: Received) -> Connection:
        """Start a generation. Blocks; raises `GpuActorsError` where it cannot be started.

        received: called with the sequence number and the record of what comes, on the thread in `Connection.serve`.
        """
        ...

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Host:
        """An array that requests and their generation may use without a copy."""
        ...

    def close(self) -> None:
        """No generation follows."""
        ...

    def after_fork(self) -> None:
        """In a forked child of the program: keep nothing open."""
        ...
