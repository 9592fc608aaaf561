"""How ``gpu-actors serve`` answers under load: ``gpu-actors bench serve``, or this module with your own numbers.

    python -m gpu_actors.bench.serve --connections 1 16 256 1024 --seconds 20
    python -m gpu_actors.bench.serve --connections 256 --seconds 1800 --think 30
    python -m gpu_actors.bench.serve --connections 16 256 512 1024 --deadline 1.5 --impatient

Starts the server with its tiny model on loopback, and for each number of connections as many clients. A client sends
its next request for a stream as soon as the last stream has ended, or once Retry-After has passed. Each stream is
checked: its events must be complete, have one id that no other stream has, report the right numbers of tokens, and end
with [DONE]. A request whose turn does not come by its deadline must be answered with 429 or 504.
Goodput counts the streams that ended within their deadline. Clients and server share this machine's CPUs, and the tiny
model computes almost nothing: the figures compare loads of one run, and say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from gpu_actors.bench import environment
from gpu_actors.bench.hostile_clients import KINDS, request, unkind_figures

__all__ = ["COLUMNS", "Load", "main", "measure", "run", "serving", "table"]

_CONNECTIONS = (1, 16, 256, 1024)
_FEW = 16
_CROWDS = (256, 512, 1024)
_DEADLINES = (1.0, 1.5, 3.0)
_TOKENS = 16
_DEADLINE = 60.0
_DOUBLED = "events of another stream"
_STARTED = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass
class Load:
    """The clients' measurements. Times are in seconds, and of streams that were answered with 200.

    requests: the number of requests sent.
    answered: the number of requests with a complete answer.
    late: the number of streams whose first event came after the deadline.
    in_time: the number of streams that ended before the deadline.
    last: the time at which the last stream ended.
    refused: the seconds until each answer of 429.
    faults: what was wrong with each faulty stream or connection.
    queue: the number of texts that the server admitted within each bound of seconds, by its own histogram. None
        without metrics.
    memory: the server's MiB, noted ten times during the load, or each minute of a longer one.
    """

    connections: int
    deadline: float = _DEADLINE
    seconds: float = 0.0
    requests: int = 0
    answered: int = 0
    late: int = 0
    in_time: int = 0
    last: float = 0.0
    refused: list[float] = field(default_factory=list)
    queue: dict[float, int] | None = None
    tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    @property
    def cut(self) -> int:
        """The number of streams that ended with an error."""
        return self.errors.total()

    def figures(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "lost": self.requests - self.answered,
            "doubled": self.faults.count(_DOUBLED),
            "late": self.late,
            "deadline_s": self.deadline,
            "queue_median_at_most_s": _bound(self.queue, 0.5),
            "queue_p99_at_most_s": _bound(self.queue, 0.99),
            "streams": len(self.whole),
            "statuses": dict(self.statuses),
            "errors": dict(self.errors),
            "faults": len(self.faults),
            "streams_a_second": round(len(self.whole) / self.seconds, 1),
            "goodput_a_second": round(self.in_time / self.seconds, 1),
            "refusal_median_s": _at(self.refused, 0.5),
            "refusal_p99_s": _at(self.refused, 0.99),
            "tokens_a_second": round(self.tokens / self.seconds),
            "first_token_median_s": _at(self.first, 0.5),
            "first_token_p99_s": _at(self.first, 0.99),
            "stream_median_s": _at(self.whole, 0.5),
            "stream_p99_s": _at(self.whole, 0.99),
            "memory_mib": [round(value) for value in self.memory],
        }


def run(device: str = "mock", quick: bool = False) -> dict[str, Any]:
    """The figures of 1 to 1,024 connections, of crowds and of 16 clients with short deadlines, and of hostile clients.

    quick: only 1 and 16 connections, one small crowd and greedy clients, each for less than a second.
    """
    seconds = 0.8 if quick else 20.0
    crowds, deadlines = ((32,), (5.0,)) if quick else (_CROWDS, _DEADLINES)
    with serving(device) as (port, pid):
        figures = _figures(port, pid, (1, _FEW) if quick else _CONNECTIONS, seconds)
        figures["deadlines"] = []
        for deadline in deadlines:
            for connections, impatient in [(_FEW, False), *product(crowds, (False, True))]:
                load = asyncio.run(measure(port, connections, seconds / 2, deadline=deadline, impatient=impatient))
                figures["deadlines"].append({"connections": connections, "impatient": impatient, **load.figures()})
        figures["unkind"] = unkind_figures(measure, port, seconds / 2, ["greedy"] if quick else list(KINDS))
    return {"kind": "load", **figures}


COLUMNS = (
    "clients",
    "deadline, s",
    "200",
    "429",
    "504",
    "streams/s",
    "in time/s",
    "median, s",
    "99%, s",
    "429 median, s",
)


def table(figures: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The rows of `COLUMNS` for the result of `run`."""
    loads = [(connections, load) for connections, load in figures["loads"].items()]
    loads += [(f"{one['connections']}{', impatient' if one['impatient'] else ''}", one) for one in figures["deadlines"]]
    loads += [(f"{one['kind_ones']} beside {one['beside']}", one) for one in figures["unkind"]]
    for name, load in loads:
        statuses = (load["statuses"].get(status, 0) for status in ("200", "429", "504"))
        times = (load[key] for key in ("stream_median_s", "stream_p99_s", "refusal_median_s"))
        speeds = (load["streams_a_second"], load["goodput_a_second"])
        texts = ("-" if value is None else f"{value:.3f}" for value in times)
        yield (name, load["deadline_s"], *statuses, *speeds, *texts)


