"""Questions that a handle answers by looking, without a request: asked of the context's process, and answered there.

The asker's thread waits for the answer, which takes a tenth of a millisecond, and `QUERY_TIMEOUT` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gpu_actors.errors import ActorStopped, ContextLost, DeadlineExceeded, Overloaded, Unsupported
from gpu_actors.kv.requests import KvSequence

__all__ = ["QUERIES", "QUERY_TIMEOUT", "RemoteState"]

QUERY_TIMEOUT = 1.0
"""Seconds."""


class Query(Protocol):
    def __call__(self, name: str, *arguments: Any) -> Any: ...


# In the context's process


def _plan_cache_stats(cells: Any, actor: str) -> Any:
    return cells[actor].handle.plan_cache_stats()


def _inspect(cells: Any, actor: str, graph: Any) -> Any:
    return cells[actor].handle.inspect_plan(graph)


def _cubin_stats(cells: Any, actor: str) -> Any:
    return cells[actor].handle.cache_stats()


def _compile_seconds(cells: Any, actor: str) -> Any:
    return cells[actor].shared.compile_seconds


def _uses(cells: Any, actor: str) -> Any:
    return cells[actor].shared.uses()


def _caches(cells: Any, actor: str) -> Any:
    return cells[actor].shared.look()


def _recording_stats(cells: Any, actor: str) -> Any:
    return cells[actor].handle.recording_stats()


def _length(cells: Any, actor: str, cache: int, seq: KvSequence) -> int:
    length: int = cells[actor].shared.find(cache).table(seq).length
    return length


def _cache_stats(cells: Any, actor: str, cache: int) -> Any:
    return cells[actor].shared.find(cache).tables.stats()


QUERIES: Mapping[str, Callable[..., Any]] = {
    "plan_cache_stats": _plan_cache_stats,
    "inspect": _inspect,
    "cubin_stats": _cubin_stats,
    "compile_seconds": _compile_seconds,
    "uses": _uses,
    "caches": _caches,
    "recording_stats": _recording_stats,
    "length": _length,
    "cache_stats": _cache_stats,
}


# In the program's process


class RemoteState:
    """What stands for the state that an actor's incarnations share (``cell.shared``), which lies in another process.

    It has what the handles of this package look for there.
    """

    def __init__(self, actor: str, query: Query) -> None:
        self._actor = actor
        self._query = query
        self._last: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reason = 'lies in the context\'s process with isolation="process"; send the actor a message'
        raise Unsupported("shared", f"{self._actor}.{name}", reason)

    def recall(self, _: Any) -> None:
        """Repeated requests are recognised in the context's process."""

    def inspect(self, graph: Any) -> Any:
        return self._query("inspect", self._actor, graph)

    @property
    def plans(self) -> _Stats:
        return _Stats(self._query, "plan_cache_stats", self._actor)

    @property
    def cache(self) -> _Stats:
        return _Stats(self._query_or_last, "cubin_stats")

    @property
    def compile_seconds(self) -> Any:
        return self._query_or_last("compile_seconds")

    def uses(self) -> Any:
        """The kernels that requests have asked for."""
        return self._query("uses", self._actor)

    def look(self) -> Any:
        """The caches that are open."""
        return self._query("caches", self._actor)

    def _query_or_last(self, name: str) -> Any:
        """What metrics show: while no process answers, what the last one said."""
        try:
            self._last[name] = self._query(name, self._actor)
        except (ActorStopped, ContextLost, DeadlineExceeded, Overloaded):
            if name not in self._last:
                raise
        return self._last[name]

    def find(self, number: int) -> _Cache:
        return _Cache(self._query, self._actor, number)


class _Stats:
    def __init__(self, query: Query, *question: Any) -> None:
        self._query = query
        self._question = question

    def stats(self) -> Any:
        return self._query(*self._question)


class _Table:
    def __init__(self, length: int) -> None:
        self.length = length


class _Cache:
    def __init__(self, query: Query, actor: str, number: int) -> None:
        self._query = query
        self._actor = actor
        self._number = number

    def table(self, seq: KvSequence) -> _Table:
        return _Table(self._query("length", self._actor, self._number, seq))

    @property
    def tables(self) -> _Stats:
        return _Stats(self._query, "cache_stats", self._actor, self._number)
