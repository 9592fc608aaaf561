"""RpcClient: sends a program's requests to a worker, and settles them by its responses. It depends on no processes.

    submit ──> waiting ──attach──> pending ──> Response      (a worker has it: `Call.state` is LAUNCHED)
                  │                   └──────> ContextLost   (detach: every request that the worker had)
                  └──> deadline, cancelled, Overloaded, ActorStopped

Each request has a number of its own in the life of its context, so a late or second response matches no request.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from gpu_actors.actors.compiled_kernel import CompiledKernel, LaunchKernel
from gpu_actors.arrays.request_arrays import changed
from gpu_actors.attention.requests import AttentionOutput
from gpu_actors.catching import undo_on_error
from gpu_actors.clock import SYSTEM_CLOCK
from gpu_actors.errors import (
    DeadlineExceeded,
    GpuActorsError,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    StaleBuffer,
    WouldBlock,
)
from gpu_actors.isolation.channel import Channel, Link
from gpu_actors.isolation.records import (
    Cancel,
    Counts,
    KernelDescriptor,
    Release,
    Request,
    Response,
    StepDescriptor,
)
from gpu_actors.isolation.remote_queries import QUERY_TIMEOUT
from gpu_actors.isolation.remote_step import RemoteStep
from gpu_actors.isolation.serialization import outbound, side_effect_free, undo_message
from gpu_actors.kv.requests import AttendLayer, EndStep
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import ActorStats, Mailbox
from gpu_actors.runtime.waking import Outbox
from gpu_actors.values import show

__all__ = ["MakeError", "RemoteKernel", "RemoteMailbox", "RpcClient"]

_NO_COUNTS = Counts(0, 0, 0, 0)
_OF_A_STEP = (AttendLayer, EndStep)

MakeError = Callable[[bool], GpuActorsError]
"""Makes the error of one request. Its argument: whether a worker had the request, and may have carried it out."""


class RemoteKernel:
    """Stands for a `CompiledKernel` in a worker: the number that the worker gave it, and the worker's generation."""

    def __init__(self, number: int, generation: int) -> None:
        self.number = number
        self.generation = generation


class _Pending(NamedTuple):
    """A request that a worker has."""

    call: Call[Any]
    finish: Callable[[Any], Any] | None
    side_effect_free: bool


class RemoteMailbox(Mailbox):
    """The mailbox of one actor in another process. Its requests go to a worker, not to a thread of this process."""

    def __init__(self, name: str, capacity: int, max_in_flight: int, client: RpcClient) -> None:
        super().__init__(name, capacity, max_in_flight)
        self._client = client
        self._earlier_counts = _NO_COUNTS  # of earlier generations
        self._counts = _NO_COUNTS

    def put(self, call: Call[Any], direct: bool = False) -> None:
        refusal: GpuActorsError | None = None
        with self.lock:
            self._submitted += 1
            if self._closed is not None:
                refusal = self._closed()
            else:
                self._unanswered.add(call)
                if self.meter is not None:
                    self.meter.accepted(call)
        if refusal is not None:
            call.fail(refusal)
            return
        try:
            self._client.submit(self.name, call)
        except GpuActorsError as error:
            call.fail(error)
        except BaseException:  # Ctrl-C: the sender never learns of the call
            call.fail(RequestCancelled("interrupted as it was made"))
            raise

    def release(self, call: Call[Any]) -> bool:
        self._client.forget(call)
        return super().release(call)

    def cancel_launched(self, call: Call[Any]) -> bool:
        return self._client.cancel(call)

    def update_counts(self, counts: Counts) -> None:
        self._counts = counts

    def begin_again(self) -> None:
        """Keep the counts so far, because the next worker's counts start at 0."""
        launched, calls = self._sums()
        self._earlier_counts, self._counts = Counts(launched, calls, 0, 0), _NO_COUNTS

    def stats(self) -> ActorStats:
        stats = super().stats()
        launched, calls = self._sums()
        counts = self._counts
        return ActorStats(
            submitted=stats.submitted,
            launched=launched,
            completed=stats.completed,
            failed=stats.failed,
            cancelled=stats.cancelled,
            in_flight=counts.in_flight,
            queued=counts.queued + self._client.waiting(self.name),
            requests_per_launch=calls / launched if launched else 0.0,
            errors=stats.errors,
        )

    def _sums(self) -> tuple[int, int]:
        earlier, counts = self._earlier_counts, self._counts
        return earlier.launched + counts.launched, earlier.launched_calls + counts.launched_calls


