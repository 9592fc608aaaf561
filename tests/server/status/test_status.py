"""The state of a context for viewers: its contents, its cost, and what it never does."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside.kv import page_map
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from support.cli import Run
from support.page import page_application, reading, service_of
from support.served import Served
from support.service import NO_COMPUTE, REPOSITORY, Scripted, ask, eventually, no_threads_left, raises, rows

import gpu_actors as ga
from gpu_actors import TraceEvent, asgi
from gpu_actors.server.status import endpoints
from gpu_actors.server.status.event_log import EventLog
from gpu_actors.server.status.files import page_file
from gpu_actors.status import StatusBoard, report
from gpu_actors.testing import FaultPlan

EVIL = "</script><img src=x onerror=\"document.title='caught'\"><!--"


_WATCHING: list[StatusBoard] = []


@pytest.fixture(autouse=True)
def _every_thread_ends() -> Iterator[None]:
    with no_threads_left():
        yield
        while _WATCHING:
            _WATCHING.pop().close()


def watched(context: ga.GpuContext, **settings: Any) -> StatusBoard:
    board = StatusBoard(**settings)
    _WATCHING.append(board)
    board.watch(context)
    return board


def failure(reply: ga.Reply[Any]) -> BaseException:
    with pytest.raises(ga.GpuActorsError) as raised:
        reply.result(10)
    return raised.value


# Contents


def test_a_snapshot_says_what_the_context_says() -> None:
    with ga.open_context("mock") as ctx:
        board = watched(ctx)
        for _ in range(3):
            ask(ctx).result()
        with pytest.raises(ga.InvalidRequest):
            ctx.flash_attn.forward(rows(), rows(dim=4), rows()).result()
        found = json.loads(json.dumps(board.snapshot()))
        board.close()
    assert found["verdict"] == {"ready": True, "state": "ready", "reason": ""}
    assert found["device"]["kind"] == "mock"
    actor = next(actor for actor in found["actors"] if actor["name"] == "flash_attn")
    assert (actor["state"], actor["completed"], actor["failed"], actor["restarts"]) == ("running", 3, 1, 0)
    assert actor["errors"] == {"InvalidRequest": 1}
    assert (actor["vital"], actor["capacity"], actor["max_in_flight"]) == (True, 1024, 8)
    counted = found["history"]["windows"]["60"]["actors"]["flash_attn"]
    assert {kind: sum(counts) for kind, counts in counted.items()} == {
        "latency": 4,
        "queue": 3,
        "launch": 3,
        "batch": 3,
    }
    assert [event["name"] for event in found["events"]] == ["requests.failed"]
    assert found["events"][0]["fields"] == {"actor": "flash_attn", "error": "InvalidRequest", "count": "1"}


def test_pages_are_free_used_shared_or_kept() -> None:
    with ga.open_context("mock") as ctx:
        board = watched(ctx)
        spec: Any = {"num_blocks": 8, "page_size": 16, "kv_heads": 1, "head_dim": 64, "dtype": "float16"}

        def counted() -> tuple[dict[str, int], dict[str, int]]:
            (shown,) = board.snapshot()["caches"]
            full = {name: shown["map"][name].count("9") for name in ("used", "shared", "kept")}
            return {name: shown[name] for name in ("pages", "free", "shared", "kept")}, full

        with ctx.kv_cache(**spec) as cache:
            prompt = list(range(33))
            first = cache.create(prompt).result()
            new = np.zeros((33, 1, 64), np.float16)
            cache.append(first, new, new, tokens=np.array(prompt)).result()
            second = cache.fork(first).result()
            alone = cache.create().result()
            cache.append(alone, new[:1], new[:1]).result()
            counts, full = counted()
            assert counts == {"pages": 8, "free": 4, "shared": 3, "kept": 0}
            assert (full["shared"], full["used"]) == (3, 1)
            for sequence in (alone, first, second):
                cache.free(sequence).result()
            counts, full = counted()
            assert counts == {"pages": 8, "free": 6, "shared": 0, "kept": 2}
            assert full["kept"] == 2
        assert board.snapshot()["caches"] == []
        board.close()


def test_a_large_pool_is_drawn_in_cells() -> None:
    references = [0] * 5000
    references[4999], references[0], references[1] = 1, 2, 1
    references[5:10] = [1] * 5
    found = page_map(references, [False] * 5000)
    assert (found.per_cell, len(found.used)) == (5, 1000)
    assert (found.used[0], found.shared[0], found.used[1], found.used[-1]) == ("1", "1", "9", "1")
    assert set(found.used[2:-1]) == {"0"}
    assert page_map([], []).used == ""


def test_a_context_in_another_process_is_shown_as_well() -> None:
    with ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE), isolation="process") as ctx:
        board = watched(ctx)
        with ctx.kv_cache(num_blocks=4, page_size=16, kv_heads=1, head_dim=64, dtype="float16"):
            found = board.snapshot()
        board.close()
    shown = (found["caches"][0]["map"]["used"], found["kernels"], found["verdict"]["state"])
    assert shown == ("0000", [], "ready")


def test_kernels_are_shown_with_registers_and_where_they_came_from(tmp_path: Path) -> None:
    options = ga.ContextOptions(mock=NO_COMPUTE, compile_on_mock=True, arch="sm_80", cache_dir=tmp_path)
    q = rows(16, dim=64, dtype=np.float16)
    for source in ("compiled", "cache"):
        with ga.open_context("mock", options) as ctx:
            board = watched(ctx)
            with pytest.raises(ga.MockModeError):
                ctx.flash_attn.forward(q, q, q).result()
            (kernel,) = board.snapshot()["kernels"]
            board.close()
        assert 0 < kernel["registers"] <= 255
        shown = (kernel["arch"], kernel["asked"], kernel["spill_bytes"], kernel["source"])
        assert shown == ("sm_80", 1, 0, source)


# Events


def test_events_are_bounded_numbered_and_short() -> None:
    found = EventLog(capacity=10)
    for number in range(25):
        found(
            TraceEvent("compile.completed", 0, "here", {"variant": "v" * 5000, "error": "no" if number % 2 else None})
        )
    items, newest, missed = found.since(5)
    assert ([item["number"] for item in items], newest, missed) == (list(range(16, 26)), 25, 10)
    assert {item["level"] for item in items} == {"info", "error"}
    assert all(len(item["fields"]["variant"]) == 400 for item in items)
    assert found.since(25) == ([], 25, 0)


def test_watching_makes_no_request_an_event(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "gpu_actors.trace"), ga.open_context("mock") as ctx:
        board = watched(ctx)
        ask(ctx).result(10)
        assert "request.completed" in caplog.text
        assert board.event_log.since(0).items == [], "nor one that is logged"
        board.close()
    with ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE, actors=(Scripted,))) as ctx:
        board = watched(ctx)
        assert not ctx._children.trace.active(), "each request would build events"
        with pytest.raises(ga.MockModeError):
            ask(ctx).result()
        failure(ctx.actor(Scripted).submit(raises(RuntimeError("a reason"))))
        eventually(lambda: any(item["name"] == "actor.restarted" for item in board.event_log.since(0).items))
        board.close()
        seen = len(board.event_log.since(0).items)
        failure(ctx.actor(Scripted).submit(raises(RuntimeError("another"))))
        eventually(lambda: ctx._children.cells["scripted"].restarts == 2)
        assert len(board.event_log.since(0).items) == seen, "a closed board watches no more"


# Streams


def test_a_stream_tells_of_a_restart_and_of_a_loss() -> None:
    plan = FaultPlan().lose_context(launch=2)
    app = page_application(fault_plan=plan)
    with Served(app) as served, reading(served) as reader:
        context = service_of(app).context
        reader.until(lambda event, data: event == "state" and data["verdict"]["state"] == "ready")
        failure(context.actor(Scripted).submit(raises(RuntimeError(EVIL))))
        told = reader.until(lambda event, data: event == "happened")
        assert (told["items"][0]["name"], told["items"][0]["fields"]["actor"]) == ("actor.restarted", "scripted")
        assert EVIL in told["items"][0]["fields"]["error"]
        reader.until(lambda event, data: event == "state" and data["actors"][-1]["restarts"] == 1)
        assert isinstance(failure(ask(context)), ga.ContextLost)
        found = reader.until(lambda event, data: event == "state" and data["verdict"]["state"] == "failed")
        assert "lost" in found["verdict"]["reason"]
        assert found["verdict"]["ready"] is False
        service_of(app).board.end_streams()


@pytest.mark.perf
def test_a_stream_tells_of_a_loss_within_a_second() -> None:
    app = page_application(fault_plan=FaultPlan().lose_context(launch=2))
    with Served(app) as served, reading(served) as reader:
        reader.until(lambda event, data: event == "state" and data["verdict"]["state"] == "ready")
        began = time.monotonic()
        assert isinstance(failure(ask(service_of(app).context)), ga.ContextLost)
        reader.until(lambda event, data: event == "state" and data["verdict"]["state"] == "failed")
        assert time.monotonic() - began < 1.0
        service_of(app).board.end_streams()


def test_a_reader_that_comes_back_gets_what_it_missed_once() -> None:
    app = page_application()
    with Served(app) as served:
        board = service_of(app).board
        board.event_log.add("first", {})
        with reading(served) as reader:
            event, data, number = reader.next()
            assert (event, [item["name"] for item in data["items"]]) == ("happened", ["first"])
        board.event_log.add("second", {})
        for path, last in (("/status/events", number), (f"/status/events?last={number}", "")):
            with reading(served, last, path) as reader:
                data = reader.until(lambda event, data: event == "happened")
                assert [item["name"] for item in data["items"]] == ["second"]
        for last in ("other.1", "nonsense", "1"):
            with reading(served, last) as reader:
                data = reader.until(lambda event, data: event == "happened")
                assert len(data["items"]) == 2, "numbers of another process count for nothing"
        board.end_streams()


@pytest.mark.parametrize("guard", [True, False])
def test_all_viewers_share_the_snapshots_and_too_many_are_refused(guard: bool) -> None:
    app = page_application(guard=guard)
    with Served(app) as served:
        board = service_of(app).board
        board.max_viewers = 3
        with reading(served) as one, reading(served) as two, reading(served) as three:
            for reader in (one, two, three):
                reader.until(lambda event, data: event == "state")
            before, began = board.latest[0], time.monotonic()
            for reader in (one, two, three):
                for _ in range(3):
                    reader.until(lambda event, data: event == "state")
            snapshots, seconds = board.latest[0] - before, time.monotonic() - began
            assert snapshots <= seconds / 0.5 + 2
            refused = served.ask("/status/events")
            assert (refused.status, refused.json["reason"]) == (503, "3 viewers look already")
        eventually(lambda: not board._viewers)  # viewers that leave free their places


def test_a_reader_that_does_not_read_delays_nobody_and_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "READER_TIMEOUT", 0.5)
    app = page_application()
    with Served(app) as served:
        context, board = service_of(app).context, service_of(app).board
        board.show(lambda: {"x" * 4_000_000: 1.0})  # more than the buffers of a connection hold
        with served.raw("GET /status/events HTTP/1.1", "Host: here"):
            eventually(lambda: len(board._viewers) == 1)
            before = board.latest[0]
            ask(context).result(5)
            eventually(lambda: board.latest[0] > before + 1)
            eventually(lambda: not board._viewers)


def test_a_page_that_is_opened_while_the_server_leaves_shows_that() -> None:
    app = page_application()
    with Served(app) as served:
        service_of(app).probes.leave()
        service_of(app).board._due.set()
        eventually(lambda: service_of(app).board.draining)
        with reading(served) as reader:
            state = reader.until(lambda event, data: event == "state")
    assert state["verdict"] == {"ready": False, "state": "draining", "reason": "the server is leaving"}


def test_a_stream_ends_well_before_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "STREAM_SECONDS", 0.5)
    app = page_application()
    with Served(app) as served:
        replies = (served.ask("/status/events") for _ in range(60))  # a busy machine may have no state in that time
        reply = next(reply for reply in replies if b"event: state" in reply.body)
        assert reply.body.startswith(b"retry: 500\n\nevent: state\ndata: {")
        assert reply.body.endswith(b"}\n\n")
        monkeypatch.setattr(endpoints, "STREAM_SECONDS", 60.0)
        # The guard would cut the stream off at the deadline, which its reader would see.
        reply = served.ask("/status/events", headers={"X-Deadline-Ms": "2500"})
        assert (reply.status, reply.headers["x-accel-buffering"], reply.body[-2:]) == (200, "no", b"\n\n")


_SERVER = """
import uvicorn
from starlette.applications import Starlette
from gpu_actors import asgi
from gpu_actors.server.status import endpoints
endpoints.STREAM_SECONDS = 600.0
app = Starlette(lifespan=asgi.lifespan("mock", leave_seconds=0.2), routes=asgi.routes())
uvicorn.run(app, port=0, log_level="info")
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_open_page_does_not_hold_up_the_end_of_a_server(number: signal.Signals) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", _SERVER], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        port = next(int(line.split("127.0.0.1:")[1].split()[0]) for line in process.stderr if "127.0.0.1:" in line)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=150)
        connection.request("GET", "/status/events")
        reply = connection.getresponse()
        while not reply.readline().startswith(b"data: "):
            pass
        process.send_signal(number)
        rest = b"data: " + reply.read()
        process.stderr.read()
        process.wait(150)  # the stream itself would last for 600 s
        assert rest.endswith(b"\n\n") or rest == b"data: \n", "a whole event is the last"
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        connection.close()


