"""Functions that tests run beside a worker's context, in a module that a child process can import."""

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


def describe(ctx: ga.GpuContext, *arguments: Any) -> tuple[str, int, tuple[Any, ...]]:
    return ctx.info.kind, ctx.generation, arguments


def double(_: ga.GpuContext, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array * 2


async def append_turns(ctx: ga.GpuContext, cache: ga.KvCache, seq: ga.KvSequence, rows: Any, count: int) -> list[int]:
    """Append the rows ``count`` times."""
    return [await cache.append(seq, rows, rows, expect_length=turn * len(rows)) for turn in range(count)]


def attend(ctx: ga.GpuContext, q: Any) -> Any:
    return ctx.flash_attn.forward(q, q, q).result(30.0).out


def raise_error(_: ga.GpuContext, error: BaseException) -> None:
    raise error


async def raise_error_async(_: ga.GpuContext, error: BaseException) -> None:
    raise error


def return_lock(_: ga.GpuContext) -> Any:
    return threading.Lock()


async def wait_until_cancelled(_: ga.GpuContext, flag: str) -> None:
    """Wait to be cancelled. A file says "waits", then "cancelled"."""
    note = Path(flag).write_text
    try:
        note("waits")
        await asyncio.sleep(60.0)
    except asyncio.CancelledError:
        note("cancelled")
        raise


def sleep(_: ga.GpuContext, seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def hold_gil(_: ga.GpuContext, seconds: float) -> None:
    """Hold the GIL, so that no other thread of the process runs."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(interval)


def kill_process(_: ga.GpuContext, number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60.0)


class Adder:
    """A callable object."""

    def __init__(self, value: int) -> None:
        self.value = value

    async def __call__(self, _: ga.GpuContext, other: int) -> int:
        return self.value + other


async def sleep_async(_: ga.GpuContext, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds
