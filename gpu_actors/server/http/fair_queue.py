"""FairQueue: decides which waiter is next. Clients take turns; within one client short work goes first, for a while."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

import anyio

from gpu_actors.errors import Overloaded

__all__ = ["FairQueue", "Waiter"]


@dataclass(slots=True, eq=False)
class Waiter:
    """A piece of work that waits for a place.

    decided: set once the waiter is admitted or refused.
    spare: whether it holds a spare place, above the limit.
    """

    cost: float
    deadline: float | None
    client: str
    priority: int
    decided: anyio.Event | None = None
    admitted: bool = False
    spare: bool = False
    waits: bool = False
    refusal: Overloaded | None = None
    rank: tuple[float, int] = (0.0, 0)
    urgency: float = 0.0


@dataclass(slots=True, eq=False)
class _Client:
    """served: the cost of its admitted work, divided by its weight. cost: the cost of its waiting work."""

    served: float
    weight: float
    held: int = 0
    waiting: int = 0
    read: int = 0
    cost: float = 0.0
    queue: list[tuple[tuple[float, int], Waiter]] = field(default_factory=list)

    def head(self) -> Waiter | None:
        while self.queue and not self.queue[0][1].waits:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue else None


class FairQueue:
    """The waiters, by client. weights: by client name; 1 for absent ones. cost: the cost of all waiting work."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.cost = 0.0
        self._weights = weights
        self._clients: dict[str, _Client] = {}
        self._waiting = 0
        self._served = 0.0  # ``served`` of the client that was served last; a new client begins there
        self._admitted_cost = 0.0  # the cost of all admitted work, by which waiters age
        self._numbers = count()

    def __len__(self) -> int:
        return self._waiting

    def held(self, client: str) -> int:
        entry = self._clients.get(client)
        return entry.held if entry is not None else 0

    def under_way(self, client: str) -> int:
        """How many requests of a client hold a place, wait or are being read."""
        entry = self._clients.get(client)
        return entry.held + entry.waiting + entry.read if entry is not None else 0

    def ahead(self, waiter: Waiter) -> float:
        """The waiting cost ahead of a new waiter: all of its own client, and up to as much of each other client."""
        entry = self._clients.get(waiter.client)
        cost, weight = (entry.cost, entry.weight) if entry is not None else (0.0, self._weights.get(waiter.client, 1.0))
        others = ((one.cost, one.weight) for one in self._clients.values() if one is not entry and one.waiting)
        return cost + sum(min(other_cost, (cost + waiter.cost) * other / weight) for other_cost, other in others)

    def read_ahead(self, client: str) -> float:
        """How many requests being read are ahead of a new one: all of its client, and as many of each other client."""
        entry = self._clients.get(client)
        own_reads, weight = (entry.read, entry.weight) if entry is not None else (0, self._weights.get(client, 1.0))
        others = (one for one in self._clients.values() if one is not entry and one.read)
        return own_reads + sum(min(one.read, (own_reads + 1) * one.weight / weight) for one in others)

    def begin_reading(self, client: str) -> None:
        self._client(client).read += 1

    def end_reading(self, client: str) -> None:
        self._clients[client].read -= 1
        self._forget(client)

    def add(self, waiter: Waiter, worth: float) -> None:
        """Enqueue a waiter. worth: the cost that one step of priority is worth."""
        client = self._client(waiter.client)
        client.served = max(client.served, self._served)
        waiter.urgency = waiter.priority * worth
        waiter.rank = (self._admitted_cost + waiter.cost - waiter.urgency, next(self._numbers))
        waiter.waits = True
        heapq.heappush(client.queue, (waiter.rank, waiter))
        client.waiting += 1
        client.cost += waiter.cost
        self.cost += waiter.cost
        self._waiting += 1

    def remove(self, waiter: Waiter) -> None:
        if waiter.waits:
            waiter.waits = False
            client = self._clients[waiter.client]
            client.waiting -= 1
            self._waiting -= 1
            # Sums of floats of different magnitudes leave a remainder.
            client.cost = client.cost - waiter.cost if client.waiting else 0.0
            self.cost = self.cost - waiter.cost if self._waiting else 0.0
            self._forget(waiter.client)

    def next(self, eligible: Callable[[Waiter], bool] | None) -> Waiter | None:
        """The next waiter, or None. eligible: whether a waiter may be admitted; None: all may."""
        heads = ((one.served, one.head()) for one in self._clients.values() if one.waiting)
        ordered = [
            (served - head.urgency, head.rank, head)
            for served, head in heads
            if head is not None and (eligible is None or eligible(head))
        ]
        return min(ordered)[2] if ordered else None

    def begin(self, waiter: Waiter) -> None:
        waiter.admitted = True
        client = self._client(waiter.client)
        client.held += 1
        self._served = max(self._served, client.served)
        client.served = self._served + waiter.cost / client.weight
        self._admitted_cost += waiter.cost

    def end(self, waiter: Waiter) -> None:
        self._clients[waiter.client].held -= 1
        self._forget(waiter.client)

    def _client(self, name: str) -> _Client:
        entry = self._clients.get(name)
        if entry is None:
            entry = self._clients[name] = _Client(self._served, self._weights.get(name, 1.0))
        return entry

    def _forget(self, name: str) -> None:
        client = self._clients[name]
        if not client.held and not client.waiting and not client.read:
            del self._clients[name]
