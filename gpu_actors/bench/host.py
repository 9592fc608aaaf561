"""The cost of a request on the host: ``gpu-actors bench host``, which needs no GPU.

A driver that takes no time and computes nothing (`NullApi`) replaces the real one; everything else is real. Each kind
of request is measured in turns with ``asyncio.to_thread`` in one run, so other work of the machine slows both. Kernels
that take no time are compared with an empty function, kernels of 50 us with a function that sleeps as long. A ratio
below 1 means that the request is cheaper.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.devices.cuda.device import CudaDevice
from gpu_actors.devices.cuda.null_api import NullApi
from gpu_actors.handles.gpu_context import GpuContext, start_context
from gpu_actors.kv.requests import KvSequence
from gpu_actors.options import ContextOptions

__all__ = ["KINDS", "run"]

Ask: TypeAlias = Callable[[int], Awaitable[object]]
"""Makes one request. The argument is its index among concurrent requests, each of which writes to its own array."""

KINDS = ("forward", "backward", "decode", "paged", "append", "attend")
KERNEL_SECONDS = 50e-6
_TO_THREAD = "to_thread"
_CROWD = 64
_TURN = 50
_LONGEST = 1 << 12  # rows of a sequence
_HEADS, _HEADS_KV, _DIM, _PAGE, _LAYERS = 64, 8, 128, 16, 32
_addresses = itertools.count(1 << 50, 1 << 32)


def run(kinds: Sequence[str] = KINDS, requests: int = 1000) -> dict[str, Any]:
    """Microseconds per request, their ratio to ``asyncio.to_thread``, and the driver's calls of a request, by kind.

    requests: the number of requests of each kind and each way to wait: alone, 64 together by gather, and 64 together
    awaited in turn. "steps" are steps of a model of 32 layers, for one sequence and for 64, one after the other.
    """
    figures: dict[str, Any] = {
        name: asyncio.run(_measured(kinds, requests, seconds))
        for name, seconds in (("no_time", 0.0), ("kernel_50_us", KERNEL_SECONDS))
    }
    figures["driver_calls"] = asyncio.run(_driver_calls(kinds))
    return figures | {
        "steps": {f"{batch}": asyncio.run(_steps(batch, max(4 * _TURN, requests // 5))) for batch in (1, _CROWD)}
    }


class _NullDevice(CudaDevice):
    def note_caller(self) -> None:
        """Note nothing: asking CuPy for its stream would call the real driver, which may be missing."""


def _open(api: NullApi) -> GpuContext:
    options = ContextOptions(qualify="off")  # kernels compute nothing here, so no proof would hold
    return start_context(lambda: _NullDevice(0, options, api), options)


async def _measured(kinds: Sequence[str], requests: int, seconds: float) -> dict[str, Any]:
    context = _open(NullApi(seconds))
    try:
        asks = {_TO_THREAD: _to_thread(seconds)} | {kind: await _ask(context, kind) for kind in kinds}
        ways = {"alone": _alone, "gather": _gathered, "in_turn": _in_turn}
        figures = {way: await _in_turns(asks, wait, requests) for way, wait in ways.items()}
    finally:
        await asyncio.to_thread(context.close)
    return {kind: {way: _beside(seconds_of, kind) for way, seconds_of in figures.items()} for kind in asks}


def _beside(seconds: Mapping[str, float], kind: str) -> dict[str, float]:
    return {"us": round(seconds[kind] * 1e6, 1), "ratio": round(seconds[kind] / seconds[_TO_THREAD], 2)}


async def _in_turns(
    asks: Mapping[str, Ask], wait: Callable[[Ask], Awaitable[tuple[float, int]]], requests: int
) -> dict[str, float]:
    """The median seconds per request, by kind. The first turn of each does not count: it starts threads."""
    times: dict[str, list[float]] = {kind: [] for kind in asks}
    while len(next(iter(times.values()))) <= requests // _TURN:
        for kind, ask in asks.items():
            seconds, count = await wait(ask)
            times[kind].append(seconds / count)
    return {kind: statistics.median(samples[1:]) for kind, samples in times.items()}


async def _alone(ask: Ask) -> tuple[float, int]:
    start = time.perf_counter()
    for _ in range(_TURN):
        await ask(0)
    return time.perf_counter() - start, _TURN


async def _gathered(ask: Ask) -> tuple[float, int]:
    start = time.perf_counter()
    await asyncio.gather(*(ask(place) for place in range(_CROWD)))
    return time.perf_counter() - start, _CROWD


async def _in_turn(ask: Ask) -> tuple[float, int]:
    start = time.perf_counter()
    for reply in [ask(place) for place in range(_CROWD)]:
        await reply
    return time.perf_counter() - start, _CROWD


async def _steps(batch: int, steps: int) -> dict[str, Any]:
    """Steps of `_LAYERS` layers with a new row, compared with ``asyncio.to_thread``, and the driver's calls of a step.

    "captured": a step that replays another step's layers, which a graph has. "queries": calls that ask whether a stream
    is being captured. They enqueue nothing, and "driver_calls" leaves them out.
    """
    api = NullApi()
    context = _open(api)
    try:
        cache, seqs = await _cache(context, batch, layers=_LAYERS)
        heads = (_HEADS, _HEADS_KV, _HEADS_KV, _HEADS)
        layers = [[_array(batch, 1, count, _DIM) for count in heads] for _ in range(_LAYERS)]

        async def step(_: int) -> None:
            begun = await cache.step(seqs, heads_q=_HEADS)
            for layer, (q, k, v, out) in enumerate(layers):
                begun.attend(layer, q, k, v, out=out, stream=stream)
            await begun.commit()

        stream = api.create_stream()
        begun = await cache.step(seqs, heads_q=_HEADS, max_length=_LONGEST)
        for capture in (False, True):
            if capture:
                api.begin_capture(stream)
            for layer, (q, k, v, out) in enumerate(layers):
                begun.attend(layer, q, k, v, out=out, stream=stream)
        graph = api.end_capture(stream)
        await begun.commit()
        captured = begun.captured

        async def replay(_: int) -> None:
            begun = await captured.step(seqs)
            begun.replay(lambda: api.launch_graph(graph, stream), stream=stream)
            await begun.commit()

        asks: dict[str, Ask] = {"step": step, "captured": replay}
        calls = {}
        for kind, ask in asks.items():
            for _ in range(_TURN):
                await ask(0)
            api.calls.clear()
            for _ in range(_TURN):
                await ask(0)
            calls[kind] = {
                "queries": api.calls.pop("is_capturing", 0) / _TURN,
                "driver_calls": api.calls.total() / _TURN,
            }
        figures = await _in_turns({_TO_THREAD: _to_thread(0.0), **asks}, _alone, steps)
    finally:
        await asyncio.to_thread(context.close)
    return {kind: _beside(figures, kind) | calls[kind] for kind in asks}


async def _driver_calls(kinds: Sequence[str], requests: int = 200) -> dict[str, dict[str, float]]:
    """The mean number of each of the driver's calls in a warm request, by kind of request."""
    api = NullApi()
    context = _open(api)
    figures = {}
    try:
        for kind in kinds:
            ask = await _ask(context, kind)
            for _ in range(_TURN):
                await ask(0)
            api.calls.clear()
            for _ in range(requests):
                await ask(0)
            counts = {call: round(count / requests, 2) for call, count in sorted(api.calls.items())}
            figures[kind] = {"all": round(sum(api.calls.values()) / requests, 2)} | counts
    finally:
        await asyncio.to_thread(context.close)
    return figures


