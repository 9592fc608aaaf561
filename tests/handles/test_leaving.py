"""Leaving a context by cancellation, draining or closing takes bounded time and answers every request."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from inside.actors import context
from inside.devices import mock
from inside.runtime import Completion
from support.service import AT_ONCE, Gate, Scripted, answer, ask, eventually, launches, no_threads_left, rows, scripted

import gpu_actors as ga
from gpu_actors.handles import gpu_context
from gpu_actors.testing import FaultPlan, MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end")


# Opening and leaving, cancelled


class SlowOpening(Scripted):
    """Opens once its gate is open."""

    label = "slow"
    gate = Gate()

    def open(self) -> None:
        type(self).gate()


@pytest.mark.parametrize("how", ["task twice", "scope"])
async def test_a_context_whose_opener_was_cancelled_is_closed_again(how: str) -> None:
    SlowOpening.gate = gate = Gate()
    with no_threads_left():

        async def open_it() -> None:
            async with ga.open_context("mock", ga.ContextOptions(actors=(SlowOpening,))):
                await anyio.sleep_forever()

        if how == "scope":
            with anyio.move_on_after(0.03):
                threading.Timer(0.1, gate.open).start()
                await open_it()
            return
        task = asyncio.create_task(open_it())
        await asyncio.to_thread(gate.entered.wait, 30.0)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)  # lets the task receive the cancellation
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.usefixtures("patient_closing")
@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_task_that_is_cancelled_while_it_leaves_still_closes(how: str) -> None:
    with no_threads_left():
        drain = 0.3 if how == "scope" else 60.0
        options = ga.ContextOptions(fault_plan=FaultPlan().hang(launch=1), drain_timeout=drain)
        opener = ga.open_context("mock", options)
        context = await opener.__aenter__()
        reply, leaving = ask(context), asyncio.Event()

        async def leave() -> None:
            leaving.set()
            await opener.__aexit__(None, None, None)

        began = time.monotonic()
        if how == "task":
            task = asyncio.create_task(leave())
            await leaving.wait()  # the task runs until it waits for the launch
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with anyio.move_on_after(0.1):
                await leave()
        assert time.monotonic() - began < AT_ONCE
        assert context.health().state == "stopped"
        with pytest.raises(ga.ActorStopped):
            await reply


async def test_leaving_needs_none_of_the_threads_that_wait_for_its_replies() -> None:
    """Every thread of the loop's pool blocks in a result() that only closing the context answers."""
    limiter = anyio.to_thread.current_default_thread_limiter()
    limiter.total_tokens = 2
    options = ga.ContextOptions(fault_plan=FaultPlan().hang(launch=1), drain_timeout=0.05)
    answers: list[str] = []

    async def block(reply: ga.Reply[Any]) -> None:
        try:
            await anyio.to_thread.run_sync(reply.result)
        except ga.GpuActorsError as error:
            answers.append(type(error).__name__)

    with anyio.fail_after(30.0):
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
        assert gate.entered.wait(30.0)
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
        assert drained.result(30.0) is None
        assert (in_flight.result(0.0), queued.result(0.0)) == ("in flight", "queued")
        assert ctx.drain().result(30.0) is None
        assert ctx.health().state == "draining", "draining is not undone"


def test_drain_waits_for_a_launch_whose_deadline_has_passed() -> None:
    """Its output array is still being written."""
    clock = MockClock()
    with scripted(clock=clock) as (ctx, actor):
        gate = Gate()
        expired = actor.submit(launches(gate), timeout=1.0)
        eventually(lambda: ctx.stats()["scripted"].in_flight == 1)
        clock.advance(1.0)
        with pytest.raises(ga.DeadlineExceeded):
            expired.result(30.0)
        drained = ctx.drain()
        assert not drained.done()
        gate.open()
        assert drained.result(30.0) is None


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
            drained.result(30.0)
        gate.open()
        assert reply.result(30.0) == "late"
        assert ctx.drain(1.0).result(30.0) is None


