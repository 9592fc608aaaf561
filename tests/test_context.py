"""Contexts: opened, shared, drained, left in every way, and honest about their health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
from service_support import Gate, Scripted, answer, eventually, launches, no_threads_left, raises, rows, scripted

import gpu_actors as ga
from gpu_actors.actors import nvrtc
from gpu_actors.devices import mock
from gpu_actors.devices.interface import Kernel
from gpu_actors.testing import FaultPlan, MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end")


def ask(ctx: ga.GpuContext, **options: Any) -> ga.Reply[ga.AttentionOutput]:
    return ctx.flash_attn.forward(rows(), rows(), rows(), **options)


# Opening


def test_a_fresh_context_says_what_it_runs_on() -> None:
    with ga.open_context("mock") as ctx:
        assert (ctx.info.kind, ctx.info.arch, ctx.info.runs_kernels) == ("mock", "sm_90a", False)
        assert ctx.generation == 1
        assert set(ctx.stats()) == {"nvrtc", "flash_attn", "cudnn"}
        health = ctx.health()
        assert (health.state, health.ready, health.reason, health.generation) == ("ready", True, "", 1)
        assert health.actors == {"nvrtc": "running", "flash_attn": "running", "cudnn": "running"}
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


async def test_two_contexts_of_one_loop_are_independent() -> None:
    async with ga.open_context("mock") as one, ga.open_context("mock") as two:
        await ask(one)
        await ask(two)
        assert one.stats()["flash_attn"].submitted == two.stats()["flash_attn"].submitted == 1
        await anyio.to_thread.run_sync(one.close)
        assert (one.health().state, two.health().state) == ("stopped", "ready")
        await ask(two)


# Opening and leaving, cancelled


class SlowOpening(Scripted):
    """Opens once it is let."""

    label = "slow"
    gate = Gate()

    def open(self) -> None:
        type(self).gate()


@pytest.mark.parametrize("how", ["task", "scope", "timeout"])
async def test_a_context_whose_opener_was_cancelled_is_closed_again(how: str) -> None:
    SlowOpening.gate = gate = Gate()
    with no_threads_left():

        async def open_it() -> None:
            async with ga.open_context("mock", ga.ContextOptions(actors=(SlowOpening,))):
                await asyncio.sleep(10.0)

        if how == "task":
            task = asyncio.create_task(open_it())
            await asyncio.to_thread(gate.entered.wait, 5.0)
            task.cancel()
            await asyncio.sleep(0.02)
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "scope":
            with anyio.move_on_after(0.03):
                threading.Timer(0.1, gate.open).start()
                await open_it()
        else:
            with contextlib.suppress(TimeoutError):
                threading.Timer(0.1, gate.open).start()
                await asyncio.wait_for(open_it(), 0.03)


@pytest.mark.parametrize("how", ["task", "scope", "timeout"])
async def test_a_task_that_is_cancelled_while_it_leaves_closes_all_the_same(how: str) -> None:
    with no_threads_left():
        contexts: list[ga.GpuContext] = []
        replies: list[ga.Reply[Any]] = []
        leaving = asyncio.Event()

        async def leave() -> None:
            plan = FaultPlan().hang(launch=1)
            drain = 0.3 if how == "scope" else 30.0
            async with ga.open_context("mock", ga.ContextOptions(fault_plan=plan, drain_timeout=drain)) as ctx:
                contexts.append(ctx)
                replies.append(ask(ctx))
                leaving.set()

        began = time.monotonic()
        if how == "task":
            task = asyncio.create_task(leave())
            await leaving.wait()
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "scope":
            with anyio.move_on_after(0.1):
                await leave()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(leave(), 0.1)
        assert time.monotonic() - began < 3.0
        assert contexts[0].health().state == "stopped"
        with pytest.raises(ga.ActorStopped):
            await replies[0]


async def test_leaving_needs_none_of_the_threads_that_wait_for_its_replies() -> None:
    """Every thread of the loop blocks in a result() that only closing the context will answer."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    limiter.total_tokens = 2
    options = ga.ContextOptions(fault_plan=FaultPlan().hang(launch=1), drain_timeout=0.05)
    answers: list[str] = []

    async def block(reply: ga.Reply[Any]) -> None:
        try:
            await anyio.to_thread.run_sync(reply.result)
        except ga.GpuActorsError as error:
            answers.append(type(error).__name__)

    with anyio.fail_after(5.0):
        async with anyio.create_task_group() as group, ga.open_context("mock", options) as ctx:
            for reply in [ask(ctx), ask(ctx)]:
                group.start_soon(block, reply)
            await asyncio.get_running_loop().run_in_executor(None, eventually, lambda: not limiter.available_tokens)
    assert answers == ["ActorStopped"] * 2


