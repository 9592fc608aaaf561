"""Greedy and hostile clients, and their effect on others.

Each kind loads a server beside the clients of `gpu_actors.bench.serve`, from another address. The figures describe
the other, well-behaved clients. ``unkind`` counts the answers to the hostile clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

__all__ = ["KINDS", "request", "unkind_figures"]

_BESIDE = 16
_DEADLINE = 5.0
_GREEDY = 64
_LONG = 3000
_ADDRESS = ("127.0.0.2", 0)

Counts: TypeAlias = Counter[str]
Measure: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
Kind: TypeAlias = Callable[[int, float, Counts], Coroutine[Any, Any, None]]


def request(body: bytes, deadline: float, headers: str = "") -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Deadline-Ms: {deadline * 1e3:.0f}\r\n{headers}"
    lines = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return lines.encode() + body


def unkind_figures(measure: Measure, port: int, seconds: float, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The figures of well-behaved clients beside each of these kinds: a `Load`'s, and kind_ones, beside, unkind."""
    return [asyncio.run(_beside(measure, port, name, seconds)) for name in kinds]


async def _beside(measure: Measure, port: int, name: str, seconds: float) -> dict[str, Any]:
    kind, count = KINDS[name]
    answers: Counts = Counter()
    until = time.monotonic() + seconds
    unkind = [asyncio.create_task(_again(kind, port, until, answers)) for _ in range(count)]
    await asyncio.sleep(0.1)  # the hostile clients come first
    load = await measure(port, _BESIDE, seconds, deadline=_DEADLINE)
    for task in unkind:
        task.cancel()
    await asyncio.gather(*unkind, return_exceptions=True)
    return {"kind_ones": _BESIDE, "beside": f"{count} {name}", "unkind": dict(answers), **load.figures()}


async def _again(kind: Kind, port: int, until: float, answers: Counts) -> None:
    while time.monotonic() < until:
        try:
            await kind(port, until, answers)
        except (ConnectionError, asyncio.IncompleteReadError):
            answers["closed"] += 1
            await asyncio.sleep(0.01)


async def _long_prompt(port: int, until: float, answers: Counts) -> None:
    await _ask(port, {"prompt": "long " * (_LONG // 5), "max_tokens": 64}, answers)


async def _huge_prompt(port: int, until: float, answers: Counts) -> None:
    await _ask(port, {"prompt": "word " * 780_000}, answers)


async def _many_keys(port: int, until: float, answers: Counts) -> None:
    await _ask(port, {str(number): 1 for number in range(300_000)}, answers)


async def _slow_headers(port: int, until: float, answers: Counts) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=_ADDRESS)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\n")
        while time.monotonic() < until and not reader.at_eof():
            writer.write(b"X-Slow: 1\r\n")
            await writer.drain()
            await asyncio.sleep(0.2)
        answers["closed" if reader.at_eof() else "open"] += 1
    finally:
        writer.close()


async def _ask(port: int, content: dict[str, Any], answers: Counts) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=_ADDRESS)
    try:
        body = json.dumps({"model": "tiny", "temperature": 1, **content}).encode()
        writer.write(request(body, 60.0, "Connection: close\r\n"))
        with contextlib.suppress(ConnectionError):  # the answer may come before the whole request is sent
            await writer.drain()
        answer = await reader.read()
        answers[answer.split(b" ", 2)[1].decode() if answer else "closed"] += 1
    finally:
        writer.close()


KINDS: dict[str, tuple[Kind, int]] = {
    "greedy": (_long_prompt, _GREEDY),
    "huge prompts": (_huge_prompt, 6),
    "bodies of many keys": (_many_keys, 4),
    "slow heads": (_slow_headers, 64),
}
"""The repeated action of each kind of client, and the number of clients."""
