"""Moving: the part of the KvCacheActor that exports sequences from a cache and imports them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from gpu_actors.actors.kv_store import CacheStore, OpenedCache
from gpu_actors.devices.interface import Outputs
from gpu_actors.kernels.copy_pages import page_copy_variant
from gpu_actors.kv.requests import ImportSequence
from gpu_actors.kv.sequences import PageTable
from gpu_actors.kv.transfer import check_pages, export_launch, exported, import_launch, no_pages
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call

__all__ = ["Moving"]


class Moving:
    """Makes the launches of one incarnation that read the pages of a sequence, or write the pages of a new sequence.

    If a call gets an error, at once or after its launch, no caller knows its new sequence, and the sequence is freed.
    """

    def __init__(self, actor: ServiceActor, store: CacheStore) -> None:
        self._actor = actor
        self._store = store

    def has_kernel(self, call: Call[Any]) -> bool:
        """Whether there is a kernel. If not, it is being compiled: the call is parked, and comes back."""
        if self._store.kernels is None or self._kernels(call) is not None:
            return True
        self._store.order.block(call)
        return False

    def export(self, call: Call[Any], cache: OpenedCache, table: PageTable) -> None:
        """Answer a claimed call with the pages of a sequence. No launch in flight may use the sequence."""
        lease = cache.tables.fork(table)
        pages, firsts = [list(own.pages) for own in lease.groups], [own.first for own in lease.groups]
        length, digests, tail = lease.length, list(lease.digests), list(lease.tail)
        call.when_done(functools.partial(_free_unknown, cache, lease))

        def record(outputs: Outputs) -> Any:
            return exported(cache.sequence(lease), cache.groups, firsts, pages, outputs, digests, tail, length)

        if not length:
            call.resolve(record(no_pages(cache.groups)), self._actor.outbox)
            return
        launch = export_launch(cache.groups, pages, self._kernels(call) or ())
        self._actor.launch((call,), launch, lambda outputs: (record(outputs),))

    def take_in(self, call: Call[Any], cache: OpenedCache, message: ImportSequence) -> None:
        """Answer a call with a new sequence that holds exported pages."""
        with reading(message):
            contents = check_pages(message.pages, cache.groups)
        if not call.claim():
            return
        length, digests, tail = message.pages.length, message.pages.digests, message.pages.tail
        write = cache.tables.adopt(length, [content.first for content in contents], digests, tail)
        call.when_done(functools.partial(_free_unknown, cache, write.table))
        shared = write.length_before // cache.page_size
        new_pages = [list(own.pages[max(0, shared - own.first) :]) for own in write.table.groups]
        seq = dataclasses.replace(cache.sequence(write.table), cached=write.length_before)

        def finish(_: Outputs) -> Any:
            cache.tables.commit([write])
            return (seq,)

        if not any(new_pages):
            call.resolve(finish({})[0], self._actor.outbox)
            return
        launch = import_launch(cache.groups, contents, new_pages, self._kernels(call) or ())
        self._actor.launch((call,), launch, finish)

    def _kernels(self, call: Call[Any]) -> Any:
        return self._store.kernels_of(call, (page_copy_variant(self._store.arch),))


def _free_unknown(cache: OpenedCache, table: PageTable, call: Call[Any]) -> None:
    if call.error is not None:
        cache.tables.free(table)