# Draining


def test_drain_refuses_new_requests_and_waits_for_what_is_queued_and_in_flight() -> None:
    with scripted(max_in_flight=1) as (ctx, actor):
        gate = Gate()
        in_flight = actor.submit(launches(gate, "in flight"))
        assert gate.entered.wait(5.0)
        queued = actor.submit(answer("queued"))
        drained = ctx.drain()
        assert ctx.health().state == "draining"
        assert not ctx.health().ready
        for refused in (actor.submit(answer(None)), ask(ctx), ctx.nvrtc.warm([]), ctx.nvrtc.submit("x")):
            assert refused.done()
            with pytest.raises(ga.ActorStopped, match="draining"):
                refused.result()
        assert not drained.done()
        gate.open()
        assert drained.result(5.0) is None
        assert (in_flight.result(0.0), queued.result(0.0)) == ("in flight", "queued")
        assert ctx.drain().result(1.0) is None
        assert ctx.health().state == "draining", "draining is not undone"


async def test_drain_can_be_awaited() -> None:
    async with ga.open_context("mock") as ctx:
        replies = [ask(ctx) for _ in range(50)]
        await ctx.drain()
        assert all(reply.done() for reply in replies)


def test_drain_waits_for_a_launch_whose_deadline_has_passed() -> None:
    """Its output array is still being written."""
    with scripted() as (ctx, actor):
        gate = Gate()
        expired = actor.submit(launches(gate), timeout=0.02)
        with pytest.raises(ga.DeadlineExceeded):
            expired.result(5.0)
        drained = ctx.drain()
        assert not drained.done()
        gate.open()
        assert drained.result(5.0) is None


def test_drain_gives_up_when_its_time_is_over() -> None:
    clock = MockClock()
    with scripted(clock=clock) as (ctx, actor):
        gate = Gate()
        reply = actor.submit(launches(gate, "late"))
        drained = ctx.drain(10.0)
        clock.advance(9.5)
        assert not drained.done()
        clock.advance(0.5)
        with pytest.raises(ga.DeadlineExceeded, match=r"not drained within 10\.0 s"):
            drained.result(5.0)
        gate.open()
        assert reply.result(5.0) == "late"
        assert ctx.drain(1.0).result(5.0) is None


@pytest.mark.parametrize("timeout", [float("nan"), "1", [], True])
def test_a_drain_timeout_that_is_no_time_is_refused_and_drains_nothing(timeout: Any) -> None:
    with scripted() as (ctx, actor):
        with pytest.raises(ga.InvalidRequest) as caught:
            ctx.drain(timeout).result(1.0)
        assert caught.value.field == "timeout"
        assert ctx.health().ready
        assert actor.submit(answer("open")).result(5.0) == "open"
        assert actor.submit(lambda actor, call: None, timeout=0.01)._call.wait(5.0), "deadlines still fire"


def test_drain_waits_for_ever_if_asked_to() -> None:
    with scripted() as (ctx, actor):
        gate = Gate()
        actor.submit(launches(gate))
        drained = ctx.drain(float("inf"))
        assert not drained._call.wait(0.02)
        gate.open()
        drained.result(5.0)


def test_drain_of_a_lost_context_does_not_wait_for_launches_that_never_end() -> None:
    options = ga.ContextOptions(fault_plan=FaultPlan().hang(launch=1))
    with ga.open_context("mock", options) as ctx:
        hung = ask(ctx)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        drained = ctx.drain()
        assert not drained.done()
        ctx._services.context_lost(ga.ContextLost("gone"))
        assert drained.result(1.0) is None
        assert ctx.drain().result(1.0) is None
        with pytest.raises(ga.ContextLost):
            hung.result(1.0)


