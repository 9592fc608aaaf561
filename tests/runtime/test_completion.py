"""A launch is settled once, in order: by the loop that launched it if it is brief, else by the stream's thread."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from inside.devices import Event
from inside.package import SystemClock
from support.interrupting import Case, each_point
from support.service import eventually

from gpu_actors.runtime import completion
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.completion import Completion
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.progress import Progress
from gpu_actors.runtime.reply import Reply
from gpu_actors.runtime.waking import Outbox

pytestmark = pytest.mark.usefixtures("all_threads_end")


class Launch(Event):
    """Ends when told, or this many seconds after its creation. Notes which threads poll it."""

    def __init__(self, seconds: float | None = None) -> None:
        self.outputs = {}
        self.looks: list[int] = []
        self._over = threading.Event()
        self._end = None if seconds is None else time.monotonic() + seconds

    def end(self) -> None:
        self._over.set()

    def done(self) -> bool:
        self.looks.append(threading.get_ident())
        return self._over.is_set() or (self._end is not None and time.monotonic() >= self._end)

    def wait(self) -> None:
        if self._end is None:
            assert self._over.wait(30.0)
        else:
            time.sleep(max(0.0, self._end - time.monotonic()))


class Stream:
    """A completion with its mailbox. settled: the launches' numbers and the threads that settled them, in order."""

    def __init__(self) -> None:
        self.mailbox = Mailbox("stream", 1 << 20, 1 << 20)
        self.completion = Completion(
            "stream", self.mailbox, SystemClock(), lambda error: error, Progress(3, lambda: 0, lambda: None)
        )
        self.settled: list[tuple[int, int]] = []
        self._working = threading.Lock()  # only one thread at a time does an actor's work
        self._count = 0

    def launch(self, event: Event, finish: Callable[[], object] = lambda: None) -> Call[Any]:
        call: Call[Any] = Call(None, self.mailbox)
        assert call.claim()
        with self._working:
            number, self._count = self._count, self._count + 1

            def finished(_: Any) -> tuple[int]:
                self.settled.append((number, threading.get_ident()))
                finish()
                return (number,)

            outbox = Outbox()
            self.completion.watch(event, (call,), finished, outbox)
            outbox.flush()
        return call

    def thread(self) -> int:
        thread = self.completion._thread
        assert thread is not None
        assert thread.ident is not None
        return thread.ident

    def wake(self) -> None:
        """Wake the thread, which stays awake for a while after a launch."""
        event = Launch()
        call = self.launch(event)
        event.end()
        assert call.wait(30.0)
        self.settled.clear()
        self.completion._brief = True  # a busy machine may have made it long


@pytest.fixture
def stream() -> Iterator[Stream]:
    stream = Stream()
    yield stream
    assert stream.completion.close(30.0)
    assert stream.mailbox.stats().in_flight == 0


