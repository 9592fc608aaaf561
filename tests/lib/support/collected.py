"""Uses a context while the garbage collector ends waiting tasks. test_collected_tasks.py runs it in its own process.

The collector ends a task that awaits a reply and has no reference left. It does so on the thread that creates an object
at that moment, in the middle of that thread's work, and the task cancels its request from there.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from support.service import Scripted, answer, eventually, launches

import gpu_actors as ga
from gpu_actors import ChromeTrace


class Forgotten:
    """Tasks that wait for requests. Each collection finds one more of them in its garbage."""

    def __init__(self, ask: Callable[[], ga.Reply[Any]]) -> None:
        self._ask = ask
        self._replies: list[ga.Reply[Any]] = []
        self._tasks: list[Any] = []

    def prepare(self, count: int) -> None:
        self._replies = [self._ask() for _ in range(count)]
        self._tasks = [_wait(reply) for reply in self._replies]
        for task in self._tasks:
            task.send(None)

    def forget_one(self, phase: str, info: object) -> None:
        if phase == "start" and self._tasks:
            cycle: list[Any] = [self._tasks.pop()]
            cycle.append(cycle)

    def check(self) -> int:
        """Check that each forgotten task has cancelled its request. Returns how many tasks were forgotten."""
        forgotten = self._replies[len(self._tasks) :]
        for reply in forgotten:
            eventually(reply.done)  # another thread may be cancelling it
            assert isinstance(reply._call.error, ga.RequestCancelled), reply
        for task in self._tasks:
            task.close()
        return len(forgotten)


async def _wait(reply: ga.Reply[Any]) -> Any:
    return await reply


async def while_collecting(forgotten: Forgotten, act: Callable[[], Any]) -> None:
    """Do something five times while almost every new object begins a collection."""
    count = 0
    for _ in range(5):
        gc.disable()
        forgotten.prepare(100)
        gc.collect()
        gc.freeze()
        gc.callbacks.append(forgotten.forget_one)
        gc.set_threshold(1, 1000, 1000)
        gc.enable()
        await act()
        gc.disable()
        gc.callbacks.clear()
        gc.collect()
        count += forgotten.check()
    assert count > 5, "the collector found too few of them"


async def main(traced: bool) -> None:
    listener = ChromeTrace("/dev/null") if traced else None
    options = ga.ContextOptions(
        actors=(Scripted,), max_in_flight=1, mailbox_capacity=100_000, on_event=listener, drain_timeout=5.0
    )
    async with ga.open_context("mock", options) as ctx:
        actor = ctx.actor(Scripted)
        gate = threading.Event()
        launched = actor.submit(launches(gate.wait, "held"))
        await asyncio.to_thread(eventually, lambda: ctx.stats()[actor.label].in_flight == 1)
        forgotten = Forgotten(lambda: actor.submit(answer(0), timeout=100.0))
        q = np.zeros((1, 1, 1, 8), np.float32)

        async def ask() -> None:
            assert (await ctx.flash_attn.forward(q, q, q, timeout=100.0)).out.shape == q.shape

        async def ask_from_a_thread() -> None:
            await asyncio.to_thread(lambda: ctx.flash_attn.forward(q, q, q).result(30.0))

        async def queue_and_cancel() -> None:
            replies = [actor.submit(answer(1), timeout=100.0) for _ in range(4)]
            waits = [asyncio.ensure_future(_wait(reply)) for reply in replies[2:]]
            await asyncio.sleep(0)
            assert [reply.cancel() for reply in replies[:2]] == [True, True]
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            assert all(reply.done() for reply in replies)

        async def look() -> None:
            ctx.stats()
            assert ctx.health().state == "ready"

        for act in (ask, ask_from_a_thread, queue_and_cancel, look):
            await while_collecting(forgotten, act)
        gate.set()
        assert await launched == "held"
        assert await actor.submit(answer("after")) == "after"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)  # rather than hang
    threading.excepthook = lambda arguments: sys.exit(f"a thread ended: {arguments}")
    for traced in (False, True):
        asyncio.run(main(traced))
    sys.stdout.write("done\n")
