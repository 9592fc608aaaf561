"""How many answers a second the inference server gives, with few clients and with many.

    python examples/serving_load.py --device mock --connections 16 256 1024 --seconds 20

Starts `inference_server.py` on loopback, and that many clients for each number of connections. A client sends its next
request as soon as the last one is answered, even by a refusal (--patient: once Retry-After has passed). Meanwhile
another process asks /livez on the probe port up to four times a second. Clients, server and encoder share this
machine's CPUs, so the figures compare loads of one run with each other; they do not hold for another machine or for a
GPU. Loads take turns, --rounds times, because a machine's speed drifts. Prints a row for each load to stderr, then
their ratios, or everything with --json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from gpu_actors.bench import environment

SERVER = Path(__file__).with_name("inference_server.py")
SENTENCE = "The valve closes when the float has risen, and it opens again an hour after the tank has been drained. "


@dataclass
class Load:
    """What clients saw. Times are in seconds; latencies are those of answers with status 200.

    cpu: processor time that the server used. If other work takes a changing share of the CPUs, answers per second of it
    compare two loads better than answers a second.
    """

    connections: int
    seconds: float = 0.0
    cpu: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.statuses["200"] / self.seconds

    @property
    def frugality(self) -> float:
        """Answers per second of the server's processor time."""
        return self.statuses["200"] / self.cpu if self.cpu else 0.0

    def row(self) -> dict[str, object]:
        latencies = sorted(self.latencies) or [float("nan")]
        return {
            "connections": self.connections,
            "answers_a_second": round(self.goodput, 2),
            "answers_a_cpu_second": round(self.frugality, 2),
            "cpus_used": round(self.cpu / self.seconds, 2),
            "statuses": dict(self.statuses),
            "median_seconds": round(statistics.median(latencies), 2),
            "p99_seconds": round(latencies[int(0.99 * (len(latencies) - 1))], 2),
            "livez_asked": len(self.probes),
            "livez_slowest_seconds": round(max(self.probes, default=float("nan")), 3),
        }


async def client(port: int, request: bytes, load: Load, until: float, patient: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while (start := time.monotonic()) < until:
            writer.write(request)
            status, wait = await _answer(reader)
            now = time.monotonic()
            if now > until:
                return
            load.statuses[status] += 1
            if status == "200":
                load.latencies.append(now - start)
            elif patient:
                await asyncio.sleep(wait)
    except (ConnectionError, asyncio.IncompleteReadError):
        load.statuses["connection lost"] += 1
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[str, float]:
    """The status of an answer, and the seconds that it asks to wait for."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
    await reader.readexactly(int(length[1]) if length else 0)
    wait = re.search(r"retry-after: (\d+)", head, re.IGNORECASE)
    return head.split(" ", 2)[1], float(wait[1]) if wait else 0.0


async def measure(port: int, connections: int, seconds: float, texts: int, patient: bool) -> Load:
    load = Load(connections)
    body = json.dumps({"texts": [SENTENCE * 4] * texts}).encode()
    lines = ["POST /embed HTTP/1.1", "Host: x", "X-Deadline-Ms: 30000", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    start = time.monotonic()
    asking = [client(port, head.encode() + body, load, start + seconds, patient) for _ in range(connections)]
    tasks = [asyncio.ensure_future(one) for one in asking]
    # Clients that have no answer yet hang up, which stops their work.
    _, late = await asyncio.wait(tasks, timeout=seconds)
    load.seconds = time.monotonic() - start
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return load


def probe(port: int, pipe: Connection) -> None:
    """Ask /livez, 0.25 s after each answer, until told to stop. Then send how long each answer took."""
    took: list[float] = []
    while not pipe.poll(0.25):
        start = time.monotonic()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=60).close()
        except urllib.error.URLError:
            took.append(float("inf"))
        else:
            took.append(time.monotonic() - start)
    pipe.send(took)


@contextmanager
def serving(device: str, options: list[str]) -> Iterator[tuple[int, int, int]]:
    """Start a server process. Yields its port, its probe port and its process id."""
    command = [sys.executable, str(SERVER), "--device", device, "--port", "0", "--probe-port", "0", *options]
    with tempfile.NamedTemporaryFile("w+") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            while True:
                text = Path(log.name).read_text()
                port, probes = re.search(r"127\.0\.0\.1:(\d+)", text), re.search(r"probes on port (\d+)", text)
                if port and probes:
                    break
                if process.poll() is not None:
                    raise SystemExit(f"the server did not start:\n{text}")
                time.sleep(0.05)
            yield int(port[1]), int(probes[1]), process.pid
        finally:
            process.kill()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(arguments: argparse.Namespace, options: list[str]) -> list[Load]:
    loads: list[Load] = []
    with serving(arguments.device, options) as (port, probe_port, pid):
        for connections in arguments.connections * arguments.rounds:
            here, there = multiprocessing.Pipe()
            asking = multiprocessing.Process(target=probe, args=(probe_port, there))
            asking.start()
            before = cpu_seconds(pid)
            load = asyncio.run(measure(port, connections, arguments.seconds, arguments.texts, arguments.patient))
            load.cpu = cpu_seconds(pid) - before
            here.send(None)
            load.probes = here.recv()
            asking.join()
            loads.append(load)
            print(load.row(), file=sys.stderr)  # noqa: T201
            time.sleep(2.0)  # until the server has seen that the clients hung up
    return loads


def summary(loads: list[Load], first: int) -> list[dict[str, object]]:
    """Each load compared with the first one of its round: the median of the ratios, and all of them."""
    rounds = [loads[start : start + first] for start in range(0, len(loads), first)]
    rows: list[dict[str, object]] = []
    for place in range(first):
        wall = [_ratio(turn[place].goodput, turn[0].goodput) for turn in rounds]
        cpu = [_ratio(turn[place].frugality, turn[0].frugality) for turn in rounds]
        rows.append(
            {
                "connections": rounds[0][place].connections,
                "answers_a_second_ratio": statistics.median(wall),
                "answers_a_cpu_second_ratio": statistics.median(cpu),
                "ratios_of_each_round": [wall, cpu],
            }
        )
    return rows


def _ratio(value: float, first: float) -> float:
    return round(value / first, 2) if first else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=os.environ.get("GPU_ACTORS_DEVICE", "mock"))
    parser.add_argument("--connections", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--texts", type=int, default=8, help="in one request, of some 90 tokens each")
    parser.add_argument("--patient", action="store_true", help="wait for as long as Retry-After says")
    parser.add_argument("--json", action="store_true")
    # All other options are the server's.
    arguments, options = parser.parse_known_args()
    if max(arguments.connections) > 4096 or arguments.seconds > 120 or arguments.rounds > 20:
        parser.error("at most 4096 connections, 120 seconds and 20 rounds")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the server would be left running
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loads = run(arguments, options)
    found = {
        "environment": environment(),
        "settings": vars(arguments),
        "server": options,
        "loads": [load.row() for load in loads],
        "beside_the_first": summary(loads, len(arguments.connections)),
    }
    print(json.dumps(found if arguments.json else found["beside_the_first"], indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
