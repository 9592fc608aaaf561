"""ContextWorker: owns a context, and answers the requests of a channel. It does not depend on processes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gpu_actors.actors.compiled_kernel import CompiledKernel, LaunchKernel
from gpu_actors.actors.kv_step import OpenStep
from gpu_actors.attention.requests import AttentionOutput, array_fields
from gpu_actors.catching import hand_error_to
from gpu_actors.devices.select import choose_device, open_device
from gpu_actors.errors import ContextLost, GpuActorsError, InvalidRequest, StaleBuffer
from gpu_actors.handles.gpu_context import GpuContext, start_context
from gpu_actors.handles.health import Health
from gpu_actors.isolation.channel import Channel, Link
from gpu_actors.isolation.launcher import WorkerSpec
from gpu_actors.isolation.pipe import Unreadable
from gpu_actors.isolation.records import (
    Cancel,
    Counts,
    KernelDescriptor,
    Opened,
    OpenFailed,
    Ping,
    Release,
    Request,
    Response,
    Status,
    StepDescriptor,
    Stop,
)
from gpu_actors.isolation.remote_queries import QUERIES
from gpu_actors.isolation.serialization import sendable_error
from gpu_actors.isolation.side_tasks import SideTasks
from gpu_actors.kv.requests import AttendLayer, EndStep
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.progress import is_failure

__all__ = ["ContextWorker"]

_OF_A_LAYER = tuple(array_fields(AttendLayer))

# Threads that launch layers of steps. Each waits for nothing but the device, so they serve any number of steps.
_THREADS = 32


class ContextWorker:
    """Owns a context on its own device and answers the requests of a channel: the other end of a `RemoteContext`.

    Its host calls `received` with each record of the channel, on one thread or several, until ``ended`` is true, and
    then `close`.

    A request to the context itself is "probe", "drain", "run" with a function and its arguments, one of `QUERIES` with
    the label of an actor and arguments, or an `AttendLayer`.

    channel: carries the responses.
    """

    def __init__(self, channel: Channel) -> None:
        self.ended: bool = False
        self._link = Link(channel, self._handle, self._end)
        self._context: GpuContext | None = None
        self._side_tasks: SideTasks | None = None
        self._cells: Mapping[str, Any] = {}
        self._calls: dict[int, Call[Any] | Future[Any]] = {}
        self._kept: dict[int, CompiledKernel | OpenStep] = {}  # objects that the program refers to, by request
        # These threads launch layers and wait for them, so that the thread that reads the channel need not.
        self._threads = ThreadPoolExecutor(_THREADS, "gpu-actors-layers")
        self._ready = True  # whether the last health that the program got was ready

    def open(self, order: WorkerSpec) -> None:
        """Open the context, and send that it is open. If it does not open, `refuse` sends why. Blocks."""
        with hand_error_to(self.refuse):
            spec, obstacle = choose_device(order.device)
            context = start_context(lambda: open_device(spec, order.options), order.options)
            children = context._children
            children.generation = order.generation  # tells an earlier process's sequences from this one's
            self._context, self._cells = context, children.cells
            self._side_tasks = SideTasks(context)
            self._link.send(Opened(context.info, obstacle, tuple(children.cells)))

    def refuse(self, error: BaseException) -> None:
        """Send why the context does not open, and set ``ended``."""
        self._link.send(OpenFailed(sendable_error(error)))
        self.ended = True

    def received(self, sequence: int, record: Any) -> None:
        """Take a record from the channel. Records may arrive in any order and any number of times."""
        self._link.received(sequence, record)
        self._link.check()

    def close(self) -> None:
        """Close the context, unless `Stop` has, and cancel the functions that run beside it. Blocks briefly."""
        if self._side_tasks is not None:
            self._side_tasks.close()
        if self._context is not None:
            self._context.close()
        self._threads.shutdown(wait=False)

    def _handle(self, record: Any) -> None:
        """Handle one record, in order. A request never makes it raise."""
        match record:
            case Request():
                self._on_request(record)
            case Unreadable(number, error):
                self._respond(number, None, None, InvalidRequest("message", "unreadable", str(error)))
            case Cancel(number):
                call = self._calls.get(number)
                if call is not None:
                    call.cancel()
            case Ping():
                self._link.send(self._status())
            case Release(number):
                self._kept.pop(number, None)
            case Stop():
                self.close()
                self._end()

    def _end(self, _: str = "") -> None:
        self.ended = True

    # Requests

    def _on_request(self, request: Request) -> None:
        number, actor, message, left, priority = request
        try:
            if type(message) is AttendLayer:
                self._threads.submit(self._attend, number, self._step(message.step), message)
                return
            if not actor:
                self._on_context_request(number, message, left)
                return
            cell = self._cells[actor]
            prepared = None
            if type(message) is LaunchKernel:
                message.kernel = self._kernel(message.kernel)
            elif type(message) is EndStep:
                message.step = self._step(message.step)
            elif actor == "flash_attn":
                prepared = cell.shared.recall(message) if hasattr(message, "alignment") else None
            call = cell.handle.send(message, None, left, priority, prepared)
        except BaseException as error:
            self._respond(number, None, None, error)
            return
        self._calls[number] = call
        call.when_done(functools.partial(self._on_call_done, number, cell))

    def _on_context_request(self, number: int, message: tuple[Any, ...], left: float | None) -> None:
        name, *arguments = message
        assert self._context is not None
        if name in QUERIES:
            actor, *operands = arguments
            self._respond(number, None, QUERIES[name](self._cells[actor], *operands), None)
            return
        if name == "run":
            assert self._side_tasks is not None
            task = self._side_tasks.run(arguments[0], arguments[1], functools.partial(self._on_task_done, number))
            self._calls[number] = task
            if task.done():
                self._calls.pop(number, None)
            return
        reply = self._context.probe(left) if name == "probe" else self._context.drain(left)
        reply._call.when_done(functools.partial(self._on_call_done, number, None))

    def _kernel(self, number: Any) -> CompiledKernel:
        kernel = self._kept.get(number)
        if not isinstance(kernel, CompiledKernel):
            raise StaleBuffer("the kernel was compiled in an earlier process of the context: compile it again")
        return kernel

    # Steps

    def _step(self, number: Any) -> OpenStep:
        step = self._kept.get(number)
        if not isinstance(step, OpenStep):
            raise StaleBuffer("the step has ended")
        return step

    def _attend(self, number: int, step: OpenStep, message: AttendLayer) -> None:
        arrays = {name: array for name in _OF_A_LAYER if (array := getattr(message, name)) is not None or name == "q"}
        with hand_error_to(functools.partial(self._respond, number, None, None)):
            answer = step.attend(message.layer, arrays, None)
            answer = answer if isinstance(answer, AttentionOutput) else AttentionOutput(answer)
            self._respond(number, None, answer, None)

    # Responses

    def _on_task_done(self, number: int, value: Any, error: BaseException | None) -> None:
        self._calls.pop(number, None)
        self._respond(number, None, value, error)

    def _on_call_done(self, number: int, cell: Any, call: Call[Any]) -> None:
        self._calls.pop(number, None)
        value = call.value
        if isinstance(value, CompiledKernel):
            self._kept[number] = value
            value = KernelDescriptor(number, value.entry, value.parameters, value.parameter_bytes, value.cubin)
        elif isinstance(value, OpenStep):
            self._kept[number] = value
            value = StepDescriptor(number, value.cache_number, value.lengths)
        self._respond(number, cell, value, call.error)

    def _respond(self, number: int, cell: Any, value: Any, error: BaseException | None) -> None:
        health: Health | None = None
        if not self._ready or (error is not None and (isinstance(error, ContextLost) or is_failure(error))):
            health = self._health()
        if error is not None:
            value, error = None, sendable_error(error)
        counts = None if cell is None else _counts(cell)
        try:
            self._link.send(Response(number, value, error, counts, health), number)
        except Exception as failure:  # the result cannot cross, and this actor's thread must go on
            if not isinstance(failure, GpuActorsError):
                failure = GpuActorsError(f"the answer cannot be sent: {failure!r}")
            self._link.send(Response(number, None, failure, counts, health), number)

    # Status

    def _health(self) -> Health:
        assert self._context is not None
        health = self._context.health()
        self._ready = health.state == "ready"
        return health

    def _status(self) -> Status:
        assert self._context is not None
        counts = {name: _counts(cell) for name, cell in self._cells.items()}
        restarts = {name: cell.restarts for name, cell in self._cells.items()}
        return Status(self._health(), self._context._watch.age, counts, restarts)


def _counts(cell: Any) -> Counts:
    mailbox = cell.mailbox
    # Read without the mailbox's lock: this thread may be at any point. A count that is one behind is corrected later.
    return Counts(mailbox._launched, mailbox._launched_calls, mailbox._in_flight, len(mailbox._waiting))
