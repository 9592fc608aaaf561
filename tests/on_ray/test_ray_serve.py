"""Contexts behind Ray Serve: values, errors, health, back-pressure, draining and routing."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import runnables
from support.service import comes_true

import gpu_actors as ga
from gpu_actors.distributed import prefix_digests

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from ray.serve.config import RequestRouterConfig  # noqa: E402

from gpu_actors.interop.ray import ContextDeployment, as_value, ask  # noqa: E402
from gpu_actors.interop.ray.router import CacheAffineRouter  # noqa: E402

ROW = np.ones((1, 1, 1, 8), np.float32)


class Served(ContextDeployment):
    """A deployment with its own cache. noted: a file to which it writes when it ends."""

    def __init__(self, latency: float = 0.0, noted: str = "") -> None:
        super().__init__("mock", ga.ContextOptions(mock=ga.MockOptions(latency=latency), mailbox_capacity=8))
        spec: dict[str, Any] = {"num_blocks": 16, "page_size": 8, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
        self.cache = self.enter(self.context.kv_cache(**spec))
        self.noted = noted

    @as_value
    async def attend(self, q: Any, digests: Any = ()) -> Any:
        return (await self.context.flash_attn.forward(q, q, q)).out

    @as_value
    async def fails(self, error: BaseException) -> None:
        raise error

    @as_value
    async def attend_noting(self, q: Any, flag: str) -> Any:
        await asyncio.to_thread(Path(flag).write_text, "begun")
        return (await self.context.flash_attn.forward(q, q, q)).out

    async def pid(self, digests: Any = ()) -> int:
        return os.getpid()

    async def remembers(self, tokens: list[int], digests: Any = ()) -> int:
        """The number of the prompt's rows that the replica had cached."""
        seq = await self.cache.create(tokens)
        rows = np.ones((len(tokens) - seq.cached, 1, 8), np.float32)
        await self.cache.append(seq, rows, rows, tokens=tokens[seq.cached :])
        await self.cache.free(seq)
        return seq.cached

    async def sicken(self) -> None:
        await self.context.aclose()

    def __del__(self) -> None:
        super().__del__()
        if self.noted:
            Path(self.noted).write_text(self.context.health().state)


@pytest.fixture(scope="module", autouse=True)
def _serving(cluster: Any) -> Iterator[None]:
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()


def deployed(name: str, *arguments: Any, **options: Any) -> Any:
    given = {"ray_actor_options": {"num_cpus": 0}, "health_check_period_s": 0.2, "graceful_shutdown_timeout_s": 60.0}
    made = serve.deployment(Served).options(name=name, **{**given, **options})
    return serve.run(made.bind(*arguments), name=name, route_prefix=None)


@pytest.fixture(scope="module")
def served(_serving: None) -> Any:
    return deployed("served")


async def test_values_errors_and_functions(served: Any) -> None:
    np.testing.assert_array_equal(await ask(served.attend.remote(ROW)), ROW)
    with pytest.raises(ga.InvalidRequest) as caught:
        await ask(served.attend.remote(ROW[0]))
    assert caught.value.field == "q"
    assert "Traceback" not in str(caught.value)
    pickle.loads(pickle.dumps(caught.value))
    with pytest.raises(ga.Overloaded) as full:
        await ask(served.fails.remote(ga.Overloaded("later", 2.5)))
    assert full.value.retry_after == 2.5
    with pytest.raises(ValueError, match="mine"):
        await ask(served.fails.remote(ValueError("mine")))
    assert await ask(served.pid.remote()) != os.getpid()
    assert await ask(served.run.remote(runnables.describe, 1)) == ("mock", 1, (1,))
    assert await ask(served.run.remote(lambda _, array: array + 1, ROW)) is not None
    with pytest.raises(KeyError) as raised:
        await ask(served.run.remote(runnables.raise_error, KeyError("k")))
    assert "in the worker" in raised.value.__notes__[0]


