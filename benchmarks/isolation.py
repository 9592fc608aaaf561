"""Measures what a context in a child process costs, as JSON: ``python -m benchmarks.isolation``.

A request is a forward on a mock device that computes nothing, from the call to the await. It runs on a context of this
process and on one in a child process, and is compared with a `multiprocessing.Pipe` whose other end answers at once.
They take turns in one run, so other work of the machine slows all alike. The budget: an empty request in 0.25 ms at its
median on a quiet machine, and 1 MiB of operands in twice the time of a copy on top of that. A copy also displaces code
and data from the caches, which the next request reads again, so a copy is also measured with an empty request after it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gpu_actors.bench import environment, in_rows
from gpu_actors.context import open_context
from gpu_actors.errors import ContextLost, MockModeError
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.options import ContextOptions, MockOptions, RestartPolicy
from gpu_actors.runtime.reply import Reply

__all__ = ["run", "uncomputed"]

Ask: TypeAlias = Callable[[], Awaitable[float | None]]

_MIB = 1 << 20


def run(calls: int = 300, rounds: int = 7, crowd: int = 256, deaths: int = 5) -> dict[str, object]:
    """Medians in microseconds of each kind and size, requests a second, and what the death of a process costs.

    calls: of each kind in a round. crowd: awaits at once. within_budget: whether the budget is kept; a busy machine
    does not keep it.
    """
    before = os.getloadavg()
    options = ContextOptions(mock=MockOptions(compute=False), restart=RestartPolicy(max_restarts=1000, backoff=0.0))
    with _Echo() as echo, open_context("mock", options) as direct:
        began = time.perf_counter()
        with open_context("mock", options, isolation="process") as isolated:
            first = time.perf_counter() - began
            figures = asyncio.run(_measure(direct, isolated, echo, calls, rounds, crowd))
            figures |= {"death_ms": _deaths(isolated, deaths)}
        began = time.perf_counter()
        with open_context("mock", options, isolation="process"):
            second = time.perf_counter() - began
    figures |= {"open_s": {"with_a_new_zygote": round(first, 3), "with_the_zygote": round(second, 3)}}
    load = {"before": before[0], "after": os.getloadavg()[0], "cpus": os.cpu_count()}
    return {"machine": load, **figures}


class _Echo:
    """A process that answers each message of a pipe with None."""

    def __enter__(self) -> Any:
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe = ours
        return ours

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()


def _echo(pipe: Any) -> None:
    try:
        while True:
            pipe.recv()
            pipe.send(None)
    except EOFError:
        return


def uncomputed(request: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[None]]:
    """Make a request of a mock device that computes nothing, and take its refusal for the answer.

    The request raises AssertionError for any other answer.
    """

    async def ask() -> None:
        try:
            await request()
        except MockModeError:
            return
        raise AssertionError("a mock device that computes nothing has answered")

    return ask


def _forward(ctx: GpuContext, q: Any, k: Any, v: Any) -> Ask:
    return uncomputed(lambda: ctx.flash_attn.forward(q, k, v))


def _through(echo: Any, *arrays: Any) -> Ask:
    async def ask() -> None:
        echo.send(arrays)
        echo.recv()

    return ask


async def _measure(
    direct: GpuContext, isolated: GpuContext, echo: Any, calls: int, rounds: int, crowd: int
) -> dict[str, Any]:
    row = np.ones((1, 1, 1, 64), np.float16)
    empty: dict[str, Ask] = {
        "direct": _forward(direct, row, row, row),
        "isolated": _forward(isolated, row, row, row),
        "pipe": _through(echo),
    }
    found: dict[str, Any] = {"empty_us": await _medians(empty, calls, rounds)}
    for mib in (1, 16):
        q = np.ones((1, mib * _MIB // 2048, 8, 64), np.float16)
        k = np.ones((1, mib * _MIB // 4096, 8, 64), np.float16)
        shared = [isolated.empty(array.shape, array.dtype) for array in (q, k, k)]
        target = np.empty(mib * _MIB, np.uint8)
        source = np.ones_like(target)

        async def copy(target: Any = target, source: Any = source) -> None:
            np.copyto(target, source)

        async def copy_then_empty(target: Any = target, source: Any = source) -> None:
            np.copyto(target, source)
            await empty["isolated"]()

        async def copy_between(target: Any = target, source: Any = source) -> float:
            await empty["isolated"]()
            began = time.perf_counter()
            np.copyto(target, source)
            return time.perf_counter() - began

        kinds: dict[str, Ask] = {
            "copy": copy,
            "copy_between_requests": copy_between,
            "copy_then_empty_request": copy_then_empty,
            "direct": _forward(direct, q, k, k[:]),
            "isolated": _forward(isolated, q, k, k.copy()),
            "isolated_shared": _forward(isolated, *shared),
            "pipe": _through(echo, q, k, k),
        }
        found[f"in_{mib}_mib_us"] = await _medians(kinds, max(20, calls // mib // 2), rounds)
    found["requests_a_second"] = {name: await _throughput(ask, crowd) for name, ask in empty.items() if name != "pipe"}
    alone, large = found["empty_us"], found["in_1_mib_us"]
    found["within_budget"] = {
        "empty": alone["isolated"] <= 250.0,
        "in_1_mib": large["isolated"] <= alone["isolated"] + 2 * large["copy"],
        "in_1_mib_by_copies_between_requests": large["isolated"]
        <= alone["isolated"] + 2 * large["copy_between_requests"],
        "in_1_mib_by_what_a_copy_costs_a_request": large["isolated"]
        <= 2 * large["copy_then_empty_request"] - alone["isolated"],
    }
    return found


async def _medians(kinds: dict[str, Ask], calls: int, rounds: int) -> dict[str, float]:
    """The median of the rounds' medians. Each kind warms up with a few calls in a round. An ask may return its own
    time.
    """
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, ask in kinds.items():
            taken = []
            for number in range(calls + 5):
                began = time.perf_counter()
                own = await ask()
                if number >= 5:
                    taken.append(time.perf_counter() - began if own is None else own)
            found[name].append(statistics.median(taken))
    return {name: round(statistics.median(medians) * 1e6, 1) for name, medians in found.items()}


async def _throughput(ask: Ask, crowd: int, turns: int = 8) -> float:
    rates = []
    for _ in range(turns):
        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(crowd)))
        rates.append(crowd / (time.perf_counter() - began))
    return round(statistics.median(rates[1:]))


def _deaths(ctx: GpuContext, deaths: int) -> dict[str, float]:
    """Milliseconds from SIGKILL until 64 requests are answered, and until the next process has answered one."""
    row = np.ones((1, 1, 1, 64), np.float16)
    told, again = [], []
    for _ in range(deaths):
        process = ctx.pid  # type: ignore[attr-defined]
        _suspend(process)
        replies = [ctx.flash_attn.forward(row, row, row) for _ in range(64)]
        began = time.perf_counter()
        os.kill(process, signal.SIGKILL)
        lost = sum(isinstance(_error(reply), ContextLost) for reply in replies)
        told.append(time.perf_counter() - began)
        _error(ctx.flash_attn.forward(row, row, row))
        again.append(time.perf_counter() - began)
        if lost != len(replies):
            raise AssertionError(f"{lost} of {len(replies)} requests were told that their process is gone")
    return {
        "all_told_median": round(statistics.median(told) * 1e3, 2),
        "next_answer_median": round(statistics.median(again) * 1e3, 1),
    }


def _suspend(process: int) -> None:
    """Send SIGSTOP, and wait until no thread of the process runs: a running one may still answer."""
    os.kill(process, signal.SIGSTOP)
    threads = Path(f"/proc/{process}/task")
    while any((thread / "stat").read_text().rpartition(")")[2].split()[0] != "T" for thread in threads.iterdir()):
        time.sleep(0.001)


def _error(reply: Reply[Any]) -> BaseException | None:
    try:
        reply.result(60.0)
    except (ContextLost, MockModeError):
        return reply.exception()
    return None


if __name__ == "__main__":
    print(in_rows({"environment": environment()} | run()), end="")
