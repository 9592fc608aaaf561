"""Worker: owns a context, and answers what is asked of it over a channel. It knows no processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gpu_actors.actors.compiled_kernel import CompiledKernel, LaunchKernel
from gpu_actors.devices.select import choose_device, open_device
from gpu_actors.errors import ContextLost, GpuActorsError, InvalidRequest, StaleBuffer
from gpu_actors.handles.gpu_context import GpuContext, start_context
from gpu_actors.handles.health import Health
from gpu_actors.isolation.records import Answer, Ask, Cancel, Counts, Forget, KernelMade, Opened, Ping, Report, Stop
from gpu_actors.isolation.remote_queries import ANSWERS
from gpu_actors.isolation.serialization import sendable_error
from gpu_actors.isolation.side_tasks import Beside
from gpu_actors.options import ContextOptions
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.progress import is_failure

__all__ = ["KernelRef", "Worker"]

Send = Callable[[Any, int], None]


class Cancellable(Protocol):
    """What answers a request."""

    def cancel(self) -> bool: ...


class KernelRef:
    """Stands for a `CompiledKernel` of the worker's in a request to launch it."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return KernelRef, (self.number,)


class Worker:
    """A context and its requests by their numbers.

    send: sends a record, about a request or 0. ended: called when `Stop` has been obeyed.
    """

    def __init__(self, send: Send, ended: Callable[[], None]) -> None:
        self._send = send
        self._ended = ended
        self._context: GpuContext | None = None
        self._beside: Beside | None = None
        self._cells: Mapping[str, Any] = {}
        self._calls: dict[int, Cancellable] = {}
        self._kernels: dict[int, CompiledKernel] = {}
        self._ready = True  # what the program was last told

    def open(self, device: str, options: ContextOptions, generation: int) -> None:
        """Open the context, and tell the other side. Raises what opening raises."""
        spec, obstacle = choose_device(device)
        context = start_context(lambda: open_device(spec, options), options)
        children = context._children
        children.generation = generation  # sequences of an earlier process must be told from this one's
        self._context, self._cells = context, children.cells
        self._beside = Beside(context)
        self._send(Opened(context.info, obstacle, tuple(children.cells)), 0)

    def close(self) -> None:
        """Close the context, and cancel the functions beside it."""
        if self._beside is not None:
            self._beside.close()
        if self._context is not None:
            self._context.close()

    def received(self, record: Any) -> None:
        """Obey one record. Never raises for what a request is."""
        match record:
            case Ask():
                self._asked(record)
            case Cancel(number):
                call = self._calls.get(number)
                if call is not None:
                    call.cancel()
            case Ping():
                self._send(self._report(), 0)
            case Forget(kernel):
                self._kernels.pop(kernel, None)
            case Stop():
                self.close()
                self._ended()

    def unreadable(self, number: int, error: BaseException) -> None:
        """A request that could not be unpacked."""
        self._answer(number, None, None, InvalidRequest("message", "unreadable", str(error)))

    # Requests

    def _asked(self, ask: Ask) -> None:
        number, actor, message, left, priority = ask
        try:
            if not actor:
                self._about_context(number, message, left)
                return
            cell = self._cells[actor]
            prepared = None
            if type(message) is LaunchKernel:
                message.kernel = self._kernel(message.kernel)
            elif actor == "flash_attn":
                prepared = cell.shared.recall(message) if hasattr(message, "alignment") else None
            call = cell.handle.send(message, None, left, priority, prepared)
        except BaseException as error:
            self._answer(number, None, None, error)
            return
        self._calls[number] = call
        call.when_done(functools.partial(self._done, number, cell))

    def _about_context(self, number: int, message: tuple[Any, ...], left: float | None) -> None:
        name, *arguments = message
        assert self._context is not None
        if name in ANSWERS:
            self._answer(number, None, ANSWERS[name](self._cells, *arguments), None)
            return
        if name == "run":
            assert self._beside is not None
            running = self._beside.run(arguments[0], arguments[1], functools.partial(self._ran, number))
            self._calls[number] = running
            if running.done():
                self._calls.pop(number, None)
            return
        reply = self._context.probe(left) if name == "probe" else self._context.drain(left)
        reply._call.when_done(functools.partial(self._done, number, None))

    def _kernel(self, given: Any) -> CompiledKernel:
        found = self._kernels.get(given.number) if isinstance(given, KernelRef) else None
        if found is None:
            raise StaleBuffer("the kernel was compiled in an earlier process of the context: compile it again")
        return found

    def _ran(self, number: int, value: Any, error: BaseException | None) -> None:
        self._calls.pop(number, None)
        self._answer(number, None, value, error)

    def _done(self, number: int, cell: Any, call: Call[Any]) -> None:
        self._calls.pop(number, None)
        value = call.value
        if isinstance(value, CompiledKernel):
            self._kernels[number] = value
            value = KernelMade(number, value.entry, value.parameters, value.parameter_bytes, value.cubin)
        self._answer(number, cell, value, call.error)

    def _answer(self, number: int, cell: Any, value: Any, error: BaseException | None) -> None:
        health: Health | None = None
        if not self._ready or (error is not None and (isinstance(error, ContextLost) or is_failure(error))):
            health = self._health()
        if error is not None:
            value, error = None, sendable_error(error)
        counts = None if cell is None else _counts(cell)
        try:
            self._send(Answer(number, value, error, counts, health), number)
        except Exception as failure:  # the result cannot cross; and this is the thread of an actor
            if not isinstance(failure, GpuActorsError):
                failure = GpuActorsError(f"the answer cannot be sent: {failure!r}")
            self._send(Answer(number, None, failure, counts, health), number)

    # Looking on

    def _health(self) -> Health:
        assert self._context is not None
        health = self._context.health()
        self._ready = health.state == "ready"
        return health

    def _report(self) -> Report:
        counts = {name: _counts(cell) for name, cell in self._cells.items()}
        return Report(self._health(), counts, {name: cell.restarts for name, cell in self._cells.items()})


def _counts(cell: Any) -> Counts:
    mailbox = cell.mailbox
    # Read without its lock: the calling thread may be anywhere, and a number that is one behind is put right later.
    return Counts(mailbox._launched, mailbox._launched_calls, mailbox._in_flight, len(mailbox._waiting))
