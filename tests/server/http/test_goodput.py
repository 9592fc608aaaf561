"""Simulated goodput and fairness of an admission: a device that texts share, clients with deadlines, no real time."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from support.virtual_time import simulated

import gpu_actors as ga
from gpu_actors.server.http import admission as module
from gpu_actors.serving import Admission

TOKENS = 16


class Device:
    """A server with measured times: a step takes 4 ms, and 0.25 ms for each text; an HTTP request takes 0.2 ms."""

    def __init__(self, places: int = 256, step: float = 0.004, text: float = 0.00025, **options: Any) -> None:
        self.costs = step, text
        loop = asyncio.get_running_loop()
        self.time = loop.time
        clock: Any = SimpleNamespace(now=loop.time)
        self.admission = Admission(places, clock=clock, **options)
        self.running: dict[asyncio.Event, list[Any]] = {}
        self.spent = 0.0
        self.stepping = asyncio.create_task(self.step())

    async def step(self) -> None:
        while True:
            step, text = self.costs
            batch = list(self.running.items())  # later texts wait for the next step
            await asyncio.sleep(step + text * len(batch) + self.spent)
            self.spent = 0.0
            for done, work in batch:
                if done not in self.running:
                    continue
                work[0] -= 1
                work[1].did(1.0)
                if work[0] == 0:
                    del self.running[done]
                    done.set()

    async def answer(self, deadline: float, tokens: int = TOKENS, client: str = "") -> None:
        self.spent += 0.0002
        async with self.admission.reading(deadline, client=client):
            self.spent += 0.0002
        async with self.admission.place(deadline, cost=tokens, client=client) as place:
            done = asyncio.Event()
            self.running[done] = [tokens, place]
            try:
                async with asyncio.timeout_at(deadline):
                    await done.wait()
            except TimeoutError:
                raise ga.DeadlineExceeded("late") from None
            finally:
                self.running.pop(done, None)


class Clients:
    """Clients that ask again as soon as they are answered. impatient: even if they are told to return later."""

    def __init__(self, device: Device, until: float) -> None:
        self.device, self.until = device, until
        self.counts: Counter[str] = Counter()
        self.waits: list[float] = []

    async def ask(self, allowed: float, impatient: bool = False, **what: Any) -> None:
        time = self.device.time
        await asyncio.sleep(0)
        while time() < self.until:
            began = time()
            try:
                await self.device.answer(began + allowed, **what)
                self.counts["in time"] += 1
            except ga.Overloaded as error:
                self.waits.append(error.retry_after)
                self.counts["refused"] += 1
                wait = 0.001 if impatient else max(1.0, error.retry_after)
                await asyncio.sleep(min(wait, max(0.001, self.until - time())))
            except ga.DeadlineExceeded:
                self.counts["late"] += 1

    async def all_of(self, *crowd: Any) -> None:
        await asyncio.gather(*crowd)
        self.device.stepping.cancel()


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines use the loop's virtual time."""
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(module, "time", clock)


async def crowd(clients: int, deadline: float, impatient: bool, seconds: float) -> Clients:
    device = Device()
    found = Clients(device, device.time() + seconds)
    await found.all_of(*(found.ask(deadline, impatient) for _ in range(clients)))
    return found


@cache
def of_16(seconds: float) -> int:
    """The number of requests in time of 16 clients, who are never refused."""
    counts = simulated(crowd(16, 1.0, False, seconds)).counts
    assert counts.keys() == {"in time"}
    return counts["in time"]


@pytest.mark.parametrize(
    ("clients", "deadline", "impatient"),
    [(256, 1.0, False), (256, 3.0, False), (256, 1.0, True), (1024, 1.5, False)],
)
def test_crowds_with_deadlines_get_nearly_as_much_as_16_clients(clients: int, deadline: float, impatient: bool) -> None:
    seconds = 3.0
    found = simulated(crowd(clients, deadline, impatient, seconds))
    assert found.counts["in time"] >= 0.8 * of_16(seconds)
    assert found.counts["late"] <= 0.1 * found.counts["in time"], "what is begun is finished"
    assert (found.counts["refused"] > 0) == (clients > 80 * deadline * 1.4)


def test_who_returns_when_told_is_let_in() -> None:
    """Refused clients are told different times, so a second wave finds room."""
    found = simulated(crowd(512, 1.5, False, 6.0))
    assert found.counts["refused"] < found.counts["in time"]
    assert max(found.waits) <= 60.0


def test_many_run_where_that_is_worth_it_and_few_where_it_is_not() -> None:
    async def limit(text: float) -> int:
        device = Device(places=64, step=0.01, text=text)
        found = Clients(device, device.time() + 5.0)
        await found.all_of(*(found.ask(300.0, tokens=4) for _ in range(100)))
        return device.admission.stats().limit

    assert simulated(limit(0.0)) == 64, "a step takes the same time for any number of texts"
    assert simulated(limit(0.01)) <= 16, "a device that is full with one"
