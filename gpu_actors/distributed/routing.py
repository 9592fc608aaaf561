"""Routing: which worker gets a request, and which one a new sequence. Names and numbers only.

Stateless requests go to the less loaded of two workers drawn by lot (Mitzenmacher, "The power of two choices in
randomized load balancing", 1996), which needs no look at all the others.

A sequence goes where the pages of its beginning are. The `Directory` remembers that for each prefix, and is a hint: a
wrong entry costs a prefill, never a wrong answer. A prefix that it does not know goes to its place on a ring of hashes
with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350), so that several routers send it to the same
worker, and so that few prefixes move when a worker comes or goes.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

__all__ = ["Directory", "Homes", "Ring", "less_loaded_of_two"]

# Digests, of 0.15 KiB each.
DIRECTORY = 1 << 16


def less_loaded_of_two(loads: Mapping[str, float], dice: random.Random) -> str:
    """One of the workers. loads: of each, at least one."""
    names = list(loads)
    drawn = dice.sample(names, min(2, len(names)))
    return min(drawn, key=loads.__getitem__)


class Directory:
    """Which worker has the pages of a prefix. Keeps the ``capacity`` digests that were used last."""

    def __init__(self, capacity: int = DIRECTORY) -> None:
        self._capacity = capacity
        self._workers: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, digests: Sequence[bytes]) -> Iterator[str]:
        """The workers that are known for the prefix, that of the longest beginning first."""
        for digest in reversed(digests):
            worker = self._workers.get(digest)
            if worker is not None:
                yield worker

    def note(self, digests: Sequence[bytes], worker: str) -> None:
        """The worker has the pages of these from now on."""
        for digest in digests:
            self._workers[digest] = worker
            self._workers.move_to_end(digest)
        while len(self._workers) > self._capacity:
            self._workers.popitem(last=False)

    def forget(self, worker: str) -> None:
        """That worker has nothing any more."""
        for digest in [digest for digest, name in self._workers.items() if name == worker]:
            del self._workers[digest]


class Ring:
    """Workers on a circle of hashes, each at so many ``points``."""

    def __init__(self, points: int = 64) -> None:
        self._points = points
        self._places: list[tuple[bytes, str]] = []

    def add(self, worker: str) -> None:
        places = [(_hash(f"{worker}/{point}".encode()), worker) for point in range(self._points)]
        self._places = sorted(self._places + places)

    def remove(self, worker: str) -> None:
        self._places = [place for place in self._places if place[1] != worker]

    def from_place_of(self, key: bytes) -> Iterator[str]:
        """Every worker once, in the order in which the circle has them behind the key."""
        places = self._places  # never changed in place, so that a worker may come or go meanwhile
        start = bisect_left(places, (_hash(key), ""))
        seen: set[str] = set()
        for at in chain(range(start, len(places)), range(start)):
            worker = places[at][1]
            if worker not in seen:
                seen.add(worker)
                yield worker


class Homes:
    """Gives new sequences a home.

    bound: how far above the mean of all workers one may be loaded. slots: sequences that a worker is good for; below
    half of them it always takes more, because a bound by a small mean is noise. directory: digests that are kept.
    """

    def __init__(self, dice: random.Random, bound: float = 1.25, slots: int = 64, directory: int = DIRECTORY) -> None:
        self.directory = Directory(directory)
        self.ring = Ring()
        self._dice = dice
        self._bound = bound
        self._slots = slots

    def limit(self, loads: Mapping[str, float]) -> float:
        """The load from which on a worker gets no new sequence where another has room."""
        mean = (sum(loads.values()) + 1) / len(loads)
        return max(self._bound * mean, self._slots / 2)

    def choose(self, digests: Sequence[bytes], loads: Mapping[str, float]) -> str:
        """A home among the workers with ``loads``, at least one. digests: of the prompt's pages, from the first on."""
        limit = self.limit(loads)
        chosen = None
        if digests:
            known = self.directory.find(digests)
            placed = self.ring.from_place_of(digests[0])
            chosen = next((name for name in chain(known, placed) if loads.get(name, limit) < limit), None)
        if chosen is None:
            chosen = less_loaded_of_two(loads, self._dice)
        self.directory.note(digests, chosen)
        return chosen

    def forget(self, worker: str) -> None:
        """The worker has lost its pages."""
        self.directory.forget(worker)


def _hash(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=8).digest()
