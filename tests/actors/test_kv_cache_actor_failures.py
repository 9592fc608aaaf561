"""A KvCacheActor dies or loses its context while it holds requests: each is answered, and no page is lost."""

from __future__ import annotations

import pytest
from inside.kv import CacheTables
from support.kv_cache import (
    LATER,
    Rows,
    contents,
    gathered,
    holds,
    in_flight,
    opened,
    outcome,
    slow,
    spec,
    taken,
    wait,
)
from support.service import eventually
from support.supervision import break_down

import gpu_actors as ga
from gpu_actors.actors.kv_cache import _KvCoalescer
from gpu_actors.testing import FaultPlan, MockClock


def test_a_lost_context_fails_what_is_in_flight_and_makes_the_rest_stale() -> None:
    rows = Rows(10)
    clock, options = slow(FaultPlan().lose_context(2), 2)
    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**spec()) as cache:
        seq = wait(cache.create())
        wait(cache.append(seq, *rows.new(3)))
        in_flight(ctx, 0)
        flying = cache.append(seq, *rows.new(1))
        in_flight(ctx, 1)
        clock.advance(LATER)
        with pytest.raises(ga.ContextLost):
            wait(flying)
        assert ctx.generation == 2
        for reply in (
            cache.create(),
            cache.append(seq, *rows.new(1)),
            cache.attend(rows.q(1, 1), [seq]),
            cache.free(seq),
        ):
            with pytest.raises(
                ga.StaleBuffer, match="belongs to generation 1 of the context, which is at generation 2"
            ):
                wait(reply)
        with pytest.raises(ga.StaleBuffer):
            cache.length(seq)


def test_an_actor_that_dies_answers_what_it_had_gathered_and_takes_no_pages_for_it() -> None:
    rows = Rows(11)
    clock = MockClock()
    options = ga.ContextOptions(clock=clock, coalesce_delay_us=1e6, restart=ga.RestartPolicy(backoff=0.0))
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        k, v = rows.new(3)
        first = cache.append(seq, k, v)
        gathered(ctx, 1)
        eventually(lambda: clock.advance(0.25) or first.done())
        wait(first)
        lost = cache.append(seq, *rows.new(20))
        gathered(ctx, 1)
        handle = ctx.actor(ga.KvCacheActor)
        break_down(handle, cache=cache._number)
        assert isinstance(outcome(lost), ga.ActorFailed)
        eventually(lambda: handle.restarts == 1 and handle.state == "running")
        assert (cache.length(seq), cache.stats().free_blocks) == (3, 7)
        fork = wait(cache.fork(seq))
        assert holds(cache, fork, k, v)
        assert contents(cache, seq)[0].shape[0] == 3


def test_an_actor_that_dies_while_it_makes_a_launch_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(25)
    options = ga.ContextOptions(restart=ga.RestartPolicy(backoff=0.0))
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        k, v = rows.new(3)
        wait(cache.append(seq, k, v))
        with monkeypatch.context() as broken:
            broken.setattr(_KvCoalescer, "assemble", lambda self, group: 1 / 0)
            with pytest.raises(ga.ActorFailed):
                wait(cache.append(seq, *rows.new(20)))
        handle = ctx.actor(ga.KvCacheActor)
        eventually(lambda: handle.restarts == 1 and handle.state == "running")
        assert (cache.length(seq), cache.stats().free_blocks) == (3, 7)
        wait(cache.truncate(seq, 1))
        assert wait(cache.append(seq, *rows.new(1))) == 2


def test_calls_that_wait_for_a_launch_outlive_the_actor() -> None:
    rows = Rows(26)
    clock, options = slow(FaultPlan(), 1, restart=ga.RestartPolicy(backoff=0.0))
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        appended = cache.append(seq, *rows.new(3))
        in_flight(ctx, 1)
        fork = cache.fork(seq)
        taken(ctx)
        handle = ctx.actor(ga.KvCacheActor)
        break_down(handle, cache=cache._number, error=SystemExit)
        eventually(lambda: handle.restarts == 1 and handle.state == "running")
        assert not fork.done()
        clock.advance(LATER)
        assert wait(appended) == 3
        assert wait(fork).cached == 3


def test_a_fault_of_the_actor_is_not_blamed_on_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(28)
    options = ga.ContextOptions(restart=ga.RestartPolicy(backoff=0.0))
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        for owner, name, ask in (
            (_KvCoalescer, "add", lambda: cache.append(seq, *rows.new(3))),
            (CacheTables, "fork", lambda: cache.fork(seq)),
        ):
            with monkeypatch.context() as broken:
                broken.setattr(owner, name, lambda self, *_: 1 / 0)
                assert isinstance(outcome(ask()), ga.ActorFailed)
        handle = ctx.actor(ga.KvCacheActor)
        eventually(lambda: handle.restarts == 2 and handle.state == "running")
        assert (cache.length(seq), cache.stats().free_blocks) == (0, 8)
