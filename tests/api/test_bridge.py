"""The bridge to event loops: asyncio, uvloop and anyio, one loop and many, and what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from inside.bench import bridge, imports
from inside.runtime import Outbox
from support.loops import LOOPS, run
from support.service import NO_COMPUTE, Gate, Scripted, answer, comes_true, eventually, launches, raises, rows, scripted
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
def test_a_request_is_answered_on_every_kind_of_loop(loop: str) -> None:
    async def main() -> None:
        async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
            assert (await ctx.flash_attn.forward(rows(), rows(), rows())).out.shape == (1, 1, 1, 8)
            actor = ctx.actor(Scripted)
            assert await asyncio.gather(*(actor.submit(answer(number)) for number in range(300))) == list(range(300))
            with pytest.raises(ga.LaunchError):
                await actor.submit(raises(ga.LaunchError("x")))
            with pytest.raises(ga.DeadlineExceeded):
                await actor.submit(lambda actor, call: None, timeout=0.01)
            reply = actor.submit(lambda actor, call: None)
            with anyio.move_on_after(0.01):
                await reply
            with pytest.raises(ga.RequestCancelled):
                await reply

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_4096_awaits_on_each_of_two_loops_lose_nothing(loop: str) -> None:
    count = 4096
    with scripted(mailbox_capacity=2 * count) as (ctx, actor):

        async def main(offset: int) -> None:
            wanted = list(range(offset, offset + count))
            replies = [actor.submit(answer(number)) for number in wanted]
            assert await asyncio.gather(*replies) == wanted

        in_threads(lambda: run(loop, main(0)), lambda: run(loop, main(count)))
        stats = ctx.stats()["scripted"]
    assert (stats.submitted, stats.completed, stats.queued) == (2 * count, 2 * count, 0)


def test_waiters_of_many_loops_and_threads_mixed_all_get_their_own_answer() -> None:
    with scripted(mailbox_capacity=10_000) as (_, actor):

        async def main(offset: int) -> None:
            for number in range(offset, offset + 100):
                assert await actor.submit(answer(number)) == number

        def block(offset: int) -> None:
            for number in range(offset, offset + 100):
                assert actor.submit(answer(number)).result(30.0) == number

        in_threads(
            *(lambda loop=loop, offset=offset: run(loop, main(offset)) for loop in LOOPS for offset in (0, 1000)),
            *(lambda offset=offset: block(offset) for offset in (2000, 3000)),
        )


async def test_a_reply_may_cross_from_one_loop_to_another() -> None:
    gate = Gate()
    async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
        reply = ctx.actor(Scripted).submit(launches(gate, "crossed"))

        async def wait() -> str:
            return await reply

        elsewhere = asyncio.create_task(asyncio.to_thread(run, "uvloop", wait()))
        here = asyncio.create_task(wait())
        await asyncio.to_thread(eventually, lambda: len(reply._call._waiters or ()) == 2)
        gate.open()
        assert await asyncio.gather(elsewhere, here) == ["crossed", "crossed"]


async def test_anyio_task_groups_gather_replies() -> None:
    results: list[int] = []
    async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:

        async def ask(number: int) -> None:
            results.append(await ctx.actor(Scripted).submit(answer(number)))

        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(ask, number)
    assert sorted(results) == list(range(100))


async def test_an_error_in_a_task_group_cancels_the_requests_of_its_siblings() -> None:
    options = ga.ContextOptions(actors=(Scripted,), max_in_flight=1)
    gate = Gate()
    async with ga.open_context("mock", options) as ctx:
        actor = ctx.actor(Scripted)
        busy = actor.submit(launches(gate))
        await asyncio.to_thread(gate.entered.wait, 30.0)
        siblings = [actor.submit(answer(None)) for _ in range(5)]

        async def wait(reply: ga.Reply[Any]) -> None:
            await reply

        async def fail() -> None:
            await actor.submit(answer(None), priority="x")  # type: ignore[arg-type]

        async def group() -> None:
            async with asyncio.TaskGroup() as tasks:
                for reply in siblings:
                    tasks.create_task(wait(reply))
                tasks.create_task(fail())

        with pytest.raises(ExceptionGroup) as caught:
            await group()
        assert caught.group_contains(ga.InvalidRequest)
        assert ctx.stats()["scripted"].cancelled == 5
        gate.open()
        await busy


async def test_replies_work_with_asyncios_own_helpers() -> None:
    async with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
        actor = ctx.actor(Scripted)
        assert await asyncio.wait_for(actor.submit(answer(1)), 30.0) == 1
        assert await asyncio.shield(actor.submit(answer(2))) == 2
        done, _ = await asyncio.wait([asyncio.ensure_future(actor.submit(answer(3)))], timeout=30.0)
        assert [task.result() for task in done] == [3]
        async with asyncio.timeout(30.0):
            assert await actor.submit(answer(4)) == 4
        assert [await reply for reply in asyncio.as_completed([actor.submit(answer(5))])] == [5]


async def test_a_shielded_request_is_not_cancelled() -> None:
    gate = Gate()
    options = ga.ContextOptions(actors=(Scripted,), max_in_flight=1)
    async with ga.open_context("mock", options) as ctx:
        actor = ctx.actor(Scripted)
        actor.submit(launches(gate))
        reply = actor.submit(launches(lambda: None, "kept"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reply), 0.01)
        gate.open()
        assert await reply == "kept"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_ends_with_requests_in_flight_leaves_the_others_alone(loop: str) -> None:
    gate = Gate()
    with scripted(max_in_flight=1, mailbox_capacity=300) as (ctx, actor):
        first = actor.submit(launches(gate, "first"))
        assert gate.entered.wait(30.0)
        abandoned: list[ga.Reply[Any]] = []

        async def leave() -> None:
            abandoned.extend(actor.submit(answer(number)) for number in range(100))
            tasks = [asyncio.ensure_future(reply) for reply in abandoned]
            await comes_true(lambda: all(reply._call._waiters for reply in abandoned))
            assert not any(task.done() for task in tasks)

        run(loop, leave())  # the runner cancels what its main task leaves, and that cancels the requests
        assert all(reply.done() for reply in abandoned)
        assert ctx.stats()["scripted"].cancelled == 100

        async def stay() -> tuple[str, int]:
            asyncio.get_running_loop().call_later(0.01, gate.open)
            return await first, await actor.submit(answer(2))

        assert run(loop, stay()) == ("first", 2)


def test_an_outbox_wakes_each_loop_once_a_batch() -> None:
    class CountingLoop:
        def __init__(self) -> None:
            self.calls: list[list[Any]] = []

        def call_soon_threadsafe(self, function: Any, futures: list[Any]) -> None:
            self.calls.append(futures)

    class ClosedLoop(CountingLoop):
        def call_soon_threadsafe(self, function: Any, futures: list[Any]) -> None:
            raise RuntimeError("Event loop is closed")

    class FakeWaiter:
        def __init__(self, loop: CountingLoop) -> None:
            self.loop = loop

    one, closed, two = CountingLoop(), ClosedLoop(), CountingLoop()
    outbox = Outbox()
    for loop in (one, closed, two, one, two, one):
        outbox.add([FakeWaiter(loop)])  # type: ignore[arg-type]
    outbox.flush()
    outbox.flush()
    assert ([len(futures) for futures in one.calls], [len(futures) for futures in two.calls]) == ([3], [2])


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


async def test_the_loop_is_never_blocked_by_submitting() -> None:
    """With the actor stuck and its mailbox full, a thousand submissions return."""
    async with stuck_actor() as (actor, stuck):
        replies = [actor.submit(answer(None)) for _ in range(1000)]
        assert sum(reply.done() for reply in replies) == 990
        stuck.open()


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
    """Threads that are switched at nearly every byte code find the races that rarely show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with scripted(mailbox_capacity=4096) as (ctx, actor):

            async def main() -> None:
                for turn in range(30):
                    replies = [actor.submit(answer((turn, number)), timeout=30.0) for number in range(20)]
                    replies[turn % 20].cancel()
                    results = await asyncio.gather(*replies, return_exceptions=True)
                    for number, result in enumerate(results):
                        cancelled = number == turn % 20 and isinstance(result, ga.RequestCancelled)
                        assert cancelled or result == (turn, number)

            def block() -> None:
                for number in range(300):
                    assert actor.submit(answer(number)).result(30.0) == number

            in_threads(lambda: run("asyncio", main()), block, block)
            stats = ctx.stats()["scripted"]
        assert stats.submitted == stats.completed + stats.failed + stats.cancelled == 1200
    finally:
        sys.setswitchinterval(interval)


# What it costs


def test_the_bridge_benchmark_measures_both_sides_in_one_run() -> None:
    figures = bridge.run(concurrency=(16,), latencies=100, requests=256, rounds=2)
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
    """In a crowd, and alone on one core, by a quarter at least.

    Alone on two cores, both cost little more than two wake-ups of a sleeping core, whatever the code between them does:
    where the threads land then changes a try's ratio from 0.2 to 5. Each try has threads of its own.
    """

    def share() -> float:
        with (
            one_core() if crowd == 1 else contextlib.nullcontext(),
            ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE)) as ctx,
        ):
            kinds = {"service": bridge._request(ctx), "to_thread": bridge._to_thread}
            measure = bridge._latencies(kinds, 300) if crowd == 1 else bridge._throughputs(kinds, crowd, 2048)
            return 1.0 / run(loop, measure)["ratio"]

    below(0.75 if crowd == 1 else 1.0, share)


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
    """Its caller waits for all of them, and what runs after a thread has woken up runs with cold caches.

    Times vary, the number of functions that are called does not. Here it is 45, with sleeping and waking.
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
