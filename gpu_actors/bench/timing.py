"""Timing on a device: events around each call, the calls of all subjects in turns, quantiles of their times.

    hold | mark call mark | mark call mark | ... | release        one turn of one subject
         |<-- everything is enqueued here -->|

While the stream is held, nothing runs. The enqueued work then runs back to back, so no time of the host is between two
marks. Subjects take turns, so a change of the clock or of other work affects all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gpu_actors.errors import InvalidRequest

__all__ = ["Call", "EventClock", "Plan", "Quantiles", "Timing", "measure_in_turns", "quantiles"]

Call: TypeAlias = Callable[[], object]
"""Enqueues one piece of work and returns."""


class EventClock(Protocol):
    """A stream's clock. Everything is enqueued on that one stream."""

    def hold(self) -> None:
        """Stop the stream until `release`, or until some limit has passed."""

    def release(self) -> bool:
        """Let the stream continue. False if the limit had passed, so that it continued by itself."""

    def mark(self) -> Any:
        """Enqueue a mark."""

    def elapsed(self, begin: Any, end: Any) -> float:
        """The milliseconds between two marks, both of which have been reached."""

    def synchronize(self) -> None:
        """Wait until all enqueued work is over."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of the times of ``n`` calls, in milliseconds."""

    n: int
    least: float
    p10: float
    p25: float
    median: float
    p75: float
    p90: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How often to call: ``warmup`` rounds over all calls of a subject, then ``repeats`` calls in ``turns`` turns."""

    warmup: int = 3
    repeats: int = 30
    turns: int = 3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise InvalidRequest(name, value, "must be 1 or more")


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a subject.

    times: None if it failed.
    held: whether every call was enqueued before the stream continued. If not, the times may include time of the host.
    error: the subject's error.
    """

    times: Quantiles | None
    held: bool = True
    error: str | None = None


def quantiles(samples: Sequence[float]) -> Quantiles:
    """The quantiles of one or more times, with linear interpolation between the two nearest."""
    if not samples:
        raise InvalidRequest("samples", samples, "must hold one time or more")
    return Quantiles(len(samples), *np.percentile(samples, (0, 10, 25, 50, 75, 90, 100)).tolist())


def measure_in_turns(
    subjects: Mapping[str, Sequence[Call]], clock: EventClock, plan: Plan, between: Call = lambda: None
) -> dict[str, Timing]:
    """Time every subject. Its calls do the same work on different data, in rotation.

    between: called after each turn, with the stream idle.
    If a subject or ``between`` after it raises, that is reported and the subject is left out from then on.
    """
    running = {name: _Subject(list(calls)) for name, calls in subjects.items()}
    # The first turns get the remainder.
    counts = (plan.repeats // plan.turns + (number < plan.repeats % plan.turns) for number in range(plan.turns))
    steps = [functools.partial(_Subject.warm_up, clock=clock, rounds=plan.warmup)]
    steps += [functools.partial(_Subject.turn, clock=clock, calls=count) for count in counts]
    for step in steps:
        for subject in running.values():
            if subject.error is None:
                subject.attempt(step, between)
    return {name: subject.timing() for name, subject in running.items()}


class _Subject:
    def __init__(self, calls: list[Call]) -> None:
        self.error: str | None = None
        self._calls = calls
        self._next = 0
        self._times: list[float] = []
        self._held = True

    def attempt(self, step: Callable[[_Subject], None], between: Call) -> None:
        try:
            step(self)
            between()
        except Exception as error:  # of another library, or because the device is lost
            self.error = f"{type(error).__name__}: {error}"

    def warm_up(self, clock: EventClock, rounds: int) -> None:
        if not self._calls:
            raise InvalidRequest("calls", [], "must hold one call or more")
        for _ in range(rounds):
            for call in self._calls:
                call()
        clock.synchronize()

    def turn(self, clock: EventClock, calls: int) -> None:
        marks: list[tuple[Any, Any]] = []
        clock.hold()
        try:
            for _ in range(calls):
                call = self._calls[self._next % len(self._calls)]
                self._next += 1
                begin = clock.mark()
                call()
                marks.append((begin, clock.mark()))
        finally:
            held = clock.release()
        clock.synchronize()
        self._held = self._held and held
        self._times += [clock.elapsed(begin, end) for begin, end in marks]

    def timing(self) -> Timing:
        if self.error is not None:
            return Timing(None, error=self.error)
        return Timing(quantiles(self._times), self._held)
