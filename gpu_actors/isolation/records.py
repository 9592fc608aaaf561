"""The records that a program's process and a context's process exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_actors.devices.interface import DeviceInfo
from gpu_actors.handles.health import Health

__all__ = [
    "Cancel",
    "Counts",
    "KernelDescriptor",
    "OpenFailed",
    "Opened",
    "Ping",
    "Release",
    "Request",
    "Response",
    "Status",
    "StepDescriptor",
    "Stop",
]


class Counts(NamedTuple):
    """Counts of one actor in the context's process. launched_calls: the requests in the launches that have begun."""

    launched: int
    launched_calls: int
    in_flight: int
    queued: int


# To the context's process


class Request(NamedTuple):
    """Request ``number`` for an actor.

    actor: the actor's label. "" is the context itself, whose messages are a name and arguments (see `ContextWorker`).
    left: seconds until its deadline, or None.
    """

    number: int
    actor: str
    message: Any
    left: float | None
    priority: int


class Cancel(NamedTuple):
    """Cancel a request if it has not been launched. The request gets a response either way."""

    number: int


class Release(NamedTuple):
    """The program has dropped its last reference to a compiled kernel or a step. number: as in its descriptor."""

    number: int


class Ping(NamedTuple):
    """Asks for a `Status`."""


class Stop(NamedTuple):
    """Close the context and end."""


# To the program's process


class Opened(NamedTuple):
    """The context is open. obstacle: why "auto" is not CUDA. labels: the labels of its actors, in order."""

    info: DeviceInfo
    obstacle: str | None
    labels: tuple[str, ...]


class OpenFailed(NamedTuple):
    error: BaseException


class Response(NamedTuple):
    """The only response to request ``number``.

    counts: the counts of the actor that answered, None if the context itself did.
    health: the health of the context if it may have changed, else None.
    """

    number: int
    value: Any
    error: BaseException | None
    counts: Counts | None
    health: Health | None


class Status(NamedTuple):
    """The status of the context. counts, restarts: by the actor's label.

    success_age: seconds since a launch last succeeded.
    """

    health: Health
    success_age: float
    counts: Mapping[str, Counts]
    restarts: Mapping[str, int]


class KernelDescriptor(NamedTuple):
    """A `CompiledKernel`, which stays in the process that compiled it. number: stands for the kernel in requests."""

    number: int
    entry: str
    parameters: Any
    parameter_bytes: Any
    cubin: Any


class StepDescriptor(NamedTuple):
    """An `OpenStep`, which stays in the process of its device.

    number: stands for the step in requests. cache: the number of its cache.
    """

    number: int
    cache: int
    lengths: list[int]
