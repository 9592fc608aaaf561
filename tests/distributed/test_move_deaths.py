"""A worker dies, stops or exits at each step of a move: one of the two has the sequence, and nothing is leaked.

`fakes.move_steps` notes the steps of a real move. `SOURCE` and `TARGET` are what it notes today. A step that is new to
the protocol fails `test_every_step_of_a_move_is_known` until it is listed, and the sweep tries it from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from cases import shards
from fakes.move_steps import MoveSteps
from support.service import comes_true

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, PooledKvCache, PooledSequence
from gpu_actors.remote import ChildProcess, Faults, Faulty, RemoteContext, open_remote

SPEC: dict[str, Any] = {"num_blocks": 8, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
OPTIONS = ga.ContextOptions(
    actors=(MoveSteps,), hang_timeout=60.0, restart=ga.RestartPolicy(max_restarts=10**6, backoff=0.0)
)
ROWS = np.random.default_rng(0).standard_normal((20, 2, 16)).astype(np.float32)
# Of equal shapes, so that one array may have the rows of all.
LAYERS = [ga.KvLayer(), ga.KvLayer(window=9)]
WAYS = ("SIGKILL", "os._exit", "SIGSTOP")
_ANSWER = ("answer packed {}", "answer half sent {}", "answer sent {}")


def _answer(number: int) -> tuple[str, ...]:
    return tuple(step.format(number) for step in _ANSWER)


SOURCE = (
    "ExportSequence asked 1", "Moving.has_kernel 1", "Moving.export 1", "CacheTables.fork 1",
    "Moving._kernels 1",
    "export_launch 1", "_steps 1", "_names 1", "_read 1", "exported 1", "page_checks 1", "_layout 1",
    "ExportSequence done 1", *_answer(1),
    "_free_unknown 1", "FreeSequence asked 1", "CacheTables.free 1", "FreeSequence done 1", *_answer(2),
    "FreeSequence asked 2", "CacheTables.free 2", "FreeSequence done 2", *_answer(3),
)  # fmt: skip
TARGET = (
    "ImportSequence asked 1", "Moving.has_kernel 1", "Moving.take_in 1", "check_pages 1", "_expect_same 1", "_alone 1",
    "_check_group 1", "_layout 1", "_expect_same 2", "page_checks 1",
    "CacheTables.adopt 1", "Moving._kernels 1", "import_launch 1", "_steps 1", "_names 1", "_write 1",
    "CacheTables.commit 1", "ImportSequence done 1", *_answer(1), "_free_unknown 1",
)  # fmt: skip
STEPS = [("source", step) for step in SOURCE] + [("target", step) for step in TARGET]
# A sample for the default run.
SAMPLE = [
    ("source", "answer half sent 1", "SIGKILL"),
    ("source", "CacheTables.free 1", "os._exit"),
    ("target", "CacheTables.commit 1", "SIGKILL"),
]


def _two(options: ga.ContextOptions) -> Iterator[dict[str, RemoteContext]]:
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(open_remote("mock", options, workplace=ChildProcess(), name=name))
            for name in ("one", "two")
        }


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, RemoteContext]]:
    yield from _two(OPTIONS)


@pytest.fixture(scope="module")
def hasty() -> Iterator[dict[str, RemoteContext]]:
    """Workers that soon count as hung, for tests that stop them."""
    yield from _two(dataclasses.replace(OPTIONS, hang_timeout=1.5))


class Move:
    """A sequence of 20 rows at the source, which may move to the target."""

    def __init__(self, pool: ContextPool, cache: PooledKvCache, seq: PooledSequence, layers: int) -> None:
        self.pool = pool
        self.layers = layers
        self.cache = cache
        self.seq = seq
        self.names = {"source": seq.worker, "target": next(name for name in pool.workers if name != seq.worker)}

    def worker(self, side: str) -> RemoteContext:
        context = self.pool.workers[self.names[side]]
        assert isinstance(context, RemoteContext)
        return context

    async def tell(self, side: str, *message: Any) -> Any:
        return await self.worker(side).actor(MoveSteps).submit(message)

    async def append(self, seq: PooledSequence, count: int, length: int) -> int:
        """Append the first ``count`` rows, in each layer, to a sequence of ``length`` rows."""
        new = ROWS[:count] if self.layers == 1 else np.stack([ROWS[:count]] * self.layers)
        appended: int = await self.cache.append(seq, new, new, expect_length=length)
        return appended

    async def has_rows(self, seq: PooledSequence) -> None:
        """Assert that the sequence has its 20 rows, and that another can be appended."""
        q = np.zeros((1, 1, 2, 16), np.float32)
        result = await self.cache.attend(q, seq, causal=False, expect_length=20)
        np.testing.assert_allclose(result.out[0, 0], ROWS.mean(0), atol=1e-6)
        assert await self.append(seq, 1, 20) == 21

    async def dies(self, side: str, step: str, way: str) -> None:
        """Move the sequence while a worker dies at a step. Afterwards the sequence is at one of the two, or lost."""
        victim = self.worker(side)
        generation = victim.generation
        await self.tell(side, "trap", step, way)
        error: ga.WorkerLost | None = None
        moved = self.seq
        try:
            moved = await self.cache.move(self.seq, self.names["target"])
        except ga.WorkerLost as lost:
            error = lost
        assert error is None or (error.worker, error.generation) == (self.names[side], generation)
        steps = {"source": SOURCE, "target": TARGET}[side]
        answered = steps.index(step) - steps.index("answer sent 1")
        racing = answered == 0 or step == "_free_unknown 1"  # the answer may reach the program, or not
        assert racing or (error is None) == (answered > 0)
        await comes_true(lambda: victim.generation > generation and victim.health().ready)
        if self.names[side] == moved.worker:
            with pytest.raises((ga.WorkerLost, ga.StaleBuffer)):
                await self.append(moved, 1, 20)
        else:
            await self.has_rows(moved)
            await self.cache.free(moved)
        await shards.held(self.cache, 0)
        await comes_true(lambda: not any(one.outstanding for one in self.pool.stats().workers.values()))
        assert not any(one.sequences for one in self.pool.stats().workers.values())


@contextlib.asynccontextmanager
async def moving(workers: dict[str, RemoteContext], layers: list[ga.KvLayer] | None = None) -> Any:
    pool = ContextPool(workers, seed=0)
    async with pool.kv_cache(**SPEC, layers=layers or 1) as cache:
        move = Move(pool, cache, await cache.create(), len(layers or [1]))
        await move.append(move.seq, 20, 0)
        yield move


async def test_every_step_of_a_move_is_known(workers: dict[str, RemoteContext]) -> None:
    async with moving(workers) as move:
        for side in move.names:
            await move.tell(side, "note")
        moved = await move.cache.move(move.seq)
        for side, steps in (("source", SOURCE), ("target", TARGET)):
            noted: list[str] = []
            while len(noted) < len(steps):  # answers are noted a moment later
                noted = await move.tell(side, "noted")
            assert sorted(noted) == sorted(steps)
        await move.has_rows(moved)


@pytest.mark.parametrize("layers", [None, LAYERS], ids=["one layer", "layers that differ"])
@pytest.mark.parametrize(("side", "step", "way"), SAMPLE)
async def test_a_death_in_a_move(
    workers: dict[str, RemoteContext], side: str, step: str, way: str, layers: list[ga.KvLayer] | None
) -> None:
    async with moving(workers, layers) as move:
        await move.dies(side, step, way)


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize(("side", "step"), STEPS)
async def test_a_death_at_each_step_of_a_move(
    workers: dict[str, RemoteContext], side: str, step: str, way: str
) -> None:
    async with moving(workers) as move:
        await move.dies(side, step, way)


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("side", "step"), STEPS)
async def test_a_worker_that_is_stopped_at_each_step_of_a_move(
    hasty: dict[str, RemoteContext], side: str, step: str
) -> None:
    async with moving(hasty) as move:
        await move.dies(side, step, "SIGSTOP")


@pytest.mark.sweep
@pytest.mark.timeout(1800)
async def test_fifty_generations_of_moves_leave_nothing_behind(hasty: dict[str, RemoteContext]) -> None:
    here = psutil.Process()
    resident = 0

    def left() -> tuple[int, int, int]:
        gc.collect()  # a mapping has a descriptor, until it is collected
        return here.num_fds(), here.num_threads(), len(here.children(recursive=True))

    before = left()
    for turn in range(50):
        (side, step), way = STEPS[turn * 7 % len(STEPS)], WAYS[turn % 5 % 3]
        async with moving(hasty) as move:
            await move.dies(side, step, way)
        if turn == 4:
            before, resident = left(), here.memory_info().rss

    def none_more() -> bool:
        return all(now <= then for now, then in zip(left(), before, strict=True))

    await comes_true(none_more)
    assert here.memory_info().rss - resident < 16 << 20
    for worker in hasty.values():
        assert worker._generations.launcher.arena.used() == 0  # type: ignore[attr-defined]


@pytest.mark.sweep
@pytest.mark.timeout(300)
async def test_moves_over_channels_that_drop_records() -> None:
    """A lost record ends its worker's generation: the sequence is at one of the two, or lost with the source."""
    lossy = {name: Faulty(Faults(seed=seed), patience=0.2) for seed, name in enumerate(("one", "two"))}
    counts = Counter[str]()
    async with contextlib.AsyncExitStack() as stack:
        opened = {
            name: await stack.enter_async_context(open_remote("mock", OPTIONS, workplace=workplace, name=name))
            for name, workplace in lossy.items()
        }
        for _ in range(60):
            async with moving(opened) as move:
                for workplace in lossy.values():
                    workplace.faults = Faults(drop=0.05)
                there = move.seq
                with contextlib.suppress(ga.WorkerLost, ga.StaleBuffer):
                    there = await move.cache.move(move.seq, move.names["target"])
                for workplace in lossy.values():
                    workplace.faults = Faults()
                # A dropped record is noticed once the next one arrives.
                await asyncio.gather(*(one.probe(30.0) for one in opened.values()), return_exceptions=True)
                await comes_true(lambda: all(one.health().ready for one in opened.values()))
                try:
                    await move.has_rows(there)
                    await move.cache.free(there)
                    counts["moved" if there is not move.seq else "stayed"] += 1
                except (ga.WorkerLost, ga.StaleBuffer):
                    counts["lost"] += 1
                await shards.held(move.cache, 0)
    assert all(workplace.dropped for workplace in lossy.values())
    assert len(counts) == 3
