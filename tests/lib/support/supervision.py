"""Shared by tests of supervision: two actors that fail on demand, and a context with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from support.service import answer, eventually, raises

import gpu_actors as ga


class Worker(ga.ServiceActor):
    """Counts its incarnations, calls ``openings`` when it opens, and handles a message by calling it."""

    label = "worker"
    openings: ClassVar[Callable[[int], None]] = staticmethod(lambda number: None)
    incarnations: ClassVar[int] = 0

    def open(self) -> None:
        type(self).incarnations += 1
        type(self).openings(type(self).incarnations)

    def handle(self, call: ga.Call[Any]) -> None:
        call.message(self, call)


class Vital(Worker):
    """A worker without which the context fails."""

    vital = True


class Sibling(Worker):
    label = "sibling"


@contextmanager
def supervised(
    policy: ga.RestartPolicy | None = None, kind: type[Worker] = Worker, **options: Any
) -> Iterator[tuple[ga.GpuContext, Any, Any]]:
    """A context with a Worker, or another kind of one, and a Sibling, and their handles."""
    Vital.incarnations = 0
    options.setdefault("drain_timeout", 1.0)
    policy = policy or ga.RestartPolicy(backoff=0.0)
    with ga.open_context("mock", ga.ContextOptions(actors=(kind, Sibling), restart=policy, **options)) as ctx:
        yield ctx, ctx.actor(kind), ctx.actor(Sibling)


def crash(actor: ga.ActorHandle, error: BaseException | None = None) -> ga.ActorFailed:
    """Make the actor raise. Returns the error of the request at which it raised."""
    with pytest.raises(ga.ActorFailed) as caught:
        actor.submit(raises(error or ZeroDivisionError("on purpose"))).result(30.0)
    return caught.value


def alive(actor: ga.ActorHandle, times: int = 1) -> None:
    """Wait until the actor has been restarted ``times`` times and answers."""
    eventually(lambda: actor.restarts == times and actor.state == "running")
    assert actor.submit(answer("alive")).result(30.0) == "alive"


class Broken:
    """A message that raises when any actor looks up its class."""

    def __init__(self, cache: int = 0, error: type[BaseException] = ZeroDivisionError) -> None:
        self.cache = cache
        self._error = error

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise self._error("on purpose")


def break_down(actor: ga.ActorHandle, **how: Any) -> None:
    """Make any actor raise."""
    with pytest.raises(ga.ActorFailed):
        actor.submit(Broken(**how)).result(30.0)


def hold(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
    """Keep the call, as an actor that batches does."""
    actor.__dict__.setdefault("kept", []).append(call)
