"""Contexts: opened, shared, drained, left in every way, and honest about their health."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import anyio
import anyio.to_thread
import pytest
from service_support import Scripted, ask, eventually, no_threads_left, raises, rows, scripted

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

pytestmark = pytest.mark.usefixtures("all_threads_end")


# Opening


def test_a_fresh_context_says_what_it_runs_on() -> None:
    with ga.open_context("mock") as ctx:
        assert (ctx.info.kind, ctx.info.arch, ctx.info.runs_kernels) == ("mock", "sm_90a", False)
        assert ctx.generation == 1
        assert set(ctx.stats()) == {"nvrtc", "flash_attn", "cudnn", "kv_cache"}
        health = ctx.health()
        assert (health.state, health.ready, health.reason, health.generation) == ("ready", True, "", 1)
        assert health.actors == dict.fromkeys(("nvrtc", "flash_attn", "cudnn", "kv_cache"), "running")
        assert health.oldest_launch is None


def test_the_arch_can_be_chosen() -> None:
    with ga.open_context("mock", ga.ContextOptions(arch="sm_80")) as ctx:
        assert ctx.info.arch == "sm_80"
        request = ga.FlashForward(q=rows(), k=rows(), v=rows())
        assert ctx.flash_attn.inspect_key(request).arch == "sm_80"


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "MOCK", None, 0, b"mock"])
def test_a_device_that_does_not_exist_is_refused_by_name(device: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match='must be "auto", "cuda"') as caught:
        ga.open_context(device)
    assert (caught.value.field, caught.value.value) == ("device", device)


@pytest.mark.parametrize("arch", ["sm_90", "sm_1", "hopper", "90a"])
def test_an_arch_that_does_not_exist_keeps_the_context_from_opening(arch: str) -> None:
    with no_threads_left(), pytest.raises(ga.RequestError) as caught:
        ga.open_context("mock", ga.ContextOptions(arch=arch))
    assert (caught.value.field, caught.value.value) == ("arch", arch)


def test_auto_says_which_device_it_took_and_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_actors.devices.cuda as cuda

    monkeypatch.setattr(cuda, "cuda_usable", lambda *index: "no driver is installed")
    with caplog.at_level(logging.INFO, "gpu_actors"), ga.open_context("auto") as ctx:
        assert ctx.info.kind == "mock"
    assert "open_context('auto') runs on mock: no driver is installed" in caplog.text


def test_a_device_that_cannot_be_used_raises_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_actors.devices.cuda as cuda

    monkeypatch.setattr(cuda, "cuda_usable", lambda *index: "no driver is installed")
    with pytest.raises(ga.GpuActorsError, match="no driver is installed"), ga.open_context("cuda"):
        pass


def test_an_open_context_cannot_be_entered_again() -> None:
    opener = ga.open_context("mock")
    with opener, pytest.raises(ga.GpuActorsError, match="entered already"), opener:
        pass
    with opener as ctx:
        assert ctx.health().ready, "but it can be used again once it was left"


async def test_a_context_that_is_not_entered_cannot_be_left() -> None:
    opener = ga.open_context("mock")
    for _ in range(2):
        with pytest.raises(ga.GpuActorsError, match="is not entered, or has been left already"):
            await opener.__aexit__(None, None, None)
        async with opener:
            pass


async def test_two_contexts_of_one_loop_are_independent() -> None:
    async with ga.open_context("mock") as one, ga.open_context("mock") as two:
        await ask(one)
        await ask(two)
        assert one.stats()["flash_attn"].submitted == two.stats()["flash_attn"].submitted == 1
        await anyio.to_thread.run_sync(one.close)
        assert (one.health().state, two.health().state) == ("stopped", "ready")
        await ask(two)


# Threads that cannot be started


def test_a_request_whose_thread_cannot_be_started_is_answered_and_the_next_one_too(no_more_threads: Any) -> None:
    options = ga.ContextOptions(restart=ga.RestartPolicy(backoff=0.1))
    with ga.open_context("mock", options) as ctx:
        with no_more_threads(), pytest.raises(ga.ActorFailed, match="can't start new thread"):
            ask(ctx).result(30.0)
        assert ask(ctx).result(30.0).out.shape == (1, 1, 1, 8)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 0)


def test_a_completion_thread_that_cannot_be_started_is_tried_again(no_more_threads: Any) -> None:
    options = ga.ContextOptions(
        restart=ga.RestartPolicy(backoff=0.1), fault_plan=FaultPlan().delay(0.01), mock=ga.MockOptions(compute=False)
    )
    with ga.open_context("mock", options) as ctx:
        with no_more_threads(), pytest.raises(ga.ActorFailed, match="can't start new thread"):
            ask(ctx).result(30.0)
        with pytest.raises(ga.MockModeError):
            ask(ctx).result(30.0)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 0)


# Sharing


def test_one_context_serves_several_threads_and_loops() -> None:
    shapes: list[tuple[int, ...]] = []
    with ga.open_context("mock", ga.ContextOptions(mailbox_capacity=4096)) as ctx:

        async def wait() -> None:
            results = await asyncio.gather(*(ask(ctx) for _ in range(50)))
            shapes.extend(result.out.shape for result in results)

        def block() -> None:
            shapes.extend(ask(ctx).result(30.0).out.shape for _ in range(50))

        threads = [threading.Thread(target=asyncio.run, args=(wait(),)) for _ in range(3)]
        threads += [threading.Thread(target=block) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        stats = ctx.stats()["flash_attn"]
    assert shapes == [(1, 1, 1, 8)] * 300
    assert (stats.submitted, stats.completed) == (300, 300)


def test_a_message_of_the_wrong_kind_is_refused_by_every_actor() -> None:
    with ga.open_context("mock") as ctx:
        for actor in (ctx.flash_attn, ctx.cudnn, ctx.nvrtc):
            for message in (None, "forward", object(), 3, {}):
                with pytest.raises(ga.InvalidRequest, match=r"Forward|takes") as caught:
                    actor.submit(message).result(30.0)
                assert caught.value.field == "message"
            assert actor.restarts == 0


def test_a_child_can_be_found_by_its_type() -> None:
    with scripted() as (ctx, actor):
        assert ctx.actor(ga.FlashAttnActor) is ctx.flash_attn
        assert ctx.actor(Scripted) is actor
        with pytest.raises(KeyError, match=r"ContextOptions\(actors=\.\.\.\)"):
            ctx.actor(ga.ServiceActor)


def test_stats_of_a_failed_request_are_there_when_its_waiter_wakes() -> None:
    with scripted() as (ctx, actor):
        for number in range(1, 20):
            with pytest.raises(ga.LaunchError):
                actor.submit(raises(ga.LaunchError("x"))).result(30.0)
            assert ctx.stats()["scripted"].failed == number
