"""Sequences of a pool: each lives at one worker, and is lost with it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from fakes import runnables
from support.service import comes_true, suspend

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, PooledKvCache, ShardedKvCache, open_pool
from gpu_actors.remote import InProcess, RemoteContext
from gpu_actors.testing import FaultPlan

SPEC: dict[str, Any] = {"num_blocks": 64, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)


def rows(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((count, 2, 16)).astype(np.float32)


@pytest.fixture
async def pool() -> AsyncIterator[ContextPool]:
    async with open_pool("mock", workers=3, workplace=InProcess, slots=8, seed=0) as opened:
        yield opened


@pytest.fixture
async def cache(pool: ContextPool) -> AsyncIterator[PooledKvCache]:
    async with pool.kv_cache(**SPEC) as entered:
        yield entered


async def test_it_answers_as_one_cache(cache: PooledKvCache) -> None:
    async with ga.open_context("mock") as ctx, ctx.kv_cache(**SPEC) as own:
        seq, mine = await cache.create(range(30)), await own.create(range(30))
        assert seq.cached == 0
        assert await cache.append(seq, rows(24), rows(24), tokens=range(24)) == 24
        await own.append(mine, rows(24), rows(24), tokens=range(24))
        fork, fork_of_mine = await cache.fork(seq), await own.fork(mine)
        await cache.truncate(fork, 10)
        await own.truncate(fork_of_mine, 10)
        q = np.random.default_rng(3).standard_normal((2, 1, 4, 16)).astype(np.float32)
        new = rows(2, 5)[:, None]
        result = await cache.attend(q, [seq, fork], k=new, v=new, expect_length=[24, 10])
        expected = await own.attend(q, [mine, fork_of_mine], k=new, v=new)
        np.testing.assert_array_equal(result.out, expected.out)
        assert (cache.length(seq), cache.length(fork)) == (25, 11)
        assert (await cache.create(range(30))).cached == 24
        assert sum(stats.sequences for stats in cache.stats().values()) == 3


async def test_a_prompt_goes_where_its_beginning_is(cache: PooledKvCache, pool: ContextPool) -> None:
    homes = {}
    for prompt in range(12):
        first = await cache.create([prompt] * 17)
        await cache.append(first, rows(16), rows(16), tokens=[prompt] * 16)
        again = await cache.create([prompt] * 40)
        assert again.worker == first.worker
        assert again.cached == 16
        homes[prompt] = first.worker
        await cache.free(first)
        await cache.free(again)
    assert len(set(homes.values())) == 3
    assert not any(worker.sequences for worker in pool.stats().workers.values())


async def test_a_prompt_follows_a_sequence_that_began_as_it_does(cache: PooledKvCache, pool: ContextPool) -> None:
    first = await cache.create([7] * 17)
    await cache.append(first, rows(16), rows(16), tokens=[7] * 16)
    others = sorted(set(pool.stats().workers) - {first.worker})
    for name, tokens in zip(others, ((8, 9), (10, 11)), strict=True):
        moved = await cache.move(first, name)
        for token in tokens:  # with the old home, and without it
            again = await cache.create([7] * 16 + [token] * 24)
            assert (again.worker, again.cached) == (name, 16)
            await cache.free(again)
            if first.worker in pool.stats().workers:
                await pool.remove(first.worker)
        first = moved


async def test_a_pool_remembers_as_many_pages_as_its_directory_has_room_for() -> None:
    async with (
        open_pool("mock", workers=2, workplace=InProcess, directory=3) as pool,
        pool.kv_cache(**SPEC) as cache,
    ):
        for prompt in range(4):
            seq = await cache.create([prompt] * 16)
            await cache.append(seq, rows(16), rows(16), tokens=[prompt] * 16)
        assert len(pool.homes.directory) == 3
    with pytest.raises(ga.InvalidRequest, match=r"directory.*-1"):
        open_pool("mock", directory=-1)


async def test_a_loaded_home_gets_no_more(cache: PooledKvCache, pool: ContextPool) -> None:
    seqs = [await cache.create([1] * 20) for _ in range(24)]
    counts = Counter(seq.worker for seq in seqs)
    assert len(counts) == 3
    assert max(counts.values()) <= 1.25 * 25 / 3 + 1
    assert {name: worker.sequences for name, worker in pool.stats().workers.items()} == counts


async def test_requests_on_a_sequence_stay_in_order(cache: PooledKvCache) -> None:
    seq = await cache.create()
    replies = [cache.append(seq, rows(1), rows(1), expect_length=turn) for turn in range(40)]
    assert [await reply for reply in replies] == list(range(1, 41))


async def test_functions_run_at_home(cache: PooledKvCache) -> None:
    seq = await cache.create()
    assert await cache.run(seq, _steps, rows(2), 3) == [2, 4, 6]
    assert cache.length(seq) == 6
    async with ga.open_context("mock") as ctx:
        alone = ContextPool({"plain": ctx})
        async with alone.kv_cache(**SPEC) as other:
            reply = other.run(await other.create(), _steps, rows(2), 3)
            with pytest.raises(ga.Unsupported, match="RemoteContext"):
                await reply


async def _steps(_: ga.GpuContext, cache: ga.KvCache, seq: ga.KvSequence, new: Any, count: int) -> list[int]:
    return [await cache.append(seq, new, new) for _ in range(count)]


async def test_what_is_refused(cache: PooledKvCache, pool: ContextPool) -> None:
    seqs: dict[str, Any] = {}
    for prompt in range(12):
        seq = await cache.create([prompt] * 20)
        seqs.setdefault(seq.worker, seq)
    one, other, *_ = seqs.values()
    new = rows(2)[:, None]
    for reply in (
        cache.append([one, other], new, new),
        cache.append([], new, new),
        cache.append(3, new, new),  # type: ignore[arg-type]
        cache.append(one.handle, new, new),
    ):
        with pytest.raises(ga.InvalidRequest) as caught:
            await reply
        assert caught.value.field == "seqs"
    await cache.free(one)
    with pytest.raises(ga.InvalidRequest, match="freed"):
        await cache.free(one)
    with pytest.raises(ga.InvalidRequest, match="token ids"):
        await cache.create("abc")
    with pytest.raises(ga.InvalidRequest, match="page_size"):
        async with pool.kv_cache(**{**SPEC, "page_size": 0}):
            pass
    closed = pool.kv_cache(**SPEC)
    with pytest.raises(ga.InvalidRequest, match="entered first"):
        await closed.create()
    async with closed:
        last = await closed.create()
    with pytest.raises(ga.GpuActorsError, match="entered already"):
        await closed.__aenter__()
    with pytest.raises(ga.StaleBuffer):
        await closed.create()
    with pytest.raises(ga.StaleBuffer):
        await closed.append(last, rows(1), rows(1))


async def test_a_home_that_is_lost_takes_its_sequences_along() -> None:
    options = ga.ContextOptions(restart=QUICK)
    async with open_pool("mock", workers=2, options=options, seed=0) as pool, pool.kv_cache(**SPEC) as cache:
        seqs = [await cache.create([prompt] * 20) for prompt in range(8)]
        victim = seqs[0].worker
        context = pool.workers[victim]
        assert isinstance(context, RemoteContext)
        dying = context.run(runnables.kill_process)
        with pytest.raises(ga.WorkerLost):
            await dying
        for seq in seqs:
            if seq.worker == victim:
                with pytest.raises(ga.StaleBuffer):
                    await cache.append(seq, rows(1), rows(1))
                with pytest.raises(ga.StaleBuffer):
                    await cache.fork(seq)
            else:
                assert await cache.append(seq, rows(1), rows(1)) == 1
        assert pool.stats().workers[victim].sequences == 0
        # Its next generation is a home again.
        async with asyncio.timeout(20.0):
            while (young := await cache.create()).worker != victim:
                pass
        assert young.generation == 2
        assert await cache.append(young, rows(3), rows(3), expect_length=0) == 3
        with pytest.raises(ga.StaleBuffer):
            await cache.append(seqs[0], rows(1), rows(1))
        await pool.remove(victim, timeout=0.0)


async def test_a_sequence_is_begun_elsewhere_when_its_home_is_lost_meanwhile() -> None:
    options = ga.ContextOptions(restart=QUICK)
    async with open_pool("mock", workers=2, options=options, seed=0) as pool, pool.kv_cache(**SPEC) as cache:
        home = (await cache.create([5] * 20)).worker
        context = pool.workers[home]
        assert isinstance(context, RemoteContext)
        suspend(context.pid or 0)
        creating = [asyncio.create_task(cache.create([5] * 20)) for _ in range(8)]
        await asyncio.sleep(0.1)
        os.kill(context.pid or 0, signal.SIGKILL)
        for seq in await asyncio.gather(*creating):
            assert await cache.append(seq, rows(2), rows(2), expect_length=0) == 2


async def test_a_cache_whose_context_is_lost_in_process_is_opened_again() -> None:
    plan = FaultPlan().lose_context(launch=3)
    options = ga.ContextOptions(restart=QUICK, fault_plan=plan)
    async with (
        open_pool("mock", workers=1, options=options, workplace=InProcess) as pool,
        pool.kv_cache(**SPEC) as cache,
    ):
        for generation in (1, 2, 3):
            seq = await cache.create()
            assert seq.generation == generation
            assert await cache.append(seq, rows(1), rows(1)) == 1
            assert await cache.append(seq, rows(1), rows(1)) == 2
            with pytest.raises(ga.WorkerLost) as caught:
                await cache.append(seq, rows(1), rows(1), expect_length=2)
            assert caught.value.happened == "unknown"


@pytest.mark.parametrize("kind", ["pooled", "sharded"])
async def test_leaving_that_is_cancelled_closes_every_workers_cache(kind: str) -> None:
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.3))
    async with open_pool("mock", workers=3, options=options, workplace=InProcess) as pool:
        cache: Any = pool.kv_cache(**SPEC) if kind == "pooled" else ShardedKvCache(pool, **SPEC, interleave=8)
        entered = await cache.__aenter__()
        if kind == "pooled":
            appending = [cache.append(await cache.create(), rows(8), rows(8)) for _ in range(9)]
        else:
            appending = [asyncio.create_task(cache.append(await cache.create(), rows(24), rows(24)))]
            await comes_true(lambda: all(worker.outstanding for worker in pool.stats().workers.values()))
        leaving = asyncio.create_task(entered.__aexit__(None, None, None))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await asyncio.gather(*(one.wait() if kind == "pooled" else one for one in appending), return_exceptions=True)
        for context in pool.workers.values():
            look = context._children.cells["kv_cache"].shared.look
            await comes_true(lambda look=look: not look())


async def test_a_cache_that_opens_in_a_later_generation_serves_that_one() -> None:
    """The worker ends between the decision to open a cache there and the opening."""
    options = ga.ContextOptions(restart=QUICK)
    async with open_pool("mock", workers=1, options=options, workplace=InProcess) as pool:
        context = pool.workers["worker-1"]
        assert isinstance(context, RemoteContext)
        cache = pool.kv_cache(**SPEC)
        cache._entered = True  # without the caches that entering opens
        creating = asyncio.create_task(cache.create())
        while not cache._shards:  # noqa: ASYNC110
            await asyncio.sleep(0)
        connection = context._generations.connection
        assert connection is not None
        connection.kill()
        while context.generation == 1:  # this thread holds the loop, so the cache has not begun to open
            time.sleep(0.001)  # noqa: ASYNC251
        first = await creating
        assert first.generation == 2
        second, length = await asyncio.gather(cache.create(), cache.append(first, rows(3), rows(3)).wait())
        assert length == 3
        assert first.handle.cache == second.handle.cache
        assert cache.length(first) == 3
        await cache.__aexit__(None, None, None)
