"""Caches on an emulated device on which the caller has arrays and streams too, as on a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, cast, get_args

import numpy as np
from emulated.memory import host_view
from inside.arrays import DeviceArray
from inside.cuda import CudaDevice, HostOrder
from inside.emulation import EmulatedApi
from inside.handles import start_context

import gpu_actors as ga
from gpu_actors import ContextOptions, EmulationOptions

LAYERS, HEADS, HEADS_Q, DIM, PAGE = 3, 1, 2, 64, 4
SIZES: dict[str, Any] = {
    "num_blocks": 32, "page_size": PAGE, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float16", "layers": LAYERS,
}  # fmt: skip
ORDERS: tuple[HostOrder, ...] = get_args(HostOrder)

_PLAIN = ContextOptions()


class CallerDevice(CudaDevice):
    """A device on which callers may have arrays, as on a GPU."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.info = dataclasses.replace(self.info, kind="cuda")

    def note_caller(self) -> None:
        """Notes no stream: CuPy would call the real driver, which may be missing."""


class Program:
    """A cache on an emulated device, two streams of the caller, and a plain cache for requests alone."""

    def __init__(self, ctx: ga.GpuContext, cache: ga.KvCache, plain: ga.KvCache, seed: int) -> None:
        self.device = cast("CudaDevice", ctx._children.device)
        self.api: Any = self.device.driver.api
        self.context, self.cache, self.plain, self.flash_attn = ctx, cache, plain, ctx.flash_attn
        self.kept: list[Any] = []  # arrays that the streams' work reads, until the end
        self.rng = np.random.default_rng(seed)
        self.streams = [self.api.create_stream() for _ in range(2)]
        self.idle = self.device.memory.empty((1,), "float32")
        self.seqs, self.twins = ([one.create().result(20) for _ in range(2)] for one in (cache, plain))
        self.append(self.rows(5), self.rows(5))

    def append(self, k: Any, v: Any) -> None:
        for one, seqs in ((self.cache, self.seqs), (self.plain, self.twins)):
            one.append(seqs, k, v).result(20)

    def rows(self, count: int) -> Any:
        return self.rng.standard_normal((LAYERS, 2, count, HEADS, DIM)).astype(np.float16)

    def produced(self, value: Any, handle: int | None) -> DeviceArray:
        """An array that a stream's work will write, or without a handle one that belongs to no stream."""
        memory = self.device.memory.empty(value.shape, value.dtype.name)
        if handle is None:
            host_view(memory)[...] = value
            return memory
        staged = self.api.allocate_pinned(value.nbytes)
        ctypes.memmove(staged, value.ctypes.data, value.nbytes)
        self.api.copy_to_device(memory.address, staged, value.nbytes, handle)
        return dataclasses.replace(memory, stream=handle, owner=memory)

    def consumed(self, array: DeviceArray, handle: int) -> DeviceArray:
        """A copy of an array, which a stream makes after its earlier work."""
        copy = self.device.memory.empty(array.shape, array.dtype.name)
        nbytes = int(np.prod(array.shape)) * array.dtype.itemsize
        self.api.copy_on_device(copy.address, array.address, nbytes, handle)
        return copy

    def step(self, kept: list[Any], on: Callable[[int], int | None]) -> tuple[ga.Reply[Any], list[Any], list[Any]]:
        """A step whose layers run on streams. Returns its commit, outputs as the streams' next work reads them, and the
        expected ones."""
        k, v, q = self.rows(1), self.rows(1), self.rng.standard_normal((LAYERS, 2, 1, HEADS_Q, DIM)).astype(np.float16)
        # Rows that are still on their way, and a page that the step must copy.
        before = self.rows(1), self.rows(1)
        appended = [one.append(seqs, *before) for one, seqs in ((self.cache, self.seqs), (self.plain, self.twins))]
        forked = self.cache.fork(self.seqs[0])
        step = self.cache.step(self.seqs, heads_q=HEADS_Q).result(20)
        outs = []
        for layer in range(LAYERS):
            handle = on(layer)
            arrays = [self.produced(one[layer], handle) for one in (q, k, v)]
            out = self.device.memory.empty(q[layer].shape, "float16")
            result = step.attend(layer, *arrays, out=out, stream=handle)
            # A stream-ordered allocator would keep the stream's arrays; the step holds the others.
            kept += [out] if handle is None else [out, *arrays]
            outs.append(result if handle is None else self.consumed(result, handle))
        reply = step.commit()
        for one in appended:
            one.result(20)
        self.cache.free(forked.result(20)).result(20)
        self.plain.append(self.twins, k, v).result(20)
        return reply, outs, [self.attended(self.plain, self.twins, layer, q[layer]) for layer in range(LAYERS)]

    def attended(self, cache: ga.KvCache, seqs: Any, layer: int, q: Any) -> Any:
        return cache.attend(q, seqs, layer=layer).result(20).out

    def delay(self, handle: int) -> None:
        """Give a stream work, so that its next launch is late."""
        for _ in range(60):
            self.api.copy_on_device(self.idle.address, self.idle.address, 4, handle)

    def finish(self) -> None:
        """Wait for the caller's streams, which the commit does not wait for."""
        for handle in self.streams:
            event = self.api.create_event()
            self.api.record_event(event, handle)
            self.api.synchronize_event(event)

    def same(self) -> bool:
        """Whether both caches have the same rows in all layers."""
        q = self.rng.standard_normal((2, 1, HEADS_Q, DIM)).astype(np.float16)
        return all(
            np.array_equal(
                self.attended(self.cache, self.seqs, layer, q), self.attended(self.plain, self.twins, layer, q)
            )
            for layer in range(LAYERS)
        )


