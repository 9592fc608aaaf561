"""The thread that sends a call does the actor's work on it if the actor sleeps and could launch it at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pykka
import pytest
from support.service import Gate, eventually
from support.supervision import Broken

import gpu_actors as ga
from gpu_actors.runtime import pykka_base
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox

pytestmark = pytest.mark.usefixtures("all_threads_end")


class Worker(pykka_base.MailboxActor):
    """Runs the messages of its calls, and notes which threads do and whether two work at once."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.threads: list[int] = []
        self.crashes: list[str] = []
        self.crowded = False
        self._busy = threading.Lock()
        super().__init__(mailbox)

    def on_failure(self, exception_type: Any, exception_value: Any, traceback: Any) -> None:
        self.crashes.append(str(exception_value))

    def _receive(self, message: Any) -> Any:
        return message()

    def _work(self, calls: list[Call[Any]]) -> None:
        self.crowded |= not self._busy.acquire(blocking=False)
        try:
            for call in calls:
                self.threads.append(threading.get_ident())
                try:
                    call.resolve(call.message())
                except BaseException as error:
                    call.fail(error)
                    pykka_base.raise_exception("worker", error)
        finally:
            self._busy.release()


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    yield Mailbox("worker", 256, 2)
    pykka.ActorRegistry.stop_all()


def started(mailbox: Mailbox) -> Worker:
    actor = Worker(mailbox)
    pykka.ActorRegistry.register(actor.actor_ref)
    actor._start_actor_loop()
    asleep(mailbox)
    return actor


def asleep(mailbox: Mailbox) -> None:
    eventually(lambda: mailbox._asleep)


def send(mailbox: Mailbox, message: Any) -> Call[Any]:
    call: Call[Any] = Call(message, mailbox)
    mailbox.put(call, direct=True)
    return call


def test_it_is_answered_before_the_send_returns_and_the_actor_sleeps_on(mailbox: Mailbox) -> None:
    actor = started(mailbox)
    calls = [send(mailbox, lambda: "done") for _ in range(3)]
    assert [call.answer() for call in calls] == ["done"] * 3
    assert set(actor.threads) == {threading.get_ident()}
    assert mailbox._asleep


def test_calls_and_messages_meanwhile_wait_for_it(mailbox: Mailbox) -> None:
    actor = started(mailbox)
    gate, order = Gate(), []
    sender = threading.Thread(target=send, args=(mailbox, gate))
    sender.start()
    assert gate.entered.wait(30.0)
    mailbox._wake()  # a spurious wake-up, as a pipe may have
    time.sleep(0.05)
    direct = send(mailbox, lambda: order.append("call"))
    told = threading.Event()
    actor.actor_ref.tell(lambda: (order.append("message"), told.set()))
    assert not direct.wait(0.05)
    gate.open()
    assert direct.wait(30.0)
    assert told.wait(30.0)
    sender.join()
    assert order == ["message", "call"]
    assert not actor.crowded
    assert len(set(actor.threads)) == 2


def test_a_call_that_could_not_be_launched_waits_for_the_actor(mailbox: Mailbox) -> None:
    actor = started(mailbox)
    mailbox.launch_began()
    mailbox.launch_began()
    call = send(mailbox, lambda: None)
    assert not call.wait(0.05)
    mailbox.launch_ended()
    assert call.wait(30.0)
    assert threading.get_ident() not in actor.threads


def test_a_call_sent_within_another_is_queued(mailbox: Mailbox) -> None:
    actor = started(mailbox)
    inner: list[Call[Any]] = []
    send(mailbox, lambda: inner.append(send(mailbox, lambda: "inner")))
    assert inner[0].wait(30.0)
    assert actor.threads[0] == threading.get_ident() != actor.threads[1]


def test_an_actor_that_is_stopped_meanwhile_stops_behind_the_call(mailbox: Mailbox) -> None:
    actor = started(mailbox)
    call = send(mailbox, lambda: actor.actor_ref.stop(block=False))
    assert call.done
    eventually(lambda: not actor.actor_ref.is_alive())
    assert actor.crashes == []
    waits = send(mailbox, lambda: None)
    assert not waits.wait(0.05)


