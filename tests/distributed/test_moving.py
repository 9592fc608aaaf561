"""Sequences that move between workers. If a step fails, one of the two has the sequence, and nothing is leaked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from cases import shards
from support.service import comes_true

import gpu_actors as ga
from gpu_actors.distributed import (
    ContextPool,
    PooledKvCache,
    PooledSequence,
    copy_sequence,
    exported_pages,
    move_sequence,
    open_pool,
)
from gpu_actors.remote import InProcess, RemoteContext

SPEC: dict[str, Any] = {"num_blocks": 8, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
# Of equal shapes, so that one array may have the rows of all.
LAYERS = [ga.KvLayer(), ga.KvLayer(window=9), ga.KvLayer(window=9)]
ROWS = np.random.default_rng(0).standard_normal((20, 2, 16)).astype(np.float32)


class Two:
    """A cache over two workers, and a sequence at the first one. Each launch takes ``latency`` seconds.

    layers: how many the cache has.
    """

    def __init__(self, pool: ContextPool, cache: PooledKvCache, seq: PooledSequence, layers: int) -> None:
        self.pool = pool
        self.layers = layers
        self.cache = cache
        self.seq = seq
        self.other = next(name for name in pool.workers if name != seq.worker)

    def append(self, seq: PooledSequence, count: int, **options: Any) -> ga.Reply[Any]:
        rows = np.resize(ROWS, (count, *ROWS.shape[1:]))
        new = rows if self.layers == 1 else np.stack([rows] * self.layers)
        return self.cache.append(seq, new, new, **options)

    def lose(self, name: str) -> None:
        context = self.pool.workers[name]
        assert isinstance(context, RemoteContext)
        connection = context._generations.connection
        assert connection is not None
        connection.kill()

    async def busy(self, name: str, requests: int) -> None:
        """Wait until a worker has got ``requests`` requests in all."""
        await comes_true(lambda: self.pool.stats().workers[name].requests >= requests)

    def requests(self, name: str) -> int:
        return self.pool.stats().workers[name].requests


@pytest.fixture(params=[1, LAYERS], ids=["one layer", "layers that differ"])
async def two(request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    layers = request.param
    options = ga.ContextOptions(restart=QUICK, mock=ga.MockOptions(latency=0.2), drain_timeout=1.0)
    async with (
        open_pool("mock", workers=2, options=options, workplace=InProcess, seed=0) as pool,
        pool.kv_cache(**SPEC, layers=layers) as cache,
    ):
        both = Two(pool, cache, await cache.create(), layers if isinstance(layers, int) else len(layers))
        await both.append(both.seq, 20)
        yield both


async def stays(two: Two) -> None:
    """Assert that the sequence is where it was, with its rows, and is the only one."""
    assert two.cache.length(two.seq) == 20
    await shards.held(two.cache, 1)
    assert await two.append(two.seq, 1, expect_length=20) == 21
    await two.cache.free(two.seq)
    await shards.held(two.cache, 0)


async def test_rows_and_counts_move(two: Two) -> None:
    moved = await two.cache.move(two.seq, two.other)
    assert moved.worker == two.other
    assert two.cache.length(moved) == 20
    await shards.held(two.cache, 1)
    with pytest.raises(ga.InvalidRequest, match="freed"):
        await two.append(two.seq, 20)
    workers = two.pool.stats().workers
    await comes_true(lambda: two.pool.stats().workers[two.seq.worker].sequences == 0)
    assert workers[two.other].sequences == 1
    back = await two.cache.move(moved)
    assert back.worker == two.seq.worker
    await two.pool.remove(two.other)
    with pytest.raises(ga.InvalidRequest, match="another worker"):
        await two.cache.move(back)


async def test_a_sequence_leaves_a_worker_that_is_removed(two: Two) -> None:
    removing = asyncio.create_task(two.pool.remove(two.seq.worker))
    await asyncio.sleep(0)
    with pytest.raises(ga.InvalidRequest, match="must be one of"):
        await two.cache.move(two.seq, two.seq.worker)
    moved = await two.cache.move(two.seq)
    await removing
    assert await two.append(moved, 1, expect_length=20) == 21


async def test_no_room_at_the_target(two: Two) -> None:
    filler = await two.cache.create()
    while filler.worker != two.other:
        filler = await two.cache.create()
    await two.append(filler, 48)
    with pytest.raises(ga.CacheFull):
        await two.cache.move(two.seq, two.other)
    assert two.cache.length(two.seq) == 20


async def test_the_target_is_lost_before_and_while_it_takes_the_pages(two: Two) -> None:
    for step in ("export", "import"):
        before = two.requests(two.other)
        moving = asyncio.create_task(two.cache.move(two.seq, two.other))
        if step == "import":
            await two.busy(two.other, before + 1)
        else:
            await two.busy(two.seq.worker, two.requests(two.seq.worker) + 1)
        two.lose(two.other)
        with pytest.raises((ga.WorkerLost, ga.StaleBuffer)):
            await moving
        assert two.cache.length(two.seq) == 20
        await comes_true(lambda: two.pool.workers[two.other].health().ready)
        await (await two.cache._shard(two.pool.member(two.other))).opening  # type: ignore[arg-type]
    await stays(two)


async def test_the_source_is_lost_while_the_target_takes_the_pages(two: Two) -> None:
    before = two.requests(two.other)
    moving = asyncio.create_task(two.cache.move(two.seq, two.other))
    await two.busy(two.other, before + 1)
    two.lose(two.seq.worker)
    moved = await moving
    assert await two.append(moved, 1, expect_length=20) == 21
    await two.cache.free(moved)
    await shards.held(two.cache, 0)


@pytest.mark.parametrize("step", ["export", "import"])
@pytest.mark.parametrize("way", ["cancel", "timeout"])
async def test_a_move_that_is_given_up(two: Two, step: str, way: str) -> None:
    timeout = None if way == "cancel" else {"export": 0.1, "import": 0.3}[step]
    before = two.requests(two.other)
    moving = asyncio.create_task(two.cache.move(two.seq, two.other, timeout=timeout))
    if way == "cancel":
        if step == "import":
            await two.busy(two.other, before + 1)
        else:
            await two.busy(two.seq.worker, two.requests(two.seq.worker) + 1)
        moving.cancel()
    with pytest.raises(asyncio.CancelledError if way == "cancel" else ga.DeadlineExceeded):
        await moving
    await stays(two)


async def test_caches_of_one_process_move_sequences_too() -> None:
    async with (
        ga.open_context("mock") as one,
        ga.open_context("mock") as other,
        one.kv_cache(**SPEC) as source,
        other.kv_cache(**SPEC) as target,
        other.kv_cache(**{**SPEC, "page_size": 16}) as strange,
    ):
        seq = await source.create()
        await source.append(seq, ROWS, ROWS)
        with pytest.raises(ga.InvalidRequest) as refused:
            await move_sequence(source, seq, strange)
        assert refused.value.field == "page_size"
        assert source.length(seq) == 20
        assert strange.stats().sequences == 0
        await comes_true(lambda: source.stats().sequences == 1)
        with pytest.raises(ga.InvalidRequest, match="finite number"):
            await copy_sequence(source, seq, target, timeout=float("nan"))
        twin = await copy_sequence(source, seq, target)
        moved = await move_sequence(source, seq, target, timeout=30.0)
        assert target.length(twin) == target.length(moved) == 20
        await comes_true(lambda: source.stats().free_blocks == 8)
        async with exported_pages(target, moved) as pages:
            assert target.stats().sequences == 3
            assert pages.length == 20
        await comes_true(lambda: target.stats().sequences == 2)
