"""KvCacheActor: owns the paged pools of a context and makes all changes to them.

A request is checked when the actor takes it, and waits with others for a launch. Pages are taken on the actor's thread
just before the launch. The device does its part later, in the same order, on the actor's only stream. If a launch
fails, the writes of its requests are undone, and the requests in flight that build on these writes fail too
(`gpu_actors.kv.sequences` says how). So a request takes effect completely or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from gpu_actors.actors.coalescing import Coalescer, Finished, Flush
from gpu_actors.actors.kv_kind import kind_launch, kind_of, pose_layers
from gpu_actors.actors.kv_launch import add_rows, append_launch, append_layers
from gpu_actors.actors.kv_moving import Moving
from gpu_actors.actors.kv_stepping import Stepping
from gpu_actors.actors.kv_store import CacheStore, KvWork, OpenedCache, check_once, expected_lengths
from gpu_actors.arrays.adopt import Adopted
from gpu_actors.arrays.request_arrays import adopt_request, is_brief
from gpu_actors.attention.requests import PagedForward
from gpu_actors.devices.interface import Launch, Outputs
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import describe, integer
from gpu_actors.kv.prefix import prompt_digests
from gpu_actors.kv.requests import (
    AppendRows,
    AttendCache,
    BeginStep,
    CloseCache,
    CreateSequence,
    EndStep,
    ExportSequence,
    ForkSequence,
    FreeSequence,
    ImportSequence,
    OpenCache,
    TruncateSequence,
)
from gpu_actors.kv.sequences import PageTable
from gpu_actors.planning.append_rows import NEW_ROWS, NewRows
from gpu_actors.planning.cached import CacheRequest
from gpu_actors.planning.cascade import CascadeKeys, Cascading
from gpu_actors.planning.plan import Plan
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.handle import ActorHandle

__all__ = ["KvCacheActor"]

# The options of attention that `PagedForward` has too.
_OPTIONS = tuple(
    field.name
    for field in dataclasses.fields(AttendCache)
    if field.name != "q" and field.name in PagedForward.__dataclass_fields__
)


_CHANGES = (CloseCache, CreateSequence, ExportSequence, ForkSequence, FreeSequence, ImportSequence, TruncateSequence)
_MESSAGES = (AppendRows, AttendCache, BeginStep, EndStep, *_CHANGES)


class KvCacheActor(ServiceActor):
    """Owns the caches of a context and their sequences."""

    label: ClassVar[str] = "kv_cache"
    handle_type: ClassVar[type[ActorHandle]] = ActorHandle
    takes: ClassVar[tuple[type, ...]] = (OpenCache, *_MESSAGES)
    vital: ClassVar[bool] = True

    @classmethod
    def make_shared(cls, cell: ActorCell) -> CacheStore:
        return CacheStore(cell)

    @classmethod
    def brief(cls, message: object) -> bool:
        if isinstance(message, AppendRows | AttendCache):
            return is_brief(message)
        return isinstance(message, BeginStep | EndStep)

    def open(self) -> None:
        self._store: CacheStore = self.cell.shared
        self._coalescer = _KvCoalescer(self, self._store)
        self._moving = Moving(self, self._store)
        self._stepping = Stepping(self, self._store, self._has_kernels)
        self._store.order.look_again()

    def on_message(self, message: Any) -> None:
        if isinstance(message, Flush):
            self._coalescer.flush(due=True)

    def flush(self) -> None:
        self._coalescer.flush()
        self._store.order.release()

    def handle(self, call: Call[Any]) -> None:
        message = call.message
        if isinstance(message, OpenCache):
            if call.claim():
                number = self._store.open(message.spec, call.caller_notes)
                if not call.resolve(number, self.outbox):
                    self._store.forget(number)
            return
        if not isinstance(message, _MESSAGES):
            raise self.refusal(message)
        if isinstance(message, EndStep):  # other requests wait for it
            self._stepping.end(call, message)
            return
        cache = self._store.find(message.cache)
        # Closing a cache does not wait for calls that wait for an open step, because the step may never end.
        if not (cache.stepping and isinstance(message, CloseCache)) and not self._store.order.admits(call):
            return
        launched = isinstance(message, AppendRows | AttendCache)
        if not launched and not isinstance(message, CreateSequence):
            self._coalescer.flush(due=True)  # the request comes after all requests that were made before it
        if not launched:
            self._change(call, cache, message)
            return
        with reading(message):
            if cache.stepping and not cache.stepping.isdisjoint(cache.tables_of(message.seqs)[1]):
                self._store.order.hold(call)
                return
            adopted, template = adopt_request(message, self._store.device_name, call.caller_notes)
            work = self._checked(call, cache, adopted, template)
        if self._has_kernels(work):
            self._coalescer.add(work, work.shared, work.tables)

    # Sequences

    def _change(self, call: Call[Any], cache: OpenedCache, message: Any) -> None:
        """Answer a request that shares no launch."""
        if isinstance(message, CreateSequence):
            with reading(message):
                tokens = message.tokens
                digests = () if tokens is None else prompt_digests(tokens, cache.page_size, cache.most_rows)
            if call.claim():
                self._answer_with(call, cache, cache.tables.create(digests))
            return
        if isinstance(message, BeginStep) and not self._coalescer.held_up:
            self._stepping.begin(call, cache, message)
            return
        with reading(message):
            several = isinstance(message, BeginStep | CloseCache | ImportSequence)
            table = None if several else cache.table(message.seq)
        # Pages whose rows are still being written are not shared, cut off or given back.
        if self._coalescer.held_up or (table is not None and table.users):
            self._store.order.hold(call)
            if self._coalescer.held_up:
                self._store.order.look_again()  # gives it back to the mailbox, where all calls wait for a launch to end
            return
        if isinstance(message, ExportSequence | ImportSequence) and not self._moving.has_kernel(call):
            return
        if isinstance(message, ImportSequence):
            self._moving.take_in(call, cache, message)
            return
        if isinstance(message, TruncateSequence) and table is not None:
            with reading(message):
                integer("length", message.length, 0, table.length)
                cache.tables.check_cut(table, message.length)
        if not call.claim():
            return
        if table is None:
            self._store.forget(message.cache)
        elif isinstance(message, ExportSequence):
            self._moving.export(call, cache, table)
            return
        elif isinstance(message, ForkSequence):
            self._answer_with(call, cache, cache.tables.fork(table))
            return
        elif isinstance(message, TruncateSequence):
            cache.tables.truncate(table, message.length)
        else:
            cache.tables.free(table)
        call.resolve(None, self.outbox)

    def _answer_with(self, call: Call[Any], cache: OpenedCache, table: PageTable) -> None:
        """Answer with a new sequence. If the call has been answered meanwhile, the sequence is freed."""
        if not call.resolve(cache.sequence(table), self.outbox):
            cache.tables.free(table)

    # Rows

    def _checked(
        self, call: Call[Any], cache: OpenedCache, message: AppendRows | AttendCache, template: Adopted | None
    ) -> KvWork:
        """Check an adopted request. Raises `InvalidRequest` and `Unsupported`."""
        single, tables = cache.tables_of(message.seqs)
        layer = _layer(cache, message) if isinstance(message, AttendCache) else 0
        by_layer: Sequence[NewRows] = ()
        group, request = cache.group_of[layer], None
        if isinstance(message, AttendCache):
            message = group.bounded(message)
        if isinstance(message, AppendRows) and _lie_apart(cache, message):
            kind, by_layer = pose_layers(self._store, cache, message, tables)
            rows: NewRows | None = by_layer[0]
        else:
            kind, (request, rows) = kind_of(self._store, group, message, tables)
        if rows is not None and len(tables) > 1 and rows.counts.any():
            check_once(tables)
        work = KvWork(call=call, cache=cache, tables=tables, request=request, plan=kind.plan, rows=rows, kind=kind)
        work.single, work.template, work.expected, work.layer = single, template, expected_lengths(message), layer
        work.by_layer = by_layer
        if request is not None and kind.plan is not None:
            work.result = call.message.out  # the caller's own array, if it gave one, and not the adopted array
            if cache.cascade and (again := cache.tables.most_shared(tables, group.number)):
                work.cascade = self._store.cascader.keys(kind.plan, request, again, cache.cascade is True)
        return work

    def _has_kernels(self, work: KvWork) -> bool:
        """Give a request its kernels. Returns False if they are being compiled: the call is parked, and comes back."""
        if self._store.kernels is None:
            return True
        assert work.kind is not None
        variants = work.kind.variants
        attending = cascading = 0 if work.plan is None else len(work.plan.variants)
        if isinstance(work.cascade, CascadeKeys):
            of_cascade = work.cascade.variants
            variants = (*variants[:attending], *of_cascade, *variants[attending:])
            cascading += len(of_cascade)
        kernels = self._store.kernels_of(work.call, variants)
        if kernels is None:
            self._store.order.block(work.call)
            return False
        work.loaded = kernels
        work.kernels, work.cascading = kernels[:attending], kernels[attending:cascading]
        work.appending = kernels[cascading:]
        return True


class _KvCoalescer(Coalescer[KvWork]):
    """Coalescer of a KvCacheActor: reserves pages for a launch, adds the append of rows, and undoes failed launches."""

    def __init__(self, actor: KvCacheActor, store: CacheStore) -> None:
        super().__init__(actor, store.decoding)
        self._store = store

    def begin(self, group: list[KvWork], begun: list[KvWork]) -> None:
        for work, error in group[0].cache.begin(group, begun):
            self._actor.answer_failure((work.call,), error)
        for work in begun:
            work.take_pages(self._decoding)

    def assemble(self, group: list[KvWork]) -> tuple[Launch, Finished]:
        first, begun = group[0], group
        if first.cache.cascade and any(isinstance(work.cascade, CascadeKeys) for work in begun):
            # Sequences with the same first pages become neighbours.
            group = sorted(begun, key=lambda work: work.table[:1].tobytes())
        launch: Launch
        answers: Finished | None = None
        if first.by_layer:
            launch = append_layers(first)
        elif len(group) == 1 and first.kind is not None and self._is_plain(first):
            launch = kind_launch(first.kind, first)
        else:
            if first.request is None:
                launch = append_launch(group)
            else:
                launch, answers = super().assemble(group)
            if first.rows is not None:
                launch = add_rows(launch, group)

        def finish(outputs: Outputs) -> Sequence[Any]:
            answered = answers(outputs) if answers else [work.answer(outputs) for work in group]
            first.cache.succeeded(begun)
            self._store.order.look_again()
            if group is begun:
                return answered
            results = dict(zip(map(id, group), answered, strict=True))
            return [results[id(work)] for work in begun]

        return launch, finish

    def _is_plain(self, work: KvWork) -> bool:
        """Whether the launch of a request is only that of its kind: it makes no cascade and copies no page."""
        return work.cascade is None and not any(write.copies for write in work.writes)

    def bind(self, group: list[KvWork], plan: Plan, request: CacheRequest) -> Launch:
        launch, chosen = None, None
        for work in group:
            if isinstance(work.cascade, str):
                chosen = Cascading(False, work.cascade)
            elif work.cascade is not None and isinstance(request, PagedForward):
                forced = work.cache.cascade is True
                cascader = self._store.cascader
                launch, chosen = cascader.bind(plan, request, work.cascade, work.cascading, forced)
                break
        trace = self._actor.cell.environment.trace
        if chosen is not None and trace.active():
            trace.emit("launch.cascade", actor=self._actor.cell.name, **chosen._asdict())
        return super().bind(group, plan, request) if launch is None else launch

    def refused(self, group: list[KvWork]) -> None:
        if group:
            group[0].cache.failed(group)

    def failed(self, group: list[KvWork], error: BaseException) -> Collection[Call[Any]]:
        for work in group[0].cache.failed(group):
            work.call.fail(error)
        self._store.order.look_again()
        return ()


def _lie_apart(cache: OpenedCache, message: AppendRows) -> bool:
    """Whether each layer has its own array of new rows: the layers have different shapes, or the caller gave a list."""
    return len(cache.groups) > 1 or any(isinstance(getattr(message, name), list | tuple) for name in NEW_ROWS)


def _layer(cache: OpenedCache, message: AttendCache) -> int:
    """The layer that a request attends to. Raises `InvalidRequest`."""
    for name in NEW_ROWS if cache.layers > 1 else ():
        if getattr(message, name) is not None:
            reason = f"must be None: a cache of {cache.layers} layers gets rows by a step, or by append of all layers"
            raise InvalidRequest(name, describe(getattr(message, name)), reason)
    return integer("layer", message.layer, 0, cache.layers - 1)
