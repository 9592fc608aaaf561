"""A model's step over sequences of a pool: it is the step of their home's cache, and they stay there until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from cases import shards
from support.service import comes_true

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, PooledKvCache, PooledSequence, open_pool
from gpu_actors.remote import ChildProcess, InProcess, RemoteContext, Workplace
from gpu_actors.testing import FaultPlan

LAYERS, HEADS, HEADS_Q, DIM = 4, 2, 4, 16
SPEC: dict[str, Any] = {"num_blocks": 48, "page_size": 8, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
SPEC["layers"] = LAYERS
QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
EACH_LAYER = pytest.mark.parametrize("layer", range(LAYERS))
EACH_PLACE = pytest.mark.parametrize("workplace", [InProcess, ChildProcess], ids=["thread", "process"])


class Draw:
    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)

    def rows(self, *shape: int, heads: int = HEADS) -> Any:
        return self.rng.standard_normal((*shape, heads, DIM)).astype(np.float32)

    def layer(self, *shape: int) -> tuple[Any, Any, Any]:
        return self.rows(*shape, heads=HEADS_Q), self.rows(*shape), self.rows(*shape)


@contextlib.asynccontextmanager
async def pooled(
    workers: int, workplace: Callable[[], Workplace] = InProcess, **options: Any
) -> AsyncIterator[tuple[ContextPool, PooledKvCache]]:
    opened = ga.ContextOptions(restart=QUICK, **options)
    async with (
        open_pool("mock", workers=workers, options=opened, workplace=workplace, seed=0) as pool,
        pool.kv_cache(**SPEC) as cache,
    ):
        yield pool, cache


async def quiet(pool: ContextPool) -> None:
    """Wait until no worker has an open request or step."""
    await comes_true(lambda: not any(one.outstanding for one in pool.stats().workers.values()))


async def works(cache: PooledKvCache, seq: PooledSequence, length: int) -> None:
    """Assert that the sequence has ``length`` rows, and that a step over it is right."""
    await comes_true(lambda: cache.length(seq) == length)
    draw = Draw(9)
    async with await cache.step([seq], heads_q=HEADS_Q) as step:
        assert step.lengths == [length + 1]
        for layer in range(LAYERS):
            step.attend(layer, *draw.layer(1, 1))
    assert cache.length(seq) == length + 1


@pytest.mark.parametrize("seed", range(6))
async def test_random_steps_have_the_bits_of_one_cache(seed: int) -> None:
    draw = Draw(seed)
    rng = draw.rng
    async with (
        pooled(3, **({"mock": ga.MockOptions(latency=0.001)} if seed == 5 else {})) as (pool, cache),
        ga.open_context("mock") as ctx,
        ctx.kv_cache(**SPEC) as own,
    ):
        twins: dict[PooledSequence, ga.KvSequence] = {}
        for _ in range(6):
            twins[await cache.create()] = await own.create()
        for _ in range(25):
            some = list(twins)
            one = some[rng.integers(len(some))]
            together = [seq for seq in some if seq.worker == one.worker][: int(rng.integers(1, 4))]
            match rng.integers(6):
                case 0:
                    rows = draw.rows(LAYERS, 5), draw.rows(LAYERS, 5)
                    assert await cache.append(one, *rows) == await own.append(twins[one], *rows)
                case 1:
                    moved = await cache.move(one)
                    twins[moved] = twins.pop(one)
                case 2 if len(twins) < 9:
                    twins[await cache.fork(one)] = await own.fork(twins[one])
                case _:
                    counts = rng.integers(1, 4, len(together)).tolist()
                    appends, commits = bool(rng.random() < 0.8), bool(rng.random() < 0.7)
                    held = zip(together, counts, strict=True)
                    appends = appends or any(cache.length(seq) < count for seq, count in held)
                    asked: dict[str, Any] = {"heads_q": HEADS_Q, "rows": counts, "append": appends, "return_lse": True}
                    asked["layer_options"] = {2: {"window_size": (4, 0)}}
                    step = await cache.step(together, **asked)
                    other = await own.step([twins[seq] for seq in together], **asked)
                    assert step.lengths == other.lengths
                    for layer in rng.permutation(LAYERS).tolist():
                        q, *new = draw.layer(sum(counts))
                        results = [each.attend(layer, q, *(new if appends else ())) for each in (step, other)]
                        assert results[0].out.tobytes() == results[1].out.tobytes()
                        assert results[0].lse.tobytes() == results[1].lse.tobytes()
                    if commits:
                        assert await step.commit() == await other.commit()
                    else:
                        await asyncio.gather(step.abort().wait(), other.abort().wait())
            assert [cache.length(seq) for seq in twins] == [own.length(twin) for twin in twins.values()]
        await quiet(pool)
        q = draw.rows(1, 1, heads=HEADS_Q)
        for seq, twin in twins.items():
            for layer in range(LAYERS):
                found, wanted = await cache.attend(q, seq, layer=layer), await own.attend(q, twin, layer=layer)
                assert found.out.tobytes() == wanted.out.tobytes()


async def test_a_step_on_emulated_kernels_has_the_bits_of_one_cache() -> None:
    async with ga.open_context("emulated") as ctx:
        pool = ContextPool({"one": ctx}, seed=0)
        async with pool.kv_cache(**SPEC) as cache, ctx.kv_cache(**SPEC) as own:
            seqs = [await cache.create(), await cache.create()]
            twins = [await own.create(), await own.create()]
            draw = Draw()
            for _ in range(2):
                async with (
                    await cache.step(seqs, heads_q=HEADS_Q, rows=3) as step,
                    await own.step(twins, heads_q=HEADS_Q, rows=3) as other,
                ):
                    for layer in range(LAYERS):
                        arrays = draw.layer(2, 3)
                        assert step.attend(layer, *arrays).tobytes() == other.attend(layer, *arrays).tobytes()
            assert [cache.length(seq) for seq in seqs] == [6, 6]


async def test_sequences_with_several_homes_are_named_by_place() -> None:
    async with pooled(2) as (pool, cache):
        first = await cache.create()
        same = await cache.fork(first)
        other = await cache.move(await cache.fork(first))
        reply = cache.step([first, other, same], heads_q=HEADS_Q)
        with pytest.raises(ga.InvalidRequest, match="move them") as caught:
            await reply
        assert (caught.value.field, caught.value.value) == ("seqs", {first.worker: [0, 2], other.worker: [1]})
        for wrong in ([], first.handle, [first.handle], 3):
            with pytest.raises(ga.InvalidRequest, match="seqs"):
                await cache.step(wrong, heads_q=HEADS_Q)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="windows"):
            cache.step([first], heads_q=HEADS_Q, windows=3)
        await quiet(pool)
        home = await cache.move(other, first.worker)
        step = await cache.step([first, home, same], heads_q=HEADS_Q)
        await step.abort()


async def test_a_worker_with_the_name_of_another_has_none_of_its_sequences() -> None:
    draw = Draw()
    async with ga.open_context("mock") as first, ga.open_context("mock") as second:
        pool = ContextPool({"one": first}, seed=0)
        async with pool.kv_cache(**SPEC) as cache:
            old = await cache.create()
            await cache.append(old, draw.rows(LAYERS, 3), draw.rows(LAYERS, 3))
            await pool.remove("one", timeout=0.0)
            pool.add(second, "one")
            for opens in (True, False):
                for ask in (
                    lambda: cache.step([old], heads_q=HEADS_Q),
                    lambda: cache.append(old, draw.rows(LAYERS, 1), draw.rows(LAYERS, 1)),
                    lambda: cache.attend(draw.rows(1, 1, heads=HEADS_Q), old),
                ):
                    with pytest.raises(ga.StaleBuffer, match="the home of the sequence, one, has left"):
                        await ask()
                with pytest.raises(ga.StaleBuffer):
                    cache.length(old)
                if opens:
                    young = await cache.create()
                    await works(cache, young, 0)


# What a step holds stays where it is


@EACH_PLACE
@pytest.mark.parametrize("commits", [True, False])
async def test_a_move_waits_for_the_step_and_takes_its_rows_along(
    workplace: Callable[[], Workplace], commits: bool
) -> None:
    async with pooled(2, workplace) as (pool, cache):
        seq, draw = await cache.create(), Draw()
        await cache.append(seq, draw.rows(LAYERS, 9), draw.rows(LAYERS, 9))
        step = await cache.step([seq], heads_q=HEADS_Q)
        moving = asyncio.create_task(cache.move(seq))
        with pytest.raises(ga.DeadlineExceeded):
            await cache.move(seq, timeout=0.05)
        for layer in range(LAYERS):
            step.attend(layer, *draw.layer(1, 1))
            await asyncio.sleep(0.01)
            assert not moving.done()
        await (step.commit() if commits else step.abort())
        moved = await moving
        assert moved.worker != seq.worker
        await works(cache, moved, 9 + commits)
        await shards.held(cache, 1)
        await quiet(pool)


async def test_a_free_and_the_removal_of_its_home_wait_for_the_step() -> None:
    async with pooled(2) as (pool, cache):
        seq, draw = await cache.create(), Draw()
        step = await cache.step([seq], heads_q=HEADS_Q)
        freeing = cache.free(seq)
        removing = asyncio.create_task(pool.remove(seq.worker))
        for layer in range(LAYERS):
            step.attend(layer, *draw.layer(1, 1))
            await asyncio.sleep(0.01)
            assert not freeing.done()
            assert not removing.done()
        assert await step.commit() == [1]
        await freeing
        await removing
        assert seq.worker not in pool.workers
        with pytest.raises(ga.StaleBuffer):
            await cache.step([seq], heads_q=HEADS_Q)


# Ends


@EACH_LAYER
@pytest.mark.parametrize("how", ["abort", "cancel", "raise", "drop", "deadline"])
async def test_a_step_that_ends_early_leaves_no_trace(layer: int, how: str) -> None:
    async with pooled(2) as (pool, cache):
        seq, draw = await cache.create(), Draw()
        await cache.append(seq, draw.rows(LAYERS, 9), draw.rows(LAYERS, 9))
        reached = asyncio.Event()
        options: dict[str, Any] = {"heads_q": HEADS_Q, "timeout": 0.2 if how == "deadline" else None}

        async def block() -> None:
            async with await cache.step([seq], **options) as step:
                for each in range(layer):
                    step.attend(each, *draw.layer(1, 1))
                reached.set()
                if how == "raise":
                    raise ZeroDivisionError
                await asyncio.sleep(0.3 if how == "deadline" else 60.0)
                step.attend(layer, *draw.layer(1, 1))

        if how in ("abort", "drop"):
            step: Any = await cache.step([seq], **options)
            for each in range(layer):
                step.attend(each, *draw.layer(1, 1))
            if how == "abort":
                await step.abort()
                with pytest.raises(ga.StaleBuffer):
                    await step.commit()
            step = None
            gc.collect()
        elif how == "cancel":
            task = asyncio.create_task(block())
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(ZeroDivisionError if how == "raise" else ga.DeadlineExceeded):
                await block()
        await works(cache, seq, 9)
        await quiet(pool)
        await cache.free(seq)
        await shards.held(cache, 0)


@EACH_PLACE
@EACH_LAYER
async def test_a_launch_that_fails_aborts_the_step(layer: int, workplace: Callable[[], Workplace]) -> None:
    async with pooled(1, workplace, fault_plan=FaultPlan().fail(2 + layer, ga.OutOfDeviceMemory)) as (pool, cache):
        seq, draw = await cache.create(), Draw()
        await cache.append(seq, draw.rows(LAYERS, 9), draw.rows(LAYERS, 9))
        step = await cache.step([seq], heads_q=HEADS_Q)
        for each in range(layer):
            step.attend(each, *draw.layer(1, 1))
        with pytest.raises(ga.OutOfDeviceMemory):
            step.attend(layer, *draw.layer(1, 1))
        with pytest.raises(ga.OutOfDeviceMemory):
            await step.commit()
        await works(cache, seq, 9)
        await quiet(pool)


@EACH_PLACE
@pytest.mark.parametrize("layer", [*range(LAYERS), LAYERS])
async def test_a_home_that_is_lost_ends_the_step_as_it_ends_a_request(
    layer: int, workplace: Callable[[], Workplace]
) -> None:
    async with pooled(2, workplace) as (pool, cache):
        seq, draw = await cache.create(), Draw()
        safe = await cache.move(await cache.fork(seq))
        step = await cache.step([seq], heads_q=HEADS_Q)
        for each in range(layer):
            step.attend(each, *draw.layer(1, 1))
        home = pool.workers[seq.worker]
        assert isinstance(home, RemoteContext)
        connection = home._generations.connection
        assert connection is not None
        connection.kill()
        lost = (ga.WorkerLost, ga.StaleBuffer)  # for open requests, and for later ones
        if layer < LAYERS:
            with pytest.raises(lost):
                step.attend(layer, *draw.layer(1, 1))
        with pytest.raises(lost):
            await step.commit()
        await comes_true(lambda: home.generation == 2)
        with pytest.raises(ga.StaleBuffer):
            await cache.step([seq], heads_q=HEADS_Q)
        await works(cache, safe, 0)
        await quiet(pool)
        young = await cache.create()
        await works(cache, young, 0)


@EACH_PLACE
@EACH_LAYER
async def test_a_home_that_is_lost_by_a_layer_raises_what_it_raises_for_a_request(
    layer: int, workplace: Callable[[], Workplace]
) -> None:
    async with pooled(1, workplace, fault_plan=FaultPlan().lose_context(2 + layer)) as (pool, cache):
        seq, draw = await cache.create(), Draw()
        await cache.append(seq, draw.rows(LAYERS, 9), draw.rows(LAYERS, 9))
        step = await cache.step([seq], heads_q=HEADS_Q)
        for each in range(layer):
            step.attend(each, *draw.layer(1, 1))
        with pytest.raises(ga.WorkerLost) as caught:
            step.attend(layer, *draw.layer(1, 1))
        assert (caught.value.worker, caught.value.happened) == (seq.worker, "unknown")
        with pytest.raises((ga.WorkerLost, ga.StaleBuffer)):
            await step.commit()
        with pytest.raises(ga.StaleBuffer):
            await cache.append(seq, draw.rows(LAYERS, 1), draw.rows(LAYERS, 1))
        await quiet(pool)


async def test_the_begin_and_the_end_of_a_step_count_as_requests() -> None:
    async with pooled(1, mock=ga.MockOptions(latency=0.2)) as (pool, cache):
        seq, draw = await cache.create(), Draw()

        def counts() -> tuple[int, int]:
            (worker,) = pool.stats().workers.values()
            return worker.outstanding, worker.requests

        first = counts()[1]
        step = await cache.step([seq], heads_q=HEADS_Q)
        assert counts() == (0, first + 1)
        for layer in range(LAYERS):
            step.attend(layer, *draw.layer(1, 1))
        committing = step.commit()
        assert counts()[1] == first + 2  # it may be over already
        await committing
        assert counts() == (0, first + 2)
        step = await cache.step([seq], heads_q=HEADS_Q)
        await step.abort()
        assert counts() == (0, first + 4)
        replies = [cache.step([seq], heads_q=HEADS_Q)]
        await comes_true(lambda: replies[0].done())
        replies.clear()  # before a task has taken the step
        await works(cache, seq, 1)
        await quiet(pool)
