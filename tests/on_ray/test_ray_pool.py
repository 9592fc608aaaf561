"""Pools and workers in Ray actors: what a death costs, what a failed start reports, and that nothing is left."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fakes import runnables
from support.service import comes_true, eventually, suspend

import gpu_actors as ga
from gpu_actors.distributed import ContextPool
from gpu_actors.remote import RemoteContext

ray = pytest.importorskip("ray")

from gpu_actors.interop.ray import RayActor, StartTimeout, ray_pool, start_worker  # noqa: E402
from gpu_actors.interop.ray.channel import Parcels  # noqa: E402
from gpu_actors.interop.ray.ray_actor import _Connection  # noqa: E402
from gpu_actors.interop.ray.ray_worker import Place  # noqa: E402

SPEC: dict[str, Any] = {"num_blocks": 64, "page_size": 8, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)

pytestmark = pytest.mark.usefixtures("cluster")


def actor(ctx: ga.GpuContext) -> Any:
    assert isinstance(ctx, RemoteContext)
    return ctx._generations.connection._actor  # type: ignore[union-attr]


def pid(ctx: ga.GpuContext) -> int:
    assert isinstance(ctx, RemoteContext)
    assert ctx.pid is not None
    return ctx.pid


def by_ray(ctx: ga.GpuContext) -> None:
    ray.kill(actor(ctx))


def by_signal(ctx: ga.GpuContext) -> None:
    os.kill(pid(ctx), signal.SIGKILL)


@pytest.mark.parametrize("kill", [by_ray, by_signal])
async def test_a_worker_that_is_killed_costs_no_request_and_every_sequence_is_told(
    kill: Callable[[ga.GpuContext], None],
) -> None:
    options = ga.ContextOptions(restart=QUICK, hang_timeout=60.0)
    async with ray_pool(2, device="mock", options=options, seed=1) as pool, pool.kv_cache(**SPEC) as cache:
        row = np.ones((1, 1, 8), np.float32)
        seqs = [await cache.create() for _ in range(16)]
        for seq in seqs:
            assert await cache.append(seq, row, row) == 1
        there = [seq for seq in seqs if seq.worker == "worker-1"]
        assert 2 <= len(there) < 16
        victim = pool.workers["worker-1"]
        suspend(pid(victim))  # so that it answers none of these
        asked = [asyncio.ensure_future(_stateless(pool, number)) for number in range(64)]
        appended = {seq: cache.append(seq, row, row, expect_length=1) for seq in seqs if seq is not there[0]}
        await comes_true(lambda: pool.stats().workers["worker-1"].outstanding >= 20 + len(there) - 1)
        kill(victim)
        await asyncio.gather(*asked)
        assert pool.stats().repeated >= 20
        for seq, reply in appended.items():
            if seq.worker != "worker-1":
                assert await reply == 2
                assert await cache.append(seq, row, row, expect_length=2) == 3
                continue
            with pytest.raises(ga.WorkerLost) as caught:
                await reply
            assert (caught.value.worker, caught.value.generation) == ("worker-1", 1)
            assert caught.value.happened == "unknown"
        for seq in there:  # the first sequence had nothing in flight
            with pytest.raises(ga.StaleBuffer):
                await cache.append(seq, row, row)
        await comes_true(lambda: victim.health().ready, 120.0)
        assert victim.generation == 2
        again = [await cache.create() for _ in range(16)]
        assert {seq.worker for seq in again} == {"worker-1", "worker-2"}


async def _stateless(pool: ContextPool, number: int) -> None:
    q = np.full((1, 2, 1, 8), number, np.float32)
    found = await pool.ask(lambda ctx: ctx.flash_attn.forward(q, q, q))
    np.testing.assert_array_equal(found.out, q)


def test_a_worker_that_stops_is_told_and_ended() -> None:
    options = ga.ContextOptions(restart=QUICK, hang_timeout=2.0)
    with start_worker("mock", options, num_cpus=0, name="w") as ctx:
        stopped = pid(ctx)
        suspend(stopped)
        with pytest.raises(ga.WorkerLost, match="has not answered for 2 s"):
            ctx.run(runnables.describe).result(60.0)
        assert ctx.run(runnables.describe).result(60.0)[1] == 2
        assert not psutil.pid_exists(stopped)


def test_no_process_group_or_resource_is_left() -> None:
    async def use() -> tuple[list[int], Any]:
        opening = ray_pool(2, device="mock", strategy="STRICT_PACK")
        async with opening as pool:
            pids = [pid(ctx) for ctx in pool.workers.values()]
            assert all(psutil.pid_exists(each) for each in pids)
            assert ray.available_resources()["CPU"] == 14.0
            return pids, opening._group

    descriptors = psutil.Process().num_fds()
    pids, group = asyncio.run(use())
    eventually(lambda: not any(psutil.pid_exists(each) for each in pids))
    assert ray.util.placement_group_table(group)["state"] == "REMOVED"
    eventually(lambda: ray.available_resources()["CPU"] == 16.0)
    gc.collect()
    assert psutil.Process().num_fds() <= descriptors + 4  # Ray keeps some connections


def test_a_start_that_takes_too_long_says_what_was_asked_and_what_there_is() -> None:
    with pytest.raises(StartTimeout) as caught, start_worker("mock", num_gpus=1, start_timeout=0.5):
        pass
    error = caught.value
    assert isinstance(error, ga.DeadlineExceeded)
    assert str(error) == (
        "1 Ray worker with CPU 1, GPU 1 did not start within 0.5 s: the cluster has CPU 16, GPU 0, "
        "of which CPU 16, GPU 0 free"
    )
    assert (error.asked, error.count, error.timeout) == ({"CPU": 1.0, "GPU": 1.0}, 1, 0.5)
    assert (error.total["CPU"], error.free.get("GPU", 0)) == (16.0, 0)


async def test_a_pool_that_cannot_be_placed_says_so_and_leaves_nothing() -> None:
    opening = ray_pool(3, device="mock", num_cpus=7, start_timeout=0.5)
    with pytest.raises(StartTimeout, match=r"3 Ray workers with, each, CPU 7 did not start within 0.5 s"):
        async with opening:
            pass
    assert opening._group is None
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def test_a_pool_that_is_not_waited_for_leaves_nothing() -> None:
    async def use() -> None:
        task = asyncio.create_task(ray_pool(3, device="mock", num_cpus=7).__aenter__())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(use())
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def test_a_device_that_cannot_be_opened_is_an_error_of_its_own() -> None:
    with pytest.raises(ga.GpuActorsError, match=r"cuda:7|CUDA"), start_worker("cuda:7", num_gpus=0, num_cpus=0):
        pass


def test_the_last_records_are_taken_though_the_word_of_the_end_overtakes_them() -> None:
    """Ray does not order the two calls that wait for records."""
    connection = _Connection.__new__(_Connection)
    connection._place, connection._fetching = Place(1, "here", "node", ()), 2
    connection.channel = Parcels(asks=True)  # type: ignore[assignment]
    taken: list[Any] = []
    connection._received = lambda sequence, record: taken.append(record)
    connection._inbox = queue.SimpleQueue()
    for arrived in (None, [tuple(Parcels(asks=False).pack("the last"))]):
        connection._inbox.put(arrived)
    connection.serve(lambda: 1.0)
    assert taken == ["the last"]


def test_an_actor_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from fakes.fault_injector import FaultInjector\nclass Own(FaultInjector):\n    name = 'own'\n"
    (tmp_path / "only_here.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    options = ga.ContextOptions(actors=(importlib.import_module("only_here").Own,))
    with (
        pytest.raises(ga.GpuActorsError, match=r"the Ray actor did not start: .*Error"),
        start_worker("mock", options, num_cpus=0),
    ):
        pass


def test_functions_that_a_worker_cannot_import_travel_by_value() -> None:
    added = 2.0
    with start_worker("mock", num_cpus=0) as ctx:
        big = np.ones(3 << 20, np.float32)
        found = ctx.run(lambda _, array: array + added, big).result(60.0)
        np.testing.assert_array_equal(found, big + 2)
        found[:] = 0.0  # it can be written, as it is not in Ray's object store
        assert ctx.run(runnables.double, big[::-3]).result(60.0).sum() == 2 * len(big[::-3])
        out = np.zeros((1, 4096, 2, 64), np.float32)
        q = np.ones_like(out)
        assert ctx.flash_attn.forward(q[:, :4], q, q, out=out[:, ::1024]).result(60.0).out.base is out
        assert out.sum() == 4 * 2 * 64


async def test_limits_of_time_and_cancelling_reach_the_worker() -> None:
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.5), max_in_flight=1)
    q = np.ones((1, 4, 2, 16), np.float32)
    async with start_worker("mock", options, num_cpus=0) as ctx:
        replies = [ctx.flash_attn.forward(q * number, q, q) for number in range(4)]
        with pytest.raises(ga.DeadlineExceeded):
            await ctx.flash_attn.forward(q, q, q, timeout=0.05)
        assert replies[3].cancel()
        replies[3] = ctx.flash_attn.forward(q, q, q)
        for reply in replies:
            await reply
        assert ctx.stats()["flash_attn"].launched == 4


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ga.InvalidRequest, match="num_cpus"):
        ray_pool(2, device="mock", num_cpus=0)
    with pytest.raises(ga.InvalidRequest, match="num_gpus"):
        start_worker("mock", num_gpus=-1)
    with pytest.raises(ga.InvalidRequest, match="num_workers"):
        ray_pool(0)
    with pytest.raises(ga.InvalidRequest, match="actor_options"), start_worker("mock", actor_options={"no": 1}):
        pass
    for timeout in (0.0, 301.0, float("nan")):
        with pytest.raises(ga.InvalidRequest, match="start_timeout"):
            RayActor({}, timeout)


async def test_ray_is_not_started_behind_the_programs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ga.GpuActorsError, match=r"call ray\.init"):
        async with start_worker("mock", num_cpus=0):
            pass
    with pytest.raises(ga.GpuActorsError, match=r"call ray\.init"):
        async with ray_pool(2, device="mock"):
            pass
