"""A pool's stateless requests: where they go, what is repeated, and workers that come and go."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from typing import Any

import numpy as np
import psutil
import pytest
from fakes import runnables
from support.service import comes_true, suspend

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, PoolOptions, RetryBudget, open_pool
from gpu_actors.remote import InProcess, RemoteContext
from gpu_actors.testing import FaultPlan

QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
ROWS = np.random.default_rng(0).standard_normal((1, 8, 2, 16)).astype(np.float32)


def forward(ctx: ga.GpuContext, **options: Any) -> ga.Reply[ga.AttentionOutput]:
    return ctx.flash_attn.forward(ROWS, ROWS, ROWS, **options)


@pytest.fixture(scope="module")
def out() -> np.ndarray[Any, Any]:
    with ga.open_context("mock") as ctx:
        result: np.ndarray[Any, Any] = forward(ctx).result(30.0).out
        return result


def slow(seconds: float, **options: Any) -> ga.ContextOptions:
    return ga.ContextOptions(mock=ga.MockOptions(latency=seconds), restart=QUICK, **options)


def in_process(workers: int, options: ga.ContextOptions | None = None, **more: Any) -> open_pool:
    return open_pool("mock", workers=workers, options=options, workplace=InProcess, seed=0, **more)


def pid_of(pool: ContextPool, name: str) -> int:
    context = pool.workers[name]
    assert isinstance(context, RemoteContext)
    assert context.pid is not None
    return context.pid


async def test_answers_are_those_of_one_context(out: np.ndarray[Any, Any]) -> None:
    async with in_process(3) as pool:
        result = await asyncio.gather(*(pool.ask(forward) for _ in range(30)))
        for one in result:
            np.testing.assert_array_equal(one.out, out)
        requests = [worker.requests for worker in pool.stats().workers.values()]
        assert sum(requests) == 30
        assert all(requests)
        assert pool.ready
        assert {health.state for health in pool.health().values()} == {"ready"}
        assert list(pool.workers) == ["worker-1", "worker-2", "worker-3"]
        assert "worker-2" in repr(pool)


async def test_requests_go_where_fewer_wait() -> None:
    async with in_process(4, slow(0.02)) as pool:
        asking = [asyncio.create_task(pool.ask(forward)) for _ in range(80)]
        await asyncio.sleep(0.05)
        loads = [worker.outstanding for worker in pool.stats().workers.values()]
        assert 40 <= sum(loads) <= 80
        assert max(loads) - min(loads) <= 4
        await asyncio.gather(*asking)
        assert not any(worker.outstanding for worker in pool.stats().workers.values())


async def test_a_contradiction_is_not_repeated() -> None:
    async with in_process(2) as pool:
        with pytest.raises(ga.InvalidRequest):
            await pool.ask(lambda ctx: forward(ctx, dropout_p=2.0))
        assert sum(worker.requests for worker in pool.stats().workers.values()) == 1


async def test_a_worker_killed_with_64_in_flight_costs_no_answer(out: np.ndarray[Any, Any]) -> None:
    async with open_pool("mock", workers=2, options=slow(0.02), seed=1) as pool:
        async with pool.kv_cache(num_blocks=64, page_size=8, kv_heads=2, head_dim=16, dtype="float32") as cache:
            seqs = [await cache.create([number] * 20) for number in range(16)]
            victim = "worker-1"
            suspend(pid_of(pool, victim))  # so that it answers nothing
            asking = [asyncio.create_task(pool.ask(forward)) for _ in range(256)]
            appends = [cache.append(seq, ROWS[0], ROWS[0]) for seq in seqs]
            await comes_true(lambda: pool.stats().workers[victim].outstanding >= 64)
            os.kill(pid_of(pool, victim), signal.SIGKILL)
            for one in await asyncio.gather(*asking):
                np.testing.assert_array_equal(one.out, out)
            outcomes = await asyncio.gather(*(reply.wait() for reply in appends), return_exceptions=True)
            homes = {seq.worker for seq in seqs}
            assert homes == {"worker-1", "worker-2"}
            for seq, answer in zip(seqs, outcomes, strict=True):
                if seq.worker == victim:
                    assert isinstance(answer, ga.WorkerLost)
                    assert (answer.worker, answer.generation, answer.happened) == (victim, 1, "unknown")
                    with pytest.raises(ga.StaleBuffer):
                        await cache.append(seq, ROWS[0], ROWS[0])
                else:
                    assert answer == 8
                    assert cache.length(seq) == 8
        assert pool.stats().repeated >= 1
        assert pool.stats().retries_left < 256


async def test_what_may_not_be_repeated_is_told(out: np.ndarray[Any, Any]) -> None:
    async with open_pool("mock", workers=3, options=slow(0.0), retries=1, seed=1) as pool:
        with pytest.raises(ga.WorkerLost) as caught:
            await pool.ask(lambda ctx: remote(ctx).run(runnables.kill_process))
        assert caught.value.happened == "unknown"
        assert pool.stats().repeated == 0
        await comes_true(
            lambda: {health.state for health in pool.health().values()} == {"ready"}
        )  # so that two can take it
        asked: list[str] = []

        def once(ctx: ga.GpuContext) -> ga.Reply[Any]:
            asked.append(remote(ctx).name)
            return (
                remote(ctx).run(runnables.kill_process) if len(asked) == 1 else remote(ctx).run(runnables.describe, 5)
            )

        assert (await pool.ask(once, repeatable=True))[2] == (5,)
        assert len(set(asked)) == 2
        with pytest.raises(ga.WorkerLost):  # one that kills workers ends after its retries
            await pool.ask(lambda ctx: remote(ctx).run(runnables.kill_process), repeatable=True)
        assert pool.stats().repeated == 2
        await comes_true(lambda: sum(worker.generation - 1 for worker in pool.stats().workers.values()) == 4)
        np.testing.assert_array_equal((await pool.ask(forward)).out, out)


def remote(ctx: ga.GpuContext) -> RemoteContext:
    assert isinstance(ctx, RemoteContext)
    return ctx


async def test_a_budget_that_is_spent_repeats_nothing() -> None:
    plan = FaultPlan().lose_context(launch=1)
    options = ga.ContextOptions(fault_plan=plan, restart=QUICK)
    async with in_process(2, options, budget=RetryBudget(ratio=0.0, burst=0.0)) as pool:
        with pytest.raises(ga.WorkerLost):
            await pool.ask(forward)
        assert pool.stats().repeated == 0
    async with in_process(2, options, budget=RetryBudget(ratio=0.0, burst=2.0)) as pool:
        # The first launch of every generation is lost, so three attempts fail.
        with pytest.raises(ga.WorkerLost):
            await pool.ask(forward)
        assert pool.stats().repeated == 2
        assert pool.stats().retries_left == 0.0


async def test_a_worker_that_hangs_is_answered_for_by_another(out: np.ndarray[Any, Any]) -> None:
    options = ga.ContextOptions(restart=QUICK, hang_timeout=1.0)
    async with open_pool("mock", workers=2, options=options, seed=3) as pool:
        await pool.ask(forward)
        suspend(pid_of(pool, "worker-1"))
        for one in await asyncio.gather(*(pool.ask(forward) for _ in range(20))):
            np.testing.assert_array_equal(one.out, out)
        assert pool.stats().repeated >= 1


async def test_a_full_worker_is_left_for_another(out: np.ndarray[Any, Any]) -> None:
    options = slow(0.05, mailbox_capacity=2, max_in_flight=1, coalesce_max=1)
    async with in_process(2, options, retries=0) as pool:
        outcomes = await asyncio.gather(*(pool.ask(forward) for _ in range(16)), return_exceptions=True)
        refused = [one for one in outcomes if isinstance(one, ga.Overloaded)]
        assert 0 < len(refused) < 16
    stalling = slow(1.0, mailbox_capacity=1, max_in_flight=1, coalesce_max=1, drain_timeout=0.0)
    async with ga.open_context("mock", stalling) as full, ga.open_context("mock") as free:
        stuck = [forward(full) for _ in range(8)]
        pool = ContextPool({"full": full, "free": free}, seed=0)
        # The pool counts only its own requests, so it sometimes chooses the full worker.
        for one in await asyncio.gather(*(pool.ask(forward) for _ in range(12))):
            np.testing.assert_array_equal(one.out, out)
        assert pool.stats().repeated
    assert all(reply.done() for reply in stuck)


async def test_a_deadline_counts_for_all_attempts() -> None:
    async with in_process(2, slow(30.0)) as pool:
        start = time.monotonic()
        with pytest.raises(ga.DeadlineExceeded):
            await pool.ask(forward, timeout=0.1)
        with pytest.raises(ga.DeadlineExceeded):
            await pool.ask(lambda ctx: forward(ctx, timeout=0.1))
        assert time.monotonic() - start < 5.0
        with pytest.raises(ga.InvalidRequest):
            await pool.ask(forward, timeout=float("nan"))


async def test_cancelling_cancels_the_request() -> None:
    async with in_process(1) as pool:
        (name,) = pool.workers
        waiting = asyncio.create_task(pool.ask(lambda ctx: remote(ctx).run(runnables.sleep_async, 60.0)))
        await comes_true(lambda: pool.stats().workers[name].outstanding == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await comes_true(lambda: pool.stats().workers[name].outstanding == 0)


async def test_no_worker_left_is_told_and_did_not_happen() -> None:
    plan = FaultPlan().lose_context(launch=1)
    options = ga.ContextOptions(fault_plan=plan, restart=ga.RestartPolicy(max_restarts=0))
    async with in_process(2, options) as pool:
        with pytest.raises(ga.WorkerLost):
            await pool.ask(forward)
        # The pool checks a worker that was ready a moment later, not at each request.
        await comes_true(lambda: all(member.health().state == "failed" for member in pool._members.values()))
        with pytest.raises(ga.WorkerLost, match=r"no worker.*worker-1: .*worker-2: ") as caught:
            await pool.ask(forward)
        assert caught.value.happened == "no"
        assert not pool.ready
    with pytest.raises(ga.ActorStopped, match="closed"):
        await pool.ask(forward)
    with pytest.raises(ga.WorkerLost, match="it has none"):
        await ContextPool().ask(forward)


# Workers that come and go


async def test_a_worker_added_and_one_removed_in_flight(out: np.ndarray[Any, Any]) -> None:
    async with in_process(2, slow(0.02)) as pool:
        asking = [asyncio.create_task(pool.ask(forward)) for _ in range(40)]
        await asyncio.sleep(0.02)
        async with ga.open_context("mock") as mine:
            assert pool.add(mine, "mine") == "mine"
            with pytest.raises(ga.InvalidRequest, match="differ"):
                pool.add(mine, "mine")
            with pytest.raises(ga.InvalidRequest, match="open context"):
                pool.add(3)  # type: ignore[arg-type]
            gone = pool.workers["worker-1"]
            removing = asyncio.create_task(pool.remove("worker-1"))
            await asyncio.sleep(0)
            before = pool.stats().workers["worker-1"]
            assert before.leaving
            more = await asyncio.gather(*(pool.ask(forward) for _ in range(40)))
            result = await asyncio.gather(*asking)
            await removing
            assert len(more) == len(result) == 40
            for one in (*more, *result):
                np.testing.assert_array_equal(one.out, out)
            assert gone.health().state == "stopped"  # the pool opened it
            assert set(pool.workers) == {"worker-2", "mine"}
            assert pool.stats().workers["mine"].requests
            assert pool.stats().repeated == 0
            await pool.remove("mine")
            assert mine.health().ready  # the pool did not open it
        with pytest.raises(ga.InvalidRequest, match="worker-2"):
            await pool.remove("mine")


async def test_a_removal_that_cannot_wait_and_one_that_is_cancelled(out: np.ndarray[Any, Any]) -> None:
    async with (
        in_process(2, slow(0.05, drain_timeout=0.0)) as pool,
        pool.kv_cache(num_blocks=8, page_size=8, kv_heads=2, head_dim=16, dtype="float32") as cache,
    ):
        seq = await cache.create()
        removing = asyncio.create_task(pool.remove(seq.worker))
        await asyncio.sleep(0.05)
        assert pool.stats().workers[seq.worker].leaving
        assert (await cache.create()).worker != seq.worker
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        assert not pool.stats().workers[seq.worker].leaving
        assert await cache.append(seq, ROWS[0], ROWS[0]) == 8
        asking = [asyncio.create_task(pool.ask(forward)) for _ in range(20)]
        await asyncio.sleep(0.05)
        await pool.remove(seq.worker, timeout=0.05)
        for one in await asyncio.gather(*asking):  # other workers repeat the unanswered ones
            np.testing.assert_array_equal(one.out, out)
        with pytest.raises(ga.StaleBuffer, match="left the pool"):
            await cache.append(seq, ROWS[0], ROWS[0])
        with pytest.raises(ga.StaleBuffer):
            cache.length(seq)


@pytest.mark.parametrize("turns", range(5))
async def test_a_removal_is_cancelled_at_whatever_moment(turns: int) -> None:
    async with (
        in_process(2) as pool,
        pool.kv_cache(num_blocks=8, page_size=8, kv_heads=2, head_dim=16, dtype="float32") as cache,
    ):
        seq = await cache.create()
        removing = asyncio.create_task(pool.remove(seq.worker))
        await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        assert pool.member(seq.worker) is not None

        def cancel(turns: int) -> None:
            if turns:
                loop.call_soon(cancel, turns - 1)
            else:
                removing.cancel()

        loop.call_soon(cancel, turns)
        done, _ = await asyncio.wait({removing}, timeout=5.0)
        assert done
        assert removing.cancelled()


async def test_a_removal_that_is_cancelled_keeps_the_prefixes() -> None:
    async with (
        in_process(3) as pool,
        pool.kv_cache(num_blocks=64, page_size=8, kv_heads=2, head_dim=16, dtype="float32") as cache,
    ):
        prompts = [[number] * 20 for number in range(12)]
        seqs = [await cache.create(prompt) for prompt in prompts]
        for seq, prompt in zip(seqs, prompts, strict=True):
            await cache.append(seq, *np.zeros((2, 16, 2, 16), np.float32), tokens=prompt[:16])
        victim = seqs[0].worker
        removals = [asyncio.create_task(pool.remove(victim)) for _ in range(2)]
        await asyncio.sleep(0)
        elsewhere = await cache.create(prompts[0])
        assert elsewhere.worker != victim
        await cache.free(elsewhere)
        for removing in removals:
            assert pool.stats().workers[victim].leaving
            removing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await removing
        assert not pool.stats().workers[victim].leaving
        for seq, prompt in zip(seqs[1:], prompts[1:], strict=True):
            again = await cache.create(prompt)
            assert (again.worker, again.cached) == (seq.worker, 16)


async def test_two_removals_of_a_worker_end_together() -> None:
    async with in_process(2) as pool, ga.open_context("mock") as mine:
        name = pool.add(mine)
        held = pool.member(name)
        assert held is not None
        held.housed(mine.generation, 1)
        first, second = (asyncio.create_task(pool.remove(name)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert pool.stats().workers[name].leaving  # the second one still waits
        held.housed(mine.generation, -1)
        await second
        assert name not in pool.workers
        assert set(pool.homes.ring.from_place_of(b"any")) == {"worker-1", "worker-2"}


async def test_a_pool_that_cannot_open_leaves_nothing_open() -> None:
    before = len(psutil.Process().children(recursive=True))
    with pytest.raises(ga.InvalidRequest):
        open_pool("nothing")
    with pytest.raises(ga.InvalidRequest):
        open_pool([])
    with pytest.raises(ga.InvalidRequest):
        open_pool("mock", workers=0)
    with pytest.raises(ga.InvalidRequest):
        open_pool("mock", bound=0.5)
    with pytest.raises(ga.GpuActorsError):
        async with open_pool(["mock", "cuda:97"]):
            pass
    opening = asyncio.create_task(open_pool("mock", workers=3).__aenter__())
    await asyncio.sleep(0.01)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await comes_true(lambda: len(psutil.Process().children(recursive=True)) <= before + 1)  # the zygote


def test_open_pool_takes_what_a_pool_takes() -> None:
    taken = inspect.signature(ContextPool).parameters.keys() - {"contexts"}
    assert set(PoolOptions.__annotations__) == taken
    with pytest.raises(TypeError, match="slot'"):
        open_pool("mock", slot=3)  # type: ignore[call-arg]
    with pytest.raises(ga.InvalidRequest, match="bound"):
        open_pool("mock", bound=0.5)
    assert open_pool("mock", retries=7, workplace=InProcess)._pool.retries == 7