def test_drain_of_a_closed_context_is_over_at_once() -> None:
    with scripted() as (ctx, _):
        pass
    assert ctx.drain(1.0).result(1.0) is None


# Waiting for a kernel


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Compilations on the mock device that end when the gate is opened, with whatever ``gate.outcome`` is."""
    gate = Gate()
    gate.outcome = None  # type: ignore[attr-defined]
    gate.compiled = []  # type: ignore[attr-defined]

    def make(workshop: Any, source: Any, arch: str, for_device: bool) -> Kernel:
        gate.compiled.append(source.macros)  # type: ignore[attr-defined]
        gate()
        if gate.outcome is not None:  # type: ignore[attr-defined]
            raise gate.outcome  # type: ignore[attr-defined]
        return Kernel("entry", None)

    monkeypatch.setattr(nvrtc._Workshop, "_make", make)
    yield gate
    gate.open()


COMPILING = ga.ContextOptions(compile_on_mock=True, drain_timeout=2.0)


def test_requests_of_one_kernel_wait_for_one_compilation_and_others_go_on(compiling: Gate) -> None:
    with ga.open_context("mock", COMPILING) as ctx:
        waiting = [ask(ctx) for _ in range(5)]
        assert compiling.entered.wait(5.0)
        refused = ask(ctx, softcap=-1.0)
        with pytest.raises(ga.InvalidRequest):
            refused.result(5.0)
        assert not any(reply.done() for reply in waiting)
        compiling.open()
        for reply in waiting:
            assert reply.result(5.0).out.shape == (1, 1, 1, 8)
        assert len(compiling.compiled) == 1
        ask(ctx).result(5.0)
        assert len(compiling.compiled) == 1


def test_a_request_that_waits_for_its_kernel_can_be_cancelled_and_can_expire(compiling: Gate) -> None:
    with ga.open_context("mock", COMPILING) as ctx:
        cancelled, expired, patient = ask(ctx), ask(ctx, timeout=0.05), ask(ctx)
        assert compiling.entered.wait(5.0)
        assert cancelled.cancel()
        with pytest.raises(ga.DeadlineExceeded, match="before its launch"):
            expired.result(5.0)
        compiling.open()
        patient.result(5.0)
        assert ctx.stats()["flash_attn"].launched == 1


@pytest.mark.parametrize("error", [ga.CompileError("line 3"), ZeroDivisionError("in the compiler"), SystemExit(1)])
def test_a_compilation_that_fails_answers_everybody_who_waits_for_it(compiling: Gate, error: BaseException) -> None:
    compiling.outcome = error  # type: ignore[attr-defined]
    with ga.open_context("mock", COMPILING) as ctx:
        waiting = [ask(ctx) for _ in range(3)]
        assert compiling.entered.wait(5.0)
        compiling.open()
        for reply in waiting:
            with pytest.raises(ga.GpuActorsError) as caught:
                reply.result(5.0)
            assert type(error) in (type(caught.value), type(caught.value.__cause__))
        assert ctx.health().ready


def test_the_wait_for_a_kernel_outlives_both_actors(compiling: Gate) -> None:
    with ga.open_context("mock", ga.ContextOptions(compile_on_mock=True, restart=ga.RestartPolicy(backoff=0))) as ctx:
        waiting = ask(ctx)
        assert compiling.entered.wait(5.0)
        for actor in (ctx.flash_attn, ctx.nvrtc):
            crash(actor)
            eventually(lambda actor=actor: actor.restarts == 1 and actor.state == "running")
        assert not waiting.done()
        compiling.open()
        assert waiting.result(5.0).out.shape == (1, 1, 1, 8)


def crash(actor: ga.ActorHandle) -> None:
    def broken(self: Any, call: Any) -> None:
        raise ZeroDivisionError

    actor_type = actor._post.actor_type
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_type, "handle", broken)
        with pytest.raises(ga.ActorFailed):
            actor.submit(None).result(5.0)


def test_requests_that_wait_for_a_kernel_count_towards_the_mailboxs_capacity(compiling: Gate) -> None:
    options = ga.ContextOptions(compile_on_mock=True, mailbox_capacity=5, drain_timeout=2.0)
    with ga.open_context("mock", options) as ctx:
        waiting = [ask(ctx)]
        assert compiling.entered.wait(5.0)
        eventually(lambda: ctx.stats()["flash_attn"].queued == 0)
        for _ in range(4):
            waiting.append(ask(ctx))
            eventually(lambda: ctx.stats()["flash_attn"].queued == 0)
        with pytest.raises(ga.Overloaded, match="flash_attn has 5 requests waiting"):
            ask(ctx).result(5.0)
        assert waiting[0].cancel()
        waiting.append(ask(ctx))
        eventually(lambda: ctx.stats()["flash_attn"].queued == 0)
        with pytest.raises(ga.Overloaded):
            ask(ctx).result(5.0)
        compiling.open()
        for reply in waiting[1:]:
            reply.result(5.0)
        assert ask(ctx).result(5.0).out.shape == (1, 1, 1, 8)
        assert ctx.flash_attn._post.mailbox._parked == 0


@pytest.mark.parametrize("error", [ga.CompileError("line 3"), None])
def test_whatever_becomes_of_those_that_wait_the_capacity_is_theirs_again(compiling: Gate, error: Any) -> None:
    compiling.outcome = error  # type: ignore[attr-defined]
    options = ga.ContextOptions(compile_on_mock=True, mailbox_capacity=4, drain_timeout=2.0)
    with ga.open_context("mock", options) as ctx:
        waiting = [ask(ctx), ask(ctx, timeout=0.02), ask(ctx)]
        assert compiling.entered.wait(5.0)
        waiting[2].cancel()
        eventually(waiting[1].done)
        compiling.open()
        eventually(waiting[0].done)
        assert ctx.flash_attn._post.mailbox._parked == ctx.nvrtc._post.mailbox._parked == 0


def test_draining_waits_for_requests_that_wait_for_a_kernel(compiling: Gate) -> None:
    with ga.open_context("mock", COMPILING) as ctx:
        waiting = ask(ctx)
        assert compiling.entered.wait(5.0)
        drained = ctx.drain()
        # This one was accepted, but has not asked for its kernel yet.
        compiling.open()
        assert drained.result(5.0) is None
        assert waiting.result(0.0).out.shape == (1, 1, 1, 8)


def test_a_request_accepted_before_the_drain_still_gets_its_kernel(compiling: Gate) -> None:
    options = ga.ContextOptions(compile_on_mock=True, max_in_flight=1, drain_timeout=5.0)
    with ga.open_context("mock", options) as ctx:
        compiling.open()
        gate = Gate()
        ctx.flash_attn._post.mailbox.launch_began()  # the actor is busy, so the request stays in its mailbox
        waiting = ask(ctx)
        drained = ctx.drain()
        ctx.flash_attn._post.mailbox.launch_ended()
        assert waiting.result(5.0).out.shape == (1, 1, 1, 8)
        assert drained.result(5.0) is None
        gate.open()


def test_closing_answers_requests_that_wait_for_a_kernel(compiling: Gate) -> None:
    with ga.open_context("mock", ga.ContextOptions(compile_on_mock=True, drain_timeout=0.05)) as ctx:
        waiting = ask(ctx)
        assert compiling.entered.wait(5.0)
    with pytest.raises(ga.ActorStopped, match="closed"):
        waiting.result(0.0)
    compiling.open()


def test_warming_answers_whatever_its_progress_callback_does(compiling: Gate) -> None:
    compiling.open()
    with ga.open_context("mock") as ctx:
        key = ctx.flash_attn.inspect_key(ga.FlashForward(q=rows(), k=rows(), v=rows()))
        for error in (ZeroDivisionError(), SystemExit(1)):

            def progress(done: int, total: int, key: Any, error: BaseException = error) -> None:
                raise error

            with pytest.raises(ga.GpuActorsError, match="progress callback raised"):
                ctx.nvrtc.warm([key, key], progress).result(5.0)
        eventually(lambda: ctx.stats()["nvrtc"].in_flight == 0)


# Leaving


def test_leaving_waits_for_what_was_asked() -> None:
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.005))
    with ga.open_context("mock", options) as ctx:
        replies = [ask(ctx) for _ in range(10)]
    assert [reply.result(0.0).out.shape for reply in replies] == [(1, 1, 1, 8)] * 10


def test_leaving_by_an_exception_waits_and_passes_it_on() -> None:
    with no_threads_left():
        replies: list[ga.Reply[Any]] = []

        def fail() -> None:
            with ga.open_context("mock") as ctx:
                replies.append(ask(ctx))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert replies[0].result(0.0).out.shape == (1, 1, 1, 8)


async def test_leaving_by_a_cancelled_scope_closes_the_context() -> None:
    with no_threads_left(), anyio.move_on_after(0.02):
        async with ga.open_context("mock") as ctx:
            await anyio.sleep(10)
    assert ctx.health().state == "stopped"


def test_leaving_is_bounded_by_the_drain_timeout_even_on_a_mock_clock(caplog: pytest.LogCaptureFixture) -> None:
    with no_threads_left():
        with scripted(drain_timeout=0.05, clock=MockClock()) as (_, actor):
            reply = actor.submit(lambda actor, call: None)
            began = time.monotonic()
        assert 0.05 <= time.monotonic() - began < 2.0
    with pytest.raises(ga.ActorStopped, match="the context is closed"):
        reply.result(0.0)
    assert "not drained within 0.05 s" in caplog.text


async def test_leaving_an_async_context_is_bounded_too(caplog: pytest.LogCaptureFixture) -> None:
    options = ga.ContextOptions(actors=(Scripted,), drain_timeout=0.05, clock=MockClock())
    async with ga.open_context("mock", options) as ctx:
        reply = ctx.actor(Scripted).submit(lambda actor, call: None)
        began = time.monotonic()
    assert 0.05 <= time.monotonic() - began < 2.0
    with pytest.raises(ga.ActorStopped):
        await reply
    assert "not drained within 0.05 s" in caplog.text


async def test_the_loop_runs_on_while_a_context_opens_and_closes() -> None:
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    ticking = asyncio.create_task(tick())
    options = ga.ContextOptions(fault_plan=FaultPlan().hang(launch=1), drain_timeout=0.1)
    async with ga.open_context("mock", options) as ctx:
        ask(ctx)
    ticking.cancel()
    assert max(gaps) < 0.09, "the loop stood still"


def test_a_closed_context_answers_stopped() -> None:
    with scripted() as (ctx, actor):
        pass
    for reply in (ask(ctx), actor.submit(answer(None)), ctx.nvrtc.warm([])):
        assert reply.done()
        with pytest.raises(ga.ActorStopped, match="the context is closed"):
            reply.result()
    health = ctx.health()
    assert (health.state, health.ready, health.reason) == ("stopped", False, "the context is closed")
    assert set(health.actors.values()) == {"stopped"}
    assert ask(ctx, timeout=1.0).done()


def test_close_may_be_called_again_and_from_several_threads() -> None:
    with scripted() as (ctx, _):
        threads = [threading.Thread(target=ctx.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5.0)
            assert not thread.is_alive()
        ctx.close()


def test_an_actor_that_never_comes_back_is_left_behind_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gpu_actors.context._PATIENCE", 0.1)
    stuck = Gate()
    with scripted(drain_timeout=0.0) as (ctx, actor):
        reply = actor.submit(lambda actor, call: stuck())
        assert stuck.entered.wait(5.0)
        began = time.monotonic()
    assert time.monotonic() - began < 2.0
    with pytest.raises(ga.ActorStopped):
        reply.result(0.0)
    assert "left behind: ['scripted']" in caplog.text
    assert ctx.drain().result(1.0) is None
    stuck.open()


def test_several_launches_that_never_end_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that hangs hangs on all of its streams."""
    monkeypatch.setattr("gpu_actors.actors.context._PATIENCE", 0.3)
    hung = Gate()
    params = ga.AttentionParams(1, 1, 1, 1, 1, 8)
    with scripted(drain_timeout=0.0) as (ctx, actor):
        monkeypatch.setattr(mock._MockStream, "close", lambda self: None)
        monkeypatch.setattr(mock._MockStream, "run", lambda self, launch: hung() or {})
        replies = [ask(ctx), actor.submit(launches(lambda: None))]
        replies.append(ctx.cudnn.mha_forward(params, rows(), rows(), rows()))
        eventually(lambda: sum(stats.in_flight for stats in ctx.stats().values()) == 3)
        began = time.monotonic()
    assert 0.3 <= time.monotonic() - began < 0.8
    assert all(reply.done() for reply in replies)
    hung.open()
    for post in ctx._services.posts.values():
        if post._stream is not None:
            post._stream._work.put(None)


