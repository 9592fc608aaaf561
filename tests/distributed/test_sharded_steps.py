"""A model's step over keys of several workers: a layer is as in a cache of one layer, and the commit is one append."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from support.service import comes_true

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, ShardedKvCache, ShardedSequence, open_pool
from gpu_actors.remote import InProcess, RemoteContext
from gpu_actors.testing import FaultPlan

LAYERS, HEADS, HEADS_Q, DIM = 4, 2, 4, 16
SPEC: dict[str, Any] = {"num_blocks": 32, "page_size": 8, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
EACH_LAYER = pytest.mark.parametrize("layer", range(LAYERS))
SINKS = np.array([0.5, -1.0, 0.25, 2.0], np.float32)
SLOPES = np.array([0.5, 0.25, 0.3, 0.0625], np.float32)


class Draw:
    def __init__(self, seed: int = 0, dtype: Any = np.float32) -> None:
        self.rng, self.dtype = np.random.default_rng(seed), dtype

    def rows(self, *shape: int, heads: int = HEADS) -> Any:
        return self.rng.standard_normal((*shape, heads, DIM)).astype(self.dtype)

    def layer(self, count: int = 1, heads: int = HEADS_Q) -> tuple[Any, Any, Any]:
        return self.rows(count, heads=heads), self.rows(count), self.rows(count)


def lengths(cache: ShardedKvCache, seq: ShardedSequence) -> list[int]:
    return [one.length(handle) for one, handle in zip(cache._caches, seq._handles, strict=True)]


async def works(cache: ShardedKvCache, seq: ShardedSequence, length: int) -> None:
    """Assert that the sequence has ``length`` rows over all workers, and that a step over it is right."""
    async with asyncio.timeout(20.0), await cache.step(seq, heads_q=HEADS_Q) as step:
        assert (seq.length, step.length, lengths(cache, seq)) == (length, length + 1, cache.split.lengths(length))
        for layer in range(LAYERS):
            await step.attend(layer, *Draw(9).layer())
    assert (seq.length, lengths(cache, seq)) == (length + 1, cache.split.lengths(length + 1))


@contextlib.asynccontextmanager
async def sharded(
    workers: int = 2, changes: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[ContextPool, ShardedKvCache, ShardedSequence]]:
    """A pool, and a cache with a sequence of nine rows in runs of two."""
    opened = ga.ContextOptions(restart=QUICK, **options)
    async with (
        open_pool("mock", workers=workers, options=opened, workplace=InProcess, seed=0) as pool,
        ShardedKvCache(pool, **{**SPEC, **(changes or {})}, layers=LAYERS, interleave=2) as cache,
    ):
        seq, draw = await cache.create(), Draw()
        assert await cache.append(seq, draw.rows(LAYERS, 9), draw.rows(LAYERS, 9)) == 9
        yield pool, cache, seq


# As caches of one layer


async def equal(
    pool: ContextPool,
    whole: ga.GpuContext,
    heads: list[int],
    given: dict[str, Any],
    by_layer: dict[int, dict[str, Any]],
    interleave: int = 3,
    dtype: str = "float32",
) -> None:
    """Steps have the bits of a sharded cache for each layer, and agree with steps over one KvCache."""
    spec, draw, within = {**SPEC, "dtype": dtype}, Draw(3, np.dtype(dtype)), {"float32": 4e-6, "float16": 2e-3}
    async with contextlib.AsyncExitStack() as stack:
        cache = await stack.enter_async_context(ShardedKvCache(pool, **spec, layers=LAYERS, interleave=interleave))
        ones = [
            await stack.enter_async_context(ShardedKvCache(pool, **spec, interleave=interleave)) for _ in range(LAYERS)
        ]
        own = await stack.enter_async_context(whole.kv_cache(**spec, layers=LAYERS))
        seq, twins, mine = await cache.create(), [await one.create() for one in ones], await own.create()
        prompt = draw.rows(LAYERS, 7), draw.rows(LAYERS, 7)
        assert await cache.append(seq, *prompt) == await own.append(mine, *prompt) == 7
        for layer, (one, twin) in enumerate(zip(ones, twins, strict=True)):
            await one.append(twin, prompt[0][layer], prompt[1][layer])
        for count, append in ((1, True), (5, True), (1, False), (3, False), (1, True)):
            asked: dict[str, Any] = {"heads_q": heads, "append": append, "layer_options": by_layer, **given}
            step = await cache.step(seq, rows=count, **asked)
            other = await own.step([mine], rows=[count], **asked)
            for layer in (2, 0, 1, 3):
                options = {**given, **by_layer.get(layer, {})}
                if layer == 0:  # attended again below, with other rows
                    await step.attend(layer, *draw.layer(count, heads[layer])[: 3 if append else 1])
                q, k, v = draw.layer(count, heads[layer])
                new: dict[str, Any] = {"k": k, "v": v} if append else {}
                found, wanted = await step.attend(layer, q, **new), other.attend(layer, q, **new)
                alone = await ones[layer].attend(q, twins[layer], **new, **options)
                if options.get("return_lse"):
                    np.testing.assert_allclose(found.lse, wanted.lse, rtol=1e-5, atol=1e-5)
                    assert found.lse.tobytes() == alone.lse.tobytes()
                    found, wanted = found.out, wanted.out
                np.testing.assert_allclose(found, wanted, rtol=within[dtype], atol=within[dtype])
                assert (found.tobytes(), found.dtype) == (alone.out.tobytes(), alone.out.dtype)
                for array in new.values():
                    array[...] = 0  # the arrays are the caller's again
            assert [await step.commit()] == await other.commit() == [seq.length]
            for one, twin in zip(ones, twins, strict=True):
                assert (seq.length, lengths(cache, seq)) == (twin.length, lengths(one, twin))
        assert seq.length == 14
        for layer, (one, twin) in enumerate(zip(ones, twins, strict=True)):
            q = draw.rows(3, heads=4)
            of_layer, alone = await cache.attend(q, seq, layer=layer), await one.attend(q, twin)
            assert of_layer.out.tobytes() == alone.out.tobytes()
        await cache.free(seq)
        stats = [one.stats() for one in cache._caches]
        assert [(each.sequences, each.free_blocks) for each in stats] == [(0, SPEC["num_blocks"])] * len(stats)


OPTIONS: dict[str, tuple[list[int], dict[str, Any], dict[int, dict[str, Any]]]] = {
    "plain": ([4] * 4, {}, {}),
    "heads of each layer": ([4, 2, 4, 8], {"softcap": 3.0}, {}),
    "lse of the step": ([4] * 4, {"return_lse": True, "sinks": SINKS}, {2: {"return_lse": False}}),
    "windows of some layers": ([4] * 4, {}, {0: {"window_size": (6, 0), "sink_tokens": 2}, 3: {"window_size": (2, 0)}}),
    "one layer of chunks, one with an lse": ([4] * 4, {}, {1: {"attention_chunk": 5}, 2: {"return_lse": True}}),
}


@pytest.mark.parametrize("name", OPTIONS)
async def test_layers_have_the_bits_of_caches_of_one_layer(
    pool_of: Callable[[int], ContextPool], whole: ga.GpuContext, name: str
) -> None:
    heads, given, by_layer = OPTIONS[name]
    for workers, interleave in ((1, 8), (2, 1), (3, 3)):
        await equal(pool_of(workers), whole, heads, given, by_layer, interleave)


async def test_slopes_and_rope_go_by_the_places_in_the_whole(pool: ContextPool, whole: ga.GpuContext) -> None:
    await equal(pool, whole, [4] * 4, {}, {1: {"alibi_slopes": SLOPES}}, interleave=1)
    rope = ga.Rope(dim=DIM)
    spec = {**SPEC, "layers": 2}
    async with whole.kv_cache(**spec) as own, ShardedKvCache(pool, **spec, interleave=2) as cache:
        seq, mine, draw = await cache.create(), await own.create(), Draw()
        for count in (9, 1, 4):
            step = await cache.step(seq, heads_q=HEADS_Q, rows=count, rope=rope)
            other = await own.step([mine], heads_q=HEADS_Q, rows=[count], rope=rope)
            for layer in range(2):
                q, k, v = draw.layer(count)
                out = await step.attend(layer, q, k, v)
                np.testing.assert_allclose(out, other.attend(layer, q, k, v), rtol=1e-5, atol=1e-5)
            assert [await step.commit()] == await other.commit()


async def test_over_child_processes(three_workers: dict[str, RemoteContext], whole: ga.GpuContext) -> None:
    await equal(ContextPool(three_workers, seed=0), whole, *OPTIONS["windows of some layers"])


async def test_on_emulated_kernels() -> None:
    async with ga.open_context("emulated") as one, ga.open_context("emulated") as other:
        pool = ContextPool({"one": one, "other": other}, seed=0)
        await equal(pool, one, [4] * 4, {}, {}, dtype="float16")


# While a step is open


async def test_requests_on_the_sequence_wait_and_others_do_not() -> None:
    async with sharded() as (_, cache, seq):
        draw, other = Draw(1), await cache.create()
        step = await cache.step(seq, heads_q=HEADS_Q)
        rows = draw.rows(LAYERS, 1)
        waiting = [
            asyncio.create_task(one)
            for one in (cache.append(seq, rows, rows), cache.attend(draw.rows(1, heads=4), seq), cache.free(seq))
        ]
        with pytest.raises(ga.DeadlineExceeded):
            await cache.step(seq, heads_q=HEADS_Q, timeout=0.01)
        for layer in range(LAYERS):
            await step.attend(layer, *draw.layer())
            assert await cache.append(other, rows, rows) == layer + 1
            assert not any(task.done() for task in waiting)
        assert await step.commit() == 10
        assert await waiting[0] == 11
        await asyncio.gather(*waiting)
        assert [one.stats().sequences for one in cache._caches] == [1, 1]


async def test_layers_at_once_take_turns() -> None:
    """Rows in the cache see different keys of a worker, which forks its sequence for them once."""
    async with sharded() as (_, cache, seq):
        queries = [Draw(layer).rows(5, heads=4) for layer in range(LAYERS)]
        async with await cache.step(seq, heads_q=HEADS_Q, rows=5, append=False) as step:
            outs = await asyncio.gather(*(step.attend(layer, queries[layer]) for layer in range(LAYERS)))
            assert seq._prefixes
            for layer in range(LAYERS):
                np.testing.assert_array_equal(await step.attend(layer, queries[layer]), outs[layer])
        await works(cache, seq, 9)
        await cache.free(seq)
        assert [one.stats().sequences for one in cache._caches] == [0, 0]


async def test_requests_wait_for_a_layer_of_a_step_that_was_aborted_meanwhile() -> None:
    async with sharded(mock=ga.MockOptions(latency=0.5)) as (_, cache, seq):
        step = await cache.step(seq, heads_q=HEADS_Q)
        attending = asyncio.create_task(step.attend(0, *Draw(1).layer()))
        await asyncio.sleep(0.02)
        aborting = asyncio.create_task(step.abort())
        await asyncio.sleep(0.02)
        assert seq._lock.locked()
        assert not aborting.done()
        await attending
        await aborting
        assert not seq._lock.locked()


# Ends


@EACH_LAYER
@pytest.mark.parametrize("how", ["abort", "cancel", "raise", "drop", "deadline", "deadline while idle"])
async def test_a_step_that_ends_early_leaves_no_trace(layer: int, how: str) -> None:
    async with sharded() as (pool, cache, seq):
        draw, reached = Draw(1), asyncio.Event()

        async def begin() -> Any:
            seconds = {"deadline": 0.05, "deadline while idle": 0.5}
            step = await cache.step(seq, heads_q=HEADS_Q, timeout=seconds.get(how))
            for each in range(layer):
                await step.attend(each, *draw.layer())
            return step

        async def block() -> None:
            async with await begin() as step:
                reached.set()
                if how == "raise":
                    raise ZeroDivisionError
                await asyncio.sleep(0.06 if how == "deadline" else 60.0)
                await step.attend(layer, *draw.layer())

        if how in ("abort", "deadline while idle"):
            step = await begin()
            if how == "abort":
                await step.abort()
                await step.abort()
            await works(cache, seq, 9)
            for late in (step.attend(layer, *draw.layer()), step.commit()):
                with pytest.raises(ga.StaleBuffer if how == "abort" else ga.DeadlineExceeded):
                    await late
            assert seq.length == 10
        elif how == "drop":
            await begin()
            gc.collect()
            await works(cache, seq, 9)
        elif how == "cancel":
            task = asyncio.create_task(block())
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await works(cache, seq, 9)
        else:
            with pytest.raises(ZeroDivisionError if how == "raise" else ga.DeadlineExceeded):
                await block()
            await works(cache, seq, 9)
        assert not any(worker.outstanding for worker in pool.stats().workers.values())


async def test_a_deadline_ends_a_layer_that_a_worker_does_not_answer() -> None:
    async with sharded(mock=ga.MockOptions(latency=1.0)) as (_, cache, seq):
        async with asyncio.timeout(0.9):
            step = await cache.step(seq, heads_q=HEADS_Q, timeout=0.05)
            with pytest.raises(ga.DeadlineExceeded):
                await step.attend(0, *Draw().layer())
            later = await cache.step(seq, heads_q=HEADS_Q)
            await later.abort()


async def test_a_layer_that_is_cancelled_or_refused_can_be_attended_again() -> None:
    async with sharded() as (_, cache, seq):
        draw = Draw(1)
        async with await cache.step(seq, heads_q=HEADS_Q) as step:
            arrays = [draw.layer() for _ in range(LAYERS)]
            task = asyncio.create_task(step.attend(0, *arrays[0]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            q, k, v = arrays[0]
            for wrong, field in (
                ((LAYERS, q, k, v), "layer"),
                ((True, q, k, v), "layer"),
                ((0, q), "k"),
                ((0, q, k), "v"),
                ((0, q[:0], k[:0], v[:0]), "q"),
                ((0, q[:, :2], k, v), "q"),
                ((0, q, k[:, :1], v), "k"),
                ((0, q.astype(np.float64), k, v), "q"),
            ):
                with pytest.raises(ga.InvalidRequest) as caught:
                    await step.attend(*wrong)
                assert caught.value.field == field
            for each in range(3):
                await step.attend(each, *arrays[each])
            with pytest.raises(ga.InvalidRequest, match=r"layers=\[3\]"):
                await step.commit()
            await step.attend(3, *arrays[3])
        await works(cache, seq, 10)


@EACH_LAYER
async def test_a_launch_that_fails_aborts_the_step(layer: int) -> None:
    async with sharded(1, fault_plan=FaultPlan().fail(2 + layer)) as (pool, cache, seq):
        draw, step = Draw(1), await cache.step(seq, heads_q=HEADS_Q, append=False)
        for each in range(layer):
            await step.attend(each, draw.rows(1, heads=4))
        with pytest.raises(ga.LaunchError):
            await step.attend(layer, draw.rows(1, heads=4))
        with pytest.raises(ga.LaunchError):
            await step.commit()
        await works(cache, seq, 9)
        assert not any(worker.outstanding for worker in pool.stats().workers.values())


@pytest.mark.parametrize("layer", [*range(LAYERS), LAYERS])
async def test_a_lost_worker_takes_the_step_and_the_sequence_along(layer: int) -> None:
    async with sharded(3) as (pool, cache, seq):
        draw, step = Draw(1), await cache.step(seq, heads_q=HEADS_Q, rows=4)
        for each in range(layer):
            await step.attend(each, *draw.layer(4))
        victim = pool.workers[cache.workers[1]]
        assert isinstance(victim, RemoteContext)
        connection = victim._generations.connection
        assert connection is not None
        connection.kill()
        lost = (ga.WorkerLost, ga.StaleBuffer)
        if layer < LAYERS:
            with pytest.raises(lost):
                await step.attend(layer, *draw.layer(4))
        with pytest.raises(lost):
            await step.commit()
        async with asyncio.timeout(20.0):
            for late in (step.attend(0, *draw.layer(4)), step.commit(), cache.step(seq, heads_q=HEADS_Q)):
                with pytest.raises(lost):
                    await late
        await comes_true(lambda: not any(worker.outstanding for worker in pool.stats().workers.values()))


async def test_a_worker_that_refuses_its_rows_at_the_commit_leaves_the_sequence_as_it_was() -> None:
    async with sharded(3, {"num_blocks": 2}) as (_, cache, seq):
        stranger = cache._caches[1]
        other = await stranger.create()
        await stranger.append(other, Draw().rows(LAYERS, 8), Draw().rows(LAYERS, 8))
        for count in (30, 30, 4):
            draw, step = Draw(1), await cache.step(seq, heads_q=HEADS_Q, rows=count)
            for layer in range(LAYERS):
                await step.attend(layer, *draw.layer(count))
            if count == 30:  # ten rows for each worker, and one has no room for seven of them
                with pytest.raises(ga.CacheFull):
                    await step.commit()
                assert (seq.length, lengths(cache, seq)) == (9, [4, 3, 2])
        assert await step.commit() == 13
        await stranger.free(other)
        await works(cache, seq, 13)


async def test_rows_that_cannot_be_taken_back_cost_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker has no room at the commit, and another one cannot drop the rows that it has."""
    async with sharded(2, {"num_blocks": 2}) as (_, cache, seq):
        full, other = cache._caches
        stranger = await full.create()
        await full.append(stranger, Draw().rows(LAYERS, 8), Draw().rows(LAYERS, 8))

        def truncate(*_: Any) -> None:
            raise ga.LaunchError("on purpose")

        monkeypatch.setattr(other, "truncate", truncate)
        draw, step = Draw(1), await cache.step(seq, heads_q=HEADS_Q, rows=14)
        for layer in range(LAYERS):
            await step.attend(layer, *draw.layer(14))
        with pytest.raises(ga.CacheFull):
            await step.commit()
        with pytest.raises(ga.StaleBuffer, match="on purpose"):
            await cache.step(seq, heads_q=HEADS_Q)


