"""Keys over several workers: attention equals that over one cache."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.service import suspend

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, ShardedKvCache, open_pool
from gpu_actors.remote import InProcess, RemoteContext

SPEC: dict[str, Any] = {"num_blocks": 32, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}


def rows(count: int, heads: int = 2, seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng((seed, count, heads)).standard_normal((count, heads, 16)).astype(dtype)


def tree(count: int, seed: int = 0) -> Any:
    """bool (count, count): each row sees itself, and some of those before it."""
    seen = np.tril(np.random.default_rng((seed, count)).random((count, count)) < 0.5)
    return seen | np.eye(count, dtype=np.bool_)


def bits(seen: Any) -> Any:
    return np.array([sum(1 << int(key) for key in np.flatnonzero(row)) for row in seen], np.uint64)


def near(found: Any, wanted: Any, scale: float = 1.0) -> None:
    """Equal, except for the order of sums and for one rounding of each worker's part."""
    far = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[wanted.out.dtype.name] * scale
    assert found.out.dtype == wanted.out.dtype
    out, whole = found.out.astype(np.float64), wanted.out[0].astype(np.float64)
    np.testing.assert_allclose(out, whole, rtol=far, atol=far)
    assert found.lse.dtype == np.float32
    np.testing.assert_allclose(found.lse, wanted.lse[0], rtol=2e-6 * scale, atol=2e-6 * scale)


async def equal(
    pool: ContextPool,
    ctx: ga.GpuContext,
    given: dict[str, Any],
    changed: dict[str, Any] | None = None,
    dtype: Any = np.float32,
    scale: float = 1.0,
) -> None:
    """Chunks of new rows, rows that are in the cache, and appended rows, over keys in runs of 5 or as given."""
    given, spec = dict(given), {**SPEC, **(changed or {})}
    treed = given.pop("tree", False)
    interleave = given.pop("interleave", 5)
    rotation = {name: given.pop(name) for name in ("rope", "rope_cos", "rope_sin") if name in given}
    options = {**given, "return_lse": True}
    async with ctx.kv_cache(**spec) as own, ShardedKvCache(pool, **spec, interleave=interleave) as cache:
        seq, mine = await cache.create(), await own.create()

        async def attend(count: int, step: int) -> None:
            q, k, v = (rows(count, heads, step + heads, dtype) for heads in (4, 2, 2))
            places = rotation and {"positions": np.arange(count, dtype=np.int32) * 2 + step}
            arguments = {**options, **rotation, **(places if step % 2 else {})}
            seen = tree(count, step)
            mask, theirs = {}, {}
            if treed:
                mask, theirs = {"tree_mask": seen if step % 2 else bits(seen)}, {"tree_mask": seen[None]}
            result = await cache.attend(q, seq, k=k, v=v, **arguments, **mask)
            near(result, await own.attend(q[None], mine, k=k[None], v=v[None], **arguments, **theirs), scale)

        await attend(4, 0)
        new = [rows(9, 2, seed, dtype) for seed in (1, 2)]
        assert await cache.append(seq, *new, **rotation) == await own.append(mine, *new, **rotation) == 13
        for step, count in enumerate((1, 6, 20, 1, 3), 1):
            await attend(count, step)
        assert seq.length == own.length(mine) == 44
        for count in (1, 5):
            q = rows(count, 4, 98, dtype)
            near(await cache.attend(q, seq, **options), await own.attend(q[None], mine, **options), scale)
        assert (await cache.attend(q, seq, **given)).lse is None
        if treed and not given.keys() & {"window_size", "alibi_slopes"}:
            for count in (1, 3, 7, 44, 64):
                q, seen = rows(count, 4, 97, dtype), tree(count, 9)
                result = await cache.attend(q, seq, tree_mask=bits(seen).view(np.int64), **options)
                near(result, await own.attend(q[None], mine, tree_mask=bits(seen)[None], **options), scale)
        await cache.free(seq)
        stats = [one.stats() for one in cache._caches]
        assert [(one.sequences, one.free_blocks) for one in stats] == [(0, spec["num_blocks"])] * len(stats)


