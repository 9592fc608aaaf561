"""The exception tree.

GpuActorsError
├── RequestError               the request itself is at fault; names field, value and reason
│   ├── InvalidRequest         (also a ValueError) no device could answer it
│   └── Unsupported            a valid request that no kernel here answers; names the nearest that works
├── Overloaded                 a mailbox is full
├── DeadlineExceeded           not answered by its deadline
├── RequestCancelled           cancelled before its launch
├── MockModeError              the mock device cannot compute this
├── CompileError               NVRTC refused the source
├── LaunchError                the launch or the kernel failed; the context is still good
├── Unqualified                each kernel that could answer has computed wrong numbers on this machine
├── OutOfDeviceMemory
├── CacheFull                  no page left in a KV cache; nothing was written
├── StaleBuffer                the buffer belongs to a closed cache, an earlier generation or another process
├── ContextLost                the device context is gone; everything in flight failed
│   └── WorkerLost             its worker is gone too; says whether the request may have been carried out
├── ActorStopped               the actor is stopped, or stopped before it answered
│   └── ActorFailed            the actor raised while it handled this request
├── WouldBlock                 a blocking call on the thread of a running event loop
├── AsyncioNeeded              awaited on the loop of another library, such as trio, or on none
└── NotCopyable                (also a TypeError) a context, handle, cache or reply was pickled or copied

Errors pickle with their fields, notes and cause.
"""

from __future__ import annotations

import pickle
from typing import Any, Literal, TypeVar

from gpu_actors.values import show

__all__ = [
    "ActorFailed",
    "ActorStopped",
    "AsyncioNeeded",
    "CacheFull",
    "CompileError",
    "ContextLost",
    "DeadlineExceeded",
    "GpuActorsError",
    "InvalidRequest",
    "LaunchError",
    "MockModeError",
    "NotCopyable",
    "OutOfDeviceMemory",
    "Overloaded",
    "RequestCancelled",
    "RequestError",
    "StaleBuffer",
    "Unqualified",
    "Unsupported",
    "WorkerLost",
    "WouldBlock",
]

E = TypeVar("E", bound=BaseException)


class GpuActorsError(Exception):
    """Base of every error that this package raises on purpose. Pickles with its fields, notes and cause."""

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: _portable(value) for name, value in vars(self).items()}
        return _rebuilt, (type(self), tuple(map(_portable, self.args)), fields, _portable(self.__cause__))


class _Described:
    """Stands for a value that cannot be pickled. Its text in messages is the same."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _portable(value: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return None if isinstance(value, BaseException) else _Described(show(value))
    return value


def _rebuilt(
    kind: type[GpuActorsError], args: tuple[Any, ...], fields: dict[str, Any], cause: BaseException | None
) -> GpuActorsError:
    # __init__ is not called: its parameters may differ from the args.
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    if cause is not None:
        error.__cause__ = cause
    return error


def caused(error: E, cause: BaseException | None) -> E:
    """Return ``error`` with ``cause`` as its cause. Neither traceback is changed."""
    error.__cause__ = cause
    return error


class RequestError(GpuActorsError):
    """A request that cannot be answered as asked.

    field: the public name of the argument at fault, or of a size of several arrays, such as head_dim or page_size.
    value: the argument; for an array, its description.
    reason: a sentence that says what would be accepted.
    """

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(field, value, reason)
        self.field = field
        self.value = value
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}={show(self.value)}: {self.reason}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(show, self.args))})"

    def named_for(self, message: object) -> RequestError:
        """The same error, with the field's name as the sender of ``message`` knows it.

        A message type's ``argument_names`` maps inner names to its own, where they differ.
        """
        name = getattr(type(message), "argument_names", {}).get(self.field)
        return self if name is None else type(self)(name, *self.args[1:])


class InvalidRequest(RequestError, ValueError):
    """A request that contradicts itself or the layout rules: no device could answer it."""


class Unsupported(RequestError):
    """A valid request that no kernel here computes.

    nearest: the closest value of the same field that is supported, or None if there is none.
    """

    def __init__(self, field: str, value: object, reason: str, nearest: object = None) -> None:
        super().__init__(field, value, reason)
        self.args: tuple[Any, ...] = (field, value, reason, nearest)
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
    """The mock device cannot compute this: it was opened with ``MockOptions(compute=False)``, or the request launches a
    kernel of your own, for which it has no oracle."""


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
    """A launch failed. The context is still usable."""


class Unqualified(GpuActorsError):
    """A kernel has failed the proof that it computes correctly on this machine, and no other kernel can answer.

    kernel: its name. problem: the small problem that it computed wrong. reason: how wrong the result was. evidence: the
    path of the file with the arrays of that problem, or None.
    """

    def __init__(
        self, message: str, kernel: str = "", problem: str = "", reason: str = "", evidence: str | None = None
    ) -> None:
        super().__init__(message, kernel, problem, reason, evidence)
        self.kernel = kernel
        self.problem = problem
        self.reason = reason
        self.evidence = evidence

    def __str__(self) -> str:
        return str(self.args[0])


class OutOfDeviceMemory(GpuActorsError):
    """The device has no memory left for the request's buffers."""


# State that outlives a request


class CacheFull(GpuActorsError):
    """A KV cache has no free page for the request. Nothing was written."""


class StaleBuffer(GpuActorsError):
    """A buffer cannot be used: its cache was closed, or an earlier generation or another process made it."""


class ContextLost(GpuActorsError):
    """The device context is gone. generation: the generation that was lost."""

    def __init__(self, message: str, generation: int = 0) -> None:
        super().__init__(message, generation)
        self.generation = generation

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerLost(ContextLost):
    """A worker is gone, and its device context too. Everything that it held (caches, sequences, kernels) is lost.

    worker: its name. generation: the generation that was lost. happened: "no" if the request never reached the worker,
    "unknown" if it may have been carried out.
    """

    def __init__(
        self, message: str, generation: int = 0, worker: str = "", happened: Literal["no", "unknown"] = "unknown"
    ) -> None:
        super().__init__(message, generation)
        self.args: tuple[Any, ...] = (message, generation, worker, happened)
        self.worker = worker
        self.happened: Literal["no", "unknown"] = happened


class ActorStopped(GpuActorsError):
    """The actor is stopped, or stopped before it answered."""


class ActorFailed(ActorStopped):
    """The actor raised an unexpected exception while it handled this request (see ``__cause__``)."""


class WouldBlock(GpuActorsError, RuntimeError):
    """A call that blocks was made on the thread of a running event loop."""


class AsyncioNeeded(GpuActorsError, RuntimeError):
    """An awaitable was awaited that needs an asyncio event loop (uvloop and anyio on asyncio work, too)."""


class NotCopyable(GpuActorsError, TypeError):
    """A context, handle, cache or reply was pickled or copied. It belongs to the process that made it."""
