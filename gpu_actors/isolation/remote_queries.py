"""Queries: read an actor's state for its handles, without a request to the actor.

A query is sent to the context's process by its name. The calling thread waits for the answer, about a tenth of a
millisecond, and at most `QUERY_TIMEOUT`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from gpu_actors.errors import ActorStopped, ContextLost, DeadlineExceeded, Overloaded, Unsupported
from gpu_actors.kv.requests import KvSequence

__all__ = ["QUERIES", "QUERY_TIMEOUT", "RemoteState"]

QUERY_TIMEOUT = 1.0
"""Seconds."""

QUERIES: Mapping[str, Callable[..., Any]] = {
    "plan_cache_stats": lambda cell: cell.handle.plan_cache_stats(),
    "inspect": lambda cell, graph: cell.handle.inspect_plan(graph),
    "cubin_stats": lambda cell: cell.handle.cache_stats(),
    "compile_seconds": lambda cell: cell.shared.compile_seconds,
    "proofs": lambda cell: cell.shared.proofs,
    "uses": lambda cell: cell.shared.uses(),
    "caches": lambda cell: cell.shared.look(),
    "length": lambda cell, cache, seq: cell.shared.find(cache).table(seq).length,
    "cache_stats": lambda cell, cache: cell.shared.find(cache).tables.stats(),
    "group_stats": lambda cell, cache: cell.shared.find(cache).tables.group_stats(),
}
"""For each query, the function that the context's process calls with the actor's cell and the query's arguments."""


class RemoteState:
    """Stands for the state that an actor's incarnations share (``cell.shared``), if that lies in another process.

    It has the attributes that the handles of this package read.

    query: sends a query, by its name and arguments, and returns the answer.
    """

    def __init__(self, actor: str, query: Callable[..., Any]) -> None:
        self._actor = actor
        self._query = query
        self._last: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reason = 'lies in the context\'s process with isolation="process"; send the actor a message'
        raise Unsupported("shared", f"{self._actor}.{name}", reason)

    def recall(self, *_: Any) -> None:
        """None: the context's process recognises repeated requests."""

    def inspect(self, graph: Any) -> Any:
        return self._query("inspect", self._actor, graph)

    @property
    def plans(self) -> Any:
        return self._stats("plan_cache_stats")

    @property
    def cache(self) -> Any:
        return SimpleNamespace(stats=functools.partial(self._query_or_last, "cubin_stats"))

    @property
    def compile_seconds(self) -> Any:
        return self._query_or_last("compile_seconds")

    @property
    def proofs(self) -> Any:
        return self._query_or_last("proofs")

    def uses(self) -> Any:
        return self._query("uses", self._actor)

    def look(self) -> Any:
        return self._query("caches", self._actor)

    def find(self, number: int) -> Any:
        def table(seq: KvSequence) -> Any:
            return SimpleNamespace(length=self._query("length", self._actor, number, seq))

        tables = self._stats("cache_stats", number)
        tables.group_stats = functools.partial(self._query, "group_stats", self._actor, number)
        return SimpleNamespace(table=table, tables=tables)

    def _stats(self, name: str, *arguments: Any) -> Any:
        return SimpleNamespace(stats=functools.partial(self._query, name, self._actor, *arguments))

    def _query_or_last(self, name: str) -> Any:
        """The answer to a query, or the last answer while no process answers. For metrics."""
        try:
            self._last[name] = self._query(name, self._actor)
        except (ActorStopped, ContextLost, DeadlineExceeded, Overloaded):
            if name not in self._last:
                raise
        return self._last[name]
