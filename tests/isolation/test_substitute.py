"""A thread that reads a channel in place of the one in `serve`."""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.fault_injector import FaultInjector
from support.service import eventually

import gpu_actors as ga
from gpu_actors.isolation import pipe
from gpu_actors.isolation.arena import Arena
from gpu_actors.isolation.child import ReadingPipe
from gpu_actors.isolation.pipe import AdaptiveSpin, PipeChannel, Substitute


class Ends:
    """A channel that a thread serves, and the other side's end. A substitute may receive numbers but no texts."""

    def __init__(self) -> None:
        self.arenas = Arena(), Arena()
        mine, theirs = socket.socketpair()
        self.got: list[tuple[Any, int]] = []
        self.refused: BaseException | None = None
        self.raised: BaseException | None = None
        self.ended = False
        self.rounds = 0
        self.channel = PipeChannel(mine, False, *self.arenas, self._received, lambda record: type(record) is int)
        self.other = PipeChannel(theirs, True, *self.arenas[::-1], lambda *_: None)
        self.sent = 0
        self.thread = threading.Thread(target=self._serve)
        self.wakers: list[int] = []
        self.thread.start()
        self.send("begin")
        eventually(lambda: self.rounds == 2)  # it has received "begin" and sleeps again
        self.got.clear()

    def _received(self, sequence: int, record: Any) -> None:
        if record == "fail" or (record == 13 and threading.get_ident() != self.thread.ident):
            raise ZeroDivisionError
        self.got.append((record, threading.get_ident()))

    def _serve(self) -> None:
        try:
            self.channel.serve(self._tick)
            self.ended = True
        except BaseException as error:
            self.raised = error

    def _tick(self) -> float:
        self.rounds += 1
        return -1.0 if self.got and self.got[-1][0] == "stop" else 60.0

    def send(self, *records: Any) -> None:
        for record in records:
            self.sent += 1
            self.other.post(self.sent, self.other.pack(record))

    def substitute(self) -> tuple[Substitute, int]:
        """A substitute, and the function that wakes it."""
        waker = os.eventfd(0, os.EFD_NONBLOCK)
        self.wakers.append(waker)
        return self.channel.substitute(waker), waker

    def asleep(self) -> bool:
        """Whether a substitute reads and the serving thread sleeps until something arrives."""
        return self.channel._lent and not self.channel._watched & select.EPOLLIN


@contextmanager
def serving() -> Iterator[Ends]:
    ends = Ends()
    try:
        yield ends
    finally:
        if ends.thread.is_alive():
            ends.send("stop")
        ends.thread.join(30.0)
        alive = ends.thread.is_alive()
        ends.other.close()
        ends.channel.close()
        for arena in ends.arenas:
            arena.close()
        for waker in ends.wakers:
            os.close(waker)
        assert not alive