@pytest.mark.parametrize("timeout", [float("nan"), "1", [], True])
def test_a_drain_timeout_that_is_no_time_is_refused_and_drains_nothing(timeout: Any) -> None:
    with scripted() as (ctx, actor):
        with pytest.raises(ga.InvalidRequest) as caught:
            ctx.drain(timeout).result(30.0)
        assert caught.value.field == "timeout"
        assert ctx.health().ready
        assert actor.submit(answer("open")).result(30.0) == "open"
        assert actor.submit(lambda actor, call: None, timeout=0.01)._call.wait(30.0), "deadlines still fire"


def test_drain_waits_for_ever_if_asked_to() -> None:
    with scripted() as (ctx, actor):
        gate = Gate()
        actor.submit(launches(gate))
        drained = ctx.drain(float("inf"))
        due = threading.Event()
        ctx._children.timers.after(0.0, due.set)
        assert due.wait(30.0)
        assert not drained.done()
        gate.open()
        drained.result(30.0)


def test_drain_of_a_lost_context_does_not_wait_for_launches_that_never_end() -> None:
    options = ga.ContextOptions(fault_plan=FaultPlan().hang(launch=1))
    with ga.open_context("mock", options) as ctx:
        hung = ask(ctx)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        drained = ctx.drain()
        assert not drained.done()
        ctx._children.context_lost(ga.ContextLost("gone"))
        assert drained.result(30.0) is None
        assert ctx.drain().result(30.0) is None
        with pytest.raises(ga.ContextLost):
            hung.result(30.0)


# Leaving


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


@pytest.mark.usefixtures("patient_closing")
def test_leaving_is_bounded_by_the_drain_timeout_even_on_a_mock_clock(caplog: pytest.LogCaptureFixture) -> None:
    with no_threads_left():
        with scripted(drain_timeout=0.05, clock=MockClock()) as (_, actor):
            reply = actor.submit(lambda actor, call: None)
            began = time.monotonic()
        assert 0.05 <= time.monotonic() - began < AT_ONCE
    with pytest.raises(ga.ActorStopped, match="the context is closed"):
        reply.result(0.0)
    assert "not drained within 0.05 s" in caplog.text


@pytest.mark.usefixtures("patient_closing")
async def test_leaving_an_async_context_is_bounded_too(caplog: pytest.LogCaptureFixture) -> None:
    options = ga.ContextOptions(actors=(Scripted,), drain_timeout=0.05, clock=MockClock())
    async with ga.open_context("mock", options) as ctx:
        reply = ctx.actor(Scripted).submit(lambda actor, call: None)
        began = time.monotonic()
    assert 0.05 <= time.monotonic() - began < AT_ONCE
    with pytest.raises(ga.ActorStopped):
        await reply
    assert "not drained within 0.05 s" in caplog.text


@pytest.mark.usefixtures("patient_closing")
async def test_the_loop_runs_on_while_a_context_opens_and_closes() -> None:
    """The loop itself opens the gates that opening, draining and closing wait for."""
    opening, launched, closing = Gate(), Gate(), Gate()
    closed: list[bool] = []

    class Slow(Scripted):
        label = "slow"

        @classmethod
        def make_shared(cls, cell: Any) -> Any:
            return SimpleNamespace(close=lambda: (closing(), closed.append(True)))

        def open(self) -> None:
            opening()

    async def let_through(gate: Gate) -> None:
        await asyncio.to_thread(gate.entered.wait, 30.0)
        gate.open()

    async def let_out(ctx: ga.GpuContext) -> None:
        await asyncio.to_thread(eventually, lambda: ctx.health().state == "draining")
        await let_through(launched)
        await let_through(closing)

    letting_in = asyncio.create_task(let_through(opening))
    async with ga.open_context("mock", ga.ContextOptions(actors=(Slow,))) as ctx:
        await letting_in
        reply = ctx.actor(Slow).submit(launches(launched, "awaited"))
        letting_out = asyncio.create_task(let_out(ctx))
    await letting_out
    assert (await reply, closed) == ("awaited", [True])


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


