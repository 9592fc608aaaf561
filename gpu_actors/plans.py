"""PlanCache: what was worked out for a problem once and holds for every request that poses it again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["PlanCache", "PlanCacheStats"]

Plan = TypeVar("Plan")


class PlanCacheStats(NamedTuple):
    hits: int
    misses: int
    evicted: int
    entries: int


class PlanCache(Generic[Plan]):
    """A bounded map from signatures to plans that forgets the least recently used. Safe to use from any thread."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._latest: Plan | None = None
        self._lock = threading.Lock()
        self._hits = self._misses = self._evicted = 0

    def find(self, signature: Hashable) -> Plan | None:
        """The plan of that signature, or None. Raises TypeError for a signature that cannot be hashed."""
        with self._lock:
            plan = self._plans.get(signature)
            if plan is not None:
                self._hits += 1
                if plan is not self._latest:
                    self._plans.move_to_end(signature)
                    self._latest = plan
            return plan

    def add(self, signature: Hashable, plan: Plan) -> None:
        """Keep a plan that was not found."""
        with self._lock:
            self._misses += 1
            self._plans[signature] = self._latest = plan
            if len(self._plans) > self._capacity:
                self._plans.popitem(last=False)
                self._evicted += 1

    def stats(self) -> PlanCacheStats:
        return PlanCacheStats(self._hits, self._misses, self._evicted, len(self._plans))
