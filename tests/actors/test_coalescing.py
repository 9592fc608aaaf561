"""Requests over caches that wait together share launches, and the answers are as if they did not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import Batch, random_batch, tree_bits
from support.service import eventually, has_handled
from support.supervision import break_down

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock

TASKS = 128


def ask_pages(ctx: ga.GpuContext, batch: Batch, page_size: int = 16) -> Callable[..., ga.Reply[ga.AttentionOutput]]:
    """Return a function that asks for one sequence. All sequences share one pool."""
    pages = batch.pages(page_size)

    def ask(index: int, **options: Any) -> ga.Reply[ga.AttentionOutput]:
        own = slice(index, index + 1)
        columns = -(-int(pages.cache_seqlens[index]) // page_size) + 1
        return ctx.flash_attn.paged_forward(
            batch.q[own], pages.k, pages.v, block_table=pages.block_table[own, :columns],
            cache_seqlens=pages.cache_seqlens[own], return_lse=True, **options,
        )  # fmt: skip

    return ask


def ask_arrays(ctx: ga.GpuContext, batch: Batch) -> Callable[..., ga.Reply[ga.AttentionOutput]]:
    k, v = batch.arrays()

    def ask(index: int, **options: Any) -> ga.Reply[ga.AttentionOutput]:
        own = slice(index, index + 1)
        return ctx.flash_attn.decode(batch.q[own, 0], k[own], v[own], batch.lengths[own], return_lse=True, **options)

    return ask


@pytest.mark.parametrize(("ask_for", "num_splits"), [(ask_pages, 4), (ask_arrays, 0)])
def test_128_tasks_share_launches_and_get_what_they_would_get_alone(ask_for: Any, num_splits: int) -> None:
    lengths = np.random.default_rng(0).integers(0, 70, TASKS)
    batch = random_batch(1, lengths.tolist(), dtype="bfloat16")

    async def decode(options: ga.ContextOptions) -> tuple[list[ga.AttentionOutput], ga.ActorStats]:
        async with ga.open_context("mock", options) as ctx:
            ask = ask_for(ctx, batch)

            async def task(index: int) -> ga.AttentionOutput:
                return await ask(index, num_splits=num_splits)

            asked = asyncio.gather(*(task(index) for index in range(TASKS)))
            if isinstance(options.clock, MockClock):
                await asyncio.to_thread(launching, ctx)
                options.clock.advance(1.0)
            return await asked, ctx.stats()["flash_attn"]

    # Behind one launch all others wait together. Without it the scheduler decides how many share a launch.
    together, stats = asyncio.run(decode(one_at_a_time()))
    freely, _ = asyncio.run(decode(ga.ContextOptions()))
    alone, unmerged = asyncio.run(decode(ga.ContextOptions(coalesce_max=1)))
    assert (stats.completed, unmerged.completed, unmerged.launched) == (TASKS, TASKS, TASKS)
    assert stats.launched < TASKS / 20, stats
    assert stats.requests_per_launch > 20
    for one, other in zip((*together, *freely), (*alone, *alone), strict=True):
        assert np.array_equal(one.out, other.out)
        assert np.array_equal(one.lse, other.lse)


def one_at_a_time(plan: FaultPlan | None = None) -> ga.ContextOptions:
    """One launch may be in flight. The first ends after a second of the mock clock, and requests made until then wait
    together."""
    plan = (plan or FaultPlan()).delay(1.0, 1)
    return ga.ContextOptions(max_in_flight=1, fault_plan=plan, clock=MockClock())


def launching(ctx: ga.GpuContext) -> None:
    """Wait until a launch is in flight."""
    eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)


def launches_of(ctx: ga.GpuContext, ask: Callable[[], list[ga.Reply[Any]]]) -> tuple[list[Any], int]:
    """Ask for replies behind the first launch. Returns the results, with an error in place of a result that failed, and
    the number of launches."""
    q = np.zeros((1, 1, 1, 8), np.float32)
    first = ctx.flash_attn.forward(q, q, q)
    launching(ctx)
    before = ctx.stats()["flash_attn"].launched
    replies = ask()
    ctx._children.clock.advance(1.0)  # type: ignore[attr-defined]
    results: list[Any] = []
    for reply in (first, *replies):
        try:
            results.append(reply.result(10.0))
        except ga.GpuActorsError as error:
            results.append(error)
    return results[1:], ctx.stats()["flash_attn"].launched - before


def test_results_are_views_of_one_output() -> None:
    with ga.open_context("mock", one_at_a_time()) as ctx:
        ask = ask_pages(ctx, random_batch(2, (5, 20, 0)))
        results, launched = launches_of(ctx, lambda: [ask(index) for index in range(3)])
    assert launched == 1
    assert len({id(result.out.base) for result in results}) == 1
    assert all(result.out.shape == (1, 1, 4, 16) and result.lse.shape == (1, 4, 1) for result in results)


@pytest.mark.parametrize("form", ["bool", "bits"])
def test_operands_of_every_sequence_are_put_together(form: str) -> None:
    rng = np.random.default_rng(4)
    batch = random_batch(4, (12, 40, 3), rows=3, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    trees = rng.random((3, 3, 3)) < 0.5
    own = [
        {
            "k_descale": rng.uniform(0.5, 2, (1, 2)).astype(np.float32),
            "v_descale": rng.uniform(0.5, 2, (1, 2)).astype(np.float32),
            "alibi_slopes": rng.uniform(0, 1, (1, 4)).astype(np.float32),
            "tree_mask": tree if form == "bool" else tree_bits(tree),
        }
        for tree in trees[:, None]
    ]
    with ga.open_context("mock", one_at_a_time()) as ctx:
        ask = ask_pages(ctx, batch)
        results, launched = launches_of(ctx, lambda: [ask(index, **one) for index, one in enumerate(own)])
        assert launched == 1
        for index, one in enumerate(own):
            alone = ask(index, **one).result(10.0)
            assert np.array_equal(results[index].out, alone.out)
            assert np.array_equal(results[index].lse, alone.lse)


def test_packed_rows_are_put_together() -> None:
    batch = random_batch(5, (12, 40, 3, 9), rows=4)
    pages = batch.pages(8)

    def ask(ctx: ga.GpuContext, first: int, counts: tuple[int, int]) -> ga.Reply[Any]:
        own = slice(first, first + 2)
        q = np.concatenate([batch.q[first + index, :count] for index, count in enumerate(counts)])
        return ctx.flash_attn.paged_forward(
            q, pages.k, pages.v, block_table=pages.block_table[own], cache_seqlens=pages.cache_seqlens[own],
            cu_seqlens_q=np.cumsum([0, *counts]).astype(np.int32), return_lse=True,
        )  # fmt: skip

    with ga.open_context("mock", one_at_a_time()) as ctx:
        asked = [(0, (1, 4)), (2, (2, 0))]
        results, launched = launches_of(ctx, lambda: [ask(ctx, *one) for one in asked])
        assert launched == 1
        for one, result in zip(asked, results, strict=True):
            alone = ask(ctx, *one).result(10.0)
            assert np.array_equal(result.out, alone.out)
            assert np.array_equal(result.lse, alone.lse)
            assert result.lse.shape == (4, sum(one[1]))


def test_a_request_that_is_wrong_is_refused_among_sound_ones() -> None:
    with ga.open_context("mock", one_at_a_time()) as ctx:
        batch = random_batch(6, (5, 20, 7))
        ask = ask_pages(ctx, batch)
        pages = batch.pages(16)

        def all_of_them() -> list[ga.Reply[Any]]:
            bad = ctx.flash_attn.paged_forward(
                batch.q[:1], pages.k, pages.v, block_table=np.full((1, 1), 99, np.int32),
                cache_seqlens=pages.cache_seqlens[:1], return_lse=True,
            )  # fmt: skip
            return [ask(0), bad, ask(1, softcap=-1.0), ask(2)]

        (first, bad, worse, last), launched = launches_of(ctx, all_of_them)
        assert (bad.field, worse.field, launched) == ("block_table", "softcap", 1)
        assert np.array_equal(first.out, ask(0).result(10.0).out)
        assert np.array_equal(last.out, ask(2).result(10.0).out)


@pytest.mark.parametrize("error", [ga.LaunchError, ga.OutOfDeviceMemory])
def test_a_shared_launch_that_fails_is_repeated_for_each_alone(error: type[ga.GpuActorsError]) -> None:
    """The shared launch is the second, and the fourth is one of those that repeat it."""
    plan = FaultPlan().fail(2, error).fail(4, error)
    with ga.open_context("mock", one_at_a_time(plan)) as ctx:
        ask = ask_pages(ctx, random_batch(7, (5, 20, 7)))
        results, launched = launches_of(ctx, lambda: [ask(index) for index in range(3)])
        assert launched == 4
        assert [isinstance(result, error) for result in results] == [False, True, False]
        for index in (0, 2):
            assert np.array_equal(results[index].out, ask(index).result(10.0).out)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 0)
        stats = ctx.stats()["flash_attn"]
        assert (stats.failed, stats.queued) == (1, 0)


def test_a_lost_context_fails_all_that_shared_a_launch() -> None:
    with ga.open_context("mock", one_at_a_time(FaultPlan().lose_context(2))) as ctx:
        ask = ask_pages(ctx, random_batch(8, (5, 20)))
        results, _ = launches_of(ctx, lambda: [ask(index) for index in range(2)])
        assert all(isinstance(result, ga.ContextLost) for result in results)


def test_a_request_that_is_cancelled_or_late_drops_out_of_its_group() -> None:
    clock = MockClock()
    options = ga.ContextOptions(coalesce_delay_us=1000.0, clock=clock)
    with ga.open_context("mock", options) as ctx:
        ask = ask_pages(ctx, random_batch(9, (5, 20, 7)))
        kept, cancelled, late = ask(0), ask(1), ask(2, timeout=0.0005)
        eventually(lambda: ctx.stats()["flash_attn"].queued == 0)
        assert cancelled.cancel()
        clock.advance(0.0006)
        with pytest.raises(ga.DeadlineExceeded, match="before its launch"):
            late.result(10.0)
        assert not kept.done()
        # The actor may have begun their delay only now.
        eventually(lambda: clock.advance(0.001) or kept.done())
        kept.result(10.0)
        with pytest.raises(ga.RequestCancelled):
            cancelled.result(10.0)
        assert ctx.stats()["flash_attn"].requests_per_launch == 1.0


def test_requests_wait_for_others_as_long_as_they_are_told_to_or_until_a_launch_is_full() -> None:
    clock = MockClock()
    options = ga.ContextOptions(coalesce_delay_us=500.0, coalesce_max=4, clock=clock)
    with ga.open_context("mock", options) as ctx:
        ask = ask_pages(ctx, random_batch(10, (5, 20, 7, 3, 9, 1)))
        replies = [ask(index) for index in range(3)]
        has_handled(ctx.flash_attn)
        assert ctx.stats()["flash_attn"].launched == 0
        replies.append(ask(3))
        for reply in replies:
            reply.result(10.0)
        launched = ctx.stats()["flash_attn"].launched
        replies += [ask(index) for index in (4, 5)]
        has_handled(ctx.flash_attn)
        assert ctx.stats()["flash_attn"].launched == launched
        eventually(lambda: clock.advance(0.001) or all(reply.done() for reply in replies))
        for reply in replies[4:]:
            reply.result(10.0)
        stats = ctx.stats()["flash_attn"]
        assert (stats.completed, stats.launched <= 3) == (6, True)


@pytest.mark.parametrize("actor", ["flash_attn", "kv_cache"])
def test_requests_that_wait_for_others_count_towards_the_mailboxs_capacity(actor: str) -> None:
    clock = MockClock()
    options = ga.ContextOptions(coalesce_delay_us=1000.0, mailbox_capacity=3, clock=clock)
    with (
        ga.open_context("mock", options) as ctx,
        ctx.kv_cache(num_blocks=8, page_size=8, kv_heads=1, head_dim=8, dtype="float32") as cache,
    ):
        pages = ask_pages(ctx, random_batch(12, (5, 20, 7, 3)))
        seqs = [cache.create().result(10.0) for _ in range(4)]
        row = np.ones((1, 1, 8), np.float32)

        def ask(index: int) -> ga.Reply[Any]:
            return pages(index) if actor == "flash_attn" else cache.append(seqs[index], row, row)

        replies = []
        for index in range(3):
            replies.append(ask(index))
            eventually(lambda: ctx._children.cells[actor].mailbox._gathered == len(replies))
        with pytest.raises(ga.Overloaded, match=f"{actor} has 3 requests waiting"):
            ask(3).result(10.0)
        eventually(lambda: clock.advance(0.001) or all(reply.done() for reply in replies))
        replies.append(ask(3))
        eventually(lambda: clock.advance(0.001) or replies[3].done())
        for reply in replies:
            reply.result(10.0)


def test_an_actor_that_dies_answers_what_it_had_gathered() -> None:
    options = ga.ContextOptions(coalesce_delay_us=1e6, clock=MockClock())
    with ga.open_context("mock", options) as ctx:
        ask = ask_pages(ctx, random_batch(11, (5,)))
        waiting = ask(0)
        break_down(ctx.flash_attn)
        with pytest.raises(ga.ActorFailed):
            waiting.result(10.0)


def test_requests_that_one_kernel_takes_alone_are_answered_by_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of joined operands lie side by side, so another kernel may be eligible for them."""
    from inside.planning import cached as decoding
    from inside.planning import tma_eligibility

    chosen = tma_eligibility.eligible_families
    bound: list[Any] = []
    bind = decoding.bind_cached

    def families(operands: Any) -> Any:
        return chosen(operands)[1:] if len(operands["q"]) == 1 else chosen(operands)

    def noted(plan: Any, *arguments: Any) -> Any:
        bound.append((plan.problem.batch, plan.key.kernel))
        return bind(plan, *arguments)

    monkeypatch.setattr(tma_eligibility, "eligible_families", families)
    monkeypatch.setattr("gpu_actors.actors.coalescing.bind_cached", noted)
    batch = random_batch(12, (80, 90), rows=64, dim=64, dtype="float16")
    with ga.open_context("mock", one_at_a_time()) as ctx:
        ask = ask_pages(ctx, batch)
        results, launched = launches_of(ctx, lambda: [ask(index) for index in range(2)])
        alone = ask(0).result(10.0)
    assert (launched, [size for size, _ in bound]) == (1, [2, 1])
    assert len({kernel for _, kernel in bound}) == 1
    assert np.array_equal(results[0].out, alone.out)
