"""Requests on a KvCache wait for launches in flight, for others to share one, or for users of their sequence."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.kv_cache import (
    LATER,
    Rows,
    attention,
    gathered,
    holds,
    in_flight,
    opened,
    outcome,
    slow,
    spec,
    wait,
)
from support.service import eventually

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock


def test_a_request_does_not_join_a_launch_from_before_one_that_it_follows() -> None:
    """The first and the third agree in shape; the second, on the same sequence, does not, and comes between them."""
    rows = Rows(27)
    clock, options = slow(FaultPlan(), 1, max_in_flight=1)
    with opened(options) as (ctx, cache):
        seqs = wait(cache.create(), cache.create())
        first = cache.append(seqs[1], *rows.new(1))
        in_flight(ctx, 1)
        news = [rows.new(count) for count in (2, 3, 2)]
        replies = [cache.append(seqs[0], *new) for new in news]
        clock.advance(LATER)
        wait(first)
        assert wait(*replies) == [2, 5, 7]
        assert holds(cache, seqs[0], *(np.concatenate(side) for side in zip(*news, strict=True)))


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_finds_too_many_launches_in_flight_keeps_its_place(cancelled: bool) -> None:
    """Two appends of different shape cannot share a launch, and one launch may be in flight: the second waits, and so
    does the fork behind it. If the second is cancelled, the fork goes on without its rows."""
    rows = Rows(24)
    clock, options = slow(FaultPlan(), 1, 2, max_in_flight=1)
    with opened(options) as (ctx, cache):
        seqs = wait(cache.create(), cache.create())
        first = cache.append(seqs[0], *rows.new(1))
        in_flight(ctx, 1)
        second, waiting, fork, last = (
            cache.append(seqs[0], *rows.new(2)),
            cache.append(seqs[1], *rows.new(3)),
            cache.fork(seqs[1]),
            cache.append(seqs[1], *rows.new(4)),
        )
        clock.advance(LATER)
        assert wait(first) == 1
        gathered(ctx, 1)
        assert not cancelled or waiting.cancel()
        clock.advance(LATER)
        assert wait(second) == 3
        assert isinstance(outcome(waiting), ga.RequestCancelled) if cancelled else wait(waiting) == 3
        assert wait(fork).cached == (0 if cancelled else 3)
        assert wait(last) == (4 if cancelled else 7)


def test_a_request_that_is_cancelled_or_late_while_it_waits_takes_no_pages() -> None:
    rows = Rows(7)
    clock = MockClock()
    options = ga.ContextOptions(clock=clock, coalesce_delay_us=1e6)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        k, v = rows.new(3)
        kept, dropped, late, last = (
            cache.append(seq, k, v),
            cache.append(seq, *rows.new(4)),
            cache.append(seq, *rows.new(4), timeout=0.5),
            cache.append(seq, k[:1], v[:1]),
        )
        gathered(ctx, 4)
        assert cache.length(seq) == 0
        assert dropped.cancel()
        clock.advance(0.6)
        with pytest.raises(ga.DeadlineExceeded, match="before its launch"):
            wait(late)
        eventually(lambda: clock.advance(0.25) or (kept.done() and last.done()))
        assert (wait(kept), wait(last)) == (3, 4)
        assert holds(cache, seq, np.concatenate([k, k[:1]]), np.concatenate([v, v[:1]]))
        with pytest.raises(ga.RequestCancelled):
            wait(dropped)
        in_flight(ctx, 0)


def test_what_is_late_after_its_launch_happens_all_the_same() -> None:
    rows = Rows(8)
    clock, options = slow(FaultPlan(), 1)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        k, v = rows.new(3)
        late = cache.append(seq, k, v, timeout=LATER / 2)
        in_flight(ctx, 1)
        clock.advance(LATER * 0.6)
        with pytest.raises(ga.DeadlineExceeded, match="after its launch"):
            wait(late)
        clock.advance(LATER)
        in_flight(ctx, 0)
        assert cache.length(seq) == 3
        assert holds(cache, seq, k, v)


def test_free_and_truncate_wait_for_what_uses_the_sequence() -> None:
    rows = Rows(9)
    clock, options = slow(FaultPlan(), 2)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        k, v = rows.new(9)
        wait(cache.append(seq, k, v))
        in_flight(ctx, 0)
        q = rows.q(1, 1)
        read = cache.attend(q, seq)
        in_flight(ctx, 1)
        cut, freed = cache.truncate(seq, 2), cache.free(seq)
        eventually(lambda: ctx.stats()["kv_cache"].queued == 0)
        assert not cut.done()
        assert cache.stats().free_blocks == 6
        clock.advance(LATER)
        np.testing.assert_allclose(wait(read).out[0], attention(q[0], k, v), rtol=1e-5, atol=1e-6)
        wait(cut, freed)
        assert cache.stats()[:4] == (8, 8, 0, 0)


async def test_32_tasks_share_launches_and_each_gets_its_own_sequences_answer() -> None:
    """Each task appends to its own sequence and attends a few times, as a task that generates text does."""
    tasks, steps = 32, 2

    async def generate(ctx: ga.GpuContext, cache: ga.KvCache, index: int) -> list[np.ndarray]:
        rows = Rows(index)
        seq = await cache.create()
        await cache.append(seq, *rows.new(1 + index % 5))
        outs = []
        for _ in range(steps):
            q, (k, v) = rows.q(1, 1), rows.new(1, 1)
            outs.append((await cache.attend(q, [seq], k=k, v=v, num_splits=2)).out)
        await cache.free(seq)
        return outs

    async def run(options: ga.ContextOptions) -> tuple[list[list[np.ndarray]], ga.ActorStats]:
        async with (
            ga.open_context("mock", options) as ctx,
            ctx.kv_cache(**spec(num_blocks=tasks * 3)) as cache,
        ):
            outs = await asyncio.gather(*(generate(ctx, cache, index) for index in range(tasks)))
            assert cache.stats()[:4] == (tasks * 3, tasks * 3, 0, 0)
            return outs, ctx.stats()["kv_cache"]

    # While one slow launch runs the others wait together. Without it the scheduler would decide how many share one.
    together, stats = await run(ga.ContextOptions(max_in_flight=1, mock=ga.MockOptions(latency=0.05)))
    alone, unmerged = await run(ga.ContextOptions(coalesce_max=1))
    assert unmerged.launched == tasks * (steps + 1)
    assert stats.launched < unmerged.launched / 5, stats
    for one, other in zip(together, alone, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
