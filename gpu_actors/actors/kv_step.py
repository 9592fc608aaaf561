"""OpenStep: a model's step over the layers of a cache, launched by its caller. StepCapture: its captured launches.

    BeginStep ──Stepping: reserve pages──> OpenStep ──attend(layer) for each──> EndStep ──Stepping──> commit, or undo
                                               └─ kernels one after the other on the caller's stream

A step counts as one launch in flight: if an earlier launch that it builds on fails, the step fails too.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_actors.actors.caller_launch import CallerLaunches
from gpu_actors.actors.kv_kind import kind_launch
from gpu_actors.actors.kv_launch import add_rows
from gpu_actors.actors.kv_store import (
    KvWork,
)
from gpu_actors.arrays.adopt import Adopted, name_of, restore
from gpu_actors.arrays.layout import ArrayLayout, contiguous, read_arrays
from gpu_actors.arrays.request_arrays import changed, take_in
from gpu_actors.devices.interface import Event, Launch, Outputs, Series
from gpu_actors.errors import (
    DeadlineExceeded,
    GpuActorsError,
    InvalidRequest,
    LaunchError,
    RequestError,
    StaleBuffer,
)
from gpu_actors.fields import expect, integer
from gpu_actors.kv.requests import BeginStep, EndStep
from gpu_actors.planning.append_rows import NewRows, pack_rows
from gpu_actors.planning.cached import bind_cached
from gpu_actors.planning.cascade import CascadeKeys, Cascader, Cascading
from gpu_actors.planning.forward import attention_output
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.validation.overlap import check_output_memory
from gpu_actors.values import show

__all__ = ["LATE", "LATENT", "OWN", "WHOLE", "OpenStep", "StepCapture", "StepLayers", "built_on_failed"]

WHOLE, LATENT = ("k", "v"), ("k_pe", "c_kv")
# The options that belong to the sequences of one step, and are the same for all layers.
OWN = frozenset(("tokens", "expect_length"))

LATE = "the deadline of the step has passed"


@dataclass(slots=True, eq=False)
class StepLayers:
    """Layers of one group with the same options.

    work: the work of one of them. layouts: the layout of each array. first: the first launch of these layers, None
    before it. cascade: whether ``first`` is a cascade. launched: whether a launch has waited for the options' arrays.
    """

    work: KvWork
    layouts: dict[str, ArrayLayout]
    first: Launch | None = None
    cascade: bool = False
    launched: bool = False

    def share_pages(self, cascader: Cascader) -> Cascading | None:
        """Make the launches read shared pages once, if that pays. Returns the choice, None if no pages are shared."""
        work = self.work
        if not isinstance(work.cascade, CascadeKeys):
            return None if work.cascade is None else Cascading(False, work.cascade)
        assert work.request is not None
        assert work.plan is not None
        forced = work.cache.cascade is True
        launch, chosen = cascader.bind(work.plan, work.request, work.cascade, work.cascading, forced)
        if launch is not None and work.rows is not None:
            work.rows = changed(work.rows, self._new_rows(work.rows, self._examples()))
            launch = add_rows(launch, [work])
        self.first, self.cascade = launch, launch is not None
        return chosen

    def launch(self, layer: int, arrays: Mapping[str, Any]) -> Launch:
        """The launch of a layer on its own arrays. Raises `InvalidRequest` if ``out`` overlaps q or the pools."""
        work, pools = self.work, self.work.cache.by_layer[layer]
        own: dict[str, Any] = {"q": arrays["q"], **pools}
        if work.rows is not None:
            own |= self._new_rows(work.rows, arrays)
        out = arrays.get("out")
        if out is not None:
            check_output_memory(out, {"q": arrays["q"], **work.group.pools})
        first = self.first
        if first is None:
            first = self.first = self._first(own)
        outputs = {**first.outputs, "out": first.outputs["out"]._replace(into=out)}
        inputs = {**first.inputs, **own}
        launch = Launch(first.key, inputs, outputs, first.oracle, first.steps, first.scratch, first.updates)
        return dataclasses.replace(launch, waited=first.inputs.keys() - own.keys()) if self.launched else launch

    def renew(self, captured: StepLayers, series: Series) -> None:
        """Put the tables of this step where captured launches read them."""
        # The launch of any of the layers will do, because they differ only in their pools. Pools lie on the device, so
        # `Series.renew` does not copy them, and `launch` gives each layer its own.
        launch = self.launch(self.work.layer, self._examples())
        # An earlier step may also have left tables for layers that were not captured. A cascade is never captured, and
        # this step makes none.
        first = launch if captured.first is None or captured.cascade else captured.first
        series.renew(first.steps, launch)
        self.first = captured.first = dataclasses.replace(launch, steps=first.steps, scratch=first.scratch)
        captured.cascade = False

    def _new_rows(self, rows: NewRows, arrays: Mapping[str, Any]) -> dict[str, Any]:
        given = zip("kv", LATENT if self.work.group.pool.latent else WHOLE, strict=True)
        return {name: pack_rows(own, arrays[own]) if rows.rows else arrays[own] for name, own in given}

    def _examples(self) -> dict[str, Any]:
        """Arrays like those of a layer, without contents."""
        return {
            name: contiguous(layout.shape, name_of(layout.dtype), None if layout.place is None else layout.place[0])
            for name, layout in self.layouts.items()
            if name != "out"
        }

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
    """The launches of a step that a caller's CUDA graph has captured.

    One step at a time has its tables where these launches read them. message: begins the step, with a ``max_length``
    that gives all tables one width. sequences: how many the step has. layers: its layers as they were captured.
    numbers: the numbers of the layers in the graph. q: the latest captured q, for the stream of its library. lost:
    whether a step could not be ended. The memory of the launches stays until this object is dropped.
    """

    message: BeginStep
    sequences: int
    layers: Sequence[StepLayers]
    launches: CallerLaunches
    numbers: set[int] = field(default_factory=set)
    q: Any = None
    lost: bool = False

    def __del__(self) -> None:
        self.launches.series.drop()


class OpenStep:
    """A step that has begun. Any thread may call `attend`, one at a time.

    work: the step's rows and pages, in the form of a request in flight. lengths: the lengths of its sequences, with its
    rows. capture: the capture of its layers or of an earlier step's layers, or None. failure: why the step was
    abandoned, once it is closed.
    """

    def __init__(
        self, cell: ActorCell, work: KvWork, layers: Sequence[StepLayers], deadline: float | None, message: BeginStep
    ) -> None:
        self.work = work
        self.lengths: list[int] = work.totals
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
        """Whether the step has neither ended nor failed."""
        return self._over is None

    @property
    def replaying(self) -> bool:
        """Whether this thread is in the code that replays the step. There it must not wait for the step."""
        return self._replaying is not None and self._replaying == threading.get_ident()

    def attend(self, layer: int, arrays: Mapping[str, Any], stream: Any) -> Any:
        """Launch a layer on arrays by name.

        Returns ``out``, or an array of q's kind if it is not given; with an LSE both in an `AttentionOutput`.
        """
        if self.replaying:
            raise InvalidRequest("layer", layer, "must not be attended to by what replays the step")
        try:
            with self._lock:
                outputs, template = self._attend(layer, arrays, stream)
        finally:
            if self._freed is not None:
                self._freed()
        if "lse" in outputs:
            (answer,) = attention_output(template, arrays.get("out"), outputs)
            return answer
        if "out" in arrays:
            return arrays["out"]
        return outputs["out"] if template is None else restore(outputs["out"], template)

    def _attend(self, layer: int, arrays: Mapping[str, Any], stream: Any) -> tuple[Outputs, Adopted | None]:
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
            outputs = self._launches.run(layers.first, self._pools[layer], read, stream, make)
        except BaseException as error:
            self._abandon_after(error)
            raise
        if self._launches.series.captured:
            self._captured(layer, arrays["q"])
        else:
            self._attended.add(layer)
            layers.launched = True
        if self._traced:
            self._trace("step.layer", layer=layer, captured=self._launches.series.captured)
        return outputs, template

    def replay(self, run: Callable[[], object], layers: Collection[int] | None, stream: Any) -> None:
        """Call ``run``, which enqueues captured layers. layers: their numbers, None for all.

        stream: the caller's stream; None: the current stream of the captured q's library.
        """
        expect(callable(run), "run", show(run), "must be callable, as graph.replay is")
        expect(not self.replaying, "run", show(run), "must not be replayed by what replays the step")
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
        numbers = self.capture.numbers
        if layers is not None:
            reason = f"must be a list of the captured ones, {sorted(numbers)}, or of some"
            listed = isinstance(layers, Collection)
            expect(listed and all(layer in list(numbers) for layer in layers), "layers", show(layers), reason)
            numbers = set(layers)
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
        """Record the end of the step in the trace."""
        if self._traced:
            self._trace("step.ended", committed=committed, error=error)

    def _trace(self, name: str, **fields: Any) -> None:
        cell = self._cell
        cell.environment.trace.emit(name, actor=cell.name, request=self._number, **fields)

    def _captured(self, layer: int, q: Any) -> None:
        if self.capture is None:
            message, cache = self._message, self.work.cache
            lasting = {name: value for name, value in message.options.items() if name not in OWN}
            own = {name: _as_it_is(getattr(message, name)) for name in ("heads_q", "rows", "like", "layer_options")}
            # Tables with a window serve sequences of any length.
            columns = [each.work.table.shape[1] for each in self._layers if each.work.group.window is None]
            longest = message.max_length or (min(columns) * cache.page_size if columns else cache.most_rows)
            message = dataclasses.replace(message, max_length=longest, options=_as_it_is(lasting), **own)
            self.capture = StepCapture(message, len(self.lengths), self._layers, self._launches)
            self.work.cache.stepping.add(self.capture)  # until this step has ended
        self.capture.numbers.add(layer)
        self.capture.q = q

    def _abandon_after(self, error: BaseException) -> None:
        """Abandon the step because a launch has raised, unless the request was refused and so launched nothing."""
        if not isinstance(error, RequestError):
            interrupted = LaunchError("the launch of a layer was interrupted")  # part of it may be enqueued
            self.abandon(error if isinstance(error, GpuActorsError) else interrupted)

    def seize(self, freed: Callable[[], None]) -> bool:
        """Keep layers from being launched until `release`. Returns False if one is being launched.

        ``freed`` is called at the end of each `attend` and `replay` from then on.
        """
        self._freed = freed
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        self._lock.release()

    def close(self, commit: bool) -> bool:
        """Let no layer be launched any more. Called between `seize` and `release`.

        Returns False for an abort of a step that has already ended. A commit raises what `attend` would raise, and
        `InvalidRequest` if rows of a layer are missing.
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

    def capturing(self) -> int | None:
        """The stream whose capture keeps the step from ending."""
        return None if self._closed else self._launches.series.capturing()

    def end(self) -> Event:
        """Return the event for the end of all launches."""
        series: Series = self._launches.series
        return series.end() if self.capture is None else series.mark()

    def abandon(self, reason: GpuActorsError) -> None:
        """Undo the step. Its methods raise ``reason`` from then on. Any thread may call it."""
        if self._over is None:
            self._over = reason
            mailbox = self._cell.mailbox
            mailbox.put(Call(EndStep(self.cache_number, self, False), mailbox), False)

    def _check(self) -> None:
        if self._over is not None:
            raise self._over
        failure: GpuActorsError | None = None
        if self.work.lost:
            failure = built_on_failed()
        else:
            try:
                self._cell.shared.find(self.cache_number)
            except GpuActorsError as closed:
                failure = closed.with_traceback(None)
        if failure is not None:
            self.abandon(failure)
            raise failure
        if self._deadline is not None and self._cell.environment.clock.now() >= self._deadline:
            raise DeadlineExceeded(LATE)


def _as_it_is(value: Any) -> Any:
    """A copy of lists and mappings, which a caller may change later. Arrays are not copied: each step reads them."""
    if isinstance(value, list | tuple):
        return tuple(map(_as_it_is, value))
    return {key: _as_it_is(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def built_on_failed() -> LaunchError:
    return LaunchError("a launch that the step builds on has failed: begin another")