# The page


def test_the_page_runs_nothing_but_its_own_files() -> None:
    with Served(page_application()) as served:
        page = served.ask("/")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for path, kind in (("/status/page.css", "text/css"), ("/status/page.mjs", "text/javascript")):
            file = served.ask(path)
            assert file.headers["content-type"].startswith(kind)
            assert file.headers["x-content-type-options"] == "nosniff"
        assert served.ask("/", "POST").status == 405
        head = served.ask("/status/events", "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert served.ask("/status.json").json["verdict"]["ready"] is True
    text = page_file("index.html") + page_file("page.css") + page_file("page.mjs")
    assert "http:" not in text
    assert "https:" not in text
    assert "innerHTML" not in text


def test_a_page_lies_elsewhere_or_nowhere() -> None:
    mounted = Starlette(routes=[Mount("/inner", routes=asgi.routes("/ops/"))], lifespan=asgi.lifespan("mock"))
    with Served(mounted) as served:
        assert served.ask("/inner/ops/").status == 200
        assert served.ask("/inner/ops/status.json").json["verdict"]["ready"] is True
        assert served.ask("/").status == 404
    with Served(page_application(), lifespan="off") as served:  # without a context it says why
        for path in ("/status.json", "/status/events"):
            reply = served.ask(path)
            assert (reply.status, "lifespan" in reply.json["reason"]) == (503, True)
    assert [route.path for route in asgi.routes(None) if isinstance(route, Route)] == ["/livez", "/readyz", "/metrics"]
    for page in ("ops", "/ops", "", "/{x}/", 1):
        with pytest.raises(ga.InvalidRequest, match="page"):
            asgi.routes(page)  # type: ignore[arg-type]


def test_a_report_is_one_file_in_which_no_text_is_markup() -> None:
    with ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE)) as ctx:
        board = watched(ctx)
        board.event_log.add("actor.failed", {"error": EVIL})
        page = report(board.snapshot())
        board.close()
    assert EVIL not in page
    assert page.count("</script>") == 2
    assert "status/page" not in page.replace("status/events", "")
    data = page.split('id="snapshot">')[1].split("</script>")[0]
    assert json.loads(data)["events"][0]["fields"]["error"] == EVIL
    with pytest.raises(ga.InvalidRequest, match="snapshot"):
        report({"a": 1})