SLOPES = np.array([0.5, 0.25, 0.3, 0.0625], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap and scale": {"softcap": 3.0, "softmax_scale": 0.4},
    "sinks": {"sinks": rows(1, 4, seed=7)[0, :, 0].copy()},
    "not causal": {"causal": False},
    "window": {"window_size": (9, 0)},
    "own key alone": {"window_size": (0, 0)},
    "window, not causal": {"causal": False, "window_size": (4, 3)},
    "right window": {"causal": False, "window_size": (-1, 0)},
    "window and first keys": {"window_size": (6, -1), "sink_tokens": 3, "sinks": rows(1, 4, seed=7)[0, :, 0].copy()},
    "chunks": {"attention_chunk": 12, "sink_tokens": 2},
    "first keys over workers": {"window_size": (2, 0), "sink_tokens": 14},
    "slopes": {"alibi_slopes": SLOPES},
    "slopes and a window": {"alibi_slopes": SLOPES, "window_size": (9, 0), "sink_tokens": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
async def test_decode_and_chunks_equal_one_cache(
    pool_of: Callable[[int], ContextPool], whole: ga.GpuContext, name: str
) -> None:
    """Slopes depend on distances in the whole sequence: over workers of single rows, and if one has all keys."""
    slopes = name.startswith("slopes")
    for workers, interleave in ((1, 8), (2, 1), (3, 64 if slopes else 5)):
        arguments = {**OPTIONS[name], "interleave": interleave}
        await equal(pool_of(workers), whole, arguments, scale=2.0 if slopes else 1.0)


async def test_workers_of_single_rows_answer_a_window_at_once(pool: ContextPool, whole: ga.GpuContext) -> None:
    """Rows of a window see different keys of such a worker, which knows the positions and needs no copy of its keys."""
    options: dict[str, Any] = {"window_size": (9, 2), "sink_tokens": 2, "causal": False}
    async with whole.kv_cache(**SPEC) as own, ShardedKvCache(pool, **SPEC, interleave=1) as cache:
        seq, mine = await cache.create(), await own.create()
        k, v, q = rows(40, 2, 1), rows(40, 2, 2), rows(13, 4, 3)
        await cache.append(seq, k, v)
        await own.append(mine, k, v)
        result, expected = await cache.attend(q, seq, **options), await own.attend(q[None], mine, **options)
        np.testing.assert_allclose(result.out, expected.out[0], rtol=4e-6, atol=4e-6)
        assert not seq._prefixes


@pytest.mark.parametrize("workers", [1, 3])
async def test_rows_lie_where_they_belong(pool_of: Callable[[int], ContextPool], workers: int) -> None:
    async with ShardedKvCache(pool_of(workers), **SPEC, interleave=4) as cache:
        seq = await cache.create()
        total = 0
        for count in (0, 3, 1, 9, 30, 2):
            total += count
            assert await cache.append(seq, rows(count), rows(count)) == total
            lengths = [one.length(handle) for one, handle in zip(cache._caches, seq._handles, strict=True)]
            assert lengths == [int((np.arange(total) // 4 % workers == rank).sum()) for rank in range(workers)]
        await cache.free(seq)
        assert all(one.stats().sequences == 0 for one in cache._caches)


async def test_an_empty_sequence_and_no_rows(pool: ContextPool) -> None:
    async with ShardedKvCache(pool, **SPEC) as cache:
        seq = await cache.create()
        result = await cache.attend(rows(1, 4), seq, return_lse=True)
        np.testing.assert_array_equal(result.out, np.zeros((1, 4, 16), np.float32))
        assert np.isneginf(result.lse).all()
        await cache.append(seq, rows(2), rows(2))
        result = await cache.attend(rows(3, 4), seq, return_lse=True)  # the first row sees no key
        assert np.isneginf(result.lse[:, 0]).all()
        assert np.isfinite(result.lse[:, 1:]).all()
        result = await cache.attend(rows(0, 4), seq, k=rows(0), v=rows(0))
        assert result.out.shape == (0, 4, 16)
        assert seq.length == 2


async def test_bfloat16_rounds_a_part_once_more(pool: ContextPool, whole: ga.GpuContext) -> None:
    await equal(pool, whole, {}, {"dtype": "bfloat16"}, ml_dtypes.bfloat16)


async def test_a_full_worker_leaves_no_trace(pool_of: Callable[[int], ContextPool]) -> None:
    async with ShardedKvCache(pool_of(2), **{**SPEC, "num_blocks": 2}, interleave=8) as cache:
        seq = await cache.create()
        assert await cache.append(seq, rows(20), rows(20)) == 20  # 12 and 8 rows of 16
        other = await cache._caches[1].create()
        await cache._caches[1].append(other, rows(8), rows(8))  # another sequence fills that worker
        with pytest.raises(ga.CacheFull):
            await cache.append(seq, rows(8), rows(8))
        with pytest.raises(ga.CacheFull):
            await cache.attend(rows(8, 4), seq, k=rows(8), v=rows(8))
        assert seq.length == 20
        assert [one.length(handle) for one, handle in zip(cache._caches, seq._handles, strict=True)] == [12, 8]
        await cache._caches[1].free(other)
        assert await cache.append(seq, rows(8), rows(8)) == 28


async def test_requests_on_a_sequence_come_one_after_the_other(pool: ContextPool) -> None:
    async with ShardedKvCache(pool, **SPEC) as cache:
        seq = await cache.create()
        lengths = await asyncio.gather(*(cache.append(seq, rows(3), rows(3)) for _ in range(20)))
        assert lengths == list(range(3, 61, 3))


async def test_a_cancelled_append_is_wholly_there() -> None:
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.1))
    async with (
        open_pool("mock", workers=2, options=options, workplace=InProcess) as pool,
        ShardedKvCache(pool, **SPEC, interleave=1) as cache,
    ):
        seq = await cache.create()
        appending = asyncio.create_task(cache.append(seq, rows(5), rows(5)))
        await asyncio.sleep(0.02)
        appending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await appending
        assert await cache.append(seq, rows(1), rows(1)) == 6
        attending = asyncio.create_task(cache.attend(rows(1, 4), seq, k=rows(1), v=rows(1)))
        await asyncio.sleep(0.02)
        attending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attending
        assert seq.length == 6
        with pytest.raises(ga.DeadlineExceeded):
            await cache.attend(rows(1, 4), seq, k=rows(1), v=rows(1), timeout=0.01)
        assert await cache.append(seq, rows(1), rows(1)) == 7


async def test_a_lost_worker_takes_the_sequence_along() -> None:
    options = ga.ContextOptions(restart=ga.RestartPolicy(max_restarts=1000, backoff=0.0))
    async with open_pool("mock", workers=2, options=options) as pool, ShardedKvCache(pool, **SPEC) as cache:
        seq, idle = await cache.create(), await cache.create()
        await cache.append(seq, rows(20), rows(20))
        assert cache.workers == ["worker-1", "worker-2"]
        victim = pool.workers["worker-2"]
        assert isinstance(victim, RemoteContext)
        suspend(victim.pid or 0)
        attending = asyncio.create_task(cache.attend(rows(1, 4), seq, k=rows(1), v=rows(1)))
        await asyncio.sleep(0.2)
        os.kill(victim.pid or 0, signal.SIGKILL)
        with pytest.raises(ga.WorkerLost) as caught:
            await attending
        assert caught.value.worker == "worker-2"
        for _ in range(2):
            with pytest.raises(ga.StaleBuffer):
                await cache.append(seq, rows(1), rows(1))
        with pytest.raises((ga.StaleBuffer, ga.WorkerLost)):
            await cache.append(idle, rows(40), rows(40))
        with pytest.raises(ga.StaleBuffer):
            await cache.attend(rows(1, 4), idle)
        async with ShardedKvCache(pool, **SPEC) as later:
            young = await later.create()
            assert await later.append(young, rows(20), rows(20)) == 20


async def test_what_is_refused(pool_of: Callable[[int], ContextPool]) -> None:
    pool = pool_of(2)
    async with ShardedKvCache(pool, **SPEC) as cache:
        seq = await cache.create()
        await cache.append(seq, rows(9), rows(9))
        q, k = rows(3, 4), rows(3)
        for field, options in (
            ("expect_length", {"expect_length": 9}),
            ("num_splits", {"num_splits": 2}),
        ):
            with pytest.raises(ga.Unsupported, match="several workers") as refused:
                await cache.attend(q, seq, k=k, v=k, **options)  # type: ignore[arg-type]
            assert refused.value.field == field
        with pytest.raises(TypeError, match="windows"):
            await cache.attend(q, seq, k=k, v=k, windows=3)
        await cache.append(seq, rows(9), rows(9))
        with pytest.raises(ga.Unsupported, match="interleave=1") as refused:
            await cache.attend(q, seq, k=k, v=k, alibi_slopes=SLOPES)
        assert refused.value.field == "alibi_slopes"
        async with ShardedKvCache(pool, **SPEC, interleave=1) as striped:
            other = await striped.create()
            kept = rows(9)
            await striped.append(other, kept, kept)
            mine = await striped.attend(q, other, causal=False, alibi_slopes=SLOPES)
            expected = await cache._pool.ask(
                lambda ctx: ctx.flash_attn.forward(q[None], kept[None], kept[None], alibi_slopes=SLOPES), timeout=60
            )
            np.testing.assert_allclose(mine.out, expected.out[0], rtol=4e-6, atol=4e-6)
            with pytest.raises(ga.Unsupported, match="2 rows come before") as refused:
                await striped.attend(rows(11, 4), other, causal=False, alibi_slopes=SLOPES)
            assert refused.value.field == "alibi_slopes"
        for field, ask in (
            ("v", cache.attend(q, seq, k=k)),
            ("k", cache.attend(q, seq, k=rows(2), v=rows(2))),
            ("k", cache.append(seq, rows(2, 4), rows(2))),
            ("v", cache.append(seq, rows(2), rows(1))),
            ("k", cache.append(seq, rows(2).astype(np.float16), rows(2))),
            ("q", cache.attend(q[:, 0], seq, k=k, v=k)),
            ("seq", cache.append(3, k, k)),  # type: ignore[arg-type]
            ("softcap", cache.attend(q, seq, k=k, v=k, softcap=-1.0)),
            ("window_size", cache.attend(q, seq, k=k, v=k, window_size=(-2, 0))),
            ("sink_tokens", cache.attend(q, seq, k=k, v=k, sink_tokens=-1)),
            ("alibi_slopes", cache.attend(q, seq, k=k, v=k, alibi_slopes=SLOPES[:3])),
        ):
            with pytest.raises(ga.InvalidRequest) as wrong:
                await ask
            assert wrong.value.field == field
        with pytest.raises(ga.InvalidRequest):
            ShardedKvCache(3, **SPEC)  # type: ignore[arg-type]
        with pytest.raises(ga.InvalidRequest, match="entered first"):
            await ShardedKvCache(pool, **SPEC).create()
        assert seq.length == 18
        await cache.free(seq)
        with pytest.raises(ga.InvalidRequest, match="freed"):
            await cache.append(seq, k, k)
        with pytest.raises(ga.GpuActorsError, match="entered already"):
            await cache.__aenter__()
        last = await cache.create()
    with pytest.raises(ga.StaleBuffer):
        await cache.append(last, k, k)


async def test_workers_that_promise_the_same_bits_are_refused() -> None:
    """Their answers would be merged, and the bits would depend on the number of workers."""
    options = ga.ContextOptions(invariant=True)
    async with open_pool("mock", workers=2, workplace=InProcess, options=options) as pool:
        with pytest.raises(ga.Unsupported, match="PooledKvCache") as refused:
            async with ShardedKvCache(pool, **SPEC):
                pass
        assert refused.value.field == "pool"
        async with pool.kv_cache(**SPEC) as cache:
            assert await cache.create() is not None