# Threads that cannot be started


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """While it is entered, no thread can be started, as on a machine that has run out of them."""

    @contextlib.contextmanager
    def exhausted() -> Iterator[None]:
        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            yield

    return exhausted


def test_a_request_whose_thread_cannot_be_started_is_answered_and_the_next_one_too(no_more_threads: Any) -> None:
    options = ga.ContextOptions(restart=ga.RestartPolicy(backoff=0.1))
    with ga.open_context("mock", options) as ctx:
        with no_more_threads(), pytest.raises(ga.ActorFailed, match="can't start new thread"):
            ask(ctx).result(5.0)
        assert ask(ctx).result(5.0).out.shape == (1, 1, 1, 8)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 0)


def test_a_completion_thread_that_cannot_be_started_is_tried_again(no_more_threads: Any) -> None:
    options = ga.ContextOptions(
        restart=ga.RestartPolicy(backoff=0.1), fault_plan=FaultPlan().delay(0.01), mock=ga.MockOptions(compute=False)
    )
    with ga.open_context("mock", options) as ctx:
        with no_more_threads(), pytest.raises(ga.ActorFailed, match="can't start new thread"):
            ask(ctx).result(5.0)
        with pytest.raises(ga.MockModeError):
            ask(ctx).result(5.0)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 0)