async def test_a_late_request_and_a_cancelled_one_are_cancelled_in_the_replica(served: Any, tmp_path: Path) -> None:
    late, cancelled = tmp_path / "late", tmp_path / "cancelled"
    asked = asyncio.create_task(ask(served.run.remote(runnables.wait_until_cancelled, str(cancelled))))
    await comes_true(cancelled.exists)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await comes_true(lambda: cancelled.read_text() == "cancelled")
    response = served.run.remote(runnables.wait_until_cancelled, str(late))
    with pytest.raises(ga.DeadlineExceeded, match=r"within 0\.5 s"):
        await ask(response, timeout=0.5)
    await comes_true(lambda: not late.exists() or late.read_text() == "cancelled")


async def test_a_replica_whose_context_has_ended_is_replaced(served: Any) -> None:
    before = await ask(served.pid.remote())
    await served.sicken.remote()
    now = before
    while now == before:
        try:
            now = await ask(served.pid.remote())
        except (ga.WorkerLost, ga.ActorStopped):
            await asyncio.sleep(0.1)
    np.testing.assert_array_equal(await ask(served.attend.remote(ROW)), ROW)


async def test_a_replica_that_dies_is_a_worker_lost(served: Any, tmp_path: Path) -> None:
    before = await ask(served.pid.remote())
    flag = tmp_path / "waits"
    dying = asyncio.create_task(ask(served.run.remote(runnables.wait_until_cancelled, str(flag))))
    await comes_true(flag.exists)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(ga.WorkerLost) as caught:
        await dying
    assert caught.value.happened == "unknown"


async def test_a_full_queue_is_overloaded_and_an_ending_replica_answers_first(tmp_path: Path) -> None:
    note = tmp_path / "ended"
    options = {"max_ongoing_requests": 2, "max_queued_requests": 2}
    handle = await asyncio.to_thread(lambda: deployed("slow", 1.0, str(note), **options))
    await ask(handle.attend.remote(ROW))
    found = await asyncio.gather(*(ask(handle.attend.remote(ROW)) for _ in range(16)), return_exceptions=True)
    refused = [each for each in found if isinstance(each, ga.Overloaded)]
    assert refused
    assert len(refused) + sum(isinstance(each, np.ndarray) for each in found) == 16
    assert refused[0].retry_after == 1.0
    flags = [tmp_path / "one", tmp_path / "other"]
    last = [asyncio.ensure_future(ask(handle.attend_noting.remote(ROW, str(flag)))) for flag in flags]
    await comes_true(lambda: all(flag.exists() for flag in flags))
    await asyncio.to_thread(serve.delete, "slow")
    for each in await asyncio.gather(*last):
        np.testing.assert_array_equal(each, ROW)
    assert note.read_text() == "stopped"


async def test_a_prompt_goes_where_its_beginning_is() -> None:
    router = RequestRouterConfig(request_router_class=CacheAffineRouter, request_router_kwargs={"slots": 64})
    handle = await asyncio.to_thread(
        lambda: deployed("affine", num_replicas=2, request_router_config=router, max_ongoing_requests=64)
    )
    prompts = [list(range(100 * number, 100 * number + 32)) for number in range(12)]
    homes: dict[int, set[int]] = {}
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            longer = prompt + [7] * 8 * turn  # each turn's prompt begins with the last turn's
            pid = await handle.pid.remote(digests=prefix_digests(longer, 8))
            homes.setdefault(number, set()).add(pid)
    assert all(len(pids) == 1 for pids in homes.values())
    assert len(set.union(*homes.values())) == 2
    hits = [await handle.remembers.remote(prompts[0], digests=prefix_digests(prompts[0], 8)) for _ in range(3)]
    assert hits[0] == 0
    assert min(hits[1:]) >= 24
    (victim,) = homes[0]
    os.kill(victim, signal.SIGKILL)
    moved = victim
    while moved == victim:
        try:
            moved = await ask(handle.pid.remote(digests=prefix_digests(prompts[0], 8)))
        except ga.WorkerLost:
            await asyncio.sleep(0.1)
    await asyncio.to_thread(serve.delete, "affine")


def test_the_replica_ends_though_its_context_never_opened() -> None:
    broken = ContextDeployment.__new__(ContextDeployment)
    broken.__del__()
    with pytest.raises(ga.GpuActorsError):
        ContextDeployment("no such device")
