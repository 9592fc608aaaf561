"""The exception tree.

GpuActorsError
├── RequestError               the request itself is at fault; names field, value and reason
│   ├── InvalidRequest         (also a ValueError) no device could answer it
│   └── Unsupported            a sound request that no kernel here answers; names the nearest that works
├── Overloaded                 a mailbox is full
├── DeadlineExceeded           not answered by its deadline
├── RequestCancelled           cancelled before its launch
├── MockModeError              the mock device was told not to compute
├── CompileError               NVRTC refused the source
├── LaunchError                the launch or the kernel failed; the context is still good
├── OutOfDeviceMemory
├── CacheFull                  no page left in a KV cache; nothing was written
├── StaleBuffer                the buffer belongs to an earlier generation of the context
├── ContextLost                the device context is gone; everything in flight failed
├── ActorStopped               the actor is stopped, or stopped before it answered
│   └── ActorFailed            the actor raised while it handled this request
└── WouldBlock                 a blocking call on the thread of a running event loop
"""

from __future__ import annotations

from gpu_actors.values import show

__all__ = [
    "ActorFailed",
    "ActorStopped",
    "CacheFull",
    "CompileError",
    "ContextLost",
    "DeadlineExceeded",
    "GpuActorsError",
    "InvalidRequest",
    "LaunchError",
    "MockModeError",
    "OutOfDeviceMemory",
    "Overloaded",
    "RequestCancelled",
    "RequestError",
    "StaleBuffer",
    "Unsupported",
    "WouldBlock",
]


class GpuActorsError(Exception):
    """Base of every error that this package raises on purpose."""


class RequestError(GpuActorsError):
    """A request that cannot be answered as asked.

    field: the argument at fault, by its public name.
    value: what was given (for arrays, a description rather than the array).
    reason: a sentence that says what would be accepted.
    """

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(field, value, reason)
        self.field = field
        self.value = value
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}={show(self.value)}: {self.reason}"


class InvalidRequest(RequestError, ValueError):
    """A request that contradicts itself or the layout rules: no device could answer it."""


class Unsupported(RequestError):
    """A sound request that no kernel here computes.

    nearest: the closest value of the same field that is supported, or None where there is none.
    """

    def __init__(self, field: str, value: object, reason: str, nearest: object = None) -> None:
        super().__init__(field, value, reason)
        self.args = (field, value, reason, nearest)
        self.nearest = nearest

    def __str__(self) -> str:
        hint = "" if self.nearest is None else f" (nearest supported: {show(self.nearest)})"
        return super().__str__() + hint


# Admission and waiting


class Overloaded(GpuActorsError):
    """The actor's mailbox is full. retry_after: seconds after which a retry may find room."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message, retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return str(self.args[0])


class DeadlineExceeded(GpuActorsError, TimeoutError):
    """The request was not answered by its deadline."""


class RequestCancelled(GpuActorsError):
    """The request was cancelled before its launch."""


# Compiling and launching


class MockModeError(GpuActorsError):
    """The mock device was opened with ``MockOptions(compute=False)`` and computes nothing."""


class CompileError(GpuActorsError):
    """A kernel did not compile.

    log: the compiler's whole log. source_line: the first offending line of source, or None.
    """

    def __init__(self, message: str, log: str = "", source_line: str | None = None) -> None:
        super().__init__(message, log, source_line)
        self.log = log
        self.source_line = source_line

    def __str__(self) -> str:
        return str(self.args[0])


class LaunchError(GpuActorsError):
    """A launch failed and the context survived it."""


class OutOfDeviceMemory(GpuActorsError):
    """The device has no memory left for the request's buffers."""


# State that outlives a request


class CacheFull(GpuActorsError):
    """A KV cache has no free page for the request. Nothing was written."""


class StaleBuffer(GpuActorsError):
    """A buffer was made by an earlier generation of the context than the one that is running."""


class ContextLost(GpuActorsError):
    """The device context is gone. generation: the generation that was lost."""

    def __init__(self, message: str, generation: int = 0) -> None:
        super().__init__(message, generation)
        self.generation = generation

    def __str__(self) -> str:
        return str(self.args[0])


class ActorStopped(GpuActorsError):
    """The actor is stopped, or stopped before it answered."""


class ActorFailed(ActorStopped):
    """The actor raised an unexpected exception while it handled this request (see ``__cause__``)."""


class WouldBlock(GpuActorsError, RuntimeError):
    """A call that blocks was made on the thread of a running event loop."""
