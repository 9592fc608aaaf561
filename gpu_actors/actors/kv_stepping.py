"""Stepping: the actor's part of a model's step. It begins a step, and commits or undoes it.

A step is checked and planned once for all layers that have the same options. Requests on its sequences wait until it
has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any

import numpy as np

from gpu_actors.actors.kv_kind import kind_of
from gpu_actors.actors.kv_launch import copy_launch
from gpu_actors.actors.kv_spec import dtype_text
from gpu_actors.actors.kv_step import LATE, LATENT, OWN, WHOLE, OpenStep, StepCapture, StepLayers, built_on_failed
from gpu_actors.actors.kv_store import (
    MOST_ELEMENTS,
    CacheStore,
    KvWork,
    LayerPlan,
    OpenedCache,
    PoolGroup,
    RequestKind,
    StepPlan,
    check_once,
    expected_lengths,
)
from gpu_actors.arrays.adopt import name_of
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.arrays.layout import ArrayLayout, contiguous
from gpu_actors.arrays.request_arrays import adopt_request, changed
from gpu_actors.attention.requests import PagedForward
from gpu_actors.devices.interface import Device, Outputs
from gpu_actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LaunchError,
    StaleBuffer,
    Unsupported,
)
from gpu_actors.fields import FP8, FURTHEST, expect, flag, heads_of_layers, integer
from gpu_actors.kernels.append import Rope
from gpu_actors.kernels.forward_sm90 import TMA_ALIGNMENT
from gpu_actors.kernels.support import MAX_SEQLEN
from gpu_actors.kv.requests import AttendCache, BeginStep, EndStep, StepKeywords
from gpu_actors.kv.sequences import PageTable
from gpu_actors.planning.append_rows import NewRows
from gpu_actors.planning.merging import ends_of
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call
from gpu_actors.validation.paged import check_bias
from gpu_actors.values import show

__all__ = ["Stepping"]

_CAPTURE_PAUSE = 1e-3
"""Seconds between two checks whether a capture has ended."""

_PLAIN = (int, float, bool, str, type(None), Rope)
_OF_A_LAYER = StepKeywords.__optional_keys__ - OWN


class Stepping:
    """Begins and ends the steps of one incarnation of the actor."""

    def __init__(self, actor: ServiceActor, store: CacheStore, has_kernels: Callable[[KvWork], bool]) -> None:
        self._actor = actor
        self._store = store
        self._has_kernels = has_kernels

    def begin(self, call: Call[Any], cache: OpenedCache, message: BeginStep) -> None:
        """Reserve the pages of a step's rows, and answer with the step."""
        with reading(message):
            tables, capture = _tables(cache, message), message.captured
            if not cache.stepping.isdisjoint((*tables, capture)):
                self._store.order.hold(call)
                return
            if capture is not None and capture.lost:
                raise StaleBuffer("a step of this capture could not be ended: capture another")
            if capture is not None:
                reason = f"must be {capture.sequences} sequences, as the captured step has"
                expect(len(tables) == capture.sequences, "seqs", len(tables), reason)
            layers = self._plan(call, cache, message, tables)
        units = list(dict.fromkeys(layers))
        if cache.cascade and message.max_length is None:  # a step that replays may share other pages
            forced = cache.cascade is True
            for unit in units:
                work = unit.work
                again = cache.tables.most_shared(tables, work.group.number)
                if again and work.plan is not None and work.request is not None:
                    work.cascade = self._store.cascader.keys(work.plan, work.request, again, forced)
        if not all(self._has_kernels(unit.work) for unit in units):
            return
        first, begun = units[0].work, list[KvWork]()
        given = message.layer_options or {}
        for unit in units[1:]:  # the first is checked where its pages are taken
            with _naming_layer(unit.work.layer, given):
                _check_reach(unit.work)
        for _, error in cache.begin([first], begun):
            with _naming_layer(first.layer, given):
                raise error
        if not begun:
            return  # the call was answered meanwhile
        cache.stepping.update(tables if capture is None else (*tables, capture))
        try:
            if len(units) > 1:
                cache.read_tables([unit.work for unit in units[1:]], first)
            for unit in units:
                unit.work.take_pages(self._store.decoding)
            self._copy_pages(first)
            if capture is not None:
                for unit, captured in zip(units, dict.fromkeys(capture.layers), strict=True):
                    unit.renew(captured, capture.launches.series)
            step = OpenStep(self._actor.cell, first, layers, call.deadline, message)
            for unit in units:
                # The copies have been enqueued, and layers change no pages.
                unit.work = dataclasses.replace(unit.work, writes=[])
                self._share_pages(unit)
            if call.deadline is not None:
                environment = self._actor.cell.environment
                # The timer does not keep a step that has ended, and its arrays, alive until then.
                environment.timers.at(call.deadline, functools.partial(_deadline_passed, weakref.ref(step)))
        except BaseException:
            self._undo(first)
            self._give_back(cache, capture)
            raise
        if not call.resolve(step, self._actor.outbox):
            step.close(commit=False)
            step.ended(False)
            self._undo(first)
            self._give_back(cache, capture)

    def end(self, call: Call[Any], message: EndStep) -> None:
        """Commit a step, or undo it."""
        step = message.step
        if not isinstance(step, OpenStep):
            raise InvalidRequest("step", show(step), "must be a step of this cache")
        # A thread may be launching a layer, or running the caller's code that replays a graph. An actor does not wait
        # for that.
        if not step.seize(self._store.order.look_again):
            self._store.order.hold(call)
            return
        try:
            capturing = step.capturing()
            if capturing is not None and not message.commit:  # an event recorded now would go into the graph
                mailbox, environment = self._actor.cell.mailbox, self._actor.cell.environment
                mailbox.park(call)  # alone: requests on other sequences need not wait for the program's capture
                later = environment.clock.now() + _CAPTURE_PAUSE
                environment.timers.at(later, functools.partial(mailbox.requeue, [call]))
                return
            if capturing is not None and step.open:
                reason = "is being captured, or waits for one that is: commit the step once the capture has ended"
                raise InvalidRequest("stream", capturing, reason)
            if not call.claim():
                return
            closed = step.close(message.commit)
        finally:
            step.release()
        if not closed:
            call.resolve(None, self._actor.outbox)
            return
        work, capture = step.work, step.capture
        work.call = call  # it fails with a launch that the step builds on
        watch = self._actor.cell.completion.watch
        try:
            event = step.end()
        except BaseException as error:
            step.ended(False, error)
            self._undo(work)
            if capture is not None:
                capture.lost = True
            self._give_back(work.cache, capture)
            raise
        if not message.commit:
            step.ended(False, step.failure)
            self._undo(work)
            if capture is not None:  # its next step must not change tables that kernels still read
                give_back = functools.partial(self._give_back, work.cache, capture)
                watch(event, (), lambda _: give_back(), self._actor.outbox, lambda _: give_back())
            call.resolve(None, self._actor.outbox)
            return

        def finish(_: Outputs) -> Sequence[Any]:
            self._give_back(work.cache, capture)
            step.ended(not work.lost, built_on_failed() if work.lost else None)
            if work.lost:
                self._undo(work)
                call.fail(built_on_failed())
            else:
                work.cache.succeeded([work])
                self._leave(work)
            return (step.lengths,)

        def failed(error: BaseException) -> Collection[Call[Any]]:
            step.ended(False, error)
            self._undo(work, error)
            self._give_back(work.cache, capture)
            return ()

        watch(event, (call,), finish, self._actor.outbox, failed)

    def _undo(self, work: KvWork, error: BaseException | None = None) -> None:
        for other in work.cache.failed([work]):
            other.call.fail(error or LaunchError("the step that the request builds on was undone"))
        self._leave(work)

    def _leave(self, work: KvWork) -> None:
        work.cache.stepping.difference_update(work.tables)
        self._store.order.look_again()

    def _give_back(self, cache: OpenedCache, capture: StepCapture | None) -> Sequence[Any]:
        """Let the next step use a capture. Returns no results, because it answers no call."""
        if capture is not None:
            cache.stepping.discard(capture)
            self._store.order.look_again()
        return ()

    def _share_pages(self, unit: StepLayers) -> None:
        chosen = unit.share_pages(self._store.cascader)
        cell = self._actor.cell
        if chosen is not None and cell.environment.trace.active():
            cell.environment.trace.emit("launch.cascade", actor=cell.name, **chosen._asdict())

    def _copy_pages(self, work: KvWork) -> None:
        """Copy shared pages that the step will write to."""
        if not any(write.copies for write in work.writes):
            return
        cell = self._actor.cell

        def failed(error: BaseException) -> Collection[Call[Any]]:
            work.lost = True
            return ()

        for group in work.cache.groups:
            copies = [write.copies[group.number] for write in work.writes if group.number in write.copies]
            if copies:
                launch = copy_launch(group, copies, work.appending[-1:])
                event = (cell.stream or cell.open_stream()).launch(launch)
                cell.completion.watch(event, (), lambda _: (), self._actor.outbox, failed)

    def _plan(
        self, call: Call[Any], cache: OpenedCache, message: BeginStep, tables: list[PageTable]
    ) -> list[StepLayers]:
        """Check and plan a step: the `StepLayers` of each layer. Raises `InvalidRequest` and `Unsupported`."""
        total = _check_counts(message, len(tables))
        _check_longest(message, cache, tables)
        key = _plain_key(cache, message, tables)
        known = None if key is None else cache.steps.find(key)
        if known is not None:
            again = [self._planned_again(call, cache, tables, plan) for plan in known.plans]
            return again * cache.layers if len(again) == 1 else [again[index] for index in known.of_layer]
        given = message.layer_options or {}
        expect(isinstance(given, Mapping), "layer_options", given, "must give options by layer")
        for layer, options in given.items():
            integer("layer_options", layer, 0, cache.layers - 1)
            expect(isinstance(options, Mapping), f"layer_options[{layer}]", show(options), "must give options by name")
            for name in options:
                reason = f"must be one of {', '.join(sorted(_OF_A_LAYER))}"
                expect(name in _OF_A_LAYER, f"layer_options[{layer}]", name, reason)
        # The most heads with which all elements of q can be addressed, at the largest head_dim.
        widest = max(total, 1) * max(group.pool.head_dim for group in cache.groups)
        most = min(FURTHEST, MOST_ELEMENTS // widest)
        heads = heads_of_layers(message.heads_q, [group.pool.heads_kv for group in cache.group_of], most)
        like = _like(cache, message)
        units: dict[Hashable, StepLayers] = {}
        layers: list[StepLayers] = []
        for layer, group in enumerate(cache.group_of):
            alike = group.number, heads[layer], layer if layer in given or isinstance(like, list) else None
            if alike not in units:
                own_like = like[layer] if isinstance(like, list) else {}
                examples = own_like if isinstance(like, list) else like
                with _naming_layer(layer, given, own_like):
                    arrays = _arrays(group, message, heads[layer], examples, len(tables), self._store.device)
                    units[alike] = self._planned(call, cache, message, layer, tables, arrays, given.get(layer, {}))
            layers.append(units[alike])
        if key is not None:
            numbers = {id(each): index for index, each in enumerate(units.values())}
            plans = [LayerPlan(each.work.layer, _kind(each.work), each.layouts) for each in units.values()]
            cache.steps.add(key, StepPlan(tuple(plans), tuple(numbers[id(each)] for each in layers)))
        return layers

    def _planned_again(
        self, call: Call[Any], cache: OpenedCache, tables: list[PageTable], plan: LayerPlan
    ) -> StepLayers:
        kind, q = plan.kind, plan.layouts["q"]
        # A q without contents, to plan for a table of another width.
        example = contiguous(q.shape, name_of(q.dtype), None if q.place is None else q.place[0])
        request = None if kind.request is None else changed(kind.request, {"q": example})
        return StepLayers(_work(call, cache, plan.layer, tables, kind, request, kind.rows), plan.layouts)

    def _planned(
        self,
        call: Call[Any],
        cache: OpenedCache,
        message: BeginStep,
        layer: int,
        tables: list[PageTable],
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> StepLayers:
        own = {**message.options, **options}
        device, notes = self._store.device_name, call.caller_notes
        request, _ = adopt_request(AttendCache(cache=cache.number, seqs=message.seqs, **arrays, **own), device, notes)
        group = cache.group_of[layer]
        _check_rows(group, message)
        request = group.bounded(request)
        kind, (attention, rows) = kind_of(self._store, group, request, tables, _longest(group, message))
        work = _work(call, cache, layer, tables, kind, attention, rows)
        work.expected = expected_lengths(request)
        named = ("q", "k", "v", "k_pe", "c_kv", "out")
        known = {name: array for name in named if (array := getattr(request, name)) is not None}
        if "out" not in known and kind.plan is not None:
            out = kind.plan.outputs["out"]
            known["out"] = contiguous(
                out.shape, out.dtype, request.q.device if isinstance(request.q, DeviceArray) else None
            )
        return StepLayers(
            work,
            {
                name: ArrayLayout.of(array, TMA_ALIGNMENT if name in ("q", "out") else None)
                for name, array in known.items()
            },
        )


def _work(
    call: Call[Any],
    cache: OpenedCache,
    layer: int,
    tables: list[PageTable],
    kind: RequestKind,
    request: PagedForward | None,
    rows: NewRows | None,
) -> KvWork:
    work = KvWork(call=call, cache=cache, tables=tables, request=request, plan=kind.plan, rows=rows, kind=kind)
    work.layer, group = layer, cache.group_of[layer]
    last = 0 if group.window is None else int(work.rows_each.max(initial=0))
    work.columns = group.columns(_longest(group, call.message), last)
    return work


def _longest(group: PoolGroup, message: BeginStep) -> int:
    """The least length that a step is planned for. With a window it is always the same, so that steps share plans."""
    return MAX_SEQLEN if group.window is not None else message.max_length or 0


def _check_rows(group: PoolGroup, message: BeginStep) -> None:
    """Check that a step only reads pages that a layer with a window keeps meanwhile. Raises `InvalidRequest`."""
    if group.window is None or message.append:
        return
    rows: Any = message.rows
    most = max(rows, default=0) if isinstance(rows, list | tuple) else rows
    reason = f"must be at most {1 + group.slack} in a step that appends none: layers with a window keep no more"
    expect(most <= 1 + group.slack, "rows", rows, reason)


def _check_counts(message: BeginStep, batch: int) -> int:
    """Check the numbers of rows, and return their sum. Raises `InvalidRequest`."""
    rows: Any = message.rows
    if not isinstance(rows, list | tuple):
        total = batch * integer("rows", rows, 1, MAX_SEQLEN)
    else:
        expect(len(rows) == batch, "rows", rows, f"must be a number for each of the {batch} sequences")
        total = sum([integer(f"rows[{index}]", count, 0, MAX_SEQLEN) for index, count in enumerate(rows)])
    expect(total <= FURTHEST, "rows", rows, f"must be at most {FURTHEST} rows of all sequences together, not {total}")
    return total


def _check_longest(message: BeginStep, cache: OpenedCache, tables: Sequence[PageTable]) -> None:
    """Check that the sequences, with their new rows, have at most ``max_length`` rows. Raises `InvalidRequest`."""
    if message.max_length is None:
        return
    expect(type(message.max_length) is int, "max_length", show(message.max_length), "must be an int")
    most = integer("max_length", message.max_length, 1, min(MAX_SEQLEN, cache.most_rows))
    rows = message.rows if isinstance(message.rows, list | tuple) else [message.rows] * len(tables)
    for index, (table, count) in enumerate(zip(tables, rows, strict=False)):
        length = table.length + (count if message.append else 0)
        expect(
            length <= most, f"seqs[{index}]", f"{length} rows", f"must have at most max_length, {most}, with the step's"
        )


def _kind(work: KvWork) -> RequestKind:
    assert work.kind is not None
    return work.kind


@contextlib.contextmanager
def _naming_layer(
    layer: int, given: Mapping[int, Mapping[str, Any]], like: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[None]:
    """Name the layer in errors about its own options or arrays. given: options by layer. like: the layer's arrays."""
    try:
        yield
    except (InvalidRequest, Unsupported) as error:
        name = error.field.partition(".")[0]
        if name in given.get(layer, {}):
            field = f"layer_options[{layer}].{error.field}"
        elif name in like:
            field = f"like[{layer}].{error.field}"
        elif name == "like" and like:
            field = f"like[{layer}]"
        else:
            raise
        raise type(error)(field, *error.args[1:]) from None


def _like(cache: OpenedCache, message: BeginStep) -> Mapping[str, Any] | list[Mapping[str, Any]]:
    """Examples of arrays by name for all layers, or a list of such examples for each layer. Raises `InvalidRequest`."""
    like: Any = message.like or {}
    expect(isinstance(like, Mapping), "like", show(like), "must give arrays by name, or by layer and name")
    if not any(isinstance(key, Integral) for key in like):
        return dict(like)
    for layer, own in like.items():
        integer("like", layer, 0, cache.layers - 1)
        expect(isinstance(own, Mapping), f"like[{layer}]", show(own), "must give arrays by name")
    return [like.get(layer, {}) for layer in range(cache.layers)]


def _plain_key(cache: OpenedCache, message: BeginStep, tables: Sequence[PageTable]) -> Hashable | None:
    """The key of the plan of a step whose options are plain values.

    None for a step with other options, with arrays in ``like`` or with options by layer.
    """
    options = message.options
    if message.like or message.layer_options or not OWN.isdisjoint(options):
        return None
    rows = message.rows
    new = [rows] * len(tables) if type(rows) is int else rows
    heads = tuple(message.heads_q) if isinstance(message.heads_q, list) else message.heads_q
    said = (heads, message.append, message.dtype, message.on_host, *options.values())
    if not isinstance(new, list | tuple) or len(new) != len(tables) or not all(map(_is_plain, (*new, *said))):
        return None
    added = new if message.append else [0] * len(tables)
    longest = max([table.length + count for table, count in zip(tables, added, strict=True)], default=0)
    # Equal values may be of different types: 1 == True == 1.0.
    kinds = *map(type, (*new, *said)), *[type(part) for value in said if type(value) is tuple for part in value]
    longest, last = max(longest, message.max_length or 0), max(new, default=0)
    columns = tuple([group.columns(longest, last) for group in cache.groups])
    return columns, type(rows), tuple(new), said, tuple(options), kinds


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value))


def _check_reach(work: KvWork) -> None:
    """Check the tables and the bias of a layer, which may be its own, against the lengths. Raises `InvalidRequest`."""
    lengths = np.array([table.length for table in work.tables], np.int32)
    if work.rows is not None:
        lengths += work.rows.counts
        work.rows.check_reach(lengths)
    work.group.check_window(work, lengths.tolist())
    if work.plan is not None and work.request is not None and work.plan.problem.bias_keys:
        check_bias(work.plan.problem, changed(work.request, {"cache_seqlens": lengths}))


def _deadline_passed(step: weakref.ref[OpenStep]) -> None:
    alive = step()
    if alive is not None:
        alive.abandon(DeadlineExceeded(LATE))


def _tables(cache: OpenedCache, message: BeginStep) -> list[PageTable]:
    if not isinstance(message.seqs, list | tuple):
        raise InvalidRequest("seqs", show(message.seqs), "must be a list of KvSequence")
    _, tables = cache.tables_of(message.seqs)
    check_once(tables)
    return tables


def _arrays(
    group: PoolGroup, message: BeginStep, heads: int, like: Mapping[str, Any], batch: int, device: Device
) -> dict[str, Any]:
    """Arrays of a layer by name: those of ``like``, and for other names contiguous arrays without contents."""
    pool = group.pool
    rows: Any = message.rows
    own: dict[str, Any] = {}
    if isinstance(rows, list | tuple):
        own["cu_seqlens_q"] = ends_of(np.array(rows, np.int32))
        leading: tuple[int, ...] = (sum(rows),)
    else:
        leading = batch, rows
    name = pool.cache_dtype if message.dtype is None else dtype_text(message.dtype)
    expect(name not in FP8 or message.dtype is not None, "dtype", None, "must be given: the cache's is fp8")
    shapes = {"q": (heads, sum(pool.sides.values()) if pool.latent else pool.head_dim)}
    if flag("append", message.append):
        k, v = LATENT if pool.latent else WHOLE
        shapes |= {k: (pool.heads_kv, pool.head_dim), v: (pool.heads_kv, pool.head_dim_v)}
    for other in like.keys() - shapes.keys() - {"out"}:
        raise InvalidRequest("like", other, f"must name arrays of a layer: {', '.join((*shapes, 'out'))}")
    index = None if message.on_host or device.info.kind != "cuda" else device.info.index
    made = {part: like.get(part, contiguous((*leading, *shape), name, index)) for part, shape in shapes.items()}
    return own | made | {part: like[part] for part in like if part == "out"}