@contextmanager
def program(order: HostOrder, seed: int, options: ContextOptions = _PLAIN, **changes: Any) -> Iterator[Program]:
    """changes: of both caches."""

    def device() -> CudaDevice:
        return CallerDevice(0, options, EmulatedApi("sm_80", EmulationOptions(seed=seed), options, order))

    with (
        closing(start_context(device, options)) as ctx,
        ctx.kv_cache(**{**SIZES, **changes}) as cache,
        ctx.kv_cache(**{**SIZES, **changes}) as plain,
    ):
        yield Program(ctx, cache, plain, seed)


class Graphs:
    """A graph of all layers over arrays at fixed addresses, and its replays."""

    def __init__(self, made: Program) -> None:
        self.made, self.api = made, made.api
        self.kept: list[Any] = []
        empty = made.device.memory.empty
        shapes = (2, 1, HEADS_Q, DIM), (2, 1, HEADS, DIM), (2, 1, HEADS, DIM), (2, 1, HEADS_Q, DIM)
        self.arrays = [[empty(shape, "float16") for shape in shapes] for _ in range(LAYERS)]
        self.graph = 0

    def attend(self, step: ga.KvStep, handle: int, layers: Iterable[int] = range(LAYERS)) -> None:
        for layer in layers:
            q, k, v, out = self.arrays[layer]
            step.attend(layer, q, k, v, out=out, stream=handle)

    def write(self, handle: int) -> tuple[Any, ...]:
        """Have a stream copy new q, k and v into the fixed arrays. Returns them by layer."""
        made = self.made
        q = made.rng.standard_normal((LAYERS, 2, 1, HEADS_Q, DIM)).astype(np.float16)
        values = q, made.rows(1), made.rows(1)
        for layer, fixed in enumerate(self.arrays):
            for value, array in zip(values, fixed, strict=False):
                produced = made.produced(value[layer], handle)
                self.kept.append(produced)
                self.api.copy_on_device(array.address, produced.address, produced.nbytes, handle)
        return values

    def delay_the_cache(self) -> None:
        """Give the cache's own stream work, so that its next launch is late."""
        self.made.delay(self.made.cache._handle._cell.stream.handle)

    def wanted(self, twins: Any, values: Any) -> list[Any]:
        """The answers of the plain cache."""
        made = self.made
        q, k, v = values
        made.plain.append(twins, k, v).result(20)
        return [made.attended(made.plain, twins, layer, q[layer]) for layer in range(LAYERS)]

    def capture(self, **options: Any) -> tuple[ga.KvCapture, Any, Any]:
        """Warm a step up, capture it, commit it. Returns the capture, the outputs and the expected ones."""
        made, (warm, recorded) = self.made, self.made.streams
        values = self.write(warm)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, **options).result(20)
        self.attend(step, warm)
        outs = [made.consumed(array[3], warm) for array in self.arrays]
        captured = self.record(step, recorded)
        step.commit().result(20)
        return captured, outs, self.wanted(made.twins, values)

    def record(self, step: ga.KvStep, handle: int, layers: Iterable[int] = range(LAYERS)) -> ga.KvCapture:
        """Capture layers of a step that has been attended to."""
        self.api.begin_capture(handle)
        self.attend(step, handle, layers)
        self.graph = self.api.end_capture(handle)
        assert step.captured is not None
        return step.captured

    def replay(self, captured: ga.KvCapture, seqs: Any, twins: Any, handle: int, values: Any = None) -> tuple[Any, Any]:
        values = values or self.write(handle)
        step = captured.step(seqs).result(20)
        step.replay(lambda: self.api.launch_graph(self.graph, handle), stream=handle)
        outs = [self.made.consumed(array[3], handle) for array in self.arrays]
        step.commit().result(20)
        return outs, self.wanted(twins, values)
