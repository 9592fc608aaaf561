"""The way of a request: the package's files that a warm request enters on the mock device.

python scripts/way.py            a line a kind of request
python scripts/way.py --files    and the files, in the order in which they are entered

A file is entered when one of its functions is called, on any thread, from the call of the handle to the awaited answer.
The oracle (gpu_actors/reference) takes a kernel's place there, so neither it nor what it calls is counted.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import gpu_actors as ga

PACKAGE = Path(ga.__file__).resolve().parent
WARM = 3
TRIES = 100

Request = Callable[[], Awaitable[Any]]


class Steps:
    """The files of the package that are entered while ``on`` is set, and how often a thread enters another one."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.changes = 0
        self._names: dict[str, str | None] = {}
        self._last: dict[int, str] = {}
        self._oracle: dict[int, int] = {}
        self.on = False

    def install(self) -> None:
        """Watch this thread and those that start later."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def clear(self) -> None:
        """Forget what was counted."""
        self.files.clear()
        self.changes = 0

    def remove(self) -> None:
        """Stop watching this thread. Threads that have the hook go on calling it without effect."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.on or event not in ("call", "return"):
            return
        name = self._name(frame.f_code.co_filename)
        if name is None:
            return
        thread = threading.get_ident()
        if name.startswith("reference/"):
            self._oracle[thread] = self._oracle.get(thread, 0) + (1 if event == "call" else -1)
        elif event == "call" and not self._oracle.get(thread):
            self.files.setdefault(name)
            if self._last.get(thread) != name:
                self._last[thread] = name
                self.changes += 1

    def _name(self, filename: str) -> str | None:
        if filename not in self._names:
            path = Path(filename)
            inside = path.is_relative_to(PACKAGE)
            self._names[filename] = path.relative_to(PACKAGE).as_posix() if inside else None
        return self._names[filename]


async def follow(request: Request, steps: Steps) -> None:
    """Make the request until it is warm, then once more while it is watched."""
    for _ in range(WARM):
        await request()
    steps.clear()
    steps.on = True
    try:
        await request()
    finally:
        steps.on = False


async def ways() -> dict[str, Steps]:
    """Each kind of request, and the way that it takes."""
    found: dict[str, Steps] = {}
    for name, make in KINDS.items():
        steps = Steps()
        steps.install()
        try:
            async with ga.open_context("mock") as ctx:
                await make(ctx, steps)
        finally:
            steps.remove()
        found[name] = steps
    return found


def _rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


async def _forward(ctx: ga.GpuContext, steps: Steps) -> None:
    q, k, v = (_rows(1, 4, 2, 64) for _ in range(3))
    await follow(lambda: ctx.flash_attn.forward(q, k, v, causal=True), steps)


async def _backward(ctx: ga.GpuContext, steps: Steps) -> None:
    q, k, v = (_rows(1, 4, 2, 64) for _ in range(3))
    found = await ctx.flash_attn.forward(q, k, v, causal=True, return_lse=True)
    await follow(lambda: ctx.flash_attn.backward(q, q, k, v, found.out, found.lse, causal=True), steps)


async def _paged(ctx: ga.GpuContext, steps: Steps) -> None:
    q, pages = _rows(1, 1, 2, 64), _rows(4, 8, 2, 64)
    table, lengths = np.zeros((1, 1), np.int32), np.array([5], np.int32)

    async def two() -> None:
        request = {"block_table": table, "cache_seqlens": lengths, "causal": True}
        counting = steps.on
        # The actor may launch the first request alone. Such a try does not count.
        for _ in range(TRIES):
            before = ctx.stats()["flash_attn"].launched
            steps.clear()
            steps.on = counting
            await asyncio.gather(*[ctx.flash_attn.paged_forward(q, pages, pages, **request) for _ in range(2)])
            steps.on = False
            if ctx.stats()["flash_attn"].launched == before + 1:
                return
        raise RuntimeError(f"two requests never shared a launch in {TRIES} tries")

    await follow(two, steps)


async def _attend(ctx: ga.GpuContext, steps: Steps) -> None:
    spec = {"num_blocks": 8, "page_size": 8, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    async with ctx.kv_cache(**spec) as cache:
        sequence = await cache.create()
        await cache.append(sequence, _rows(3, 2, 64), _rows(3, 2, 64))
        q = _rows(1, 1, 2, 64)
        await follow(lambda: cache.attend(q, [sequence]), steps)


async def _graph(ctx: ga.GpuContext, steps: Steps) -> None:
    graph = ga.OperationGraph()
    q, k, v = (graph.tensor(uid=uid, dims=(1, 2, 4, 64), dtype="float32") for uid in (1, 2, 3))
    scores = graph.softmax(graph.tanh(graph.matmul(q, graph.transpose(k))))
    graph.output(graph.matmul(scores, v), uid=4, dtype="float32")
    arrays = {uid: _rows(1, 2, 4, 64) for uid in (1, 2, 3)}
    await follow(lambda: ctx.cudnn.execute(graph, arrays), steps)


KINDS: dict[str, Callable[[ga.GpuContext, Steps], Awaitable[None]]] = {
    "forward": _forward,
    "backward": _backward,
    "two paged requests": _paged,
    "KvCache.attend": _attend,
    "graph": _graph,
}


def main() -> None:
    """Print the counts, and with --files the files."""
    for name, steps in asyncio.run(ways()).items():
        print(f"{name:20} {len(steps.files):3} files, entered {steps.changes} times")
        if "--files" in sys.argv[1:]:
            print(*(f"    {file}" for file in steps.files), sep="\n")


if __name__ == "__main__":
    main()