def test_a_compilation_whose_thread_cannot_be_started_is_answered(no_more_threads: Any, compiling: Gate) -> None:
    compiling.open()
    with ga.open_context("mock", COMPILING) as ctx:
        with no_more_threads(), pytest.raises(ga.GpuActorsError, match="can't start new thread"):
            ask(ctx).result(5.0)
        assert ask(ctx).result(5.0).out.shape == (1, 1, 1, 8)
        eventually(lambda: ctx.stats()["nvrtc"].in_flight == 0)


# Sharing


def test_one_context_serves_several_threads_and_loops() -> None:
    shapes: list[tuple[int, ...]] = []
    with ga.open_context("mock", ga.ContextOptions(mailbox_capacity=4096)) as ctx:

        async def wait() -> None:
            results = await asyncio.gather(*(ask(ctx) for _ in range(50)))
            shapes.extend(result.out.shape for result in results)

        def block() -> None:
            shapes.extend(ask(ctx).result(5.0).out.shape for _ in range(50))

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
                    actor.submit(message).result(5.0)
                assert caught.value.field == "message"
            assert actor.restarts == 0


def test_a_child_can_be_found_by_its_type() -> None:
    with scripted() as (ctx, actor):
        assert ctx.actor(ga.FlashAttnActor) is ctx.flash_attn
        assert ctx.actor(Scripted) is actor
        with pytest.raises(KeyError, match=r"ContextOptions\(actors=\.\.\.\)"):
            ctx.actor(SlowOpening)


def test_stats_of_a_failed_request_are_there_when_its_waiter_wakes() -> None:
    with scripted() as (ctx, actor):
        for number in range(1, 20):
            with pytest.raises(ga.LaunchError):
                actor.submit(raises(ga.LaunchError("x"))).result(5.0)
            assert ctx.stats()["scripted"].failed == number
