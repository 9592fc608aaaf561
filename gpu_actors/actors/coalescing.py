"""Coalescer: answers requests over caches that wait at the same time with as few launches as their options allow.

Each request is checked alone before it joins others, so that only a wrong request is refused. If a shared launch fails,
each of its requests is launched again alone, so that a request fails only for its own errors.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gpu_actors.arrays.adopt import Adopted
from gpu_actors.attention.requests import BatchedDecode
from gpu_actors.devices.interface import Kernel, Launch, Outputs
from gpu_actors.errors import ActorStopped, ContextLost, GpuActorsError
from gpu_actors.planning.cached import CacheRequest, Decoding, bind_cached, decoding_output
from gpu_actors.planning.merging import merge, split_outputs
from gpu_actors.planning.plan import Plan
from gpu_actors.runtime.actor import ServiceActor
from gpu_actors.runtime.call import Call

__all__ = ["Coalescer", "Flush", "Work", "may_succeed_alone"]

Finished = Callable[[Outputs], Sequence[Any]]


class Flush:
    """The message that a `Coalescer` sends to its actor when requests have waited for others long enough."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A valid request that waits for its launch.

    request, plan: the attention of the request. template, result: as for `attention_output`. kernels: as for
    `Plan.launch`, and the same for all requests that may share a launch.
    """

    call: Call[Any]
    request: CacheRequest | None
    plan: Plan | None
    template: Adopted | None = None
    result: Any = None
    kernels: tuple[Kernel, ...] = ()

    def answer(self, outputs: Outputs) -> Any:
        """The result, from the request's own share of the outputs of a launch."""
        (answer,) = decoding_output(isinstance(self.request, BatchedDecode), self.template, self.result, outputs)
        return answer


W = TypeVar("W", bound=Work)


class Coalescer(Generic[W]):
    """The work that one incarnation of an actor has taken and not launched yet, in groups of one launch each.

    Groups are launched in the order in which they were begun. The actor calls `flush` after each batch of calls, and
    when a `Flush` comes. gathered: how many requests wait. held_up: whether they wait because too many launches are in
    flight. An actor that also launches without the Coalescer calls `flush` before such a launch, which would otherwise
    take the next free place each time.
    """

    def __init__(self, actor: ServiceActor, decoding: Decoding) -> None:
        options = actor.cell.environment.options
        self._actor = actor
        self._mailbox = actor.cell.mailbox
        self._decoding = decoding
        self._largest = options.coalesce_max
        self._delay = options.coalesce_delay_us * 1e-6
        self._waiting = False
        self.gathered: int = 0
        self.held_up: bool = False
        # Groups are numbered; `_first` is the number of the next one to be launched.
        self._groups: deque[list[W]] = deque()
        self._first = 0
        self._newest: dict[Hashable, int] = {}
        self._touched: dict[Hashable, int] = {}

    def add(self, work: W, key: Hashable | None, touches: Iterable[Hashable] = ()) -> None:
        """Put work into the newest group with this key if it has room, or else into a new group.

        key: equal for work that may share a launch; None: the work is launched alone. touches: the objects that the
        work depends on or changes. The work must not overtake other work on these objects, so it joins no group older
        than the newest group that touches one of them.
        """
        touches = tuple(touches)
        if work.call.unmergeable:
            key = None
        number = None if key is None else self._newest.get(key)
        earliest = self._first
        if self._touched:
            earliest = max([earliest, *(self._touched.get(what, earliest) for what in touches)])
        if number is None or number < earliest or len(self._groups[number - self._first]) >= self._largest:
            number = self._first + len(self._groups)
            self._groups.append([])
            if key is not None:
                self._newest[key] = number
        self._groups[number - self._first].append(work)
        for what in touches:
            self._touched[what] = number
        self._count(1)

    def flush(self, due: bool = False) -> None:
        """Launch the work that has gathered, unless it should wait for more. due: it must not wait any longer."""
        full = due or self.held_up or any(len(group) >= self._largest for group in self._groups)
        if not self.gathered or self._waits(full):
            return
        self.held_up = False
        while self._groups:
            if self._mailbox.saturated:
                self.held_up = True
                self._mailbox.request_flush()
                return
            group = self._groups.popleft()
            self._first += 1
            self._count(-len(group))
            self._launch(group)
        self._newest, self._touched = {}, {}

    def _count(self, more: int) -> None:
        self.gathered += more
        self._mailbox.gather(self.gathered)

    def _waits(self, due: bool) -> bool:
        """Whether the gathered work waits for more. A `Flush` ends the wait."""
        if due or not self._delay:
            self._waiting = False
        elif not self._waiting:
            self._waiting = True
            self._actor.cell.environment.timers.after(self._delay, self._ring)
        return self._waiting

    def _ring(self) -> None:
        if self._actor.actor_ref.is_alive():
            self._actor.actor_ref.tell(Flush())

    def _launch(self, group: list[W]) -> None:
        begun: list[W] = []
        try:
            self.begin(group, begun)
            if begun:
                launch, finish = self.assemble(begun)
                calls = [work.call for work in begun]
                self._actor.launch(calls, launch, finish, functools.partial(self.failed, begun))
        except BaseException as error:
            self.refused(begun)
            if not isinstance(error, GpuActorsError):
                raise
            if len(begun) == 1 or not may_succeed_alone(error):
                self._actor.answer_failure([work.call for work in begun], error)
                return
            # Nothing has been launched since, so each request is launched alone before all work that came after it.
            again = [[work] for work in begun if work.call.unclaim()]
            self._groups.extendleft(reversed(again))
            self._first -= len(again)
            self._newest = {}
            self._count(len(again))

    # For subclasses to extend

    def begin(self, group: list[W], begun: list[W]) -> None:
        """Claim the calls for a launch, and put the work that goes into it in ``begun``."""
        begun += [work for work in group if work.call.claim()]

    def assemble(self, group: list[W]) -> tuple[Launch, Finished]:
        """The attention of a group as one launch, and the function that turns its outputs into a result per request.

        Raises `GpuActorsError`.
        """
        first = group[0]
        requests = [work.request for work in group if work.request is not None]
        assert first.request is not None
        assert first.plan is not None
        if len(group) == 1:
            return self.bind(group, first.plan, first.request), lambda outputs: (first.answer(outputs),)
        merged = merge(requests)
        launch = self.bind(group, self._decoding.plan(merged, first.plan.key), merged)

        def finish(outputs: Outputs) -> Sequence[Any]:
            shares = split_outputs(requests, outputs)
            return [work.answer(share) for work, share in zip(group, shares, strict=True)]

        return launch, finish

    def bind(self, group: list[W], plan: Plan, request: CacheRequest) -> Launch:
        """A launch of a group's plan on the arrays of their merged request."""
        return bind_cached(plan, request, group[0].kernels)

    def refused(self, group: list[W]) -> None:
        """Called if a group was begun but its launch was not made."""

    def failed(self, group: list[W], error: BaseException) -> Collection[Call[Any]]:
        """Called on any thread when the launch of a group has failed. Returns the calls that are launched again."""
        if len(group) == 1 or not may_succeed_alone(error):
            return ()
        calls = [work.call for work in group]
        for call in calls:
            call.unmergeable = True
            if call.unclaim():
                self._mailbox.requeue((call,))
        return calls


def may_succeed_alone(error: BaseException) -> bool:
    """Whether requests of a failed launch may succeed alone, since one of them may have made it fail.

    After the device is lost, no request succeeds.
    """
    return isinstance(error, GpuActorsError) and not isinstance(error, ContextLost | ActorStopped)
