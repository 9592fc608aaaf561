"""A model's step over the layers of a cache: begun and ended by the actor, and launched by its caller in between.

    BeginStep ──reserve pages──> OpenStep ──attend(layer) for each──> EndStep ──> commit, or undo
                                     └─ kernels behind each other on the caller's stream

A step is checked and planned once for all layers that have the same options. It counts as one launch in flight: where a
launch before it fails, it fails too, and requests on its sequences wait until it has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu_actors.actors.caller_launch import CallerLaunches
from gpu_actors.actors.kv_kind import kind_launch, kind_of
from gpu_actors.actors.kv_launch import add_rows, copy_launch
from gpu_actors.actors.kv_store import (
    CacheStore,
    KvWork,
    OpenedCache,
    RequestKind,
    StepPlan,
    check_once,
    dtype_text,
    expected_lengths,
)
from gpu_actors.arrays.adopt import Adopted, name_of, restore
from gpu_actors.arrays.adoption import adopt_request, changed, take_in
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.arrays.layout import ArrayLayout, contiguous, read_arrays
from gpu_actors.attention.requests import PagedForward
from gpu_actors.devices.interface import Device, Event, Launch, Outputs, Series
from gpu_actors.errors import (
    DeadlineExceeded,
    GpuActorsError,
    InvalidRequest,
    LaunchError,
    RequestError,
    StaleBuffer,
)
from gpu_actors.fields import FP8, expect, flag, integer
from gpu_actors.kernels.append import AppendProblem, Rope
from gpu_actors.kernels.forward_sm90 import TMA_ALIGNMENT
from gpu_actors.kernels.support import MAX_SEQLEN
from gpu_actors.kv.requests import AttendCache, BeginStep, EndStep, StepKeywords
from gpu_actors.kv.sequences import PageTable
from gpu_actors.planning.append_rows import NewRows, pack_rows
from gpu_actors.planning.cached import bind_cached
from gpu_actors.planning.merging import ends_of
from gpu_actors.runtime.actor import ServiceActor, reading
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.validation.overlap import check_output_memory
from gpu_actors.validation.paged import check_bias
from gpu_actors.values import show

__all__ = ["OpenStep", "StepCapture", "Stepping"]

_WHOLE, _LATENT = ("k", "v"), ("k_pe", "c_kv")
_PLAIN = (int, float, bool, str, type(None), Rope)
# Of options, what holds for the sequences of one step, whatever the layer.
_OWN = frozenset(("tokens", "expect_length"))
_OF_A_LAYER = StepKeywords.__optional_keys__ - _OWN

_LATE = "the deadline of the step has passed"


@dataclass(slots=True, eq=False)
class _Layers:
    """Layers with the same options. work: of one of them. layouts: of each array. first: the launch of the first."""

    work: KvWork
    layouts: dict[str, ArrayLayout]
    first: Launch | None = None

    def launch(self, layer: int, arrays: Mapping[str, Any]) -> Launch:
        """The launch of a layer on its own arrays. Raises `InvalidRequest` for where ``out`` lies."""
        work, pools = self.work, self.work.cache.pools_of(layer)
        own: dict[str, Any] = {"q": arrays["q"], **pools}
        if work.rows is not None:
            for name, given in zip("kv", _LATENT if work.cache.pool.latent else _WHOLE, strict=True):
                own[name] = pack_rows(given, arrays[given]) if work.rows.rows else arrays[given]
        out = arrays.get("out")
        if out is not None:
            check_output_memory(out, {"q": arrays["q"], **work.cache.pools})
        first = self.first
        if first is None:
            first = self.first = self._first(own)
        outputs = {**first.outputs, "out": first.outputs["out"]._replace(into=out)}
        inputs = {**first.inputs, **own}
        return Launch(first.key, inputs, outputs, first.oracle, first.steps, first.scratch, first.updates)

    def renew(self, captured: _Layers, series: Series) -> None:
        """Put the tables of this step to where captured launches read them."""
        examples = {
            name: contiguous(layout.shape, name_of(layout.dtype), layout.place[0])
            for name, layout in self.layouts.items()
            if layout.place is not None and name != "out"
        }
        launch = self.launch(0, examples)
        # Of a group that was not captured, an earlier step may have left tables too.
        first = captured.first or launch
        series.renew(first.steps, launch)
        self.first = captured.first = dataclasses.replace(launch, steps=first.steps, scratch=first.scratch)

    def _first(self, own: Mapping[str, Any]) -> Launch:
        work = self.work
        assert work.request is not None
        assert work.plan is not None
        caches = {"k_cache": own["k_cache"], "v_cache": own.get("v_cache")}
        work.request = changed(work.request, {"q": own["q"], "out": None, **caches})
        if work.rows is not None:
            work.rows = changed(work.rows, {"k": own["k"], "v": own["v"]})
        if work.kind is not None:
            return kind_launch(work.kind, work)
        launch = bind_cached(work.plan, work.request, work.kernels)
        return launch if work.rows is None else add_rows(launch, [work])


@dataclass(slots=True, eq=False)
class StepCapture:
    """Launches of a step that a caller's CUDA graph has. One step at a time has its tables where they read them.

    message: of the step, for tables of one width. sequences: how many. layers: as they were captured. numbers: of the
    layers that the graph has. q: of the latest one, for the stream of its library. lost: a step could not be ended. The
    memory of the launches stays until this is dropped.
    """

    message: BeginStep
    sequences: int
    layers: Sequence[_Layers]
    launches: CallerLaunches
    numbers: set[int] = field(default_factory=set)
    q: Any = None
    lost: bool = False

    def __del__(self) -> None:
        self.launches.series.drop()


class OpenStep:
    """A step that has begun. `attend` may be called by any thread, by one at a time.

    work: its rows and pages, as of a request in flight. lengths: of its sequences, with its rows. capture: of its
    layers, or of those of a step before it. failure: why it was abandoned, once it is closed.
    """

    def __init__(
        self, cell: ActorCell, work: KvWork, layers: Sequence[_Layers], deadline: float | None, message: BeginStep
    ) -> None:
        self.work = work
        self.lengths: list[int] = work.lengths.tolist()
        self.capture: StepCapture | None = message.captured
        self._message = message
        self._cell = cell
        self._traced, self._number = work.call.traced, work.call.number
        if self._traced:
            self._trace("step.begun", sequences=len(self.lengths), layers=len(layers))
        self._layers = layers
        self._launches = CallerLaunches(cell) if self.capture is None else self.capture.launches
        self._device_name = cell.environment.device.info.device_name
        self._deadline = deadline
        self._lock = threading.Lock()
        self._pools: Sequence[Mapping[str, Any]] = work.cache.by_layer
        self._attended: set[int] = set()
        self._over: GpuActorsError | None = None
        self.failure: GpuActorsError | None = None
        self._closed = False
        self._freed: Callable[[], None] | None = None
        self._replaying: int | None = None

    @property
    def cache_number(self) -> int:
        return self.work.cache.number

    @property
    def open(self) -> bool:
        """Whether it has neither ended nor failed."""
        return self._over is None

    def attend(self, layer: int, arrays: Mapping[str, Any], stream: Any) -> Any:
        """Launch a layer on arrays by name. Gives its output in the kind of q, or ``out``."""
        if self._replaying is not None and self._replaying == threading.get_ident():
            raise InvalidRequest("layer", layer, "must not be attended to by what replays the step")
        try:
            with self._lock:
                out, template = self._attend(layer, arrays, stream)
        finally:
            if self._freed is not None:
                self._freed()
        if "out" in arrays:
            return arrays["out"]
        return out if template is None else restore(out, template)

    def _attend(self, layer: int, arrays: Mapping[str, Any], stream: Any) -> tuple[Any, Adopted | None]:
        work = self.work
        if self._over is not None or work.lost or work.cache.closed or self._deadline is not None:
            self._check()
        if type(layer) is not int or not 0 <= layer < len(self._layers):
            layer = integer("layer", layer, 0, len(self._layers) - 1)
        layers = self._layers[layer]
        read, template = read_arrays(layers.layouts, arrays, self._device_name, "this step")
        if len(read) < len(layers.layouts):
            for name in layers.layouts:
                expect(name in read or name == "out", name, None, "must be given to each layer of this step")
        make = functools.partial(layers.launch, layer, read)
        try:
            out = self._launches.run(layers.first, self._pools[layer], read, stream, make)["out"]
        except BaseException as error:
            self._abandon_after(error)
            raise
        if self._launches.series.captured:
            self._captured(layer, arrays["q"])
        else:
            self._attended.add(layer)
        if self._traced:
            self._trace("step.layer", layer=layer, captured=self._launches.series.captured)
        return out, template

    def replay(self, run: Callable[[], object], layers: Collection[int] | None, stream: Any) -> None:
        """Have ``run`` enqueue captured layers, all or some, on a stream: the caller's, or that of q's library."""
        expect(callable(run), "run", show(run), "must be callable, as graph.replay is")
        try:
            with self._lock:
                self._replay(run, layers, stream)
        finally:
            if self._freed is not None:
                self._freed()

    def _replay(self, run: Callable[[], object], layers: Collection[int] | None, stream: Any) -> None:
        self._check()
        if self.capture is None:
            reason = "replays the layers of a step that were captured, and this step has none"
            raise InvalidRequest("run", show(run), reason)
        numbers = self.capture.numbers if layers is None else set(layers)
        reason = f"must be of the captured ones, {sorted(self.capture.numbers)}"
        expect(numbers <= self.capture.numbers, "layers", layers, reason)
        q: Any = take_in(self.capture.q, "q", self._device_name).array
        self._replaying = threading.get_ident()
        try:
            self._launches.replay(run, q, stream)
        except BaseException as error:
            self._abandon_after(error)
            raise
        finally:
            self._replaying = None
        self._attended |= numbers
        if self._traced:
            self._trace("step.replayed", layers=len(numbers))

    def ended(self, committed: bool, error: BaseException | None = None) -> None:
        """It is over, for the trace."""
        if self._traced:
            self._trace("step.ended", committed=committed, error=error)

    def _trace(self, name: str, **fields: Any) -> None:
        cell = self._cell
        cell.environment.trace.emit(name, actor=cell.name, request=self._number, **fields)

    def _captured(self, layer: int, q: Any) -> None:
        if self.capture is None:
            message, columns = self._message, self.work.table.shape[1]
            options = {name: value for name, value in message.options.items() if name not in _OWN}
            longest = message.max_length or columns * self.work.cache.pool.page_size
            message = dataclasses.replace(message, max_length=longest, options=options)
            self.capture = StepCapture(message, len(self.lengths), self._layers, self._launches)
            self.work.cache.stepping.add(self.capture)  # until this step has ended
        self.capture.numbers.add(layer)
        self.capture.q = q

    def _abandon_after(self, error: BaseException) -> None:
        """A launch has raised. A request that is refused has launched nothing."""
        if not isinstance(error, RequestError):
            interrupted = LaunchError("the launch of a layer was interrupted")  # part of it may be enqueued
            self.abandon(error if isinstance(error, GpuActorsError) else interrupted)

    def seize(self, freed: Callable[[], None]) -> bool:
        """Keep layers from being launched until `release`. False while one is: then ``freed`` is called after it."""
        self._freed = freed
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()

    def close(self, commit: bool) -> bool:
        """Let no layer follow. False for an abort of a step that has ended. Between `seize` and `release`.

        Raises what `attend` would, and `InvalidRequest` for a commit of rows that are missing.
        """
        if commit:
            self._check()
            missing = sorted(set(range(len(self._layers))) - self._attended)
            reason = "have no new rows: they must be attended to before the commit"
            expect(self.work.rows is None or not missing, "layers", missing, reason)
        elif self._closed:
            return False
        self._closed, self.failure = True, self._over
        self._over = self._over or StaleBuffer("the step has ended")
        return True

    def end(self) -> Event:
        """The end of all launches."""
        series: Series = self._launches.series
        return series.end() if self.capture is None else series.mark()

    def abandon(self, reason: GpuActorsError) -> None:
        """Undo the step, and raise ``reason`` for what is still asked of it. For any thread."""
        if self._over is None:
            self._over = reason
            mailbox = self._cell.mailbox
            mailbox.put(Call(EndStep(self.cache_number, self, False), mailbox), False)

    def _check(self) -> None:
        if self._over is not None:
            raise self._over
        failure: GpuActorsError | None = None
        if self.work.lost:
            failure = _built_on_failed()
        else:
            try:
                self._cell.shared.find(self.cache_number)
            except GpuActorsError as closed:
                failure = closed.with_traceback(None)
        if failure is not None:
            self.abandon(failure)
            raise failure
        if self._deadline is not None and self._cell.environment.clock.now() >= self._deadline:
            raise DeadlineExceeded(_LATE)


class Stepping:
    """Begins and ends the steps of one incarnation of the actor."""

    def __init__(self, actor: ServiceActor, store: CacheStore, has_kernels: Callable[[KvWork], bool]) -> None:
        self._actor = actor
        self._store = store
        self._has_kernels = has_kernels

    def begin(self, call: Call[Any], cache: OpenedCache, message: BeginStep) -> None:
        """Reserve the pages of a step's rows, and answer with it."""
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
        groups = list(dict.fromkeys(layers))
        if not all(self._has_kernels(group.work) for group in groups):
            return
        first, begun = groups[0].work, list[KvWork]()
        for group in groups[1:]:  # the first is checked where its pages are taken
            _check_reach(group.work)
        for _, error in cache.begin([first], begun):
            raise error
        if not begun:
            return  # answered meanwhile
        cache.stepping.update(tables if capture is None else (*tables, capture))
        try:
            for group in groups:
                group.work.table, group.work.lengths = first.table, first.lengths
                group.work.take_pages(self._store.decoding)
            self._copy_pages(first)
            if capture is not None:
                for group, captured in zip(groups, dict.fromkeys(capture.layers), strict=True):
                    group.renew(captured, capture.launches.series)
            step = OpenStep(self._actor.cell, first, layers, call.deadline, message)
            for group in groups:
                # Copies are made, and layers change no pages.
                group.work = dataclasses.replace(group.work, writes=[])
            if call.deadline is not None:
                environment = self._actor.cell.environment
                # A step that has ended, and its arrays, need not stay until then.
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
        # A thread may be in a layer, or in code of the caller's that replays a graph: no actor waits for that.
        if not step.seize(self._store.order.look_again):
            self._store.order.hold(call)
            return
        try:
            if not call.claim():
                return
            closed = step.close(message.commit)
        finally:
            step.release()
        if not closed:
            call.resolve(None, self._actor.outbox)
            return
        work, capture = step.work, step.capture
        work.call = call  # which fails with a launch that the step builds on
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
            step.ended(not work.lost, _built_on_failed() if work.lost else None)
            if work.lost:
                self._undo(work)
                call.fail(_built_on_failed())
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
        """Let the next step have a capture. Answers no call."""
        if capture is not None:
            cache.stepping.discard(capture)
            self._store.order.look_again()
        return ()

    def _copy_pages(self, work: KvWork) -> None:
        """Copy shared pages that the step will write to."""
        copies = [write.copy for write in work.writes if write.copy is not None]
        if not copies:
            return
        launch = copy_launch(work.cache, copies, work.appending[-1:])
        cell = self._actor.cell

        def failed(error: BaseException) -> Collection[Call[Any]]:
            work.lost = True
            return ()

        event = (cell.stream or cell.open_stream()).launch(launch)
        cell.completion.watch(event, (), lambda _: (), self._actor.outbox, failed)

    def _plan(self, call: Call[Any], cache: OpenedCache, message: BeginStep, tables: list[PageTable]) -> list[_Layers]:
        """Of each layer. Raises `InvalidRequest` and `Unsupported`."""
        _check_longest(message, cache.pool, tables)
        key = _plain_key(cache, message, tables)
        known = None if key is None else cache.steps.find(key)
        if known is not None:
            kind = known.kind
            q = known.layouts["q"]
            # To plan for a table of another width.
            example = contiguous(q.shape, name_of(q.dtype), None if q.place is None else q.place[0])
            request = None if kind.request is None else changed(kind.request, {"q": example})
            return [_Layers(_work(call, cache, tables, kind, request, kind.rows), known.layouts)] * cache.layers
        given = message.layer_options or {}
        expect(isinstance(given, Mapping), "layer_options", given, "must give options by layer")
        for layer, options in given.items():
            integer("layer_options", layer, 0, cache.layers - 1)
            expect(isinstance(options, Mapping), f"layer_options[{layer}]", show(options), "must give options by name")
            for name in options:
                reason = f"must be one of {', '.join(sorted(_OF_A_LAYER))}"
                expect(name in _OF_A_LAYER, f"layer_options[{layer}]", name, reason)
        arrays = _arrays(cache, message, len(tables), self._store.device)
        common = self._planned(call, cache, message, tables, arrays, {})
        own = {layer: self._planned(call, cache, message, tables, arrays, given[layer]) for layer in given}
        if key is not None:
            assert common.work.kind is not None
            cache.steps.add(key, StepPlan(common.work.kind, common.layouts))
        return [own.get(layer, common) for layer in range(cache.layers)]

    def _planned(
        self,
        call: Call[Any],
        cache: OpenedCache,
        message: BeginStep,
        tables: list[PageTable],
        arrays: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> _Layers:
        own = {**message.options, **options}
        device, notes = self._store.device_name, call.caller_notes
        request, _ = adopt_request(AttendCache(cache=cache.number, seqs=message.seqs, **arrays, **own), device, notes)
        expect(request.return_lse is False, "return_lse", request.return_lse, "must be False: a layer gives out alone")
        kind, (attention, rows) = kind_of(self._store, cache, request, tables, message.max_length or 0)
        work = _work(call, cache, tables, kind, attention, rows)
        work.expected = expected_lengths(request)
        named = ("q", "k", "v", "k_pe", "c_kv", "out")
        known = {name: array for name in named if (array := getattr(request, name)) is not None}
        if "out" not in known and kind.plan is not None:
            out = kind.plan.outputs["out"]
            known["out"] = contiguous(
                out.shape, out.dtype, request.q.device if isinstance(request.q, DeviceArray) else None
            )
        return _Layers(
            work,
            {
                name: ArrayLayout.of(array, TMA_ALIGNMENT if name in ("q", "out") else None)
                for name, array in known.items()
            },
        )


def _work(
    call: Call[Any],
    cache: OpenedCache,
    tables: list[PageTable],
    kind: RequestKind,
    request: PagedForward | None,
    rows: NewRows | None,
) -> KvWork:
    work = KvWork(call=call, cache=cache, tables=tables, request=request, plan=kind.plan, rows=rows, kind=kind)
    work.columns = cache.columns(call.message.max_length or 0)
    return work


def _check_longest(message: BeginStep, pool: AppendProblem, tables: Sequence[PageTable]) -> None:
    """Check that the sequences, with their new rows, are no longer than said. Raises `InvalidRequest`."""
    if message.max_length is None:
        return
    expect(type(message.max_length) is int, "max_length", show(message.max_length), "must be an int")
    most = integer("max_length", message.max_length, 1, min(MAX_SEQLEN, pool.num_blocks * pool.page_size))
    rows = message.rows if isinstance(message.rows, list | tuple) else [message.rows] * len(tables)
    for index, (table, count) in enumerate(zip(tables, rows, strict=False)):
        length = table.length + (count if message.append and type(count) is int else 0)
        expect(
            length <= most, f"seqs[{index}]", f"{length} rows", f"must have at most max_length, {most}, with the step's"
        )


def _plain_key(cache: OpenedCache, message: BeginStep, tables: Sequence[PageTable]) -> Hashable | None:
    """What decides the plan of a step whose options are plain values. None for others, and where layers differ."""
    options = message.options
    if message.like or message.layer_options or not _OWN.isdisjoint(options):
        return None
    rows = message.rows
    new = [rows] * len(tables) if type(rows) is int else rows
    said = (message.heads_q, message.append, message.dtype, message.on_host, *options.values())
    if not isinstance(new, list | tuple) or len(new) != len(tables) or not all(map(_is_plain, (*new, *said))):
        return None
    added = new if message.append else [0] * len(tables)
    longest = max([table.length + count for table, count in zip(tables, added, strict=True)], default=0)
    # Equal is not alike: 1 == True == 1.0.
    kinds = *map(type, (*new, *said)), *[type(part) for value in said if type(value) is tuple for part in value]
    columns = cache.columns(max(longest, message.max_length or 0))
    return columns, type(rows), tuple(new), said, tuple(options), kinds


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(part) in _PLAIN for part in value))