async def leave_to_the_loop(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wake the thread, and keep it from polling again."""
    stream.wake()
    monkeypatch.setattr(completion, "_TICK", 60.0)
    await asyncio.sleep(0.1)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_loop_settles_what_it_launched_without_the_thread(stream: Stream) -> None:
    here = threading.get_ident()
    for _ in range(200):
        event = Launch()
        call = stream.launch(event)
        event.end()
        await turns(2)
        assert call.done
    # The thread is woken for the first launch, and polls now and then.
    assert sum(thread == here for _, thread in stream.settled) > 150


async def test_what_a_loop_has_settled_is_freed_at_once(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream.wake()
    monkeypatch.setattr(completion, "_TICK", 60.0)
    event = Launch()
    call, freed = stream.launch(event), weakref.ref(event)
    stream.completion._bell.put(None)
    time.sleep(0.1)  # noqa: ASYNC251 (the thread looks, and leaves it to the loop)
    event.end()
    del event
    await turns(2)
    assert call.done
    assert freed() is None
    stream.completion._bell.put(None)


async def test_a_loop_that_is_blocked_leaves_it_to_the_thread(stream: Stream) -> None:
    for _ in range(3):
        event = Launch()
        call = stream.launch(event)
        event.end()
        assert call.wait(30.0)  # blocks the loop
        eventually(lambda: stream.completion._asleep)
    assert {thread for _, thread in stream.settled} == {stream.thread()}
    await turns(2)


async def test_a_launch_settles_those_before_it_that_are_over(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    await leave_to_the_loop(stream, monkeypatch)
    events = [Launch() for _ in range(3)]
    calls = []
    for event in events:
        calls.append(stream.launch(event))
        event.end()
        assert all(call.done for call in calls[:-1])
    assert {thread for _, thread in stream.settled} == {threading.get_ident()}
    await turns(2)


async def test_ctrl_c_while_a_launch_settles_another_is_the_senders(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Call[Any]) -> None:
        raise KeyboardInterrupt

    await leave_to_the_loop(stream, monkeypatch)
    event, later = Launch(), Launch()
    call = stream.launch(event)
    call.when_done(interrupt)
    event.end()
    with pytest.raises(KeyboardInterrupt):
        stream.launch(later)
    later.end()
    await turns(2)
    assert [number for number, _ in stream.settled] == [1, 2]


async def test_a_loop_lets_a_thread_look_that_waits_for_the_gil(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave_to_the_loop(stream, monkeypatch)
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=slept.append)
    for next_look in (time.monotonic() + 60.0, time.monotonic() - 1.0):
        event = Launch()
        stream.launch(event)
        event.end()
        with monkeypatch.context() as patch:
            patch.setattr(completion, "time", clock)
            patch.setattr(stream.completion, "_next_look", next_look)
            await turns(2)
    assert slept == [completion._WAKING]


async def test_a_long_launch_is_not_polled_for_long(stream: Stream) -> None:
    stream.wake()
    here, event = threading.get_ident(), Launch()
    call = stream.launch(event)
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        await turns(1)
    looked = event.looks.count(here)
    await turns(1000)
    assert event.looks.count(here) == looked
    assert stream.completion._loop is None
    later = Launch()
    last = stream.launch(later)
    await turns(1000)
    assert event.looks.count(here) == looked
    event.end()
    later.end()
    assert call.wait(30.0)
    assert last.wait(30.0)


async def test_the_thread_takes_over_at_once_what_the_loop_gives_up(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave_to_the_loop(stream, monkeypatch)
    event = Launch()
    call = stream.launch(event)
    while stream.completion._loop is not None:
        await turns(1)
    event.end()
    assert call.wait(30.0)


def test_a_thread_does_not_fall_asleep_beside_a_launch_that_rang_no_bell(stream: Stream) -> None:
    event = Launch()
    call = stream.launch(event)
    time.sleep(0.1)  # the thread is woken and waits for the launch
    while not stream.completion._bell.empty():
        stream.completion._bell.get_nowait()
    stream.completion._sleep(None)
    event.end()
    assert call.wait(30.0)


async def test_a_stream_whose_launches_are_brief_again_is_polled_again(stream: Stream) -> None:
    async def launched(seconds: float) -> None:
        call = stream.launch(Launch(seconds))
        while not call.done:
            await turns(1)

    end = time.monotonic() + 30.0
    while stream.completion._brief:  # on a busy machine the thread may come late to a launch and find it short
        await launched(0.02)
        assert time.monotonic() < end
    while not stream.completion._brief:
        await launched(1.5e-4)
        assert time.monotonic() < end


async def test_launches_are_settled_in_order(stream: Stream) -> None:
    stream.wake()
    first, second = Launch(), Launch()
    calls = [stream.launch(first), stream.launch(second)]
    second.end()
    await turns(50)
    await asyncio.sleep(0.02)
    assert not any(call.done for call in calls)
    first.end()
    assert calls[1].wait(30.0)
    assert [number for number, _ in stream.settled] == [1, 2]


def test_a_loop_that_stops_while_it_polls_leaves_it_to_the_thread(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def leave() -> tuple[Launch, Call[Any]]:
        event = Launch()
        return event, stream.launch(event)

    stream.wake()
    for _ in range(3):
        loop = asyncio.new_event_loop()
        event, call = loop.run_until_complete(leave())
        loop.close()
        event.end()
        assert call.wait(30.0)
    monkeypatch.setattr(completion, "_TICK", 1.0)
    began = time.monotonic()
    for _ in range(20):  # launched by no loop, so the thread leaves no time to a loop
        event = Launch()
        call = stream.launch(event)
        event.end()
        assert call.wait(30.0)
    assert time.monotonic() - began < 10.0


def test_ctrl_c_within_a_poll_reaches_the_program_and_loses_no_answer(stream: Stream) -> None:
    def interrupt(_: Call[Any]) -> None:
        raise KeyboardInterrupt

    async def program() -> None:
        stream.wake()
        events = [Launch() for _ in range(3)]
        calls.extend(map(stream.launch, events))
        calls[1].when_done(interrupt)
        for event in events:
            event.end()
        await asyncio.sleep(30.0)

    here, attempts = threading.get_ident(), 0
    while True:
        calls: list[Call[Any]] = []
        loop = asyncio.new_event_loop()
        try:
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(asyncio.wait_for(program(), 1.0))
        except TimeoutError:  # the thread came first
            attempts += 1
            assert attempts < 20
            continue
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        break
    assert {thread for _, thread in stream.settled[:1]} == {here}
    assert all(call.wait(30.0) for call in calls)
    eventually(lambda: stream.mailbox.stats().in_flight == 0)


async def test_an_exit_that_callbacks_raise_on_the_thread_keeps_no_waiter_asleep(stream: Stream) -> None:
    def leave(_: Call[Any]) -> None:
        raise SystemExit(3)

    events = [Launch() for _ in range(3)]
    calls = [await asyncio.to_thread(stream.launch, event) for event in events]
    waiting = [asyncio.create_task(Reply(call).wait()) for call in calls]
    await turns(2)
    for call in calls[::2]:
        call.when_done(leave)
    for event in reversed(events):
        event.end()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 30.0) == [0, 1, 2]


@pytest.mark.timeout(180)
def test_ctrl_c_at_any_point_of_a_loops_work_loses_no_answer() -> None:
    streams: list[Stream] = []

    def make() -> Case:
        stream, loop = Stream(), asyncio.new_event_loop()
        streams.append(stream)
        calls: list[Call[Any]] = []
        seen: list[str] = []

        def interrupt() -> None:
            seen.append("pressed")
            raise KeyboardInterrupt

        async def program() -> None:
            calls.extend(stream.launch(Launch(1e-4)) for _ in range(2))
            await asyncio.sleep(5e-4)
            calls.append(stream.launch(Launch(0.0)))

        def go() -> None:
            try:
                loop.run_until_complete(program())
            except KeyboardInterrupt:
                seen.append("raised")
            finally:
                loop.close()

        def check() -> None:
            assert seen in ([], ["pressed", "raised"])
            assert all(call.wait(30.0) for call in calls)
            assert stream.completion.close(30.0)
            assert stream.mailbox.stats().in_flight == 0
            numbers = [number for number, _ in stream.settled]
            assert numbers == sorted(set(numbers))

        return Case(go, interrupt, check)

    assert each_point(("runtime/completion.py",), make) > 30
    assert streams[-1].completion.close(30.0)  # the stream of the uninterrupted case


@pytest.mark.parametrize("seed", range(4))
def test_launches_of_loops_and_threads_are_each_settled_once_and_in_order(
    stream: Stream, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "_TICK", (1e-4, 1e-2)[seed % 2])
    draw = random.Random(seed)
    calls: list[Call[Any]] = []

    def launch(random_seconds: random.Random) -> Call[Any]:
        calls.append(stream.launch(Launch(random_seconds.choice((0.0, 2e-5, 1e-4, 5e-4, 6e-3)))))
        return calls[-1]

    async def program(own: random.Random) -> None:
        for _ in range(150):
            call = launch(own)
            while own.random() < 0.7 and not call.done:
                await turns(own.randrange(3))
            if own.random() < 0.05:
                time.sleep(0.003)  # noqa: ASYNC251 (blocks the loop)

    def thread(own: random.Random) -> None:
        for _ in range(150):
            call = launch(own)
            if own.random() < 0.5:
                assert call.wait(30.0)

    run = [
        threading.Thread(target=lambda own: asyncio.run(program(own)), args=(random.Random(draw.random()),)),
        threading.Thread(target=lambda own: asyncio.run(program(own)), args=(random.Random(draw.random()),)),
        threading.Thread(target=thread, args=(random.Random(draw.random()),)),
    ]
    for each in run:
        each.start()
    for each in run:
        each.join(60.0)
        assert not each.is_alive()
    assert all(call.wait(30.0) for call in calls)
    assert [number for number, _ in stream.settled] == list(range(450))
