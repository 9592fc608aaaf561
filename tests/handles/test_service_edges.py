"""Rare paths through the service: a full mailbox, a saturated actor, sizes beyond any memory."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch
from inside.devices import HostEvent
from inside.planning import attention_output, merge, merge_key
from inside.runtime import Completion, Mailbox, Outbox, Progress
from support.kv_cache import Rows, attention, holds, in_flight, opened, outcome, spec, wait
from support.service import eventually, eventually_freed

import gpu_actors as ga
from gpu_actors import Call
from gpu_actors.testing import FaultPlan, MockClock

# Saturated actors


def test_requests_over_caches_are_not_overtaken_by_all_that_launch_alone() -> None:
    """A forward request waits behind each launch, and most are younger than the request over a cache."""
    begun: list[int] = []

    def listen(event: ga.TraceEvent) -> None:
        if event.name == "request.launched":
            begun.append(event.fields["request"])

    options = ga.ContextOptions(max_in_flight=1, mock=ga.MockOptions(latency=0.01), on_event=listen)
    pages = random_batch(1, (5,)).pages(8)
    q = np.zeros((1, 1, 4, 16), np.float32)
    with ga.open_context("mock", options) as ctx:
        before = [ctx.flash_attn.forward(q, q, q) for _ in range(3)]
        cached = ctx.flash_attn.paged_forward(
            q, pages.k, pages.v, block_table=pages.block_table, cache_seqlens=pages.cache_seqlens
        )
        behind = [ctx.flash_attn.forward(q, q, q) for _ in range(20)]
        wait(*before, cached, *behind)
    ahead = begun[: begun.index(cached._call.number)]
    assert sum(reply._call.number in ahead for reply in behind) <= 3, begun


def test_packed_requests_are_put_together_for_the_kernel_that_they_have() -> None:
    """Rows that max_seqlen_q allows beyond a request's own do not count in the merged request."""
    batch = random_batch(2, (20,) * 24, heads=(2, 2), dim=64, dtype="float16")
    pages = batch.pages(8)
    requests = [
        ga.PagedForward(
            q=batch.q[index], k_cache=pages.k, v_cache=pages.v, block_table=pages.block_table[index : index + 1],
            cache_seqlens=pages.cache_seqlens[index : index + 1], cu_seqlens_q=np.array([0, 1], np.int32),
            max_seqlen_q=64,
        )
        for index in range(24)
    ]  # fmt: skip
    with ga.open_context("mock") as ctx:
        decoding = ctx._children.cells["flash_attn"].shared.decoding
        plans = [decoding.plan(request) for request in requests]
        assert len({merge_key(plan, request) for plan, request in zip(plans, requests, strict=True)}) == 1
        assert decoding.plan(merge(requests)).key == plans[0].key


async def test_a_cache_is_closed_though_the_mailbox_is_full() -> None:
    clock = MockClock()
    plan = FaultPlan().delay(1.0, 1)
    options = ga.ContextOptions(mailbox_capacity=1, max_in_flight=1, fault_plan=plan, clock=clock)
    rows = Rows(1)
    async with ga.open_context("mock", options) as ctx:
        store = ctx._children.cells["kv_cache"].shared
        async with ctx.kv_cache(**spec()) as cache:
            seq = await cache.create()
            launched = cache.append(seq, *rows.new(1))
            await asyncio.to_thread(in_flight, ctx, 1)
            queued = cache.append(seq, *rows.new(1))
            with pytest.raises(ga.Overloaded):
                await cache.append(seq, *rows.new(1))
            asked = ctx.stats()["kv_cache"].submitted

            async def go_on() -> None:
                await asyncio.to_thread(eventually, lambda: ctx.stats()["kv_cache"].submitted > asked)  # to close it
                clock.advance(1.0)

            going_on = asyncio.create_task(go_on())
        await going_on
        assert (await launched, await queued) == (1, 2)
        assert not store._caches


# Sizes


