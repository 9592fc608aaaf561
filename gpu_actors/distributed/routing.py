"""Routing: chooses the worker for a request or a new sequence. It works on names and numbers only.

A stateless request goes to the less loaded of two random workers (Mitzenmacher, "The power of two choices in randomized
load balancing", 1996). A sequence goes to a worker that has the pages of its beginning according to the `Directory`. A
wrong entry costs a prefill, but makes no answer wrong. Other prefixes go to their place on a ring of hashes with
bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350). The place is the same for several routers.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

__all__ = ["Directory", "Homes", "Ring", "less_loaded_of_two"]

# How many digests a directory holds by default, of 0.15 KiB each.
DIRECTORY = 1 << 16


def less_loaded_of_two(loads: Mapping[str, float], dice: random.Random) -> str:
    """The less loaded of two random workers. loads: the workers' loads by name, at least one."""
    names = list(loads)
    drawn = dice.sample(names, min(2, len(names)))
    return min(drawn, key=loads.__getitem__)


class Directory:
    """Notes which worker has the pages of a prefix. Keeps the ``capacity`` last used digests."""

    def __init__(self, capacity: int = DIRECTORY) -> None:
        self._capacity = capacity
        self._workers: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def find(self, digests: Sequence[bytes]) -> Iterator[str]:
        """The workers that have pages of the prefix. The worker with the longest beginning comes first."""
        for digest in reversed(digests):
            worker = self._workers.get(digest)
            if worker is not None:
                yield worker

    def note(self, digests: Sequence[bytes], worker: str) -> None:
        for digest in digests:
            self._workers[digest] = worker
            self._workers.move_to_end(digest)
        while len(self._workers) > self._capacity:
            self._workers.popitem(last=False)

    def forget(self, worker: str) -> None:
        for digest in [digest for digest, name in self._workers.items() if name == worker]:
            del self._workers[digest]


class Ring:
    """Workers on a circle of hashes, each at ``points`` places."""

    def __init__(self, points: int = 64) -> None:
        self._points = points
        self._places: list[tuple[bytes, str]] = []

    def add(self, worker: str) -> None:
        places = [(_hash(f"{worker}/{point}".encode()), worker) for point in range(self._points)]
        self._places = sorted(self._places + places)

    def remove(self, worker: str) -> None:
        self._places = [place for place in self._places if place[1] != worker]

    def from_place_of(self, key: bytes) -> Iterator[str]:
        """Every worker once, in the order of the circle, starting at the key's place."""
        places = self._places  # never changed in place, so that a worker may join or leave meanwhile
        start = bisect_left(places, (_hash(key), ""))
        yielded: set[str] = set()
        for at in chain(range(start, len(places)), range(start)):
            worker = places[at][1]
            if worker not in yielded:
                yielded.add(worker)
                yield worker


class Homes:
    """Chooses the homes of new sequences.

    bound: how many times the mean load of all workers a worker's load may be.
    slots: how many sequences a worker should have at most. Below half of them it always takes more, because a bound
        from a small mean is noise.
    directory: how many digests are remembered.
    """

    def __init__(self, dice: random.Random, bound: float = 1.25, slots: int = 64, directory: int = DIRECTORY) -> None:
        self.directory = Directory(directory)
        self.ring = Ring()
        self._dice = dice
        self._bound = bound
        self._slots = slots

    def limit(self, loads: Mapping[str, float]) -> float:
        """The load at which a worker gets no new sequence if another has room."""
        mean = (sum(loads.values()) + 1) / len(loads)
        return max(self._bound * mean, self._slots / 2)

    def choose(self, digests: Sequence[bytes], loads: Mapping[str, float]) -> str:
        """Choose a home. loads: the workers' loads, at least one. digests: of the prompt's pages, from the first on."""
        limit = self.limit(loads)
        home = None
        if digests:
            by_prefix = self.directory.find(digests)
            by_hash = self.ring.from_place_of(digests[0])
            home = next((name for name in chain(by_prefix, by_hash) if loads.get(name, limit) < limit), None)
        if home is None:
            home = less_loaded_of_two(loads, self._dice)
        self.directory.note(digests, home)
        return home

    def forget(self, worker: str) -> None:
        """Forget the pages of a worker, which has lost them."""
        self.directory.forget(worker)


def _hash(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=8).digest()