def _figures(port: int, pid: int, connections: Sequence[int], seconds: float, **how: Any) -> dict[str, Any]:
    loads = [asyncio.run(measure(port, count, seconds, pid=pid, **how)) for count in connections]
    return {"tokens_a_stream": _TOKENS, "loads": {str(load.connections): load.figures() for load in loads}}


@contextmanager
def serving(device: str = "mock", *options: str, log_file: Path | None = None) -> Iterator[tuple[int, int]]:
    """Run a server in its own process. Yields (port, process id). Raises RuntimeError if it does not start.

    log_file: the file for its log, a temporary one by default.
    """
    command = [sys.executable, "-m", "gpu_actors.cli", "serve", "--device", device, "--model", "tiny", "--port", "0"]
    with (
        tempfile.NamedTemporaryFile("w+") if log_file is None else log_file.open("w+") as log,
        subprocess.Popen([*command, "--leave-seconds", "0", *options], stderr=log) as process,
    ):
        try:
            while not (match := _STARTED.search(Path(log.name).read_text())):
                if process.poll() is not None:
                    raise RuntimeError(f"the server did not start:\n{Path(log.name).read_text()}")
                time.sleep(0.05)
            yield int(match[1]), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()


async def measure(
    port: int,
    connections: int,
    seconds: float,
    *,
    pid: int | None = None,
    think: float = 0.0,
    deadline: float = _DEADLINE,
    impatient: bool = False,
) -> Load:
    """Load a server of the tiny model from this number of connections.

    pid: the process whose memory is recorded.
    think: mean seconds of a client's pause before each request. A pause is between 0 and twice the mean.
    deadline: seconds that each request states.
    impatient: whether clients ignore Retry-After and return at once.
    """
    load = Load(connections, deadline)
    earlier = await _queue(port)
    start = time.monotonic()
    clients = [
        asyncio.create_task(_client(port, number, load, start + seconds, think, impatient))
        for number in range(connections)
    ]
    noting = asyncio.create_task(_note_memory(pid, load, seconds)) if pid is not None else None
    await asyncio.gather(*clients)
    # The time in which clients only wait for their last refusals does not count.
    load.seconds = max(seconds, load.last - start)
    counts = await _queue(port)
    load.queue = None if counts is None else {bound: n - (earlier or {}).get(bound, 0) for bound, n in counts.items()}
    if noting is not None:
        noting.cancel()
    return load