def test_what_it_raises_ends_the_actor_and_not_the_sender(mailbox: Mailbox) -> None:
    actor = started(mailbox)
    call = send(mailbox, lambda: 1 // 0)
    assert isinstance(call.error, ZeroDivisionError)
    eventually(lambda: len(actor.crashes) == 1)
    later = send(mailbox, lambda: "later")
    assert not later.wait(0.05)
    started(mailbox)
    assert later.wait(30.0)


def test_ctrl_c_within_it_is_the_senders_and_ends_the_actor(mailbox: Mailbox) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    actor = started(mailbox)
    with pytest.raises(KeyboardInterrupt):
        send(mailbox, interrupt)
    eventually(lambda: len(actor.crashes) == 1)
    assert actor.crashes == ["KeyboardInterrupt() interrupted the thread that did the work of worker"]
    started(mailbox)
    later = send(mailbox, lambda: "later")
    assert later.wait(30.0)


def test_many_senders_are_all_answered_and_never_work_at_once(mailbox: Mailbox) -> None:
    actor = started(mailbox)
    calls: list[Call[Any]] = []

    def sender() -> None:
        for _ in range(300):
            call = send(mailbox, lambda: None)
            calls.append(call)
            assert call.wait(30.0)

    threads = [threading.Thread(target=sender) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(calls) == 1800
    assert all(call.done for call in calls)
    assert len(actor.threads) == 1800
    assert not actor.crowded


def test_a_mailbox_without_an_actor_keeps_the_call_and_no_actor() -> None:
    mailbox = Mailbox("worker", 256, 2)
    actor = started(mailbox)
    actor.actor_ref.stop()
    mailbox.abandon()
    mailbox._asleep = True
    call = send(mailbox, lambda: None)
    assert not call.wait(0.0)
    gone = weakref.ref(actor)
    del actor
    gc.collect()
    assert gone() is None


ROW = np.ones((1, 1, 1, 8), np.float32)


def on_a_loop(program: Coroutine[Any, Any, None]) -> None:
    """Run the program on a thread that no signal handler interrupts."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, program).result(60.0)


class Threads(ga.ServiceActor):
    """Answers with the thread that did the work."""

    takes = (int,)

    @classmethod
    def brief(cls, message: object) -> bool:
        return bool(1 / message)  # type: ignore[operator]

    def handle(self, call: ga.Call[Any]) -> None:
        call.resolve(threading.get_ident(), self.outbox)


def test_a_lone_request_on_mock_is_answered_on_the_loops_thread() -> None:
    """The request wakes no thread."""

    async def program() -> None:
        options = ga.ContextOptions(mock=ga.MockOptions(compute=False))
        async with ga.open_context("mock", options) as ctx:
            asleep(ctx.flash_attn._cell.mailbox)
            for _ in range(3):  # first a new request, then known ones
                reply = ctx.flash_attn.forward(ROW, ROW, ROW)
                assert reply.done()
                with pytest.raises(ga.MockModeError):
                    await reply

    on_a_loop(program())


def test_a_known_request_is_as_brief_as_its_arrays() -> None:
    async def program() -> None:
        big = np.ones((1, 1 << 14, 1, 8), np.float32)
        async with ga.open_context("mock") as ctx:
            for row in (ROW, big[:, :4096]):
                for _ in range(3):
                    await ctx.flash_attn.forward(ROW, row, row)
            plans = ctx.actor(ga.FlashAttnActor)._cell.shared.plans
            assert sorted(planned.brief for planned in plans.called.values()) == [False, True]

    on_a_loop(program())


def test_what_raises_as_the_senders_thread_looks_at_a_message_is_the_replys() -> None:
    async def program() -> None:
        policy = ga.RestartPolicy(backoff=0.0)
        options = ga.ContextOptions(actors=(Threads,), mock=ga.MockOptions(compute=False), restart=policy)
        async with ga.open_context("mock", options) as ctx:
            for actor in (ctx.flash_attn, ctx.actor(ga.KvCacheActor)):
                reply = actor.submit(Broken())
                with pytest.raises(ga.ActorFailed):
                    await reply
            own = ctx.actor(Threads)
            asleep(own._cell.mailbox)
            assert await own.submit(1) == threading.get_ident()
            assert await own.submit(0) != threading.get_ident()

    on_a_loop(program())
