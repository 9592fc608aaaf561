"""Batch: calls that an actor has taken and not launched yet, in groups that one launch each will answer.

Groups are launched in the order in which they were begun. A call joins the newest group with its key, unless it would
overtake something that it depends on: a group begun later that touches what the call touches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

__all__ = ["Batch"]

Item = TypeVar("Item")


class Batch(Generic[Item]):
    """Gathers items. largest: items that a group may have."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._groups: list[list[Item]] = []
        self._count = 0
        self._newest: dict[Hashable, int] = {}
        self._touched: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Items in all groups."""
        return self._count

    @property
    def full(self) -> bool:
        """Whether a group has as many items as it may have."""
        return any(len(group) >= self._largest for group in self._groups)

    def add(self, item: Item, key: Hashable | None, touches: Iterable[Hashable] = ()) -> None:
        """Put an item into a group. key: of items that may share a launch; None: with nobody."""
        touches = tuple(touches)
        index = self._newest.get(key, -1) if key is not None else -1
        earliest = max((self._touched.get(what, 0) for what in touches), default=0)
        if index < earliest or len(self._groups[index]) >= self._largest:
            index = len(self._groups)
            self._groups.append([])
            if key is not None:
                self._newest[key] = index
        self._groups[index].append(item)
        self._count += 1
        for what in touches:
            self._touched[what] = index

    def take(self) -> list[list[Item]]:
        """The groups in order; the batch is empty then."""
        groups, self._groups = self._groups, []
        self._count = 0
        self._newest, self._touched = {}, {}
        return groups