@pytest.mark.parametrize(
    "changes",
    [{"page_size": 8 << 50}, {"num_blocks": (1 << 31) - 1, "page_size": 8 << 40}, {"kv_heads": 1 << 70}],
)
def test_a_pool_that_no_memory_holds_is_refused_and_costs_nobody_the_actor(changes: dict[str, Any]) -> None:
    with ga.open_context("mock") as ctx:
        with pytest.raises(ga.OutOfDeviceMemory), ctx.kv_cache(**spec(**changes)):
            pass
        assert ctx.actor(ga.KvCacheActor).restarts == 0


@pytest.mark.parametrize("positions", [None, [-1, 0], [3, 4]])
def test_rows_beyond_the_tables_of_their_rotation_are_refused(positions: list[int] | None) -> None:
    rows, rope = Rows(2), ga.Rope(dim=8, table_rows=4)
    tables = {"rope_cos": np.ones((4, 4), np.float32), "rope_sin": np.zeros((4, 4), np.float32)}
    with opened() as (ctx, cache):
        seq = wait(cache.create())
        wait(cache.append(seq, *rows.new(3)))
        before = cache.stats()
        given = None if positions is None else np.array(positions, np.int32)
        k, v = rows.new(1, 2)
        for reply in (
            cache.append(seq, k[0], v[0], rope=rope, positions=given, **tables),
            cache.attend(rows.q(1, 2), seq, k=k, v=v, rope=rope, positions=given, **tables),
        ):
            error = outcome(reply)
            assert isinstance(error, ga.InvalidRequest), error
            assert error.field == ("rope.table_rows" if positions is None else "positions")
        assert (cache.stats(), ctx.stats()["kv_cache"].launched) == (before, 1)
        wait(cache.append(seq, k[0, :1], v[0, :1], rope=rope, **tables))  # the last row of the tables


def test_what_is_wrong_about_a_query_is_said_of_what_the_caller_gave() -> None:
    rows = Rows(3)
    with opened() as (_, cache):
        seq = wait(cache.create())
        wait(cache.append(seq, *rows.new(3)))
        q = rows.q(1, 2)
        two = np.array([0, 1, 2], np.int32)
        for reply, field in (
            (cache.attend(q[..., :8], seq), "q"),
            (cache.attend(q[0], [seq], cu_seqlens_q=two), "seqs"),
            (cache.attend(q, seq, tokens=[[1, 2]]), "tokens"),
            (cache.attend(q, seq, positions=np.zeros(2, np.int32)), "positions"),
            (cache.attend(q, seq, rope_cos=np.zeros((4, 4), np.float32)), "rope_cos"),
        ):
            error = outcome(reply)
            assert isinstance(error, ga.InvalidRequest), error
            assert error.field == field


# Failures in a cache


def test_an_urgent_cut_waits_for_the_reads_in_flight_and_is_made_though_they_fail() -> None:
    rows, clock = Rows(4), MockClock()
    plan = FaultPlan().delay(1.0, 2).delay(1.0, 3).fail(3)
    with opened(ga.ContextOptions(fault_plan=plan, clock=clock, max_in_flight=1)) as (ctx, cache):
        seqs = wait(*(cache.create() for _ in range(3)))
        k, v = rows.new(2, 14)
        wait(cache.append(seqs[:2], k, v))
        in_flight(ctx, 0)
        ahead = cache.append(seqs[2], *rows.new(1))
        in_flight(ctx, 1)
        q = rows.q(2, 1, 1)
        reads = [cache.attend(q[index], seq) for index, seq in enumerate(seqs[:2])]
        clock.advance(1.0)
        wait(ahead)
        eventually(lambda: ctx.stats()["kv_cache"].launched == 3)
        cut = cache.truncate(seqs[0], 2, priority=1)
        assert not cut.done()
        clock.advance(1.0)
        wait(cut)
        assert all(isinstance(outcome(read), ga.LaunchError) for read in reads)
        for index, keys in enumerate((2, 14)):
            wanted = attention(q[index, 0], k[index, :keys], v[index, :keys])
            found = wait(cache.attend(q[index], seqs[index]))
            np.testing.assert_allclose(found.out[0], wanted, rtol=1e-5, atol=1e-6)


