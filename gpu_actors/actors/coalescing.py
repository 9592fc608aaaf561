"""Coalescer: answers the requests over caches that wait together with as few launches as they agree on.

Each request is checked by itself before it joins others, so that what is wrong with one is never held against them. A
launch that fails is repeated for each of its requests alone; then only those fail that fail by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpu_actors.arrays.adopt import Adopted
from gpu_actors.devices.interface import Kernel, Launch, Outputs
from gpu_actors.errors import ActorStopped, ContextLost, GpuActorsError
from gpu_actors.planning.cached import CacheRequest, Decoding, bind_cached, decoding_output
from gpu_actors.planning.merging import cut_outputs, is_packed, merge, merge_key, place
from gpu_actors.planning.padding import pad_request, recordable
from gpu_actors.planning.plan import Plan
from gpu_actors.requests import BatchedDecode, PagedForward
from gpu_actors.runtime.call import Call

if TYPE_CHECKING:
    from gpu_actors.runtime.actor import ServiceActor

__all__ = ["Batch", "Coalescer", "Flush", "Waiting", "may_succeed_alone"]

Item = TypeVar("Item")


class Batch(Generic[Item]):
    """Calls that an actor has taken and not launched yet, in groups that one launch each will answer.

    Groups are launched in the order in which they were begun. A call joins the newest group with its key, unless it
    would overtake something that it depends on: a group begun later that touches what the call touches. largest: items
    that a group may have.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._groups: list[list[Item]] = []
        self._count = 0
        self._newest: dict[Hashable, int] = {}
        self._touched: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Items in all groups."""
        return self._count

    @property
    def full(self) -> bool:
        """Whether a group has as many items as it may have."""
        return any(len(group) >= self._largest for group in self._groups)

    def add(self, item: Item, key: Hashable | None, touches: Iterable[Hashable] = ()) -> None:
        """Put an item into a group. key: of items that may share a launch; None: with nobody."""
        touches = tuple(touches)
        index = self._newest.get(key, -1) if key is not None else -1
        earliest = max((self._touched.get(what, 0) for what in touches), default=0)
        if index < earliest or len(self._groups[index]) >= self._largest:
            index = len(self._groups)
            self._groups.append([])
            if key is not None:
                self._newest[key] = index
        self._groups[index].append(item)
        self._count += 1
        for what in touches:
            self._touched[what] = index

    def take(self) -> list[list[Item]]:
        """The groups in order; the batch is empty then."""
        groups, self._groups = self._groups, []
        self._count = 0
        self._newest, self._touched = {}, {}
        return groups


class Flush:
    """Sent by an actor to itself when requests have waited for others long enough."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A sound request that waits for its launch.

    like, result: as for `attention_output`. kernels: as for `Plan.launch`; requests that may share a launch are
    answered by the same ones.
    """

    call: Call[Any]
    request: CacheRequest
    plan: Plan
    like: Adopted | None
    result: Any
    kernels: tuple[Kernel, ...] = ()

    def answer(self, outputs: Outputs) -> Any:
        """The result, from the outputs of a launch of this request alone."""
        (answer,) = decoding_output(isinstance(self.request, BatchedDecode), self.like, self.result, outputs)
        return answer


class Coalescer:
    """Used by one incarnation of an actor, which calls `flush` after each batch of calls.

    gathered: there is something to flush. turned_away: what had gathered found too many launches in flight, and waits
    in the mailbox again. Others that are launched alone must not take the next place each time: `flush` before them.
    """

    def __init__(self, actor: ServiceActor, decoding: Decoding) -> None:
        options = actor.cell.environment.options
        self._actor = actor
        self._decoding = decoding
        self._batch: Batch[Waiting] = Batch(options.coalesce_max)
        self._timer = FlushTimer(actor, options.coalesce_delay_us)
        self._records = options.record_launches
        self.gathered: bool = False
        self.turned_away: bool = False

    def add(self, waiting: Waiting) -> None:
        """Take a request in that was checked."""
        key = None if waiting.call.alone else merge_key(waiting.plan, waiting.request)
        self._batch.add(waiting, key)
        self._actor.cell.mailbox.gather(len(self._batch))
        self.gathered = True

    def flush(self, due: bool = False) -> None:
        """Launch what has gathered, unless it may wait for more. due: it has waited."""
        if not self.gathered or self._timer.wait(due or self.turned_away or self._batch.full):
            return
        self.gathered = self.turned_away = False
        groups = self._batch.take()
        mailbox = self._actor.cell.mailbox
        mailbox.gather(0)
        for group in groups:
            if mailbox.saturated:
                self.turned_away = True
                mailbox.give_back([waiting.call for waiting in group])
            else:
                self._launch([waiting for waiting in group if waiting.call.claim()])

    def _launch(self, group: list[Waiting]) -> None:
        if not group:
            return
        calls = [waiting.call for waiting in group]

        def failed(error: BaseException) -> Collection[Call[Any]]:
            return again_alone(calls, error)

        try:
            launch, finish = self._merged(group)
        except GpuActorsError as error:
            self._actor.answer_failure(calls, failed(error), error)
            return

        try:
            self._actor.launch(calls, launch, finish, failed)
        except GpuActorsError:
            return  # the calls have been answered, or queued again

    def _merged(self, group: list[Waiting]) -> tuple[Launch, Callable[[Outputs], Sequence[Any]]]:
        first = group[0]
        requests = [waiting.request for waiting in group]
        records = self._records and recordable(first.request)
        if len(group) == 1 and not records:
            return bind_cached(first.plan, first.request, first.kernels), lambda outputs: (first.answer(outputs),)
        parts = place(requests)
        merged = merge(requests) if len(group) > 1 else first.request
        packed = is_packed(merged)
        if records and isinstance(merged, PagedForward):
            merged = pad_request(merged)
        plan = self._decoding.plan(merged, first.plan.key)
        launch = bind_cached(plan, merged, first.kernels)
        if records:
            launch.recording = (plan.key, plan.problem)
            launch.recording_keeps = ("k_cache", "v_cache")

        def finish(outputs: Outputs) -> Sequence[Any]:
            return [
                waiting.answer(cut_outputs(outputs, part, packed)) for waiting, part in zip(group, parts, strict=True)
            ]

        return launch, finish


def may_succeed_alone(error: BaseException) -> bool:
    """Whether a launch's failure may be the fault of one of its requests. Nothing helps against a lost device."""
    return isinstance(error, GpuActorsError) and not isinstance(error, ContextLost | ActorStopped)


def again_alone(calls: Sequence[Call[Any]], error: BaseException) -> Collection[Call[Any]]:
    """Of the calls of a launch that failed, those that get a launch of their own."""
    if len(calls) == 1 or not may_succeed_alone(error):
        return ()
    for call in calls:
        call.alone = True
    return calls


class FlushTimer:
    """Says whether what has gathered waits for more, and sends the actor a `Flush` when that is over."""

    def __init__(self, actor: ServiceActor, delay_us: float) -> None:
        self._actor = actor
        self._seconds = delay_us * 1e-6
        self._running = False

    def wait(self, due: bool) -> bool:
        """True while what has gathered should wait. due: it need not wait any longer."""
        if due or not self._seconds:
            self._running = False
            return False
        if not self._running:
            self._running = True
            self._actor.cell.environment.timers.after(self._seconds, self._ring)
        return True

    def _ring(self) -> None:
        if self._actor.actor_ref.is_alive():
            self._actor.actor_ref.tell(Flush())
