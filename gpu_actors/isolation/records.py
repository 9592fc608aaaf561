"""What a program's process and a context's process say to each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_actors.devices.interface import DeviceInfo
from gpu_actors.handles.health import Health

__all__ = ["Answer", "Ask", "Cancel", "Counts", "Forget", "KernelMade", "Opened", "Ping", "Refused", "Report", "Stop"]


class Counts(NamedTuple):
    """Of one actor in the context's process: launches begun, the requests in them, launches that have not ended,
    requests that wait."""

    launched: int
    launched_calls: int
    in_flight: int
    queued: int


# To the context's process


class Ask(NamedTuple):
    """Request ``number`` for an actor, by its label. left: seconds until its deadline, or None.

    actor "" is the context itself, whose messages are the names and arguments of `gpu_actors.isolation.remote_queries`.
    """

    number: int
    actor: str
    message: Any
    left: float | None
    priority: int


class Cancel(NamedTuple):
    """Cancel that request if it has not been launched. It is answered either way."""

    number: int


class Forget(NamedTuple):
    """The program has dropped its last reference to that compiled kernel."""

    kernel: int


class Ping(NamedTuple):
    """Answer with a `Report`."""


class Stop(NamedTuple):
    """Close the context and end."""


# To the program's process


class Opened(NamedTuple):
    """The context is open. obstacle: why "auto" is not CUDA. labels: of its actors, in order."""

    info: DeviceInfo
    obstacle: str | None
    labels: tuple[str, ...]


class Refused(NamedTuple):
    """The context could not be opened."""

    error: BaseException


class Answer(NamedTuple):
    """The one answer of request ``number``. counts: of the actor that gave it, None from the context itself.

    health: where it may have changed.
    """

    number: int
    value: Any
    error: BaseException | None
    counts: Counts | None
    health: Health | None


class Report(NamedTuple):
    """How the context is. counts, restarts: by the actor's label."""

    health: Health
    counts: Mapping[str, Counts]
    restarts: Mapping[str, int]


class KernelMade(NamedTuple):
    """Stands for a `CompiledKernel`, which stays where it was made. The other fields are the kernel's own."""

    number: int
    entry: str
    parameters: Any
    parameter_bytes: Any
    cubin: Any
