"""Turns: who of those that wait goes next. Clients take turns; of one client the short goes first, for a while."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import count

import anyio

from gpu_actors.errors import Overloaded

__all__ = ["Turns", "Waiter"]


class Waiter:
    """A piece of work that asks for a place. begun: whether it has one. spare: one of those that are kept for such.
    refusal: why it gets none.
    """

    __slots__ = (
        "begun",
        "client",
        "cost",
        "deadline",
        "priority",
        "rank",
        "refusal",
        "spare",
        "turn",
        "urgency",
        "waits",
    )

    def __init__(self, cost: float, deadline: float | None, client: str, priority: int) -> None:
        self.cost = cost
        self.deadline = deadline
        self.client = client
        self.priority = priority
        self.turn: anyio.Event | None = None
        self.begun = self.spare = self.waits = False
        self.refusal: Overloaded | None = None
        self.rank: tuple[float, int] = (0.0, 0)
        self.urgency = 0.0


class _Client:
    """served: the cost of its work that has begun, by its weight. cost: of its work that waits. read: how many of its
    requests are being read.
    """

    __slots__ = ("cost", "held", "queue", "read", "served", "waiting", "weight")

    def __init__(self, served: float, weight: float) -> None:
        self.served = served
        self.weight = weight
        self.held = self.waiting = self.read = 0
        self.cost = 0.0
        self.queue: list[tuple[tuple[float, int], Waiter]] = []

    def head(self) -> Waiter | None:
        while self.queue and not self.queue[0][1].waits:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue else None


class Turns:
    """Those that wait, by client. weights: of clients, where it is not 1. cost: of all that wait."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.cost = 0.0
        self._weights = weights
        self._clients: dict[str, _Client] = {}
        self._waiting = 0
        self._served = 0.0  # of the client whose turn was the last: where one that comes begins
        self._begun = 0.0  # the cost of all work that has begun, by which those that wait grow old
        self._numbers = count()

    def __len__(self) -> int:
        return self._waiting

    def held(self, client: str) -> int:
        """Places that a client has."""
        found = self._clients.get(client)
        return found.held if found is not None else 0

    def under_way(self, client: str) -> int:
        """Places and waits of a client, and its requests that are being read."""
        found = self._clients.get(client)
        return found.held + found.waiting + found.read if found is not None else 0

    def ahead(self, waiter: Waiter) -> float:
        """The cost of what goes before a newcomer: its client's own work, and as much of each other client's."""
        mine = self._clients.get(waiter.client)
        own, weight = (mine.cost, mine.weight) if mine is not None else (0.0, self._weights.get(waiter.client, 1.0))
        others = ((one.cost, one.weight) for one in self._clients.values() if one is not mine and one.waiting)
        return own + sum(min(cost, (own + waiter.cost) * other / weight) for cost, other in others)

    def read_ahead(self, client: str) -> float:
        """How many that are being read go before a newcomer: its client's own, and as many of each other client's."""
        mine = self._clients.get(client)
        own, weight = (mine.read, mine.weight) if mine is not None else (0, self._weights.get(client, 1.0))
        others = (one for one in self._clients.values() if one is not mine and one.read)
        return own + sum(min(one.read, (own + 1) * one.weight / weight) for one in others)

    def begin_reading(self, client: str) -> None:
        """One of its requests is being read."""
        self._client(client).read += 1

    def end_reading(self, client: str) -> None:
        """It is read."""
        self._clients[client].read -= 1
        self._forget(client)

    def add(self, waiter: Waiter, worth: float) -> None:
        """Let it wait. worth: cost that a step of priority is worth."""
        client = self._client(waiter.client)
        client.served = max(client.served, self._served)
        waiter.urgency = waiter.priority * worth
        waiter.rank = (self._begun + waiter.cost - waiter.urgency, next(self._numbers))
        waiter.waits = True
        heapq.heappush(client.queue, (waiter.rank, waiter))
        client.waiting += 1
        client.cost += waiter.cost
        self.cost += waiter.cost
        self._waiting += 1

    def remove(self, waiter: Waiter) -> None:
        """It waits no longer."""
        if waiter.waits:
            waiter.waits = False
            client = self._clients[waiter.client]
            client.waiting -= 1
            self._waiting -= 1
            # Floats of far sizes leave a rest of their sum.
            client.cost = client.cost - waiter.cost if client.waiting else 0.0
            self.cost = self.cost - waiter.cost if self._waiting else 0.0
            self._forget(waiter.client)

    def next(self, may: Callable[[Waiter], bool] | None) -> Waiter | None:
        """Whose turn it is. may: which ones may begin; None: all."""
        heads = ((one.served, one.head()) for one in self._clients.values() if one.waiting)
        ordered = [
            (served - head.urgency, head.rank, head)
            for served, head in heads
            if head is not None and (may is None or may(head))
        ]
        return min(ordered)[2] if ordered else None

    def begin(self, waiter: Waiter) -> None:
        """It has a place."""
        waiter.begun = True
        client = self._client(waiter.client)
        client.held += 1
        self._served = max(self._served, client.served)
        client.served = self._served + waiter.cost / client.weight
        self._begun += waiter.cost

    def end(self, waiter: Waiter) -> None:
        """Its place is free."""
        self._clients[waiter.client].held -= 1
        self._forget(waiter.client)

    def _client(self, name: str) -> _Client:
        found = self._clients.get(name)
        if found is None:
            found = self._clients[name] = _Client(self._served, self._weights.get(name, 1.0))
        return found

    def _forget(self, name: str) -> None:
        client = self._clients[name]
        if not client.held and not client.waiting and not client.read:
            del self._clients[name]