def test_the_command_writes_a_report_of_a_server(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Served(page_application()) as served:
        code, _, err = run("report", served.url, "-o", "there.html")
        assert (code, ", ready" in err) == (0, True)
        Path("saved.json").write_text(run("report", f"{served.url}/", "--json")[1])
        assert run("report", "saved.json")[0] == 0
    assert Path("report.html").read_text().startswith("<!doctype html>")
    assert "<!doctype html>" in Path("there.html").read_text()
    code, _, err = run("report", served.url)
    assert (code, "cannot be read" in err) == (1, True)
    Path("odd.json").write_text("[]")
    assert (run("report", "odd.json")[0], run("report", "odd.json", "--json")[0]) == (2, 2)
    assert run("report", "absent.json")[0] == 1


def test_looks_go_on_while_threads_change_everything() -> None:
    """Several threads make requests, restarts and caches while four threads look."""
    with ga.open_context("mock", ga.ContextOptions(actors=(Scripted,))) as ctx:
        board = watched(ctx, period=0.01)
        ended = threading.Event()
        failures: list[BaseException] = []

        def looks() -> None:
            try:
                while not ended.is_set():
                    json.dumps(board.snapshot())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=looks) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            with ctx.kv_cache(num_blocks=64, page_size=16, kv_heads=1, head_dim=64, dtype="float16") as cache:
                sequence = cache.create().result()
                new = np.zeros((40, 1, 64), np.float16)
                cache.append(sequence, new, new).result()
                ask(ctx).result()
        ended.set()
        for thread in threads:
            thread.join()
        board.close()
    assert failures == []
