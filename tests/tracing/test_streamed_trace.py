"""A trace that is written continuously: rows of actors and threads, bounds, and the trace of a killed process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.service import AT_ONCE, REPOSITORY, answer, ask, eventually, raises, scripted

import gpu_actors as ga
from gpu_actors.tracing import HostSpan, host
from gpu_actors.tracing.recorder import ACTORS, THREADS

pytestmark = pytest.mark.usefixtures("all_threads_end")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def salvaged(path: Path) -> list[dict[str, Any]]:
    """The records of a file, closed or not, without the one that a kill cuts off, as Perfetto reads them."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith("[\n")
    if text.endswith("]\n"):
        result: list[dict[str, Any]] = json.loads(text)
        return result
    return [json.loads(line.rstrip(",\n")) for line in text.splitlines(keepends=True)[1:] if line.endswith("\n")]


def rows(records: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """The names of the rows, by group and number. Each is named before its first record."""
    named: dict[tuple[int, int], str] = {}
    for record in records:
        place = (record["pid"], record["tid"])
        if record["ph"] == "M":
            assert place not in named
            named[place] = record["args"]["name"]
        else:
            assert place in named or record["name"] == "end of the trace"
    return named


def test_actors_and_threads_have_rows_with_names(path: Path) -> None:
    with ga.StreamedTrace(path) as trace, scripted(on_event=trace) as (ctx, actor):
        for _ in range(20):
            ask(ctx).result(AT_ONCE)
        with pytest.raises(ga.ActorFailed):
            actor.submit(raises(ZeroDivisionError())).result(AT_ONCE)
        eventually(lambda: actor.restarts == 1 and actor.state == "running")

        def work() -> None:
            with ga.host_span("tokenise"), ga.host_span("matmul", rows=7):
                time.sleep(0.002)

        for name in ("reader", "painter"):
            thread = threading.Thread(target=work, name=name)
            thread.start()
            thread.join()
    records = json.loads(path.read_text())
    named = rows(records)
    assert {name for (group, _), name in named.items() if group == ACTORS} == {"actors", "flash_attn", "scripted"}
    assert {name for (group, _), name in named.items() if group == THREADS} == {"threads", "reader", "painter"}
    begun = [record for record in records if record["ph"] == "b"]
    ended = [record for record in records if record["ph"] == "e"]
    assert Counter(record["name"] for record in begun) == {"FlashForward": 20, "launch oracle": 20, "function": 1}
    assert Counter((r["cat"], r["id"]) for r in begun) == Counter((r["cat"], r["id"]) for r in ended)
    assert [record["name"] for record in records if record["ph"] == "i"] == ["actor.restarted", "end of the trace"]
    spans = [record for record in records if record["ph"] == "X"]
    assert [record["name"] for record in spans] == ["matmul", "tokenise"] * 2
    inner, outer = spans[:2]
    assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert (inner["args"], inner["dur"] >= 2000) == ({"rows": "7"}, True)
    assert inner["tid"] != spans[2]["tid"]


def test_the_generation_engine_shows_its_work_on_threads(path: Path) -> None:
    from gpu_actors.generation import Engine, Llama, LlamaConfig, Settings, random_weights

    config = LlamaConfig.tiny()

    async def generate() -> None:
        async with ga.StreamedTrace(path) as trace:
            options = ga.ContextOptions(on_event=trace, mock=ga.MockOptions(dtype="float32"))
            async with (
                ga.open_context("mock", options) as ctx,
                Engine.open(ctx, Llama(config, random_weights(config)), Settings(blocks=64)) as engine,
            ):
                await engine.submit([1, 2, 3], max_new_tokens=4).tokens()

    import asyncio

    asyncio.run(generate())
    counted = Counter(record["name"] for record in json.loads(path.read_text()) if record["ph"] == "X")
    assert counted == {"matmul": 4 * (config.layers + 1), "sample": 4}


_ENDLESS = """
import sys, time
import gpu_actors as ga
import numpy as np
with ga.StreamedTrace(sys.argv[1]) as trace:
    options = ga.ContextOptions(on_event=trace, mock=ga.MockOptions(latency=0.001))
    with ga.open_context("mock", options) as ctx:
        q = np.zeros((1, 1, 1, 8), np.float32)
        while True:
            with ga.host_span("ask"):
                ctx.flash_attn.forward(q, q, q).result()
"""


def test_a_killed_process_leaves_a_file_that_can_be_read(path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", _ENDLESS, str(path)], env=environment)
    try:
        eventually(lambda: path.exists() and path.read_bytes().count(b'"ask"') > 200, 60.0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    records = salvaged(path)
    assert {"flash_attn", "MainThread"} <= set(rows(records).values())
    begun = {(r["cat"], r["id"]) for r in records if r["ph"] == "b"}
    ended = {(r["cat"], r["id"]) for r in records if r["ph"] == "e"}
    assert ended <= begun
    assert len(begun - ended) <= 2, "the request that was under way, and its launch"
    assert len([record for record in records if record["name"] == "ask"]) > 100


def test_what_waits_and_what_is_written_have_bounds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_actors.tracing.streamed._PERIOD", 3600.0)
    with ga.StreamedTrace(path, max_waiting=101) as trace, scripted(on_event=trace) as (_, actor):
        for _ in range(500):
            actor.submit(answer(1)).result(AT_ONCE)
        assert len(trace._waiting) <= 101 + 2
        assert not trace._open
    records = json.loads(path.read_text())
    begun, ended = (sum(record["ph"] == kind for record in records) for kind in "be")
    assert begun == ended
    assert begun + trace.dropped == 500
    assert records[-1]["args"] == {"dropped": str(trace.dropped)}
    monkeypatch.setattr("gpu_actors.tracing.streamed._PERIOD", 0.001)
    with ga.StreamedTrace(path, max_bytes=20_000) as trace:
        for number in range(3000):
            trace.host_span(HostSpan("x", number, number + 1, 1, "t", {"note": "y" * 100}))
            if number % 100 == 0:
                time.sleep(0.005)
    assert 20_000 < path.stat().st_size < 80_000
    assert trace.dropped > 1000


def test_a_disk_that_is_full_is_told_on_entering() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="No space left"), ga.StreamedTrace("/dev/full"):
        pass


def test_a_disk_that_fails_later_fails_no_request(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(ga.StreamedTrace):
        def _write(self, file: object) -> None:
            raise OSError(28, "No space left on device")

    with Full(path) as trace, scripted(on_event=trace) as (_, actor):
        eventually(lambda: "ends here" in caplog.text)
        for _ in range(100):
            assert actor.submit(answer(1)).result(AT_ONCE) == 1
        assert trace.dropped >= 100
        assert not trace._open


def test_nothing_is_measured_without_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("measured")

    with monkeypatch.context() as patch:
        patch.setattr(host, "_measured", never)
        with ga.host_span("nothing", rows=1):
            pass
    with ga.StreamedTrace(path):
        assert len(host._sinks) == 1
        with pytest.raises(ZeroDivisionError), ga.host_span("failing"):
            raise ZeroDivisionError
    assert host._sinks == ()
    (span,) = (record for record in json.loads(path.read_text()) if record["ph"] == "X")
    assert span["args"] == {"error": "ZeroDivisionError"}


def test_a_sink_that_raises_fails_no_work(caplog: pytest.LogCaptureFixture) -> None:
    def broken(span: HostSpan) -> None:
        raise RuntimeError("a full head")

    host.add_sink(broken)
    try:
        with ga.host_span("work"):
            pass
    finally:
        host.remove_sink(broken)
    assert "could not be recorded" in caplog.text


def test_a_trace_in_one_piece_has_the_rows_of_threads_too(path: Path) -> None:
    with ga.ChromeTrace(path) as trace, scripted(on_event=trace) as (ctx, _):
        ask(ctx).result(AT_ONCE)
        with ga.host_span("matmul", size=np.int64(3)):
            pass
    document = json.loads(path.read_text())
    named = rows(document["traceEvents"])
    assert set(named.values()) == {"actors", "flash_attn", "threads", "MainThread"}
    assert [r["args"] for r in document["traceEvents"] if r["ph"] == "X"] == [{"size": "3"}]
    assert host._sinks == ()


async def test_a_trace_is_entered_once_and_off_the_loop(path: Path) -> None:
    with pytest.raises(ga.WouldBlock, match="use async with"), ga.StreamedTrace(path):
        pass
    async with ga.StreamedTrace(path) as trace:
        with pytest.raises(ga.GpuActorsError, match="entered already"):
            await trace.__aenter__()
    async with trace:
        pass
    assert salvaged(path)[-1]["name"] == "end of the trace"


@pytest.mark.parametrize("bound", ["max_bytes", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_bounds_are_checked(path: Path, bound: str, value: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match=bound):
        ga.StreamedTrace(path, **{bound: value})