# Requests


def _to_thread(seconds: float) -> Ask:
    def work() -> None:
        if seconds:
            time.sleep(seconds)

    return lambda place: asyncio.ensure_future(asyncio.to_thread(work))


async def _ask(context: GpuContext, kind: str) -> Ask:
    """A request of this kind. The first one is awaited here, so its kernels are compiled already."""
    ask = await _MAKE[kind](context)
    await ask(0)
    return ask


async def _forward(context: GpuContext) -> Ask:
    q, k, v = (_array(1, 2048, 8, _DIM) for _ in range(3))
    outs = _crowd(1, 2048, 8, _DIM)
    return lambda place: context.flash_attn.forward(q, k, v, causal=True, out=outs[place])


async def _backward(context: GpuContext) -> Ask:
    dout, q, k, v, out = (_array(1, 2048, 8, _DIM) for _ in range(5))
    lse = _array(1, 8, 2048, dtype=np.float32)
    return lambda place: context.flash_attn.backward(dout, q, k, v, out, lse, causal=True)


async def _decode(context: GpuContext) -> Ask:
    q, outs = _array(1, _HEADS, _DIM), _crowd(1, _HEADS, _DIM)
    k_caches, v_caches = ([_array(_HEADS_KV, 2048, _DIM)] for _ in range(2))
    lengths = np.array([2000], np.int32)
    return lambda place: context.flash_attn.decode(q, k_caches, v_caches, lengths, out=outs[place])


async def _paged(context: GpuContext) -> Ask:
    q, outs = _array(1, 1, _HEADS, _DIM), _crowd(1, 1, _HEADS, _DIM)
    k_pool, v_pool = (_array(512, _PAGE, _HEADS_KV, _DIM) for _ in range(2))
    lengths: dict[str, Any] = {
        "block_table": np.arange(128, dtype=np.int32)[None],
        "cache_seqlens": np.array([2000], np.int32),
    }
    return lambda place: context.flash_attn.paged_forward(q, k_pool, v_pool, **lengths, out=outs[place])


async def _append(context: GpuContext) -> Ask:
    cache, seqs = await _cache(context)
    k, v = _array(1, 1, _HEADS_KV, _DIM), _array(1, 1, _HEADS_KV, _DIM)
    return lambda place: cache.append([seqs[place]], k, v)


async def _attend(context: GpuContext) -> Ask:
    cache, seqs = await _cache(context)
    q, outs = _array(1, 1, _HEADS, _DIM), _crowd(1, 1, _HEADS, _DIM)
    k, v = _array(1, 1, _HEADS_KV, _DIM), _array(1, 1, _HEADS_KV, _DIM)
    return lambda place: cache.attend(q, [seqs[place]], k=k, v=v, out=outs[place])


_MAKE: dict[str, Callable[[GpuContext], Awaitable[Ask]]] = {
    "forward": _forward,
    "backward": _backward,
    "decode": _decode,
    "paged": _paged,
    "append": _append,
    "attend": _attend,
}


async def _cache(context: GpuContext, count: int = _CROWD, layers: int = 1) -> tuple[Any, list[KvSequence]]:
    cache = context.kv_cache(
        num_blocks=1 << 14, page_size=_PAGE, kv_heads=_HEADS_KV, head_dim=_DIM, dtype="float16", layers=layers
    )
    opened = await cache.__aenter__()  # the end of the context closes it
    return opened, [await opened.create() for _ in range(count)]


def _crowd(*shape: int) -> list[DeviceArray]:
    return [_array(*shape) for _ in range(_CROWD)]


def _array(*shape: int, dtype: Any = np.float16) -> DeviceArray:
    """An array on the device at a unique address."""
    kind = np.dtype(dtype)
    return DeviceArray(next(_addresses), shape, contiguous_strides(shape, kind.itemsize), kind, 0)
