"""The cost of a request beside ``asyncio.to_thread``: ``gpu-actors bench bridge``.

Both are measured in turns in one run, so other work of the machine slows both. The request is empty: a forward of
one row on a mock device that computes nothing, from validation to the await. ``asyncio.to_thread`` calls an empty
function in the loop's own pool of threads. The budget: a request is cheaper alone and with 256 concurrent awaits.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from gpu_actors.context import open_context
from gpu_actors.errors import MockModeError
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.options import ContextOptions, MockOptions

__all__ = ["run"]

T = TypeVar("T")
Ask: TypeAlias = Callable[[], Awaitable[None]]
Loop: TypeAlias = Callable[[], asyncio.AbstractEventLoop]

_CROWD = 4096


def run(
    concurrency: Sequence[int] = (16, 256, _CROWD), latencies: int = 400, requests: int = 16384, rounds: int = 7
) -> dict[str, object]:
    """Median latency alone (microseconds), throughput (thousands per second) and their ratios, for each event loop.

    concurrency: the numbers of concurrent awaits.
    latencies: the calls of each kind that are timed alone, in each of several rounds. Each round has new threads,
        because the cost of a wake-up depends on the core of the thread.
    requests: the calls of each kind for each concurrency.
    A ratio above 1 says how many times the service is faster than ``asyncio.to_thread``. uvloop is None if it is not
    installed.
    """
    results: dict[str, object] = {}
    for name, loop in _loops().items():
        results[name] = None if loop is None else _on_loop(loop, concurrency, latencies, requests, rounds)
    with _context() as ctx:
        results["two_loops"] = _on_two_loops(ctx)
    return results


def _context() -> open_context:
    return open_context("mock", ContextOptions(mock=MockOptions(compute=False), mailbox_capacity=4 * _CROWD))


def _loops() -> dict[str, Loop | None]:
    uvloop: Loop | None = None
    if importlib.util.find_spec("uvloop") is not None:
        from uvloop import new_event_loop as uvloop
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop}


def _request(ctx: GpuContext) -> Ask:
    q = np.ones((1, 1, 1, 64), np.float16)

    async def ask() -> None:
        try:
            await ctx.flash_attn.forward(q, q, q)
        except MockModeError:
            return
        raise AssertionError("a mock device that computes nothing has answered")

    return ask


async def _to_thread() -> None:
    await asyncio.to_thread(_noop)


def _noop() -> None:
    return


def _on_loop(loop: Loop, concurrency: Sequence[int], latencies: int, requests: int, rounds: int) -> dict[str, object]:
    alone: list[dict[str, float]] = []
    for _ in range(rounds):
        with _context() as ctx:
            kinds = {"service": _request(ctx), "to_thread": _to_thread}
            alone.append(_run(loop, _latencies(kinds, latencies)))

    async def crowds(kinds: dict[str, Ask]) -> dict[str, object]:
        return {str(crowd): await _throughputs(kinds, crowd, requests) for crowd in concurrency}

    with _context() as ctx:
        crowded = _run(loop, crowds({"service": _request(ctx), "to_thread": _to_thread}))
    medians: dict[str, object] = {name: statistics.median(figures[name] for figures in alone) for name in alone[0]}
    ratios = [figures["ratio"] for figures in alone]
    return {"latency_us": medians | {"ratio_of_each_round": ratios}, "throughput_k": crowded}


async def _latencies(kinds: dict[str, Ask], calls: int, turn: int = 50) -> dict[str, float]:
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(1 + calls // turn):
        for kind, ask in kinds.items():
            for _ in range(turn):
                start = time.perf_counter()
                await ask()
                times[kind].append(time.perf_counter() - start)
    # The first turn of each kind is left out: it starts threads and fills caches.
    medians = {kind: statistics.median(seconds[turn:]) * 1e6 for kind, seconds in times.items()}
    return _rounded(medians) | {"ratio": round(medians["to_thread"] / medians["service"], 2)}


async def _throughputs(kinds: dict[str, Ask], crowd: int, calls: int) -> dict[str, float]:
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(1 + max(2, calls // crowd)):
        for kind, ask in kinds.items():
            start = time.perf_counter()
            await asyncio.gather(*(ask() for _ in range(crowd)))
            times[kind].append(time.perf_counter() - start)
    return _rates({kind: crowd / statistics.median(seconds[1:]) for kind, seconds in times.items()})


def _on_two_loops(ctx: GpuContext, turns: int = 3) -> dict[str, float]:
    """The throughput with two threads, each with its own loop and 4,096 concurrent awaits."""
    kinds: dict[str, Ask] = {"service": _request(ctx), "to_thread": _to_thread}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(turns):
        for kind, ask in kinds.items():
            start = time.perf_counter()
            threads = [threading.Thread(target=asyncio.run, args=(_crowd(ask),)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            times[kind].append(time.perf_counter() - start)
    return _rates({kind: 2 * _CROWD / statistics.median(seconds) for kind, seconds in times.items()})


async def _crowd(ask: Ask) -> None:
    await asyncio.gather(*(ask() for _ in range(_CROWD)))


def _run(loop: Loop, main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main)


def _rates(rates: dict[str, float]) -> dict[str, float]:
    """Thousands of calls per second, and how many times the service is faster."""
    thousands = {kind: rate / 1e3 for kind, rate in rates.items()}
    return _rounded(thousands) | {"ratio": round(rates["service"] / rates["to_thread"], 2)}


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: round(number, 1) for name, number in numbers.items()}