@contextmanager
def reading(work: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join(30.0)
    assert not thread.is_alive()


def test_what_comes_is_received_by_the_substitute_alone() -> None:
    with serving() as ends:
        substitute, _ = ends.substitute()
        rounds = ends.rounds
        with reading(substitute.read) as thread:
            eventually(ends.asleep)
            ends.send(1)
        assert ends.got == [(1, thread.ident)]
        assert ends.rounds == rounds, "the thread in serve slept on"
        ends.send(2)
        eventually(lambda: len(ends.got) == 2)
        assert ends.got[1] == (2, ends.thread.ident), "it has the channel again"


def test_a_record_that_is_not_for_it_goes_to_the_thread_that_serves_and_keeps_its_place() -> None:
    with serving() as ends:
        substitute, _ = ends.substitute()
        frames = []
        ends.other._send = lambda frame: frames.append(bytes(frame)) or len(frame)  # type: ignore[method-assign]
        ends.send(1, "two", 3)
        del ends.other._send
        with reading(substitute.read) as thread:
            eventually(ends.asleep)
            ends.other._socket.send(b"".join(frames))  # so that one poll finds them all
        eventually(lambda: len(ends.got) == 3)
        assert ends.got == [(1, thread.ident), ("two", ends.thread.ident), (3, ends.thread.ident)]


def test_while_the_thread_that_serves_has_records_left_no_other_reads() -> None:
    with serving() as ends:
        substitute, _ = ends.substitute()
        ends.channel._deferred.append((7, "left"))
        assert not substitute.read()
        ends.channel.wake()
        eventually(lambda: ends.got == [("left", ends.thread.ident)])


def test_one_reads_at_a_time_until_its_waker_ends_the_wait() -> None:
    with serving() as ends:
        (one, waker), (two, _) = ends.substitute(), ends.substitute()
        with reading(one.read):
            eventually(ends.asleep)
            assert not two.read()
            os.eventfd_write(waker, 1)
        assert not ends.got
        with pytest.raises(BlockingIOError):
            os.eventfd_read(waker)


def test_before_the_channel_is_served_no_other_reads() -> None:
    arenas = Arena(), Arena()
    mine, theirs = socket.socketpair()
    channel, waker = PipeChannel(mine, False, *arenas, lambda *_: None), os.eventfd(0)
    assert not channel.substitute(waker).read()
    assert channel._reading.acquire(blocking=False)
    os.close(waker)
    channel.close()
    theirs.close()
    for arena in arenas:
        arena.close()


def test_the_thread_that_serves_sees_what_a_substitute_meets() -> None:
    """The substitute meets the end of the channel or an error."""
    for raised in (None, ZeroDivisionError):
        with serving() as ends:
            substitute, _ = ends.substitute()
            with reading(substitute.read):
                eventually(ends.asleep)
                if raised is None:
                    ends.other._socket.shutdown(socket.SHUT_RDWR)
                else:
                    ends.send(13)
            ends.thread.join(30.0)
            assert (ends.ended, type(ends.raised)) == (raised is None, raised or type(None))


def test_a_backlog_is_sent_while_a_substitute_reads() -> None:
    with serving() as ends:
        substitute, _ = ends.substitute()
        with reading(substitute.read):
            eventually(ends.asleep)
            ends.channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            for number in range(200):
                ends.channel.post(number + 1, ends.channel.pack("x" * 1000))
            assert ends.channel.waiting
            ends.other._socket.setblocking(True)
            ends.other._socket.settimeout(30.0)
            eventually(lambda: ends.other._socket.recv(1 << 20) and not ends.channel.waiting)
            assert ends.asleep()
            ends.send(1)


# Staying awake


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def have(count: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))

    have(2)
    return have


def paced(spin: AdaptiveSpin, asleep: float, awake: float, turns: int) -> int:
    """Record this many requests with these waits, asleep or awake. Returns how many were waited for awake."""
    stayed = 0
    for _ in range(turns):
        stayed += spin.spinning
        spin.record(awake if spin.spinning else asleep)
    return stayed


def test_requests_that_come_sooner_awake_are_waited_for_awake(cpus: Callable[[int], None]) -> None:
    spin = AdaptiveSpin()
    assert paced(spin, 120e-6, 90e-6, AdaptiveSpin.TRIALS) == AdaptiveSpin.TRIALS // 2, "both are tried in turn"
    assert paced(spin, 120e-6, 90e-6, AdaptiveSpin.PERIOD) == AdaptiveSpin.PERIOD
    assert paced(spin, 120e-6, 90e-6, AdaptiveSpin.TRIALS) == AdaptiveSpin.TRIALS // 2, "and again"


@pytest.mark.parametrize("awake", [111e-6, 120e-6, 240e-6])
def test_where_they_do_not_its_thread_sleeps(cpus: Callable[[int], None], awake: float) -> None:
    spin = AdaptiveSpin()
    paced(spin, 120e-6, awake, AdaptiveSpin.TRIALS)
    assert paced(spin, 120e-6, awake, AdaptiveSpin.PERIOD) == 0


def test_a_judgement_holds_until_the_next_trial(cpus: Callable[[int], None]) -> None:
    spin = AdaptiveSpin()
    paced(spin, 120e-6, 90e-6, AdaptiveSpin.TRIALS + AdaptiveSpin.PERIOD)
    paced(spin, 90e-6, 120e-6, AdaptiveSpin.TRIALS)
    assert paced(spin, 120e-6, 90e-6, AdaptiveSpin.PERIOD) == 0


