"""Link, Relay and Worker over a channel that reorders, doubles, delays and drops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes.channel import BadChannel, BadNetwork
from inside.package import BUILT_IN

import gpu_actors as ga
from gpu_actors import KvCache, KvCacheActor
from gpu_actors.isolation.cells import RemoteChildren
from gpu_actors.isolation.channel import Link
from gpu_actors.isolation.records import Answer, Opened, Ping, Report, Stop
from gpu_actors.isolation.relay import Relay
from gpu_actors.isolation.worker import Worker

SPEC = ga.KvCacheSpec(num_blocks=64, page_size=8, kv_heads=1, head_dim=8, dtype="float32")


class Pair:
    """A relay and a worker in one process, with a bad network in between."""

    def __init__(self, network: BadNetwork, patience: float = 5.0) -> None:
        self.network = network
        self.now = 0.0
        self.broken: list[str] = []
        self.answers: list[Answer] = []
        self.info: Any = None
        there, here = BadChannel(network), BadChannel(network)
        self.relay: Relay = Relay(1024, lambda: None)
        self.to_worker: Link = Link(there, self._answered, self.broken.append, patience, lambda: self.now)
        self.worker: Worker = Worker(lambda record, about: self.to_relay.send(record, about), lambda: None)
        self.to_relay: Link = Link(here, self.worker.received, self.broken.append, patience, lambda: self.now)
        self._ends = {there: self.to_relay, here: self.to_worker}
        options = ga.ContextOptions()
        self.worker.open("mock", options, 1)
        self.until(lambda: self.info is not None)
        self.children: RemoteChildren = RemoteChildren(self.info, options, self.relay, BUILT_IN)
        self.relay.attach(self.to_worker, there, 1)

    def _answered(self, record: Any) -> None:
        if isinstance(record, Opened):
            self.info = record.info
        elif isinstance(record, Answer):
            self.answers.append(record)
            self.relay.answered(record)
        else:
            assert isinstance(record, Report)
            self.children.seen(record)

    def turn(self) -> None:
        self.network.deliver(lambda channel: self._ends[channel])
        if self.info is not None:
            self.relay.pump()
        time.sleep(0.0005)

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + 30.0
        while not done():
            assert time.monotonic() < end
            self.turn()

    def close(self) -> None:
        self.relay.give_up(lambda _: ga.ActorStopped("over"))
        self.children.timers.close()
        self.worker.received(Stop())


@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_answered_once_and_in_its_order(seed: int) -> None:
    network = BadNetwork(seed)
    pair = Pair(network)
    flash = pair.children.handle(ga.FlashAttnActor)
    cache = KvCache(pair.children, pair.children.handle(KvCacheActor), SPEC)
    opening = cache._open()
    pair.until(opening.done)
    cache._number = opening.result()
    creating = cache.create()
    pair.until(creating.done)
    seq = creating.result()
    replies: list[ga.Reply[Any]] = []
    appended: list[ga.Reply[Any]] = []
    for turn in range(60):
        q = np.full((1, 1, 1, 8), turn, np.float32)
        replies.append(flash.forward(q, q, q))
        appended.append(cache.append(seq, q[0], q[0]))
        if turn % 7 == 0:
            pair.turn()
    cancelled = flash.forward(q, q, q)
    assert cancelled.cancel()
    pair.until(lambda: all(reply.done() for reply in replies + appended))
    assert [float(reply.result().out[0, 0, 0, 0]) for reply in replies] == list(range(60))
    assert [reply.result() for reply in appended] == list(range(1, 61))
    assert pair.worker._cells["kv_cache"].mailbox.stats().submitted == 62
    numbers = [answer.number for answer in pair.answers]
    assert len(set(numbers)) == len(numbers)
    assert network.doubled > 5
    assert network.overtaken > 5
    assert not pair.broken
    pair.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_record_that_is_dropped_is_a_lost_generation(seed: int) -> None:
    network = BadNetwork(seed)
    told: list[Any] = []
    pair = Pair(network, patience=1.0)
    network.drop = 0.1
    flash = pair.children.handle(ga.FlashAttnActor)
    q = np.ones((1, 1, 1, 8), np.float32)
    replies = [flash.forward(q, q, q) for _ in range(100)]
    for reply in replies:
        reply.add_done_callback(told.append)
    end = time.monotonic() + 30.0
    while not pair.broken:
        assert time.monotonic() < end
        pair.turn()
        pair.now += 0.01
        pair.to_worker.send(Ping())  # as the program does every second, so that a gap at the end is seen too
        for link in (pair.to_worker, pair.to_relay):
            link.check()
    assert network.dropped
    assert "is missing" in pair.broken[0]
    pair.relay.lose(pair.relay.detach(), pair.children.next_generation(pair.broken[0]))
    assert len(told) == 100
    outcomes = {type(reply.exception()) for reply in replies}
    assert ga.ContextLost in outcomes
    assert outcomes <= {ga.ContextLost, type(None)}
    waiting = flash.forward(q, q, q)  # for the next worker
    for _ in range(50):
        pair.turn()
    assert not waiting.done()
    pair.close()
    with pytest.raises(ga.ActorStopped):
        waiting.result(0)


def test_a_gap_is_not_reported_before_its_time_and_once_it_is_filled() -> None:
    got: list[Any] = []
    broken: list[str] = []
    now = [0.0]
    link = Link(BadChannel(BadNetwork(0)), got.append, broken.append, 5.0, lambda: now[0])
    link.received(1, "a")
    link.received(3, "c")
    now[0] = 4.9
    link.check()
    assert got == ["a"]
    link.received(5, "e")
    link.received(2, "b")
    assert got == ["a", "b", "c"]
    now[0] = 9.0
    link.check()  # the gap before 5 is younger
    assert not broken
    now[0] = 15.0
    link.check()
    assert broken == ["record 4 of the channel is missing"]


def test_records_that_come_twice_or_too_late_are_dropped() -> None:
    got: list[Any] = []
    link = Link(BadChannel(BadNetwork(0)), got.append, print)
    for sequence in (1, 1, 3, 3, 2, 2, 3, 1, 4):
        link.received(sequence, sequence)
    assert got == [1, 2, 3, 4]