class _ThreadState(threading.local):
    """sending: whether this thread is sending a request, or is the channel's own thread."""

    sending = False


class RpcClient:
    """Sends requests to the current worker, and keeps them while there is none.

    capacity: how many requests may wait for a worker, or for a channel that takes no more at the moment.
    wake: makes the channel's thread call `pump`.
    kernel_cell: the cell of the actor that kernels belong to, None until it exists.

    The garbage collector may make and cancel requests at any point of a thread, even while the thread sends another
    request. So requests made during a send, and every cancellation, are queued. The channel's thread sends them.
    """

    def __init__(self, capacity: int, wake: Callable[[], None]) -> None:
        self._capacity = capacity
        self._wake = wake
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._number_of: dict[Call[Any], int] = {}
        self._abandoned: dict[int, Call[Any]] = {}  # answered here before the worker's response arrived
        self._waiting: deque[tuple[str, Call[Any]]] = deque()
        self._notes: deque[Any] = deque()
        self._link: Link | None = None
        self._channel: Channel | None = None
        self._generation = 0
        self._thread = _ThreadState()
        self._context_mailbox: RemoteMailbox = RemoteMailbox("", 1, 1, self)
        self._refusal: Callable[[], GpuActorsError] | None = None
        self.kernel_cell: Any = None

    # The program's side

    def submit(self, actor: str, call: Call[Any]) -> None:
        """Send a request, or let it wait for a worker.

        Raises `InvalidRequest` for a request that cannot cross, and `Overloaded` if too many wait. A request that
        frees memory is never `Overloaded`, as in `Mailbox`.
        """
        bounded = not getattr(type(call.message), "frees_memory", False)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal()
            if type(call.message) in _OF_A_STEP:  # no later worker answers these
                self._step_number(call.message.step)
            link = self._link
            if link is None or self._waiting or self._thread.sending:
                if bounded and self._count_waiting() >= self._capacity:
                    raise Overloaded(f"{actor}: {self._capacity} requests wait for the context's process", 1.0)
                self._waiting.append((actor, call))
                self._wake()
                return
        channel = self._channel
        if bounded and channel is not None and channel.waiting >= self._capacity:
            raise Overloaded(f"{actor}: the context's process takes no requests at the moment", 1.0)
        self._thread.sending = True
        try:
            sent = self._send(link, actor, call)
        finally:
            self._thread.sending = False
        if not sent:
            with self._lock:
                self._waiting.append((actor, call))

    def query(self, name: str, *arguments: Any) -> Any:
        """Send a query to the worker, and wait for the answer. Raises `DeadlineExceeded` if none arrives."""
        call = self.request_context((name, *arguments), None)
        if not call.wait(QUERY_TIMEOUT):
            call.fail(DeadlineExceeded(f"the context's process did not answer within {QUERY_TIMEOUT} s"))
        return call.answer()

    def request_context(self, message: tuple[Any, ...], timeout: float | None) -> Call[Any]:
        deadline = None if timeout is None else SYSTEM_CLOCK.now() + timeout
        call: Call[Any] = Call(message, self._context_mailbox, 0, deadline)
        self._context_mailbox.put(call)
        return call

    def attend(self, message: AttendLayer) -> Any:
        """Send a layer of a step to the worker, and wait for its output.

        Raises what `OpenStep.attend` raises, `ContextLost` if the worker ends, and `WouldBlock` on the channel's
        thread.
        """
        if self._thread.sending:
            raise WouldBlock("attend would block the thread that receives its answer; call it on another one")
        call: Call[Any] = Call(message, self._context_mailbox, 0, message.step.deadline)
        # An answer to an interrupted call must not be written into ``out`` later.
        with undo_on_error(call.fail, RequestCancelled("interrupted as it waited")):
            self._context_mailbox.put(call)
            if not call.wait(None if call.deadline is None else call.deadline - SYSTEM_CLOCK.now()):
                call.fail(DeadlineExceeded("the deadline of the step has passed"))
        answer: AttentionOutput = call.answer()
        return answer.out if answer.lse is None else answer

    def has(self, generation: int) -> bool:
        """Whether the current worker is that of this generation."""
        return self._link is not None and self._generation == generation

    def cancel(self, call: Call[Any]) -> bool:
        """Cancel a request that a worker has. True if that has answered the request already.

        A request that writes nothing but its answer is cancelled here. For other requests the worker decides, and
        answers `RequestCancelled` or the result.
        """
        number = self._number_of.get(call)
        pending = None if number is None else self._pending.get(number)
        if number is None or pending is None:
            return False
        if pending.side_effect_free:
            return call.fail(RequestCancelled("cancelled, and its result would be dropped"))
        self._notify(Cancel(number))
        return False

    def forget(self, call: Call[Any]) -> None:
        """Forget a request that has been answered, by the worker or here. If here, the worker is notified."""
        number = self._number_of.pop(call, None)
        if number is None:
            return
        self._abandoned[number] = call  # first, as the response may arrive at any time
        if self._pending.pop(number, None) is None:
            self._abandoned.pop(number, None)
            return
        if self._channel is not None:
            self._channel.forget(number)
        self._notify(Cancel(number))

    def waiting(self, actor: str) -> int:
        with self._lock:
            return sum(name == actor and not call.done for name, call in self._waiting)

    # The worker's side: on the channel's thread

    def attach(self, link: Link, channel: Channel, generation: int) -> None:
        """Connect to a worker: it gets the waiting requests, in order, and then new ones."""
        self._thread.sending = True
        with self._lock:
            self._notes.clear()  # they were for the previous worker
            self._link, self._channel, self._generation = link, channel, generation
        self.pump()

    def pump(self) -> None:
        """Send the requests and notes that wait for this thread."""
        link = self._link
        if link is None:
            return
        while self._waiting:
            with self._lock:
                actor, call = self._waiting[0]
            try:
                if not self._send(link, actor, call):
                    return
            except GpuActorsError as error:
                call.fail(error)
            with self._lock:  # until here, new requests wait after it
                if self._waiting and self._waiting[0][1] is call:
                    self._waiting.popleft()
        while self._notes:
            link.send(self._notes.popleft())

    def detach(self) -> list[Call[Any]]:
        """Leave a lost worker: new requests wait for the next one. Returns the requests that it had, for `fail_all`."""
        with self._lock:
            self._link = self._channel = None
            pending, self._pending = self._pending, {}
            self._number_of, self._abandoned = {}, {}
        return [sent.call for sent in pending.values()]

    def fail_all(self, calls: Iterable[Call[Any]], make_error: MakeError, sent: bool = True) -> None:
        """Fail several requests at a time. sent: whether a worker had them."""
        outbox = Outbox()
        for call in calls:
            call.fail(make_error(sent), outbox)
        outbox.flush()

    def give_up(self, make_error: MakeError) -> None:
        """Fail all requests, also waiting ones, and refuse new ones, because no worker will follow."""
        with self._lock:
            if self._refusal is None:
                self._refusal = functools.partial(make_error, False)
        self.fail_all(self.detach(), make_error)
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        self.fail_all([call for _, call in waiting], make_error, sent=False)

    def on_response(self, response: Response, outbox: Outbox | None = None) -> None:
        """Settle a request by the worker's response, if nothing else has."""
        pending = self._pending.pop(response.number, None)
        if pending is None:
            self._undo(self._abandoned.pop(response.number, None), response.value)
            return
        call = pending.call
        self._number_of.pop(call, None)
        if response.counts is not None and isinstance(call.mailbox, RemoteMailbox):
            call.mailbox.update_counts(response.counts)
        value, error = response.value, response.error
        if error is None:
            try:
                if type(value) is KernelDescriptor:
                    value = self._compiled_kernel(value)
                elif type(value) is StepDescriptor:
                    value = self._step(value, call)
                value = value if pending.finish is None else pending.finish(value)
            except Exception as failure:
                error = failure if isinstance(failure, GpuActorsError) else GpuActorsError(repr(failure))
        if not call.settle(value, error, outbox):
            self._undo(call, value)

    def on_unreadable(self, number: int, error: BaseException, outbox: Outbox | None = None) -> None:
        self.on_response(Response(number, None, error, None, None), outbox)

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self._link = self._channel = None

    # Inside

    def _count_waiting(self) -> int:
        if len(self._waiting) >= self._capacity:
            self._waiting = deque(entry for entry in self._waiting if not entry[1].done)
        return len(self._waiting)

    def _notify(self, note: Any) -> None:
        self._notes.append(note)
        self._wake()

    def _send(self, link: Link | None, actor: str, call: Call[Any]) -> bool:
        """Send a request. False if the worker is lost, so that the request has to wait for the next one."""
        message, finish = outbound(call.message, call.caller_notes)
        if type(message) is LaunchKernel:
            message = self._launch(message)
        elif type(message) in _OF_A_STEP:
            if type(message) is EndStep and isinstance(message.step, RemoteStep):
                finish = message.step.end
            message = changed(message, {"step": self._step_number(message.step)})
        number = next(self._numbers)
        pending = _Pending(call, finish, side_effect_free(call.message))
        with self._lock:
            if link is None or link is not self._link:
                return False
            if not call.claim():
                return True
            self._pending[number] = pending
            self._number_of[call] = number
        left = None if call.deadline is None else call.deadline - SYSTEM_CLOCK.now()
        try:
            link.send(Request(number, actor, message, left, call.priority), number)
        except BaseException:
            self._number_of.pop(call, None)
            self._pending.pop(number, None)
            raise
        return True

    def _undo(self, call: Call[Any] | None, value: Any) -> None:
        """Make the worker free what it made for a request, because its response came too late for the program."""
        undo = None if call is None or value is None else undo_message(call.message, value)
        if undo is not None:
            mailbox: Any = call and call.mailbox
            self._notify(Request(next(self._numbers), mailbox.name, undo, None, 0))
        if type(value) in (KernelDescriptor, StepDescriptor):
            self._notify(Release(value.number))

    def _compiled_kernel(self, descriptor: KernelDescriptor) -> CompiledKernel:
        kernel = RemoteKernel(descriptor.number, self._generation)
        self._release_with(kernel)
        sizes = descriptor.parameter_bytes
        entry, parameters, cubin = descriptor.entry, descriptor.parameters, descriptor.cubin
        return CompiledKernel(self.kernel_cell, entry, parameters, sizes, cubin, cast("Any", kernel))

    def _step(self, descriptor: StepDescriptor, call: Call[Any]) -> RemoteStep:
        mailbox: Any = call.mailbox
        step = RemoteStep(self, mailbox, descriptor, self._generation, call.deadline)
        self._release_with(step)
        return step

    def _step_number(self, step: Any) -> int:
        """The worker's number for a step. Raises `InvalidRequest` for a foreign step, `StaleBuffer` for a lost one."""
        if not isinstance(step, RemoteStep) or step.client is not self:
            raise InvalidRequest("step", show(step), "must be a step of this cache")
        if not self.has(step.generation):
            raise StaleBuffer(f"the step was begun in generation {step.generation} of the context, which is lost")
        return step.number

    def _release_with(self, remote: RemoteKernel | RemoteStep) -> None:
        """Make the worker drop the object that ``remote`` stands for once no reference to ``remote`` is left."""
        weakref.finalize(remote, self._release, remote.number, remote.generation).atexit = False

    def _release(self, number: int, generation: int) -> None:
        if generation == self._generation:
            self._notify(Release(number))

    def _launch(self, message: LaunchKernel) -> LaunchKernel:
        kernel = message.kernel
        if not isinstance(kernel, CompiledKernel) or not kernel.belongs_to(self.kernel_cell):
            raise InvalidRequest("kernel", type(kernel).__name__, "must be one that ctx.kernel of this context gave")
        remote: Any = kernel.loaded
        if not isinstance(remote, RemoteKernel) or remote.generation != self._generation:
            raise StaleBuffer(f"it was not compiled in generation {self._generation} of the context: compile it again")
        number: Any = remote.number
        return LaunchKernel(number, message.grid, message.block, message.args, message.out, message.shared_bytes)
