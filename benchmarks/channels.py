"""Measures what a channel costs compared with a direct call, as JSON: ``python -m benchmarks.channels``.

A request is a forward on a mock device that computes nothing, from the call to the await. It runs on a context of this
process, on one in a child process and on one in a Ray actor. They take turns in one run, so other work of the machine
slows all alike. Then 1, 2 and 4 workers of a pool answer many requests at once. Needs Ray, which it starts here (the
extra "ray").
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeAlias

import numpy as np

from benchmarks.isolation import uncomputed
from gpu_actors.bench import environment, in_rows
from gpu_actors.distributed import ContextPool, open_pool
from gpu_actors.errors import GpuActorsError
from gpu_actors.extras import missing
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.options import ContextOptions, MockOptions
from gpu_actors.remote import ChildProcess, InProcess

__all__ = ["main", "run"]

Ask: TypeAlias = Callable[[], Awaitable[None]]

_MIB = 1 << 20
_OPTIONS = ContextOptions(mock=MockOptions(compute=False))


def run(calls: int = 200, rounds: int = 5, crowd: int = 256, workers: tuple[int, ...] = (1, 2, 4)) -> dict[str, object]:
    """Median and 99th percentile in microseconds of each channel, and requests a second by the number of workers.

    calls: of each channel in a round. crowd: requests at once. Raises `GpuActorsError` if Ray is missing.
    """
    try:
        import ray
    except ImportError as error:
        raise GpuActorsError(missing(error, "ray")) from None
    before = os.getloadavg()[0]
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=16, include_dashboard=False, object_store_memory=512 * _MIB, log_to_driver=False)
    try:
        figures = asyncio.run(_measure(calls, rounds, crowd, workers))
    finally:
        if started:
            ray.shutdown()
    load = {"before": before, "after": os.getloadavg()[0], "cpus": os.cpu_count(), "ray": ray.__version__}
    return {"machine": load, **figures}


def _pools(count: int) -> dict[str, AbstractAsyncContextManager[ContextPool]]:
    from gpu_actors.interop.ray import ray_pool

    return {
        "direct": open_pool("mock", workers=count, options=_OPTIONS, workplace=InProcess),
        "child_process": open_pool("mock", workers=count, options=_OPTIONS, workplace=ChildProcess),
        "ray": ray_pool(count, device="mock", options=_OPTIONS, start_timeout=300.0),
    }


async def _measure(calls: int, rounds: int, crowd: int, workers: tuple[int, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rates: dict[str, dict[str, float]] = {}
    row = np.ones((1, 1, 1, 64), np.float16)
    q, k = np.ones((1, _MIB // 2048, 8, 64), np.float16), np.ones((1, _MIB // 4096, 8, 64), np.float16)
    for count in workers:
        async with AsyncExitStack() as stack:
            pools = {name: await stack.enter_async_context(opening) for name, opening in _pools(count).items()}
            if count == workers[0]:
                contexts = {name: next(iter(pool.workers.values())) for name, pool in pools.items()}
                empty = {name: _forward(ctx, row, row, row) for name, ctx in contexts.items()}
                found["empty_us"] = await _quantiles(empty, calls, rounds)
                large = {name: _forward(ctx, q, k, k.copy()) for name, ctx in contexts.items()}
                found["in_1_mib_us"] = await _quantiles(large, max(20, calls // 4), rounds)
            asks = {name: _pooled(pool, row) for name, pool in pools.items()}
            rates[str(count)] = await _rates(asks, crowd, rounds)
    return {**found, "requests_a_second_by_workers": rates}


def _forward(ctx: GpuContext, q: Any, k: Any, v: Any) -> Ask:
    return uncomputed(lambda: ctx.flash_attn.forward(q, k, v))


def _pooled(pool: ContextPool, row: Any) -> Ask:
    return uncomputed(lambda: pool.ask(lambda ctx: ctx.flash_attn.forward(row, row, row)))


async def _quantiles(kinds: dict[str, Ask], calls: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median and 99th percentile over all rounds. Channels take turns in a round, each after a few calls to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, ask in kinds.items():
            for number in range(calls + 5):
                began = time.perf_counter()
                await ask()
                if number >= 5:
                    taken[name].append(time.perf_counter() - began)
    return {
        name: {
            "median": round(statistics.median(times) * 1e6, 1),
            "p99": round(statistics.quantiles(times, n=100)[-1] * 1e6, 1),
        }
        for name, times in taken.items()
    }


async def _rates(kinds: dict[str, Ask], crowd: int, rounds: int) -> dict[str, float]:
    """The median of the rounds' rates, without the first round."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, ask in kinds.items():
            began = time.perf_counter()
            await asyncio.gather(*(ask() for _ in range(crowd)))
            found[name].append(crowd / (time.perf_counter() - began))
    return {name: round(statistics.median(rates[1:])) for name, rates in found.items()}


def main() -> None:
    try:
        found = run()
    except GpuActorsError as error:
        raise SystemExit(str(error)) from None
    print(in_rows({"environment": environment(), **found}), end="")


if __name__ == "__main__":
    main()