def _check_reach(work: KvWork) -> None:
    """Check tables and a bias, which a layer may have of its own, against the lengths. Raises `InvalidRequest`."""
    lengths = np.array([table.length for table in work.tables], np.int32)
    if work.rows is not None:
        lengths += work.rows.counts
        work.rows.check_reach(lengths)
    if work.plan is not None and work.request is not None and work.plan.problem.bias_keys:
        check_bias(work.plan.problem, changed(work.request, {"cache_seqlens": lengths}))


def _built_on_failed() -> LaunchError:
    return LaunchError("a launch that the step builds on has failed: begin another")


def _deadline_passed(step: weakref.ref[OpenStep]) -> None:
    alive = step()
    if alive is not None:
        alive.abandon(DeadlineExceeded(_LATE))


def _tables(cache: OpenedCache, message: BeginStep) -> list[PageTable]:
    if not isinstance(message.seqs, list | tuple):
        raise InvalidRequest("seqs", show(message.seqs), "must be a list of KvSequence")
    _, tables = cache.tables_of(message.seqs)
    check_once(tables)
    return tables


def _arrays(cache: OpenedCache, message: BeginStep, batch: int, device: Device) -> dict[str, Any]:
    """Arrays of a layer by name: those of ``like``, and contiguous ones without contents for the others."""
    expect(isinstance(message.like, Mapping | None), "like", show(message.like), "must give arrays by name")
    pool, like = cache.pool, dict(message.like or {})
    rows: Any = message.rows
    heads = integer("heads_q", message.heads_q, 1)
    own: dict[str, Any] = {}
    if isinstance(rows, list | tuple):
        expect(len(rows) == batch, "rows", rows, f"must be a number for each of the {batch} sequences")
        counts = [integer(f"rows[{index}]", count, 0) for index, count in enumerate(rows)]
        own["cu_seqlens_q"] = ends_of(np.array(counts, np.int32))
        leading: tuple[int, ...] = (sum(counts),)
    else:
        leading = batch, integer("rows", rows, 1)
    name = pool.cache_dtype if message.dtype is None else dtype_text(message.dtype)
    expect(name not in FP8 or message.dtype is not None, "dtype", None, "must be given: the cache's is fp8")
    shapes = {"q": (heads, sum(pool.sides.values()) if pool.latent else pool.head_dim)}
    if flag("append", message.append):
        k, v = _LATENT if pool.latent else _WHOLE
        shapes |= {k: (pool.heads_kv, pool.head_dim), v: (pool.heads_kv, pool.head_dim_v)}
    for other in like.keys() - shapes.keys() - {"out"}:
        raise InvalidRequest("like", other, f"must name arrays of a layer: {', '.join((*shapes, 'out'))}")
    index = None if message.on_host or device.info.kind != "cuda" else device.info.index
    made = {part: like.get(part, contiguous((*leading, *shape), name, index)) for part, shape in shapes.items()}
    return own | made | {part: like[part] for part in like if part == "out"}
