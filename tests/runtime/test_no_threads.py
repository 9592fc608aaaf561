"""If the system grants no more threads, errors are typed and nothing stays open."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.service import ask, eventually, run_python

import gpu_actors as ga

pytestmark = pytest.mark.usefixtures("all_threads_end")


@pytest.fixture
def grant(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many threads may be started from now on."""
    start, left = threading.Thread.start, [0]

    def refuse(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    def set_number(number: int) -> None:
        left[0] = number
        monkeypatch.setattr(threading.Thread, "start", refuse)

    return set_number


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def enter() -> None:
    with ga.open_context("mock"):
        pass


def enter_on_a_loop() -> None:
    async def aenter() -> None:
        async with ga.open_context("mock"):
            pass

    asyncio.run(aenter())


def test_an_open_without_threads_raises_a_typed_error_and_leaves_nothing(grant: Callable[[int], None]) -> None:
    enter()
    before = descriptors()
    for number, door in [*((number, enter) for number in range(7)), (0, enter_on_a_loop), (6, enter_on_a_loop)]:
        grant(number)
        with pytest.raises(ga.GpuActorsError, match="can't start new thread"):
            door()
    eventually(lambda: descriptors() <= before)


def test_a_deadline_that_no_thread_can_watch_is_refused_by_the_reply(no_more_threads: Any) -> None:
    # A context in a child process sets its first timer here, for the first deadline.
    with ga.open_context("mock", isolation="process") as ctx:
        with no_more_threads():
            reply = ask(ctx, timeout=30.0)
        with pytest.raises(ga.GpuActorsError, match="no thread for deadlines can be started"):
            reply.result(30.0)
        ask(ctx, timeout=30.0).result(30.0)


def test_a_context_that_is_opened_while_the_interpreter_ends_opens_or_raises_a_typed_error() -> None:
    program = """
        import atexit, sys, threading
        import gpu_actors as ga

        def late():
            for options in ({}, {"isolation": "process"}):
                try:
                    with ga.open_context("mock", **options):
                        print("opened")
                except ga.GpuActorsError as error:
                    print("refused:", error)

        atexit.register(late)
    """
    printed = run_python(program).stdout.splitlines()
    assert len(printed) == 2
    assert all(line == "opened" or line.startswith("refused: ") for line in printed)