async def _client(port: int, number: int, load: Load, until: float, think: float, impatient: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = 0
    pauses = random.Random(number)
    try:
        while (remaining := until - time.monotonic()) > 0:
            pause = 2 * think * pauses.random()
            await asyncio.sleep(min(pause, remaining))
            if pause >= remaining:
                return
            count += 1
            # All prompts differ. A quarter of them have the same beginning.
            prompt = f"{'A beginning that is shared. ' if number % 4 == 0 else ''}{number} {count}"
            body = json.dumps(
                {
                    "model": "tiny",
                    "prompt": prompt,
                    "max_tokens": _TOKENS,
                    "temperature": 1,
                    "seed": number,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode()
            writer.write(request(body, load.deadline))
            load.requests += 1
            start = time.monotonic()
            try:
                wait = await asyncio.wait_for(_read(reader, load, start, len(prompt) + 1), load.deadline + _DEADLINE)
            except TimeoutError:
                load.faults.append("an answer that did not end")
                return
            load.answered += 1
            if not impatient:
                await asyncio.sleep(min(wait, max(until - time.monotonic(), 0.0)))
    except (ConnectionError, asyncio.IncompleteReadError):
        load.faults.append("a connection was lost")
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, load: Load, start: float, prompt_tokens: int) -> float:
    """Read and record one answer. Returns the seconds to wait."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = head.split(" ", 2)[1]
    load.statuses[status] += 1
    if status != "200":
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(int(length[1]) if length else 0)
        if status == "429":
            load.refused.append(time.monotonic() - start)
        wait = re.search(r"retry-after: (\d+)", head, re.IGNORECASE)
        return float(wait[1]) if wait else 0.0
    body = b""
    first = 0.0
    while size := int(await reader.readuntil(b"\r\n"), 16):
        if not first:
            first = time.monotonic() - start
            load.late += first > load.deadline
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    cut = load.cut
    fault = _fault(body, load, prompt_tokens)
    if fault:
        load.faults.append(fault)
    else:
        load.last = time.monotonic()
        whole = load.last - start
        load.first.append(first)
        load.whole.append(whole)
        load.in_time += whole <= load.deadline and load.cut == cut
    return 0.0


def _fault(body: bytes, load: Load, prompt_tokens: int) -> str:
    """The fault of a stream, or an empty string."""
    pieces = body.decode().split("\n\n")
    if pieces[-2:] != ["data: [DONE]", ""]:
        return "no [DONE] at the end"
    events = [json.loads(piece.removeprefix("data: ")) for piece in pieces[:-2]]
    if "error" in events[-1]:
        load.errors[events[-1]["error"]["code"]] += 1
        return ""
    names = {event["id"] for event in events}
    if len(names) != 1 or names & load.names:
        return _DOUBLED
    load.names |= names
    usage, reason = events[-1]["usage"], events[-2]["choices"][0]["finish_reason"]
    load.tokens += usage["completion_tokens"]
    if usage["prompt_tokens"] != prompt_tokens:
        return "an answer to another prompt"
    if reason == "length" and usage["completion_tokens"] != _TOKENS:
        return f"{usage['completion_tokens']} tokens"
    return ""


async def _queue(port: int) -> dict[float, int] | None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    metrics = (await reader.read()).decode()
    writer.close()
    buckets = re.findall(r'^gpu_actors_text_queue_seconds_bucket\{le="([^"]+)"\} (\S+)$', metrics, re.MULTILINE)
    return {float(bound): int(float(count)) for bound, count in buckets} or None


async def _note_memory(pid: int, load: Load, seconds: float) -> None:
    while True:
        load.memory.append(_resident_mib(pid))
        await asyncio.sleep(min(60.0, max(seconds / 10, 0.1)))


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _bound(counts: dict[float, int] | None, share: float) -> float | None:
    reach = share * max((counts or {}).values(), default=0)
    least = min((bound for bound, count in (counts or {}).items() if reach and count >= reach), default=math.inf)
    return None if math.isinf(least) else least


def _at(values: list[float], share: float) -> float | None:
    if not values:
        return None
    if share == 0.5:
        return round(statistics.median(values), 4)
    return round(sorted(values)[math.ceil(share * len(values)) - 1], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="mock")
    parser.add_argument("--connections", type=int, nargs="+", default=_CONNECTIONS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds of a client's pause before a request")
    parser.add_argument("--deadline", type=float, default=_DEADLINE, help="seconds that each request names")
    parser.add_argument("--impatient", action="store_true", help="clients return at once after a 429")
    parser.add_argument("--log-file", type=Path, help="keep the server's log there")
    # All other options are the server's.
    arguments, options = parser.parse_known_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with serving(arguments.device, *options, log_file=arguments.log_file) as (port, pid):
        how = {"think": arguments.think, "deadline": arguments.deadline, "impatient": arguments.impatient}
        figures = _figures(port, pid, arguments.connections, arguments.seconds, **how)
    sys.stdout.write(json.dumps({"environment": environment()} | figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
