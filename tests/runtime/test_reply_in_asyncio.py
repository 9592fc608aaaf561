"""Replies where asyncio takes futures, coroutines and tasks, and their callbacks."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from support.loops import LOOPS, run
from support.service import Gate, Scripted, answer, eventually, launches, raises, rows, scripted

import gpu_actors as ga

pytestmark = pytest.mark.usefixtures("all_threads_end")


async def with_actor(use: Callable[[ga.ActorHandle], Awaitable[Any]]) -> Any:
    async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
        return await use(ctx.actor(Scripted))


def asked(actor: ga.ActorHandle) -> list[Any]:
    return [actor.submit(answer(number)) for number in range(3)]


async def group(actor: ga.ActorHandle) -> list[Any]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(reply.wait()) for reply in asked(actor)]
    return [task.result() for task in running]


async def anyio_group(actor: ga.ActorHandle) -> list[Any]:
    async with anyio.create_task_group() as tasks:
        replies = asked(actor)
        for reply in replies:
            tasks.start_soon(reply.wait)
    return [reply.result() for reply in replies]


async def waited(actor: ga.ActorHandle, **options: Any) -> list[Any]:
    replies = asked(actor)
    done, pending = await asyncio.wait(replies, **options)
    assert (done | pending, done & pending) == (set(replies), set())
    return [await reply for reply in replies]


async def one_by_one(actor: ga.ActorHandle) -> list[Any]:
    return sorted([await reply for reply in asyncio.as_completed(asked(actor))])


async def each(actor: ga.ActorHandle, make: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    return [await made for made in [make(reply) for reply in asked(actor)]]


WAYS: dict[str, Callable[[ga.ActorHandle], Awaitable[list[Any]]]] = {
    "wait": waited,
    "wait for the first": lambda actor: waited(actor, return_when=asyncio.FIRST_COMPLETED),
    "wait for an exception": lambda actor: waited(actor, return_when=asyncio.FIRST_EXCEPTION, timeout=30.0),
    "gather": lambda actor: asyncio.gather(*asked(actor)),
    "as_completed": one_by_one,
    "wait_for": lambda actor: each(actor, lambda reply: asyncio.wait_for(reply, 30.0)),
    "shield": lambda actor: each(actor, asyncio.shield),
    "ensure_future": lambda actor: each(actor, asyncio.ensure_future),
    "create_task": lambda actor: each(actor, lambda reply: asyncio.create_task(reply.wait())),
    "TaskGroup": group,
    "anyio": anyio_group,
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("way", WAYS)
def test_a_reply_goes_where_asyncio_takes_it(way: str, loop: str) -> None:
    assert run(loop, with_actor(WAYS[way])) == [0, 1, 2]


async def test_create_task_says_what_to_write() -> None:
    gate = Gate()

    async def use(actor: ga.ActorHandle) -> None:
        reply: Any = actor.submit(launches(gate))
        with pytest.raises(TypeError, match=r"a coroutine was expected, got <Reply .*create_task\(reply\.wait\(\)\)>"):
            await asyncio.create_task(reply)
        gate.open()
        await reply

    await with_actor(use)


async def test_wait_ends_at_the_first_error_and_at_its_timeout() -> None:
    gate = Gate()

    async def use(actor: ga.ActorHandle) -> None:
        slow: Any = actor.submit(launches(gate, "slow"))
        await asyncio.to_thread(gate.entered.wait, 30.0)
        failing: Any = actor.submit(raises(ga.LaunchError("x")))
        done, pending = await asyncio.wait([slow, failing], return_when=asyncio.FIRST_EXCEPTION)
        assert (done, pending) == ({failing}, {slow})
        assert isinstance(failing.exception(), ga.LaunchError)
        done, pending = await asyncio.wait([slow], timeout=0.01)
        assert (done, pending) == (set(), {slow})
        assert slow._call._callbacks == [], "nothing is left of it"
        gate.open()
        assert await slow == "slow"
        assert slow.exception() is None

    await with_actor(use)


# Callbacks


async def test_a_callback_is_called_on_the_loop_that_it_was_added_on() -> None:
    variable = contextvars.ContextVar("variable", default="")
    seen: list[tuple[Any, ...]] = []
    gate, called = Gate(), asyncio.Event()

    def note(reply: ga.Reply[Any]) -> None:
        seen.append((reply, reply.result(), threading.get_ident(), variable.get()))
        called.set()

    async def use(actor: ga.ActorHandle) -> None:
        reply = actor.submit(launches(gate, "value"))
        variable.set("the adder's")
        reply.add_done_callback(note)
        variable.set("another")
        context = contextvars.copy_context()
        gate.open()
        await called.wait()
        assert seen == [(reply, "value", threading.get_ident(), "the adder's")]
        called.clear()
        reply.add_done_callback(note, context=context)
        assert len(seen) == 1, "soon, and not at once"
        await called.wait()
        assert seen[1][3] == "another"

    await with_actor(use)


def test_a_callback_of_a_plain_thread_is_called_where_the_request_is_answered() -> None:
    gate = Gate()
    seen: list[str] = []
    with scripted() as (_, actor):
        reply = actor.submit(launches(gate, "value"))
        reply.add_done_callback(lambda reply: seen.append(threading.current_thread().name))
        gate.open()
        assert reply.result(30.0) == "value"
        eventually(lambda: seen)
        reply.add_done_callback(lambda reply: seen.append(threading.current_thread().name))
    assert seen == ["scripted-completion", "MainThread"]


def test_a_callback_that_raises_keeps_no_other_from_running(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    seen: list[Any] = []
    with scripted() as (_, actor):
        reply = actor.submit(launches(gate, "value"))
        reply.add_done_callback(lambda reply: 1 / 0)
        reply.add_done_callback(seen.append)
        gate.open()
        assert reply.result(30.0) == "value"
        assert actor.submit(answer("next")).result(30.0) == "next"
    assert seen == [reply]
    assert "a callback of a reply raised" in caplog.text


def test_a_callback_can_be_taken_back() -> None:
    gate = Gate()
    seen: list[Any] = []
    with scripted() as (_, actor):
        reply = actor.submit(launches(gate))
        for _ in range(2):
            reply.add_done_callback(seen.append)
        reply.add_done_callback(lambda reply: seen.append("kept"))
        assert reply.remove_done_callback(seen.append) == 2
        assert reply.remove_done_callback(seen.append) == 0
        gate.open()
        reply.result(30.0)
        assert reply.remove_done_callback(seen.append) == 0
    assert seen == ["kept"]


def test_a_loop_that_was_closed_is_not_called() -> None:
    gate = Gate()
    seen: list[Any] = []
    with scripted() as (_, actor):
        reply = actor.submit(launches(gate, "value"))

        async def add() -> None:
            reply.add_done_callback(seen.append)

        asyncio.run(add())
        gate.open()
        assert reply.result(30.0) == "value"
    assert seen == []


def test_a_reply_says_how_it_ended() -> None:
    with scripted(max_in_flight=1) as (_, actor):
        gate = Gate()
        first = actor.submit(launches(gate))
        assert gate.entered.wait(30.0)
        second = actor.submit(answer(None))
        with pytest.raises(ga.WouldBlock, match="is not done"):
            second.exception()
        assert not second.cancelled()
        second.cancel()
        assert second.cancelled()
        assert isinstance(second.exception(), ga.RequestCancelled)
        gate.open()
        first.result(30.0)
        assert (first.cancelled(), first.exception()) == (False, None)


# Representations


def test_requests_and_results_are_shown_in_a_line() -> None:
    q = rows(128)
    assert repr(ga.AttentionOutput(q)) == "AttentionOutput(out=ndarray float32[1, 128, 1, 8])"
    assert (
        repr(ga.MhaOutput(q, q)) == "MhaOutput(out=ndarray float32[1, 128, 1, 8], stats=ndarray float32[1, 128, 1, 8])"
    )
    assert repr(ga.FlashForward(q, 1, None, causal=True)) == (
        "FlashForward(q=ndarray float32[1, 128, 1, 8], k=1, v=None, causal=True)"
    )
    for shown in (ga.AttentionGradients(q, q, q), ga.BatchedDecode(q=q, k_caches=[q], v_caches=[q], seq_lens=q)):
        assert repr(shown).startswith(f"{type(shown).__name__}(")
        assert repr(shown).count("ndarray float32[1, 128, 1, 8]") >= 3
        assert len(repr(shown)) < 600
