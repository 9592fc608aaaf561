"""The bridge to event loops: asyncio, uvloop and anyio, one loop and many, and its cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from inside.bench import bridge, imports
from support.loops import LOOPS, run
from support.service import NO_COMPUTE, Gate, Scripted, answer, comes_true, eventually, launches, rows, scripted
from support.timing import below, median_seconds, yardsticks

import gpu_actors as ga

pytestmark = pytest.mark.usefixtures("all_threads_end")


def in_threads(*targets: Callable[[], object]) -> None:
    """Run all of them at once, each in a thread, and pass on what one raises."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], object]) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive(), "did not end"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("loop", LOOPS)
def test_1024_awaits_on_each_of_two_loops_lose_nothing(loop: str) -> None:
    count = 1024
    with scripted(mailbox_capacity=2 * count) as (ctx, actor):

        async def main(offset: int) -> None:
            expected = list(range(offset, offset + count))
            replies = [actor.submit(answer(number)) for number in expected]
            assert await asyncio.gather(*replies) == expected

        in_threads(lambda: run(loop, main(0)), lambda: run(loop, main(count)))
        stats = ctx.stats()["scripted"]
    assert (stats.submitted, stats.completed, stats.queued) == (2 * count, 2 * count, 0)


async def test_a_burst_of_answers_wakes_the_loop_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = 0
    loop = asyncio.get_running_loop()
    original = loop.call_soon_threadsafe

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal wakes
        wakes += 1
        return original(*arguments, **options)

    options = ga.ContextOptions(actors=(Scripted,), max_in_flight=1, mailbox_capacity=2048)
    async with ga.open_context("mock", options) as ctx:
        actor = ctx.actor(Scripted)
        gate = Gate()
        first = actor.submit(launches(gate))
        await asyncio.to_thread(gate.entered.wait, 30.0)
        replies = [actor.submit(answer(number)) for number in range(1024)]
        waiting = asyncio.gather(*replies)
        await comes_true(lambda: all(reply._call._waiters for reply in replies))
        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        gate.open()
        assert await waiting == list(range(1024))
        monkeypatch.undo()
        await first
    assert wakes <= 8, "one a batch of 256, and a few for the launch"


async def test_a_handler_that_is_slow_does_not_hold_up_answers_of_launches() -> None:
    slow = Gate()
    async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
        actor = ctx.actor(Scripted)
        launched = actor.submit(launches(lambda: slow.entered.wait(30.0), "launched"))
        held_up = actor.submit(lambda actor, call: (slow(), call.resolve("slow", actor.outbox)))
        await asyncio.to_thread(slow.entered.wait, 30.0)
        assert await asyncio.wait_for(launched, 30.0) == "launched"
        assert not held_up.done()
        slow.open()
        assert await held_up == "slow"


@pytest.mark.perf
async def test_a_refused_submission_takes_half_a_millisecond_at_most() -> None:
    """2.2 yardsticks."""
    async with stuck_actor() as (actor, stuck):
        below(2.2, lambda: yardsticks(median_seconds(lambda: actor.submit(answer(None)), 1000)))
        stuck.open()


@asynccontextmanager
async def stuck_actor() -> AsyncIterator[tuple[ga.ActorHandle, Gate]]:
    """An actor that handles a request until the gate opens, with room for ten more."""
    stuck = Gate()
    options = ga.ContextOptions(actors=(Scripted,), mailbox_capacity=10)
    async with ga.open_context("mock", options) as ctx:
        actor = ctx.actor(Scripted)
        actor.submit(lambda actor, call: (stuck(), call.resolve(None, actor.outbox)))
        await asyncio.to_thread(stuck.entered.wait, 30.0)
        yield actor, stuck


def test_answers_survive_a_hostile_switch_interval() -> None:
    """Switching threads at nearly every byte code shows rare races."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with scripted(mailbox_capacity=4096) as (ctx, actor):

            async def main() -> None:
                for turn in range(10):
                    replies = [actor.submit(answer((turn, number)), timeout=30.0) for number in range(20)]
                    replies[turn % 20].cancel()
                    results = await asyncio.gather(*replies, return_exceptions=True)
                    for number, result in enumerate(results):
                        cancelled = number == turn % 20 and isinstance(result, ga.RequestCancelled)
                        assert cancelled or result == (turn, number)

            def block() -> None:
                for number in range(100):
                    assert actor.submit(answer(number)).result(30.0) == number

            in_threads(lambda: run("asyncio", main()), block, block)
            stats = ctx.stats()["scripted"]
        assert stats.submitted == stats.completed + stats.failed + stats.cancelled == 400
    finally:
        sys.setswitchinterval(interval)


# Costs


def test_the_bridge_benchmark_measures_both_sides_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_CROWD", 64)
    figures = bridge.run(concurrency=(16,), latencies=100, requests=64, rounds=2)
    for loop in LOOPS:
        measured = figures[loop]
        assert set(measured["latency_us"]) == {"service", "to_thread", "ratio", "ratio_of_each_round"}
        assert len(measured["latency_us"]["ratio_of_each_round"]) == 2
        assert all(value > 0 for value in measured["throughput_k"]["16"].values())
    assert figures["two_loops"]["service"] > 0


@pytest.mark.perf
@pytest.mark.parametrize("crowd", [1, 256])
@pytest.mark.parametrize("loop", LOOPS)
def test_an_empty_request_is_cheaper_than_a_thread_of_the_loops_pool(loop: str, crowd: int) -> None:
    """It is cheaper in a crowd, and alone on one core by at least a quarter.

    Alone on two cores, both cost little more than two wake-ups of a sleeping core, whatever code runs between them: the
    threads' cores then change a try's ratio from 0.2 to 5. Each try has its own threads.

    A try on one core takes about 20 ms. While a neighbour has the other half of that core, Python's code slows down
    more than the system's wake-ups do, and all tries of that time show it. So the tries last about a second.
    """

    def share() -> float:
        with (
            one_core() if crowd == 1 else contextlib.nullcontext(),
            ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE)) as ctx,
        ):
            kinds = {"service": bridge._request(ctx), "to_thread": bridge._to_thread}
            measure = bridge._latencies(kinds, 300) if crowd == 1 else bridge._throughputs(kinds, crowd, 2048)
            return 1.0 / run(loop, measure)["ratio"]

    if crowd == 1:
        below(0.75, share, tries=40)
    else:
        below(1.0, share)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def test_an_actor_answers_a_repeated_request_within_few_calls() -> None:
    """The caller waits for all calls, and code after a thread's wake-up runs with cold caches.

    Calls are counted, because times vary. The limit is 45, with sleeping and waking.
    """
    calls: dict[int, int] = {}
    repeated = 50

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            thread = threading.get_ident()
            calls[thread] = calls.get(thread, 0) + 1

    threading.setprofile(profile)
    try:
        with ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE)) as ctx:
            q = rows()
            for turn in range(repeated + 5):
                if turn == 5:
                    eventually(lambda: ctx.flash_attn._cell.mailbox._asleep)
                    calls.clear()
                eventually(ctx.flash_attn.forward(q, q, q).done)
            counted = max(calls.values())
    finally:
        threading.setprofile(None)
    assert repeated < counted <= 45 * repeated


def test_the_import_benchmark_measures_the_package_beside_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_wheel", lambda: {"bytes": 1})
    figures = imports.run(imports=1)
    assert figures["gpu_actors"]["median_s"] > 0
    assert figures["gpu_actors"]["modules"] > figures["numpy"]["modules"]
