"""KvCacheActor: owns the paged pools of a context and everything that is done to them.

All bookkeeping happens on this actor's thread, in the order of the mailbox, when a request is taken; the device does
its part later, in the same order, on the actor's one stream. A launch that fails undoes the bookkeeping of its
requests (`gpu_actors.kv.sequences` says how), so that a request either happens or leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gpu_actors.actors.coalescing import Batch, Flush, FlushTimer, again_alone
from gpu_actors.actors.kv_launch import add_rows, append_launch, block_table
from gpu_actors.actors.kv_store import CacheItem, CacheStore, OpenedCache
from gpu_actors.arrays.adopt import Adopted
from gpu_actors.arrays.adoption import adopt_request
from gpu_actors.devices.interface import Launch, Outputs
from gpu_actors.errors import GpuActorsError, InvalidRequest, Unsupported
from gpu_actors.kernels.append.copy_pages import PageCopyKey
from gpu_actors.kernels.append.variant import AppendProblem, append_key
from gpu_actors.kernels.variants import KernelKey
from gpu_actors.kv.prefix import prompt_digests
from gpu_actors.kv.requests import (
    AppendRows,
    AttendCache,
    CloseCache,
    CreateSequence,
    ForkSequence,
    FreeSequence,
    OpenCache,
    TruncateSequence,
)
from gpu_actors.kv.sequences import PageTable
from gpu_actors.planning.append_rows import NewRows, new_rows
from gpu_actors.planning.cached import bind_cached, check_cached, decoding_output
from gpu_actors.planning.merging import cut_outputs, is_packed, merge, merge_key, place
from gpu_actors.planning.padding import pad_request, recordable
from gpu_actors.planning.planner import unreadable
from gpu_actors.requests import PagedForward
from gpu_actors.runtime.actor import ServiceActor
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.completion import AGAIN
from gpu_actors.runtime.handle import ActorHandle
from gpu_actors.validation.fields import describe, expect, integer

if TYPE_CHECKING:
    from gpu_actors.runtime.cell import ActorCell

__all__ = ["KvCacheActor"]

_OPTIONS = (
    *("causal", "window_size", "softmax_scale", "softcap", "alibi_slopes", "sinks", "sink_tokens", "tree_mask"),
    *("num_splits", "return_lse", "out", "cu_seqlens_q", "max_seqlen_q"),
)


class KvCacheActor(ServiceActor):
    """Takes the messages of `gpu_actors.kv.requests`."""

    label: ClassVar[str] = "kv_cache"
    handle_type: ClassVar[type[ActorHandle]] = ActorHandle
    vital: ClassVar[bool] = True

    @classmethod
    def make_shared(cls, cell: ActorCell) -> CacheStore:
        return CacheStore(cell)

    def open(self) -> None:
        options = self.cell.environment.options
        self._store: CacheStore = self.cell.shared
        self._records = options.record_launches
        self._batch: Batch[CacheItem] = Batch(options.coalesce_max)
        self._timer = FlushTimer(self, options.coalesce_delay_us)
        self._came_back = False
        self._store.withdraw_all()

    def on_message(self, message: Any) -> None:
        if isinstance(message, Flush):
            self._timer.wait(True)
            self._launch_groups()

    def handle(self, call: Call[Any]) -> None:
        message = call.message
        if isinstance(message, OpenCache):
            if call.claim():
                number = self._store.open(message.spec, call.caller_notes)
                if not call.resolve(number, self.outbox):
                    self._store.forget(number)
            return
        if not isinstance(message, _MESSAGES):
            raise InvalidRequest("message", type(message).__name__, "must be one of gpu_actors.kv.requests")
        cache = self._store.find(message.cache)
        before = cache.disturbed
        if not cache.gate.admits(call):
            return
        try:
            if isinstance(message, AppendRows | AttendCache):
                gather = self._append if isinstance(message, AppendRows) else self._attend
                adopted, like = adopt_request(message, self._store.place, call.caller_notes)
                item, key = gather(call, cache, adopted, like)  # type: ignore[arg-type]
                if self._has_kernels(item):
                    self._reserve(item, key, before)
            else:
                self._change(call, cache, message, before)
        except GpuActorsError:
            raise
        except Exception as error:
            raise unreadable(message, error) from error

    # Sequences

    def _change(self, call: Call[Any], cache: OpenedCache, message: Any, before: int) -> None:
        """Answer what takes no launch. It comes after everything that was asked for before it."""
        if isinstance(message, CreateSequence):
            digests = () if message.tokens is None else prompt_digests(message.tokens, cache.pool.page_size)
            if call.claim():
                self._answer_with(call, cache, cache.tables.create(digests))
            return
        self._launch_groups()
        with cache.lock:
            if self._came_back or cache.disturbed != before:
                self._again(cache, call)
                return
            if isinstance(message, CloseCache):
                if call.claim():
                    self._store.forget(message.cache)
                    call.resolve(None, self.outbox)
                return
            table = cache.table(message.seq)
            # What shares pages or gives them up must know what is in them, and that nobody will ask for it again.
            if table.users:
                cache.gate.hold(call)
                return
            self._change_pages(call, cache, message, table)

    def _change_pages(self, call: Call[Any], cache: OpenedCache, message: Any, table: PageTable) -> None:
        if isinstance(message, TruncateSequence):
            integer("length", message.length, 0, table.length)
        if not call.claim():
            return
        if isinstance(message, ForkSequence):
            self._answer_with(call, cache, cache.tables.fork(table))
            return
        if isinstance(message, TruncateSequence):
            cache.tables.truncate(table, message.length)
        else:
            cache.tables.free(table)
        call.resolve(None, self.outbox)

    def _answer_with(self, call: Call[Any], cache: OpenedCache, table: PageTable) -> None:
        """Answer with a new sequence; one that nobody waits for any more is not begun."""
        if not call.resolve(cache.sequence(table), self.outbox):
            cache.tables.free(table)

    # Rows

    def _append(
        self, call: Call[Any], cache: OpenedCache, message: AppendRows, _: Adopted | None
    ) -> tuple[CacheItem, Hashable]:
        single, tables = cache.tables_of(message.seqs)
        rows = new_rows(message, cache.pool, None if single else len(tables))
        _check_append(rows.problem(cache.pool, 1), self._store.arch)
        rows.check_reach(cache.lengths(call, tables) + rows.counts)
        key = None if rows.merge_key is None else ("append", cache.number, rows.merge_key)
        return CacheItem(call, cache, tables, rows=rows, single=single), key

    def _attend(
        self, call: Call[Any], cache: OpenedCache, message: AttendCache, like: Adopted | None
    ) -> tuple[CacheItem, Hashable]:
        _, tables = cache.tables_of(message.seqs)
        rows = None
        if message.k is not None or message.v is not None:
            rows = new_rows(message, cache.pool, len(tables))
        elif message.rope is not None:
            raise InvalidRequest("rope", message.rope, "goes with k and v: rows in the cache have been rotated")
        else:
            for name in ("tokens", "positions", "rope_cos", "rope_sin"):
                expect(getattr(message, name) is None, name, describe(getattr(message, name)), "goes with k and v")
        shape: tuple[int, ...] = getattr(message.q, "shape", ())
        if message.cu_seqlens_q is None and len(shape) == 4:
            expect(len(tables) == shape[0], "seqs", len(tables), f"must name q's sequences, {shape[0]}")
        ends: tuple[int, ...] = getattr(message.cu_seqlens_q, "shape", ())
        if len(ends) == 1:
            expect(len(tables) == ends[0] - 1, "seqs", len(tables), f"must name cu_seqlens_q's, {ends[0] - 1}")
        if shape:
            dim = cache.pool.head_dim
            expect(shape[-1] == dim, "q", describe(message.q), f"must have the cache's head_dim, {dim}")
        lengths = cache.lengths(call, tables)
        if rows is not None:
            lengths += rows.counts
            rows.check_reach(lengths)
        request = cache.request(message.q, lengths, {name: getattr(message, name) for name in _OPTIONS})
        plan = self._store.decoding.plan(request)
        check_cached(plan, request)
        if rows is not None:
            self._check_rows(cache, request, rows)
            if not rows.counts.any():
                rows = None  # nothing to append, and so nothing to launch either
        # The result is the caller's own array, where it gave one.
        result = call.message.out
        item = CacheItem(call, cache, tables, request, plan, rows, like=like, result=result, lengths=lengths)
        shared = merge_key(plan, request)
        parts = (shared, None if rows is None else rows.merge_key)
        apart = shared is None or (rows is not None and rows.merge_key is None)
        return item, None if apart else ("attend", cache.number, rows is None, parts)

    def _check_rows(self, cache: OpenedCache, request: PagedForward, rows: NewRows) -> None:
        q = request.q
        if request.cu_seqlens_q is None:
            expect(q.shape[1] == rows.rows, "k", describe(rows.k), f"must have q's rows, {q.shape[1]} a sequence")
        if rows.rope is not None:
            expect(
                q.dtype == rows.k.dtype, "q", describe(q), f"must have k's dtype, {rows.k.dtype}, to be rotated with it"
            )
        _check_append(rows.problem(cache.pool, 1, q.shape[-2]), self._store.arch)

    def _has_kernels(self, item: CacheItem) -> bool:
        """Give a request its kernels. False where they are being compiled: it comes again, and the cache waits."""
        store, call = self._store.kernels, item.call
        if store is None:
            return True
        keys: tuple[KernelKey, ...] = ()
        if item.request is not None and item.plan is not None:
            keys = item.plan.keys
        if item.rows is not None:
            heads_q = 0 if item.request is None else item.request.q.shape[-2]
            problem = item.rows.problem(item.cache.pool, 1, heads_q)
            keys += (append_key(problem, self._store.arch), PageCopyKey(arch=self._store.arch))
        kernels = store.get(keys)
        if kernels is None:
            item.cache.gate.block(call)
            store.wait_for(keys, call)
            return False
        if self._store.runs_kernels:
            item.kernels = kernels
        return True

    def _reserve(self, item: CacheItem, key: Hashable, before: int) -> None:
        """Take the pages that a request needs, and let it wait for its launch."""
        cache, tables = item.cache, item.tables
        if item.rows is not None and len({table.number for table in tables}) < len(tables):
            numbers = [table.number for table in tables]
            raise InvalidRequest("seqs", numbers, "must name each sequence once where rows are appended")
        cache.reserve(item)
        item.table = block_table(tables)
        if cache.disturbed != before:
            # While this was looked at, something that comes before it turned out to have to come again.
            cache.withdraw((item,))
            self._again(cache, item.call)
            return
        if item.request is not None:
            item.request.block_table, item.request.cache_seqlens = item.table, item.lengths
        touches = [(cache.number, table.number) for table in tables]
        self._batch.add(item, None if item.call.alone else key, touches)
        self.cell.mailbox.gather(len(self._batch))

    def _again(self, cache: OpenedCache, call: Call[Any]) -> None:
        cache.gate.returned((call,))
        self.cell.mailbox.give_back((call,))

    # Launches

    def flush(self) -> None:
        if self._batch and not self._timer.wait(self._batch.full):
            self._launch_groups()

    def _launch_groups(self) -> None:
        self._came_back = False
        groups = self._batch.take()
        self.cell.mailbox.gather(0)
        for index, group in enumerate(groups):
            # One that dropped out takes its rows with it, and what was reserved behind it has to come again.
            whole = sum(item.call.claim() for item in group) == len(group)
            if not whole or self.cell.mailbox.saturated or not group[0].cache.launching(group):
                self._withdraw([item for later in groups[index:] for item in later])
                return
            self._launch(group)

    def _withdraw(self, items: list[CacheItem]) -> None:
        """Nothing of this is launched now: it comes again, from the mailbox."""
        self._came_back = True
        for cache in {item.cache for item in items}:
            own = [item for item in items if item.cache is cache]
            cache.gate.returned([item.call for item in own])
            cache.withdraw(own)
            cache.gate.settle()
        for item in items:
            item.call.unclaim()
        self.cell.mailbox.give_back([item.call for item in items])

    def _launch(self, group: list[CacheItem]) -> None:
        cache = group[0].cache
        calls = [item.call for item in group]

        def failed(error: BaseException) -> Collection[Call[Any]]:
            return cache.failed(group, again_alone(calls, error))

        def finish(outputs: Outputs) -> Sequence[Any]:
            again = cache.succeeded(group)
            return [
                AGAIN if item.call in again else _answer(item, outputs, part, packed)
                for item, part in zip(group, parts, strict=True)
            ]

        try:
            launch, parts, packed = self._assemble(group)
        except GpuActorsError as error:
            self.answer_failure(calls, failed(error), error)
            return
        except BaseException:
            cache.failed(group, ())
            raise
        try:
            self.launch(calls, launch, finish, failed)
        except GpuActorsError:
            return  # the calls have been answered, or queued again
        except BaseException:
            cache.failed(group, ())
            raise

    def _assemble(self, group: list[CacheItem]) -> tuple[Launch, Sequence[Any], bool]:
        """The launch of a group, each item's part of it, and whether rows are packed."""
        first = group[0]
        requests = [item.request for item in group if item.request is not None]
        parts: Sequence[Any] = [None] * len(group)
        packed = False
        appending = first.kernels[-2:] if first.rows is not None else ()
        if requests:
            merged = merge(requests) if len(requests) > 1 else requests[0]
            assert isinstance(merged, PagedForward)
            attending = first.kernels[: len(first.kernels) - len(appending)]
            parts, packed = place(requests), is_packed(merged)
            records = self._records and recordable(merged, first.rows)
            if records:
                merged = pad_request(merged)
            assert first.plan is not None
            plan = self._store.decoding.plan(merged, first.plan.key)
            launch = bind_cached(plan, merged, attending)
            if records:
                launch.recording = (first.cache.number, first.cache.generation, plan.key, plan.problem)
                launch.recording_keeps = ("k_cache", "v_cache")
        else:
            launch = append_launch(group)
        if first.rows is not None:
            launch = add_rows(launch, group, self._store.arch, appending)
        return launch, parts, packed


_MESSAGES = (AppendRows, AttendCache, CloseCache, CreateSequence, ForkSequence, FreeSequence, TruncateSequence)


def _check_append(problem: AppendProblem, arch: str) -> None:
    """Raise `Unsupported` unless there is a kernel that appends the rows of a request, which calls them k."""
    try:
        append_key(problem, arch)
    except Unsupported as error:
        if error.field != "dtype":
            raise
        raise Unsupported("k", *error.args[1:]) from None


def _answer(item: CacheItem, outputs: Outputs, part: Any, packed: bool) -> Any:
    if item.request is None:
        lengths = item.lengths.tolist()
        return lengths[0] if item.single else lengths
    (answer,) = decoding_output(False, item.like, item.result, cut_outputs(outputs, part, packed))
    return answer