def test_a_launch_whose_answers_cannot_be_given_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch succeeds on the device, but its requests fail, so their rows do not count."""
    rows = Rows(5)
    clock = MockClock()
    options = ga.ContextOptions(max_in_flight=1, fault_plan=FaultPlan().delay(1.0, 1), clock=clock)
    with opened(options) as (ctx, cache):
        seqs = wait(*(cache.create() for _ in range(3)))
        first = cache.append(seqs[2], *rows.new(1))
        in_flight(ctx, 1)
        k, v = rows.new(2, 1, 2)
        q = rows.q(2, 2)
        replies = [cache.attend(q[i : i + 1], seqs[i], k=k[i], v=v[i]) for i in range(2)]
        broken = iter([ga.OutOfDeviceMemory("no room for the answer")])

        def answer(*arguments: Any) -> Any:
            for error in broken:
                raise error
            return attention_output(*arguments)

        monkeypatch.setattr("gpu_actors.planning.cached.attention_output", answer)
        clock.advance(1.0)
        wait(first)
        assert all(isinstance(outcome(reply), ga.OutOfDeviceMemory) for reply in replies)
        in_flight(ctx, 0)
        assert [cache.length(seq) for seq in seqs] == [0, 0, 1]
        assert cache.stats().free_blocks == 7
        assert ctx.stats()["kv_cache"].launched == 2
        for i, seq in enumerate(seqs[:2]):
            wait(cache.attend(q[i : i + 1], seq, k=k[i], v=v[i]))
            assert holds(cache, seq, k[i, 0], v[i, 0])


def test_requests_that_fail_with_another_are_let_go_of_once_they_are_answered() -> None:
    rows = Rows(6)
    clock = MockClock()
    with opened(ga.ContextOptions(fault_plan=FaultPlan().delay(1.0, 1).fail(1), clock=clock)) as (ctx, cache):
        seq = wait(cache.create())
        news = [rows.new(2)[0].copy() for _ in range(3)]
        replies = []
        for k in news:
            replies.append(cache.append(seq, k, k))
            in_flight(ctx, len(replies))
        clock.advance(1.0)
        assert all(isinstance(outcome(reply), ga.LaunchError) for reply in replies)
        kept = [weakref.ref(k) for k in news]
        del news, replies, k
        eventually_freed(*kept)


def test_calls_are_answered_when_something_that_looks_on_raises() -> None:
    """Settling the first call raises; the second shares its launch, and the third is in the next launch."""
    clock = MockClock()
    mailbox = Mailbox("actor", 8, 8)
    progress = Progress(5, lambda: 0, lambda: None)
    completion = Completion("actor", mailbox, clock, lambda error: error, progress)
    calls = [Call[int]("message", mailbox) for _ in range(3)]

    def raises(call: Call[int]) -> None:
        raise RuntimeError("on purpose")

    for call in calls:
        mailbox.put(call)
    assert mailbox.take([]) == calls  # type: ignore[arg-type]
    assert all(call.claim() for call in calls)
    calls[0].when_done(raises)
    events = HostEvent(), HostEvent()
    completion.watch(events[0], calls[:2], lambda outputs: (1, 2), Outbox())
    completion.watch(events[1], calls[2:], lambda outputs: (3,), Outbox())
    for event in events:
        event.succeed({})
    for call in calls:
        assert call.wait(30.0)
    assert [call.error is None for call in calls] == [True, False, True]
    assert completion.close(5.0)
    assert mailbox.stats().in_flight == 0


def test_the_prompt_of_a_sequence_is_still_found_after_an_append_to_it_had_to_be_repeated() -> None:
    """The failed append would have filled a page."""
    rows = Rows(7)
    with opened(ga.ContextOptions(fault_plan=FaultPlan().fail(2))) as (_, cache):
        seq = wait(cache.create())
        tokens = list(range(10))
        wait(cache.append(seq, *rows.new(5), tokens=tokens[:5]))
        k, v = rows.new(5)
        assert isinstance(outcome(cache.append(seq, k, v, tokens=tokens[5:])), ga.LaunchError)
        wait(cache.append(seq, k, v, tokens=tokens[5:]))
        assert wait(cache.create([*tokens, 10])).cached == 8
