"""Replies: awaited from loops, read from threads, cancelled, dropped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import traceback
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from support.service import Gate, Scripted, answer, comes_true, eventually, launches, raises, scripted

import gpu_actors as ga
from gpu_actors.runtime.call import Call, CallState
from gpu_actors.runtime.mailbox import Mailbox

pytestmark = pytest.mark.usefixtures("all_threads_end")


def test_result_times_out_and_the_request_goes_on() -> None:
    gate = Gate()
    with scripted() as (_, actor):
        reply = actor.submit(launches(gate, "late"))
        with pytest.raises(TimeoutError, match=r"0\.02 s"):
            reply.result(0.02)
        gate.open()
        assert reply.result(30.0) == "late"


@pytest.mark.parametrize("timeout", [1e12, 1e300, float("inf"), None])
def test_result_waits_as_long_as_it_takes(timeout: float | None) -> None:
    gate = Gate()
    with scripted() as (_, actor):
        reply = actor.submit(launches(gate, "in time"))
        threading.Timer(0.02, gate.open).start()
        assert reply.result(timeout) == "in time"


@pytest.mark.parametrize("timeout", [float("nan"), "1"])
def test_a_wait_with_a_bad_timeout_leaves_no_waiter(timeout: Any) -> None:
    with scripted(max_in_flight=1) as (_, actor):
        gate = Gate()
        actor.submit(launches(gate))
        reply = actor.submit(answer(None))
        with pytest.raises((TypeError, ValueError)):
            reply.result(timeout)
        assert not reply._call._callbacks
        gate.open()


async def test_result_on_the_loops_thread_raises_instead_of_blocking() -> None:
    gate = Gate()
    options = ga.ContextOptions(actors=(Scripted,))
    async with ga.open_context("mock", options) as ctx:
        reply = ctx.actor(Scripted).submit(launches(gate, "after all"))
        with pytest.raises(ga.WouldBlock, match="await the reply"):
            reply.result(30.0)
        gate.open()
        assert await reply == "after all"
        assert reply.result() == "after all", "what is done can be read anywhere"


async def test_a_plain_with_on_the_loops_thread_raises_instead_of_blocking() -> None:
    with pytest.raises(ga.WouldBlock, match="async with"), ga.open_context("mock"):
        pass


def test_a_reply_can_be_awaited_from_two_loops_and_a_thread_at_once() -> None:
    gate = Gate()
    with scripted() as (_, actor), concurrent.futures.ThreadPoolExecutor(3) as pool:
        reply = actor.submit(launches(gate, "for all"))

        async def wait() -> str:
            return await reply

        waiting = [pool.submit(asyncio.run, wait()), pool.submit(asyncio.run, wait()), pool.submit(reply.result)]
        call = reply._call
        eventually(lambda: call._callbacks and call._waiters is not None and len(call._waiters) == 2)
        gate.open()
        assert [waiter.result(30.0) for waiter in waiting] == ["for all"] * 3


def test_an_answer_is_there_before_the_request_is_done() -> None:
    """Readers read the state without the lock, so it must change last."""
    seen: list[tuple[object, object]] = []

    class Watched(Call):
        @property
        def state(self) -> CallState:
            return self._state

        @state.setter
        def state(self, state: CallState) -> None:
            self._state = state
            if state is CallState.DONE:
                seen.append((self.value, self.error))

    error = ga.LaunchError("x")
    mailbox = Mailbox("m", 1, 1)
    Watched(None, mailbox).resolve("value")
    Watched(None, mailbox).fail(error)
    assert seen == [("value", None), (None, error)]


def test_errors_raised_again_and_again_keep_their_traceback_short() -> None:
    with scripted() as (_, actor):
        reply = actor.submit(raises(ga.LaunchError("again")))
        depths = []
        for _ in range(50):
            with pytest.raises(ga.LaunchError) as caught:
                reply.result(30.0)
            depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert depths[-1] == depths[0]


def test_an_error_keeps_its_context_whatever_its_readers_handle() -> None:
    with scripted() as (_, actor):
        failure = ga.LaunchError("shared")
        failure.__context__ = origin = ValueError("origin")
        for expected, error in ((None, ga.LaunchError("shared")), (origin, failure)):
            reply = actor.submit(raises(error))
            for _ in range(2):
                try:
                    raise KeyError("of the reader")
                except KeyError:
                    with pytest.raises(ga.LaunchError) as caught:
                        reply.result(30.0)
                assert caught.value is error
                assert error.__context__ is expected


# Cancelling


def test_cancel_after_the_launch_does_nothing() -> None:
    gate = Gate()
    with scripted() as (_, actor):
        reply = actor.submit(launches(gate, "kept"))
        gate.entered.wait(30.0)
        assert reply.cancel() is False
        assert not reply.done()
        gate.open()
        assert reply.result(30.0) == "kept"
        assert reply.cancel() is False


async def cancelled_by_task(reply: ga.Reply) -> None:
    async def wait() -> None:
        await reply

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_by_scope(reply: ga.Reply) -> None:
    async with anyio.create_task_group() as group:

        async def wait() -> None:
            await reply

        group.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


@pytest.mark.parametrize("give_up", [cancelled_by_task, cancelled_by_scope])
async def test_a_waiter_that_gives_up_cancels_its_request(give_up) -> None:
    gate = Gate()
    options = ga.ContextOptions(actors=(Scripted,), max_in_flight=1)
    async with ga.open_context("mock", options) as ctx:
        actor = ctx.actor(Scripted)
        actor.submit(launches(gate))
        reply = actor.submit(launches(lambda: None))
        await give_up(reply)
        assert reply.done()
        assert ctx.stats()["scripted"].cancelled == 1
        gate.open()
        with pytest.raises(ga.RequestCancelled):
            await reply


async def test_a_waiter_that_gives_up_after_the_launch_leaves_the_request_alone() -> None:
    gate = Gate()
    async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
        reply = ctx.actor(Scripted).submit(launches(gate, "kept"))
        await asyncio.to_thread(gate.entered.wait, 30.0)
        await cancelled_by_task(reply)
        gate.open()
        assert await reply == "kept"


@pytest.mark.parametrize("other", ["task", "thread", "callback"])
async def test_a_waiter_that_gives_up_does_not_cancel_for_another(other: str) -> None:
    gate = Gate()
    options = ga.ContextOptions(actors=(Scripted,), max_in_flight=1)
    async with ga.open_context("mock", options) as ctx:
        actor = ctx.actor(Scripted)
        actor.submit(launches(gate))
        reply = actor.submit(launches(lambda: None, "for the other"))
        if other == "task":
            waiting = asyncio.create_task(reply.wait())
            await asyncio.sleep(0)
        elif other == "thread":
            waiting = asyncio.create_task(asyncio.to_thread(reply.result, 30.0))
            await asyncio.to_thread(eventually, lambda: reply._call._callbacks)
        else:
            reply.add_done_callback(lambda reply: None)
            waiting = reply  # type: ignore[assignment]
        await cancelled_by_task(reply)
        assert not reply.done()
        gate.open()
        assert await waiting == "for the other"


async def test_a_waiter_cancelled_in_the_moment_of_the_answer_leaves_the_answer() -> None:
    gate = Gate()
    async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
        reply = ctx.actor(Scripted).submit(launches(gate, "there"))

        async def wait() -> str:
            return await reply

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        gate.open()
        eventually(reply.done)  # answered, but the loop has not yet woken the task
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await reply == "there"


# Not waiting


def test_a_loop_that_is_closed_while_requests_are_in_flight_leaves_them_to_others() -> None:
    gate = Gate()
    with scripted() as (_, actor):
        reply = actor.submit(launches(gate, "later"))

        async def give_up() -> None:
            # A future of a loop that is closed before the answer: the task around it never ends.
            asyncio.ensure_future(reply)  # noqa: RUF006
            await comes_true(lambda: reply._call._waiters)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(give_up())
        pending = asyncio.all_tasks(loop)
        loop.close()
        assert len(pending) == 1
        gate.open()
        assert reply.result(30.0) == "later"

        async def go_on() -> str:
            return await actor.submit(answer("next")), await reply

        assert asyncio.run(go_on()) == ("next", "later")
        for task in pending:
            task.get_coro().close()
            task._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_a_task_whose_replies_are_all_there_lets_others_run() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
        reply = ctx.actor(Scripted).submit(answer(7))
        assert await reply == 7
        async with anyio.create_task_group() as group:
            group.start_soon(others)
            for _ in range(160):
                assert await reply == 7
            group.cancel_scope.cancel()
    assert turns >= 9
