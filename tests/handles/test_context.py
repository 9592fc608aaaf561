"""Contexts: opened, shared, drained and left in every way, with truthful health reports."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio
import anyio.to_thread
import pytest
from inside.runtime import Mailbox
from support.service import Scripted, answer, ask, eventually, no_threads_left, raises, scripted

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

pytestmark = pytest.mark.usefixtures("all_threads_end")


# Opening


def test_a_fresh_context_says_what_it_runs_on() -> None:
    with ga.open_context("mock") as ctx:
        assert (ctx.info.kind, ctx.info.arch, ctx.info.runs_kernels) == ("mock", "sm_90a", False)
        assert ctx.generation == 1
        assert set(ctx.stats()) == {"nvrtc", "flash_attn", "cudnn", "kv_cache", "kernels"}
        health = ctx.health()
        assert (health.state, health.ready, health.reason, health.generation) == ("ready", True, "", 1)
        assert health.actors == dict.fromkeys(("nvrtc", "flash_attn", "cudnn", "kv_cache", "kernels"), "running")
        assert health.oldest_launch is None
        assert health.device is ctx.info


def test_a_device_that_does_not_exist_is_refused_by_name() -> None:
    digits = ("cuda:٣", "cuda:1٣", "cuda:²", "mock\n", "cuda:0\n")
    for device in ("gpu", "cuda:", "cuda:x", "cuda:-1", "", "MOCK", None, 0, b"mock", *digits):
        with pytest.raises(ga.InvalidRequest, match='must be "auto", "cuda"') as caught:
            ga.open_context(device)  # type: ignore[arg-type]
        assert (caught.value.field, caught.value.value) == ("device", device)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    from inside.devices import cuda

    monkeypatch.setattr(cuda, "attention_obstacle", lambda *index: "no driver is installed")


def entered(opener: ga.open_context) -> ga.GpuContext:
    with opener as ctx:
        return ctx


async def entered_on_a_loop(opener: ga.open_context) -> ga.GpuContext:
    async with opener as ctx:
        return ctx


async def awaited(opener: ga.open_context) -> ga.GpuContext:
    ctx = await opener
    await ctx.aclose()
    return ctx


WAYS: dict[str, Any] = {
    "with": entered,
    "async with": lambda opener: asyncio.run(entered_on_a_loop(opener)),
    "await": lambda opener: asyncio.run(awaited(opener)),
}


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("way", WAYS)
def test_auto_without_a_gpu_warns_and_says_what_is_missing(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(ga.MockDeviceWarning, match="runs on mock: no driver is installed") as warned:
        assert WAYS[way](ga.open_context("auto")).info.kind == "mock"
    assert "gpu-actors doctor" in str(warned[0].message)
    assert warned[0].filename == __file__, "it points at the program"
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (record.name, record.getMessage()) == ("gpu_actors", str(warned[0].message))


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_makes_the_warning_an_error_opens_nothing(way: str) -> None:
    opener = ga.open_context()
    with no_threads_left(), pytest.raises(ga.MockDeviceWarning):
        WAYS[way](opener)


# Without "async with"


async def test_a_context_can_be_awaited_and_closed_later() -> None:
    opener = ga.open_context("mock")
    ctx, other = await opener, await opener
    reply = ask(ctx)
    await ctx.aclose()
    assert (await reply).out.shape == (1, 1, 1, 8)
    assert (ctx.health().state, other.health().state) == ("stopped", "ready")
    await ctx.aclose()
    await other.aclose()


@pytest.mark.parametrize("use", ["async with", "await", "aclose", "reply", "cache"])
def test_a_loop_of_another_library_is_told_that_asyncio_is_needed(use: str) -> None:
    """The test drives the coroutine as such a loop would."""
    with ga.open_context("mock") as ctx:
        cache = ctx.kv_cache(num_blocks=1, page_size=8, kv_heads=1, head_dim=8)
        opener = ga.open_context("mock")
        coroutine = {
            "async with": lambda: opener.__aenter__().__await__(),
            "await": lambda: opener.__await__(),
            "aclose": lambda: ctx.aclose().__await__(),
            "reply": lambda: ga.Reply(ga.Call(None, Mailbox("unanswered", 1, 1))).__await__(),
            "cache": lambda: cache.__aenter__().__await__(),
        }[use]
        with pytest.raises(ga.AsyncioNeeded, match=r"needs a running asyncio event loop .* trio"):
            coroutine().send(None)
        assert ctx.health().ready


def test_a_context_is_shown_in_a_few_words() -> None:
    with ga.open_context("mock") as ctx:
        assert repr(ctx) == f"<GpuContext #{ctx.number} on mock sm_90a, ready>"
        assert repr(ctx.flash_attn) == "<FlashAttnHandle of flash_attn, running>"
    assert repr(ctx) == f"<GpuContext #{ctx.number} on mock sm_90a, stopped>"


def test_a_device_that_cannot_be_used_raises_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from inside.devices import cuda

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
        assert (actor.label, actor.state, actor.restarts) == ("scripted", "running", 0)
        with pytest.raises(KeyError, match=r"ContextOptions\(actors=\.\.\.\)"):
            ctx.actor(ga.ServiceActor)


def test_stats_of_a_request_are_there_when_its_waiter_wakes() -> None:
    with scripted() as (ctx, actor):
        for number in range(1, 20):
            with pytest.raises(ga.LaunchError):
                actor.submit(raises(ga.LaunchError("x"))).result(30.0)
            assert ctx.stats()["scripted"].failed == number
            actor.submit(answer(None)).result(30.0)
            assert ctx.stats()["scripted"].completed == number
