"""A KvCache whose launches fail, are late, or lose the context: requests happen wholly and in order, or not at all.

Launches end when the mock clock says so, and the plan says which of them fail, so that everything comes in the one
order that a test is about.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from support.kv_cache import Rows, attention, contents, holds, in_flight, opened, outcome, spec, wait
from support.service import eventually

import gpu_actors as ga
from gpu_actors.actors.kv_store import OpenedCache
from gpu_actors.runtime.completion import Completion
from gpu_actors.testing import FaultPlan, MockClock

LATER = 1.0


def slow(plan: FaultPlan, *launches: int, **options: Any) -> tuple[MockClock, ga.ContextOptions]:
    """These launches end a second later than they would."""
    clock = MockClock()
    for launch in launches:
        plan = plan.delay(LATER, launch)
    return clock, ga.ContextOptions(fault_plan=plan, clock=clock, **options)


@pytest.mark.parametrize("error", [ga.LaunchError, ga.OutOfDeviceMemory])
def test_an_append_that_fails_leaves_no_trace(error: Any) -> None:
    rows = Rows(1)
    with opened(ga.ContextOptions(fault_plan=FaultPlan().fail(2, error).fail(4, error))) as (_, cache):
        seq = wait(cache.create())
        k, v = rows.new(5)
        wait(cache.append(seq, k, v))
        before = cache.stats()
        with pytest.raises(error):
            wait(cache.append(seq, *rows.new(20)))
        assert (cache.stats(), cache.length(seq)) == (before, 5)
        fork = wait(cache.fork(seq))
        wait(cache.append(fork, *rows.new(1)))
        with pytest.raises(error):
            wait(cache.attend(rows.q(1, 2), fork, k=rows.new(1, 2)[0], v=rows.new(1, 2)[1]))
        assert cache.length(fork) == 6
        assert holds(cache, seq, k, v)
        wait(cache.free(seq), cache.free(fork))
        assert cache.stats()[:4] == (8, 8, 0, 0)


def test_a_copied_page_goes_back_when_the_launch_that_copied_it_fails() -> None:
    rows = Rows(2)
    with opened(ga.ContextOptions(fault_plan=FaultPlan().fail(2))) as (_, cache):
        seq = wait(cache.create())
        k, v = rows.new(5)
        wait(cache.append(seq, k, v))
        fork = wait(cache.fork(seq))
        with pytest.raises(ga.LaunchError):
            wait(cache.append(fork, *rows.new(1)))
        assert (cache.stats().free_blocks, cache.stats().shared_blocks) == (7, 1)
        assert holds(cache, fork, k, v)


def test_what_was_launched_behind_a_failed_append_is_repeated_without_its_rows() -> None:
    rows = Rows(3)
    clock, options = slow(FaultPlan().fail(1), 1)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        (k, v), (k_new, v_new), q = rows.new(3), rows.new(1, 2), rows.q(1, 2)
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        kept = cache.append(seq, k, v)
        in_flight(ctx, 2)
        attended = cache.attend(q, seq, k=k_new, v=v_new)
        in_flight(ctx, 3)
        read = cache.attend(q[:, :1], seq)
        in_flight(ctx, 4)
        assert cache.length(seq) == 14
        clock.advance(LATER)
        with pytest.raises(ga.LaunchError):
            wait(lost)
        assert wait(kept) == 3
        whole = np.concatenate([k, k_new[0]]), np.concatenate([v, v_new[0]])
        np.testing.assert_allclose(wait(attended).out[0], attention(q[0], *whole), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(wait(read).out[0], attention(q[0, :1], *whole), rtol=1e-5, atol=1e-6)
        assert holds(cache, seq, *whole)
        assert ctx.stats()["kv_cache"].launched == 7, "three of them twice"


def test_what_comes_later_waits_for_what_has_to_come_again() -> None:
    """A fork asked for behind a request that is repeated sees its rows."""
    rows = Rows(4)
    clock, options = slow(FaultPlan().fail(1), 1, 2)
    with opened(options) as (ctx, cache):
        seq, other = wait(cache.create()), wait(cache.create())
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        k, v = rows.new(3)
        kept = cache.append(seq, k, v)
        in_flight(ctx, 2)
        fork = cache.fork(seq)
        behind = cache.append(other, k, v)
        freed = cache.free(other)
        eventually(lambda: ctx.stats()["kv_cache"].queued == 0)
        clock.advance(LATER / 2)
        assert not any(reply.done() for reply in (lost, kept, fork, behind, freed))
        clock.advance(LATER)
        with pytest.raises(ga.LaunchError):
            wait(lost)
        assert wait(kept) == 3
        assert wait(fork).cached == 3
        assert holds(cache, wait(fork), k, v)
        assert wait(behind) == 3
        wait(freed)
        with pytest.raises(ga.InvalidRequest, match="or was freed"):
            cache.length(other)


def test_a_request_made_while_an_earlier_one_is_about_to_come_again_waits_for_it() -> None:
    rows = Rows(12)
    clock, options = slow(FaultPlan().fail(1).delay(LATER, 2), 1, 2)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        first, second = rows.new(3), rows.new(2)
        behind = cache.append(seq, *first)
        in_flight(ctx, 2)
        clock.advance(LATER)
        with pytest.raises(ga.LaunchError):
            wait(lost)
        last = cache.append(seq, *second)  # the one before it is in flight still, and for nothing
        eventually(lambda: ctx.stats()["kv_cache"].queued == 0)
        clock.advance(LATER)
        assert (wait(behind), wait(last)) == (3, 5)
        assert holds(cache, seq, *(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def test_a_failure_that_shows_while_a_request_is_looked_at_sends_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(13)
    clock, options = slow(FaultPlan().fail(1).delay(LATER, 2), 1, 2)
    reserve, reserved = OpenedCache.reserve, []

    def interrupted(self: OpenedCache, item: Any) -> None:
        reserved.append(item)
        if len(reserved) == 3:
            clock.advance(LATER)
            eventually(lambda: self.disturbed)
        reserve(self, item)

    monkeypatch.setattr(OpenedCache, "reserve", interrupted)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        first, second = rows.new(3), rows.new(2)
        behind = cache.append(seq, *first)
        in_flight(ctx, 2)
        last = cache.append(seq, *second)
        assert isinstance(outcome(lost), ga.LaunchError)
        clock.advance(LATER)
        assert (wait(behind), wait(last)) == (3, 5)
        assert holds(cache, seq, *(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def test_nothing_slips_in_before_what_is_on_its_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(14)
    clock, options = slow(FaultPlan().fail(1), 1)
    relaunch, slipping = Completion.relaunch, []

    def slowly(self: Completion, call: Any) -> None:
        slipping.append(cache.append(seq, *second))
        time.sleep(0.05)
        relaunch(self, call)

    monkeypatch.setattr(Completion, "relaunch", slowly)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        first, second = rows.new(3), rows.new(2)
        behind = cache.append(seq, *first)
        in_flight(ctx, 2)
        clock.advance(LATER)
        assert isinstance(outcome(lost), ga.LaunchError)
        assert wait(behind) == 3
        assert wait(*slipping) == 5
        assert holds(cache, seq, *(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def test_a_read_that_is_repeated_does_not_see_what_was_appended_after_it() -> None:
    """It shared a launch that failed; the append behind it was already on its way."""
    rows = Rows(5)
    clock, options = slow(FaultPlan().fail(2), 2, coalesce_delay_us=1e5)
    with opened(options) as (ctx, cache):

        def launched(launches: int) -> None:
            """Let what has been asked for gather, and time pass until it is on its way."""
            eventually(lambda: ctx.stats()["kv_cache"].queued == 0)
            eventually(lambda: clock.advance(0.11) or ctx.stats()["kv_cache"].launched == launches)

        seqs = wait(cache.create(), cache.create())
        kept = [rows.new(6), rows.new(6)]
        appended = cache.append(seqs, *(np.stack(side) for side in zip(*kept, strict=True)))
        launched(1)
        wait(appended)
        q = rows.q(2, 1)
        reads = [cache.attend(q[index : index + 1], seq) for index, seq in enumerate(seqs)]
        launched(2)
        appended = cache.append(seqs[0], *rows.new(3))
        launched(3)
        clock.advance(LATER)
        launched(5)
        for index, read in enumerate(reads):
            wanted = attention(q[index], *kept[index])
            np.testing.assert_allclose(wait(read).out[0], wanted, rtol=1e-5, atol=1e-6)
        assert wait(appended) == 9


def test_a_launch_that_requests_shared_is_repeated_for_each_and_only_the_bad_one_fails() -> None:
    rows = Rows(6)
    clock, options = slow(FaultPlan().fail(2).fail(4), 1, max_in_flight=1)
    with opened(options) as (ctx, cache):
        seqs = [wait(cache.create()) for _ in range(4)]
        first = cache.append(seqs[3], *rows.new(1))
        in_flight(ctx, 1)
        news = [rows.new(2) for _ in range(3)]
        replies = [cache.append(seq, *new) for seq, new in zip(seqs, news, strict=False)]
        clock.advance(LATER)
        wait(first)
        outcomes = [outcome(reply) for reply in replies]
        assert [type(one) for one in outcomes] == [int, ga.LaunchError, int]
        assert ctx.stats()["kv_cache"].launched == 5
        for index, new in enumerate(news):
            assert cache.length(seqs[index]) == (0 if index == 1 else 2)
            assert index == 1 or holds(cache, seqs[index], *new)
        assert cache.stats().free_blocks == 8 - 3


def test_a_request_cancelled_while_it_waits_takes_its_pages_with_it() -> None:
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
        eventually(lambda: cache.length(seq) == 12)
        assert dropped.cancel()
        clock.advance(0.6)
        with pytest.raises(ga.DeadlineExceeded, match="before its launch"):
            wait(late)
        eventually(lambda: clock.advance(0.25) or cache.length(seq) == 4)
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


def test_an_actor_that_dies_gives_back_what_it_had_reserved() -> None:
    rows = Rows(11)
    clock = MockClock()
    options = ga.ContextOptions(clock=clock, coalesce_delay_us=1e6, restart=ga.RestartPolicy(backoff=0.0))
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        k, v = rows.new(3)
        first = cache.append(seq, k, v)
        eventually(lambda: cache.length(seq) == 3)
        eventually(lambda: clock.advance(0.25) or first.done())
        wait(first)
        lost = cache.append(seq, *rows.new(20))
        eventually(lambda: cache.length(seq) == 23)
        handle = ctx.actor(ga.KvCacheActor)
        broken = handle.submit(BrokenMessage(cache._number))
        for reply in (lost, broken):
            with pytest.raises(ga.ActorFailed):
                wait(reply)
        eventually(lambda: handle.restarts == 1 and handle.state == "running")
        assert (cache.length(seq), cache.stats().free_blocks) == (3, 7)
        fork = wait(cache.fork(seq))
        assert holds(cache, fork, k, v)
        assert contents(cache, seq)[0].shape[0] == 3


class BrokenMessage:
    """Kills whoever looks at it."""

    def __init__(self, cache: int) -> None:
        self.cache = cache

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise SystemExit("on purpose")


async def test_128_tasks_share_launches_and_each_gets_its_own_sequences_answer() -> None:
    """Each task appends and attends a few times for itself, as one that generates text does."""
    tasks, steps = 128, 2

    async def generate(ctx: ga.GpuContext, cache: ga.KvCache, index: int) -> list[np.ndarray]:
        rows = Rows(index)
        seq = await cache.create()
        await cache.append(seq, *rows.new(1 + index % 19))
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

    # While one slow launch runs the others wait together; without it the scheduler would say how many of them meet.
    together, stats = await run(ga.ContextOptions(max_in_flight=1, mock=ga.MockOptions(latency=0.05)))
    alone, unmerged = await run(ga.ContextOptions(coalesce_max=1))
    assert unmerged.launched == tasks * (steps + 1)
    assert stats.launched < unmerged.launched / 5, stats
    for one, other in zip(together, alone, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
