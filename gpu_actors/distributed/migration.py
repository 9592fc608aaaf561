"""move_sequence: moves a sequence from one cache to another, in this process or between any two workers.

The source keeps the sequence until the target has confirmed it. So whichever step fails, one of the two has the
sequence: the source until the import is answered, the target after that.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from gpu_actors.fields import real
from gpu_actors.handles.kv_cache import KvCache
from gpu_actors.kv.requests import KvSequence
from gpu_actors.kv.transfer import SequencePages, prefix_digests_of
from gpu_actors.runtime.reply import Reply, need_asyncio

__all__ = ["copy_sequence", "exported_pages", "move_sequence"]


@contextlib.asynccontextmanager
async def exported_pages(
    cache: KvCache, seq: KvSequence, *, timeout: float | None = None
) -> AsyncIterator[SequencePages]:
    """Lease the pages of a sequence until the block ends: ``async with exported_pages(cache, seq) as pages``.

    Raises what `KvCache.export_pages` raises.
    """
    async with _leased(cache, cache.export_pages(seq, timeout=timeout)) as pages:
        yield pages


async def copy_sequence(
    source: KvCache,
    seq: KvSequence,
    target: KvCache,
    *,
    timeout: float | None = None,
    asked: Callable[[KvCache, Reply[Any]], None] | None = None,
    arrived: Callable[[tuple[bytes, ...]], None] | None = None,
) -> KvSequence:
    """Copy a sequence of ``source`` into ``target``, and return the copy: prefill on one, decode on the other.

    source, target: caches with the same layers, layout, dtype and descales.
    timeout: seconds for the export and the import together.
    asked: called with the cache and the reply of each request.
    arrived: called with the digests of the longest prompt that can begin with the pages, once the target has them.
    Raises what `KvCache.export_pages` and `KvCache.import_pages` raise. The target is then unchanged.
    """
    need_asyncio("copy_sequence()")
    end = math.inf
    if timeout is not None:
        end = time.monotonic() + real("timeout", timeout, "a finite number of seconds, or None")
    exporting = source.export_pages(seq, timeout=timeout)
    if asked is not None:
        asked(source, exporting)
    async with _leased(source, exporting) as pages:
        importing = target.import_pages(pages, timeout=None if end == math.inf else max(0.0, end - time.monotonic()))
        if asked is not None:
            asked(target, importing)
        moved = await importing
    if arrived is not None:
        arrived(prefix_digests_of(pages))
    return moved


async def move_sequence(
    source: KvCache, seq: KvSequence, target: KvCache, *, timeout: float | None = None
) -> KvSequence:
    """Copy a sequence with `copy_sequence`, then free it at the source.

    If this raises, the source has the sequence as before. Rows that are appended at the source meanwhile do not move.
    """
    moved = await copy_sequence(source, seq, target, timeout=timeout)
    # Not awaited, so that a cancelled task leaves the sequence in one of the caches. A lost source has none to free.
    source.free(seq)
    return moved


@contextlib.asynccontextmanager
async def _leased(cache: KvCache, exporting: Reply[SequencePages]) -> AsyncIterator[SequencePages]:
    pages = await exporting
    try:
        yield pages
    finally:
        cache.release(pages)
