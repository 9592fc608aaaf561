"""Functions that tests run beside a worker's context. In a module that a child process can import."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import gpu_actors as ga


def describe(ctx: ga.GpuContext, *given: Any) -> tuple[str, int, tuple[Any, ...]]:
    return ctx.info.kind, ctx.generation, given


def twice(_: ga.GpuContext, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array * 2


async def steps(ctx: ga.GpuContext, cache: ga.KvCache, seq: ga.KvSequence, rows: Any, count: int) -> list[int]:
    """Append the rows so many times, one after the other."""
    return [await cache.append(seq, rows, rows, expect_length=turn * len(rows)) for turn in range(count)]


def attends(ctx: ga.GpuContext, q: Any) -> Any:
    return ctx.flash_attn.forward(q, q, q).result(30.0).out


def raises(_: ga.GpuContext, error: BaseException) -> None:
    raise error


async def araises(_: ga.GpuContext, error: BaseException) -> None:
    raise error


def unsendable(_: ga.GpuContext) -> Any:
    return threading.Lock()


async def waits(_: ga.GpuContext, flag: str) -> None:
    """Until it is cancelled, which it notes in a file."""
    note = Path(flag).write_text
    try:
        note("waits")
        await asyncio.sleep(60.0)
    except asyncio.CancelledError:
        note("cancelled")
        raise


def sleeps(_: ga.GpuContext, seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def holds_on(_: ga.GpuContext, seconds: float) -> None:
    """Let no other thread of the process run."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(before)


def dies(_: ga.GpuContext, number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60.0)


class Adds:
    """Not a function, and called as one."""

    def __init__(self, value: int) -> None:
        self.value = value

    async def __call__(self, _: ga.GpuContext, other: int) -> int:
        return self.value + other


async def dozes(_: ga.GpuContext, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds
