"""CacheStats: what a cubin cache has done and holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStats"]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was made, and what its folder holds now (memory, where it has no folder).

    hits: lookups answered from memory or a folder. misses: lookups that were not; of many callers who wait
    for one compile, each. compiles: compiles begun. corrupt: entries refused. evicted: entries removed to
    keep to the size bound. entries, bytes: in the folder.
    """

    hits: int = 0
    misses: int = 0
    compiles: int = 0
    corrupt: int = 0
    evicted: int = 0
    entries: int = 0
    bytes: int = 0
