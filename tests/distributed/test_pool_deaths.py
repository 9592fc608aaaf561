"""Requests of all kinds over child processes that keep dying: none is lost or doubled, and no append is replayed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
from typing import Any

import numpy as np
import psutil
import pytest
from support.service import comes_true, runs

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, PooledKvCache, PooledSequence, open_pool
from gpu_actors.remote import RemoteContext

SPEC: dict[str, Any] = {"num_blocks": 512, "page_size": 8, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
OPTIONS = ga.ContextOptions(restart=ga.RestartPolicy(max_restarts=10**6, backoff=0.0))
TOLD = (ga.WorkerLost, ga.StaleBuffer)


class Load:
    """Stateless requests and requests on sequences, and the counts of their answers."""

    def __init__(self, pool: ContextPool, cache: PooledKvCache) -> None:
        self.pool = pool
        self.cache = cache
        self.answered = self.appended = self.told = 0

    async def stateless(self, number: int) -> None:
        q = np.full((1, 2, 1, 8), number % 1000, np.float32)
        result = await self.pool.ask(lambda ctx: ctx.flash_attn.forward(q, q, q))
        np.testing.assert_array_equal(result.out, q)
        self.answered += 1

    async def appending(self, seq: PooledSequence, length: int) -> bool:
        """Append a row whose value is its place. False once the sequence is lost."""
        row = np.full((1, 1, 8), length, np.float32)
        try:
            assert await self.cache.append(seq, row, row) == length + 1
        except TOLD:
            self.told += 1
            return False
        self.appended += 1
        return True

    async def session(self, count: int) -> None:
        """Make ``count`` appends, over as many sequences as it takes."""
        left = count
        while left:
            seq = await self.cache.create()
            length = 0
            while left and length < 200:  # the cache has room for 20 of these at one home
                left -= 1
                if not await self.appending(seq, length):
                    break
                length += 1
            else:
                await self._check(seq, length)
                with contextlib.suppress(*TOLD):
                    await self.cache.free(seq)

    async def _check(self, seq: PooledSequence, length: int) -> None:
        """Assert that every row is there once: with equal scores the mean of the values is that of 0 .. length - 1."""
        q = np.zeros((1, 1, 1, 8), np.float32)
        with contextlib.suppress(*TOLD):
            result = await self.cache.attend(q, seq, causal=False, expect_length=length)
            np.testing.assert_allclose(result.out, (length - 1) / 2, rtol=1e-4)


async def _run(requests: int, every: int, workers: int = 4) -> str:
    """Returns the counts as a line."""
    dice = random.Random(7)
    here = psutil.Process()
    strangers = set(here.children(recursive=True))  # of other tests
    async with open_pool("mock", workers=workers, options=OPTIONS, seed=7, retries=4) as pool:
        async with pool.kv_cache(**SPEC) as cache:
            load = Load(pool, cache)
            half = requests // 2
            sessions = 16
            done = asyncio.Event()
            killed: set[tuple[str, int]] = set()

            async def kill() -> None:
                while not done.is_set():
                    if load.answered + load.appended + load.told >= (len(killed) + 1) * every:
                        busy = [name for name, worker in pool.stats().workers.items() if worker.outstanding]
                        victim = pool.workers[dice.choice(busy or list(pool.workers))]
                        assert isinstance(victim, RemoteContext)
                        generation, pid = (victim.name, victim.generation), victim.pid
                        if pid is not None and generation not in killed:  # otherwise it is dying already
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(pid, signal.SIGKILL)
                            killed.add(generation)
                    await asyncio.sleep(0.001)

            async def stateless(numbers: range) -> None:
                for number in numbers:
                    await load.stateless(number)

            killing = asyncio.create_task(kill())
            async with asyncio.TaskGroup() as group:
                for first in range(sessions):
                    group.create_task(stateless(range(first, half, sessions)))
                    group.create_task(load.session(len(range(first, half, sessions))))
            done.set()
            await killing
            assert load.answered == half
            assert load.appended + load.told == half
            assert load.told
            assert len(killed) > requests // every // 2  # fewer where processes start slowly
            stats = pool.stats()
            assert stats.repeated
            assert sum(worker.generation - 1 for worker in stats.workers.values()) >= len(killed) - workers
            assert not any(worker.outstanding for worker in stats.workers.values())
        pids = [context.pid for context in pool.workers.values() if isinstance(context, RemoteContext)]
        await comes_true(lambda: len(set(here.children(recursive=True)) - strangers) <= workers + 1)
    assert not [pid for pid in pids if pid is not None and runs(pid)]
    return (
        f"{load.answered} requests without state answered, {stats.repeated} of them again elsewhere; "
        f"{load.appended} rows appended, {load.told} times told that a sequence is lost; {len(killed)} workers killed"
    )


async def test_a_death_every_100_requests() -> None:
    await _run(800, 100)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
async def test_a_death_every_2000_requests_of_200000() -> None:
    print(await _run(200_000, 2000))  # noqa: T201  for the reports


async def test_pools_leave_nothing_behind() -> None:
    here = psutil.Process()

    async def once() -> None:
        async with open_pool("mock", workers=2, options=OPTIONS) as pool, pool.kv_cache(**SPEC) as cache:
            seq = await cache.create()
            big = np.ones((512, 1, 8), np.float32)
            await cache.append(seq, big, big)
            seq = await cache.move(seq)
            victim = pool.workers[seq.worker]
            assert isinstance(victim, RemoteContext)
            os.kill(victim.pid or 0, signal.SIGKILL)
            with pytest.raises(TOLD):
                await cache.append(seq, big, big)

    await once()
    gc.collect()  # a mapping has a descriptor, until it is collected
    before = here.num_fds(), here.num_threads(), len(here.children(recursive=True))
    for _ in range(2):
        await once()

    def none_more() -> bool:
        gc.collect()  # the thread of a closed context may release its mapping after a collection
        return here.num_fds() <= before[0]

    await comes_true(none_more)
    await comes_true(lambda: len(here.children(recursive=True)) <= before[2])  # the zygote reaps them a moment later
    assert here.num_threads() <= before[1] + 2  # threads of the loop's own pool
