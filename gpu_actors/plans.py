"""PlanCache: what was worked out for a problem once and holds for every request that poses it again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = ["PlanCache", "PlanCacheStats", "Planned"]

Plan = TypeVar("Plan")


class PlanCacheStats(NamedTuple):
    hits: int
    misses: int
    evicted: int
    entries: int


@dataclass(slots=True, eq=False)
class Planned(Generic[Plan]):
    """A plan under its signature."""

    signature: Hashable
    plan: Plan


class PlanCache(Generic[Plan]):
    """A bounded map from signatures to plans that forgets the least recently used.

    Used by one actor thread; `peek` and `stats` may be called from any.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[Hashable, Planned[Plan]] = OrderedDict()
        self._latest: Planned[Plan] | None = None
        self._hits = self._misses = self._evicted = 0

    def find(self, signature: Hashable) -> Plan | None:
        """The plan of that signature, or None. Raises TypeError for a signature that cannot be hashed."""
        planned = self._plans.get(signature)
        return None if planned is None else self.use(planned)

    def peek(self, signature: Hashable) -> Planned[Plan] | None:
        """What `find` would find, for whoever is not the actor: it is counted when the actor comes to `use` it."""
        return self._plans.get(signature)

    def use(self, planned: Planned[Plan]) -> Plan:
        """Count a plan as found, which may have been forgotten since."""
        self._hits += 1
        # Most requests pose the problem that the last one posed; its plan is at the end already.
        if planned is not self._latest and planned.signature in self._plans:
            self._plans.move_to_end(planned.signature)
            self._latest = planned
        return planned.plan

    def add(self, signature: Hashable, plan: Plan) -> None:
        """Keep a plan that was not found."""
        self._misses += 1
        self._plans[signature] = self._latest = Planned(signature, plan)
        if len(self._plans) > self._capacity:
            self._plans.popitem(last=False)
            self._evicted += 1

    def stats(self) -> PlanCacheStats:
        return PlanCacheStats(self._hits, self._misses, self._evicted, len(self._plans))
