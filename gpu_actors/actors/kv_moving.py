"""Sequences that leave a cache and come in: the part of the KvCacheActor that answers for them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from gpu_actors.actors.kv_store import CacheStore, OpenedCache
from gpu_actors.devices.interface import Outputs
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.copy_pages import page_copy_variant
from gpu_actors.kv.layers import before_pages
from gpu_actors.kv.requests import ImportSequence
from gpu_actors.kv.sequences import PageTable
from gpu_actors.kv.transfer import check_pages, export_launch, exported, import_launch, no_pages
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call

__all__ = ["Moving", "check_movable"]


def check_movable(cache: OpenedCache) -> None:
    """Raise `Unsupported` for a cache whose pages have several layouts, or are given back."""
    if len(cache.groups) > 1:
        reason = "exports and imports are of caches with one group of equal layers"
        raise Unsupported("layers", f"{len(cache.groups)} groups", reason, "1 group")
    if cache.groups[0].window is not None:
        raise Unsupported("window", cache.groups[0].window, "exports and imports are of caches that keep all rows")


class Moving:
    """Launches of one incarnation that read the pages of a sequence, or write those of a new one.

    A sequence that no one gets to know is freed, whenever its call gets an error: at once, or after its launch.
    """

    def __init__(self, actor: ServiceActor, store: CacheStore) -> None:
        self._actor = actor
        self._store = store

    def has_kernel(self, call: Call[Any]) -> bool:
        """False where the kernel is being compiled: the call is parked, and comes back."""
        if self._store.kernels is None or self._kernels(call) is not None:
            return True
        self._store.order.block(call)
        return False

    def export(self, call: Call[Any], cache: OpenedCache, table: PageTable) -> None:
        """Answer a claimed call with the pages of a sequence, on which no row is on its way."""
        (group,) = cache.groups
        lease = cache.tables.fork(table)
        pages, length, digests, tail = list(lease.groups[0].pages), lease.length, list(lease.digests), list(lease.tail)
        call.when_done(functools.partial(_free_unknown, cache, lease))

        def record(outputs: Outputs) -> Any:
            known = (cache.sequence(lease), group.pool, group.descales, pages)
            return exported(*known, outputs, digests, tail, length, cache.layers)

        if not pages:
            call.resolve(record(no_pages(group.pool, cache.layers)), self._actor.outbox)
            return
        launch = export_launch(group.pool, group.pools, pages, self._kernels(call) or (), cache.layers)
        self._actor.launch((call,), launch, lambda outputs: (record(outputs),))

    def take_in(self, call: Call[Any], cache: OpenedCache, message: ImportSequence) -> None:
        """Answer a call with a new sequence that has exported pages."""
        given, (group,) = message.pages, cache.groups
        with reading(message):
            check_pages(given, group.pool, group.descales, cache.layers)
        if not call.claim():
            return
        write = cache.tables.adopt(given.length, given.digests, given.tail)
        call.when_done(functools.partial(_free_unknown, cache, write.table))
        first, pages = write.length_before // cache.page_size, list(write.table.groups[0].pages)
        seq = dataclasses.replace(cache.sequence(write.table), cached=write.length_before)

        def finish(_: Outputs) -> Any:
            cache.tables.commit([write])
            return (seq,)

        if first == len(pages):
            call.resolve(finish({})[0], self._actor.outbox)
            return
        new = (*before_pages(cache.layers), slice(first, None))
        parts = [one[new] for one in (given.k, given.v) if one is not None]
        kernels = self._kernels(call) or ()
        launch = import_launch(group.pool, group.pools, parts, pages[first:], kernels, cache.layers)
        self._actor.launch((call,), launch, finish)

    def _kernels(self, call: Call[Any]) -> Any:
        return self._store.kernels_of(call, (page_copy_variant(self._store.arch),))


def _free_unknown(cache: OpenedCache, table: PageTable, call: Call[Any]) -> None:
    if call.error is not None:
        cache.tables.free(table)