def test_after_a_late_request_its_thread_sleeps(cpus: Callable[[int], None]) -> None:
    spin = AdaptiveSpin()
    paced(spin, 120e-6, 90e-6, AdaptiveSpin.TRIALS + 10)
    assert spin.spinning
    spin.record(AdaptiveSpin.SPIN_SECONDS)
    assert not spin.spinning
    assert paced(spin, 1e-3, 1e-3, 1000) == 0
    spin.record(120e-6)
    paced(spin, 120e-6, 90e-6, 2 * (AdaptiveSpin.TRIALS + AdaptiveSpin.PERIOD))
    assert paced(spin, 120e-6, 90e-6, 100) > 40


def test_on_the_only_cpu_its_thread_sleeps(cpus: Callable[[int], None]) -> None:
    cpus(1)
    assert paced(AdaptiveSpin(), 120e-6, 90e-6, 1000) == 0


class FakePoll:
    """Finds something after this many polls, or asleep."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.looks = self.slept = 0

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        if timeout is None:
            self.slept += 1
            return [(1, 1)]
        self.looks += 1
        return [(1, 1)] if self.looks > self.after else []


@pytest.mark.parametrize(
    ("awake", "after", "looks", "slept"), [(False, 0, 0, 1), (True, 20, 21, 0), (True, 999, 250, 1)]
)
def test_it_looks_awake_for_a_while_and_then_sleeps(
    monkeypatch: pytest.MonkeyPatch, awake: bool, after: int, looks: int, slept: int
) -> None:
    clock = itertools.count(0, 1e-6)
    monkeypatch.setattr(pipe, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    here, there = socket.socketpair()
    with here, there:
        substitute = Substitute(SimpleNamespace(), here, there.fileno())  # type: ignore[arg-type]
    came: list[float] = []
    substitute._spin = SimpleNamespace(spinning=awake, record=came.append)  # type: ignore[assignment]
    substitute._poll = poll = FakePoll(after)  # type: ignore[assignment]
    assert substitute._wait() == [1]
    assert (poll.looks, poll.slept) == (pytest.approx(looks, abs=2), slept)
    assert len(came) == 1


# The actor's side


def test_an_actor_that_had_no_request_leaves_the_channel_alone() -> None:
    with serving() as ends:
        sleeper = ReadingPipe(ends.channel)
        with reading(sleeper.wait) as thread:
            ends.send(1)
            eventually(lambda: ends.got)
            assert thread.is_alive()
            sleeper.wake()
        assert ends.got == [(1, ends.thread.ident)]


def test_an_actor_that_had_one_reads_until_another_thread_wakes_it() -> None:
    with serving() as ends:
        sleeper = ReadingPipe(ends.channel)
        sleeper.wake()
        sleeper.wait()  # the channel has nothing, but the wake-up is not lost
        sleeper.wake()
        os.eventfd_read(sleeper._reader)
        with reading(sleeper.wait):
            eventually(ends.asleep)
            sleeper.wake()
        assert not ends.got


def test_an_actor_need_not_wake_itself_for_what_it_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as ends:
        sleeper = ReadingPipe(ends.channel)
        sleeper._due = True
        monkeypatch.setattr(ends.channel, "_received", lambda *_: sleeper.wake())
        with reading(sleeper.wait):
            eventually(ends.asleep)
            ends.send(1)
        monkeypatch.undo()
        assert sleeper._due, "it reads the next time too"
        os.set_blocking(sleeper._reader, False)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(sleeper._reader)


def test_an_isolated_actor_receives_its_next_request_on_its_own_thread(isolated: ga.GpuContext) -> None:
    actor = isolated.actor(FaultInjector)
    assert actor.submit(("note receivers",)).result(60.0) is None
    eventually(lambda: actor.submit(("received here",)).result(60.0))
    assert isolated.health().ready, "which another thread answers"