async def test_a_commit_that_is_cancelled_is_wholly_there() -> None:
    async with sharded(mock=ga.MockOptions(latency=0.1)) as (_, cache, seq):
        draw = Draw(1)

        async def block(step: Any) -> None:
            async with step:
                for layer in range(LAYERS):
                    await step.attend(layer, *draw.layer())

        step = await cache.step(seq, heads_q=HEADS_Q)
        task = asyncio.create_task(block(step))
        await comes_true(lambda: isinstance(step._over, ga.StaleBuffer))  # it has begun to write
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await works(cache, seq, 10)


async def test_a_cache_that_is_closed_ends_its_steps() -> None:
    async with sharded() as (_, cache, seq):
        empty = await cache.create()
        steps = [await cache.step(one, heads_q=HEADS_Q) for one in (seq, empty)]
        await cache.__aexit__(None, None, None)
        for step in steps:
            for late in (step.attend(0, *Draw().layer()), step.commit()):
                with pytest.raises(ga.StaleBuffer):
                    await late


async def test_what_a_step_cannot_be_is_refused_by_name(pool: ContextPool) -> None:
    with pytest.raises(ga.InvalidRequest, match="layers"):
        ShardedKvCache(pool, **SPEC, layers=0)
    async with ShardedKvCache(pool, **SPEC, layers=LAYERS) as cache:
        seq, draw = await cache.create(), Draw()
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({"heads_q": 0}, "heads_q"),
            ({"heads_q": 3}, "heads_q"),
            ({"heads_q": [4, 4]}, "heads_q"),
            ({"heads_q": [4, 4, 3, 4]}, "heads_q[2]"),
            ({"rows": 0}, "rows"),
            ({"rows": [1]}, "rows"),
            ({"append": 1}, "append"),
            ({"timeout": "1"}, "timeout"),
            ({"return_lse": 1}, "return_lse"),
            ({"like": {"q": SINKS}}, "like"),
            ({"dtype": "float32"}, "dtype"),
            ({"max_length": 9}, "max_length"),
            ({"tokens": [1]}, "tokens"),
            ({"expect_length": [0]}, "expect_length"),
            ({"num_splits": 2}, "num_splits"),
            ({"layer_options": 5}, "layer_options"),
            ({"layer_options": {LAYERS: {}}}, "layer_options"),
            ({"layer_options": {1: 5}}, "layer_options[1]"),
            ({"layer_options": {1: {"num_splits": 2}}}, "layer_options[1].num_splits"),
            ({"layer_options": {1: {"return_lse": 1}}}, "layer_options[1].return_lse"),
        )
        for changes, field in wrong:
            with pytest.raises(ga.RequestError) as caught:
                await cache.step(seq, **{"heads_q": HEADS_Q, **changes})
            assert caught.value.field == field
        with pytest.raises(TypeError, match="windows"):
            await cache.step(seq, heads_q=HEADS_Q, windows=3)
        with pytest.raises(ga.InvalidRequest, match="seq"):
            await cache.step([seq], heads_q=HEADS_Q)  # type: ignore[arg-type]
        q, k, v = draw.layer()
        for request, field in (
            (cache.attend(q, seq, k=k, v=v), "k"),
            (cache.attend(q, seq, layer=LAYERS), "layer"),
            (cache.append(seq, k, v), "k"),
            (cache.append(seq, draw.rows(LAYERS, 1), draw.rows(LAYERS, 2)), "v"),
            (cache.append(seq, draw.rows(2, 1), draw.rows(2, 1)), "k"),
        ):
            with pytest.raises(ga.InvalidRequest) as refused:
                await request
            assert refused.value.field == field
        async with await cache.step(seq, heads_q=HEADS_Q, append=False) as step:
            with pytest.raises(ga.InvalidRequest, match="None"):
                await step.attend(0, q, k, v)
        assert seq.length == 0