def test_a_closed_context_leaves_no_file_open_while_replies_of_it_are_kept() -> None:
    kept: list[Any] = []
    opened: list[int] = []
    for _ in range(3):
        with scripted() as (ctx, actor):
            kept += [ctx, ask(ctx), actor.submit(answer(None))]
            kept[-1].result(10.0)
        opened.append(len(os.listdir("/proc/self/fd")))
    assert opened[2] == opened[1], "the first one may have opened something for good"


def test_close_may_be_called_again_and_from_several_threads() -> None:
    with scripted() as (ctx, _):
        threads = [threading.Thread(target=ctx.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
            assert not thread.is_alive()
        ctx.close()


def test_an_actor_that_never_comes_back_is_left_behind_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_context, "_CLOSE_SECONDS", 0.1)
    stuck = Gate()
    with scripted(drain_timeout=0.0) as (ctx, actor):
        reply = actor.submit(lambda actor, call: stuck())
        assert stuck.entered.wait(30.0)
        began = time.monotonic()
    assert time.monotonic() - began < AT_ONCE
    with pytest.raises(ga.ActorStopped):
        reply.result(0.0)
    assert "left behind: ['scripted']" in caplog.text
    assert ctx.drain().result(30.0) is None
    stuck.open()


def test_several_launches_that_never_end_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung device hangs all of its streams."""
    monkeypatch.setattr(context, "_DRAIN_SECONDS", 0.3)
    monkeypatch.setattr(context, "_LAST_MOMENT", 0.0)
    hung = Gate()
    waited: list[float] = []
    close = Completion.close

    def noted(completion: Completion, timeout: float) -> bool:
        ended = close(completion, timeout)
        if not ended:
            waited.append(timeout)
        return ended

    monkeypatch.setattr(Completion, "close", noted)
    params = ga.AttentionParams(1, 1, 1, 1, 1, 8)
    with scripted(drain_timeout=0.0) as (ctx, actor):
        monkeypatch.setattr(mock._MockStream, "close", lambda self: None)
        monkeypatch.setattr(mock._MockStream, "run", lambda self, launch: hung() or {})
        replies = [ask(ctx), actor.submit(launches(lambda: None))]
        replies.append(ctx.cudnn.mha_forward(params, rows(), rows(), rows()))
        eventually(lambda: sum(stats.in_flight for stats in ctx.stats().values()) == 3)
        began = time.monotonic()
    assert time.monotonic() - began >= 0.3
    assert (len(waited), sum(waited) < 0.31) == (6, True), waited
    assert all(reply.done() for reply in replies)
    hung.open()
    for cell in ctx._children.cells.values():
        if cell.stream is not None:
            cell.stream._work.put(None)  # type: ignore[attr-defined]


# Launches without a waiter


@pytest.mark.usefixtures("patient_closing")
async def test_leaving_does_not_wait_for_a_launch_whose_requests_were_answered() -> None:
    options = ga.ContextOptions(fault_plan=FaultPlan().hang(launch=1), drain_timeout=60.0)
    async with ga.open_context("mock", options) as ctx:
        with pytest.raises(ga.DeadlineExceeded):
            await ask(ctx, timeout=0.1)
        assert ctx.stats()["flash_attn"].in_flight == 1
        began = time.monotonic()
    assert time.monotonic() - began < AT_ONCE


def test_leaving_lets_a_launch_end_that_needs_only_a_moment() -> None:
    """A GPU that is closed during a launch cannot free its memory."""
    order: list[str] = []
    gate = Gate()
    with scripted() as (ctx, actor):
        reply = actor.submit(launches(lambda: (gate(), order.append("ended"))), timeout=0.1)
        assert gate.entered.wait(30.0)
        with pytest.raises(ga.DeadlineExceeded):
            reply.result(30.0)
        device, completion = ctx._children.device, actor._cell.completion
        close_device, close_completion = device.close, completion.close

        def close(timeout: float) -> bool:
            if timeout:
                gate.open()
                eventually(lambda: actor.stats().in_flight == 0)
            return close_completion(timeout)

        completion.close = close  # type: ignore[method-assign]
        device.close = lambda: (order.append("closed"), close_device())  # type: ignore[method-assign, func-returns-value]
    assert order == ["ended", "closed"]
