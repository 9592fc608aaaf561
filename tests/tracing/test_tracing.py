"""Tracing: log records, listeners, OpenTelemetry spans and trace files. Without a listener it costs nothing."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.service import Gate, answer, ask, eventually, launches, raises, rows, scripted

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock
from gpu_actors.tracing import StreamedTrace, Trace, chrome, events

pytestmark = pytest.mark.usefixtures("all_threads_end")


def of(seen: list[ga.TraceEvent], reply: ga.Reply[Any]) -> list[ga.TraceEvent]:
    """The events of one request."""
    call: Any = reply._call
    return [e for e in seen if (e.fields.get("actor"), e.fields.get("request")) == (call.mailbox.name, call.number)]


def names(seen: list[ga.TraceEvent]) -> list[str]:
    return [event.name for event in seen]


# Listeners


def test_a_request_is_accepted_launched_and_completed() -> None:
    seen: list[ga.TraceEvent] = []
    with ga.open_context("mock", ga.ContextOptions(on_event=seen.append)) as ctx:
        reply = ask(ctx)
        reply.result(30.0)
        key = ctx.flash_attn.inspect_key(ga.FlashForward(q=rows(), k=rows(), v=rows()))
    accepted, launched, completed = of(seen, reply)
    assert names([accepted, launched, completed]) == ["request.accepted", "request.launched", "request.completed"]
    assert (accepted.fields["actor"], accepted.fields["message"]) == ("flash_attn", "FlashForward")
    assert accepted.thread == threading.current_thread().name
    assert launched.fields["key"] == key
    assert launched.fields["kernel"] == "oracle"  # whichever kernel the key names for a device
    assert accepted.time <= launched.time <= completed.time


def test_every_ending_of_a_request_is_traced_once() -> None:
    seen: list[ga.TraceEvent] = []
    clock = MockClock()
    policy = ga.RestartPolicy(backoff=0.0)
    options: dict[str, Any] = {"max_in_flight": 1, "mailbox_capacity": 4, "clock": clock, "restart": policy}
    with scripted(on_event=seen.append, **options) as (_, actor):
        gate = Gate()
        launched = actor.submit(launches(gate))
        assert gate.entered.wait(30.0)
        cancelled = actor.submit(answer(None))
        expired = actor.submit(answer(None), timeout=1.0)
        waiting = [actor.submit(answer(None)) for _ in range(2)]
        overloaded = actor.submit(answer(None))
        cancelled.cancel()
        clock.advance(1.0)
        eventually(expired.done)
        gate.open()
        crashed = actor.submit(raises(ZeroDivisionError()))
        for reply in (launched, *waiting, crashed):
            eventually(reply.done)
        eventually(lambda: "actor.restarted" in names(seen))
    endings = {
        launched: "completed",
        cancelled: "RequestCancelled",
        expired: "DeadlineExceeded",
        overloaded: "Overloaded",
        crashed: "ActorFailed",
        **dict.fromkeys(waiting, "completed"),
    }
    for reply, ending in endings.items():
        trace = of(seen, reply)
        assert trace[0].name == "request.accepted"
        last = trace[-1]
        assert ending == ("completed" if last.name == "request.completed" else type(last.fields["error"]).__name__)
        assert Counter(names(trace)).most_common(1)[0][1] == 1
    (restarted,) = [event for event in seen if event.name == "actor.restarted"]
    assert (restarted.fields["actor"], restarted.fields["restarts"]) == ("scripted", 1)
    assert isinstance(restarted.fields["error"], ZeroDivisionError)


def test_the_loss_of_the_context_is_traced_with_its_generation() -> None:
    seen: list[ga.TraceEvent] = []
    options = ga.ContextOptions(on_event=seen.append, fault_plan=FaultPlan().lose_context(launch=1))
    with ga.open_context("mock", options) as ctx:
        reply = ask(ctx)
        with pytest.raises(ga.ContextLost):
            reply.result(30.0)
    (lost,) = [event for event in seen if event.name == "context.lost"]
    assert lost.fields["generation"] == 1
    assert isinstance(lost.fields["error"], ga.ContextLost)
    assert names(of(seen, reply)) == ["request.accepted", "request.launched", "request.failed"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3), KeyboardInterrupt()])
def test_a_listener_that_raises_fails_no_request(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    here = threading.current_thread()

    def listen(event: ga.TraceEvent) -> None:
        # A service must not swallow the main thread's own SystemExit and KeyboardInterrupt.
        if isinstance(error, Exception) or threading.current_thread() is not here:
            raise error

    with scripted(on_event=listen) as (ctx, actor):
        assert actor.submit(answer(1)).result(30.0) == 1
        assert actor.submit(launches(lambda: None, 2)).result(30.0) == 2
        with pytest.raises(ga.DeadlineExceeded):
            actor.submit(lambda actor, call: None, timeout=0.01).result(30.0)
        with pytest.raises(ga.DeadlineExceeded):
            actor.submit(lambda actor, call: None, timeout=0.01).result(30.0)
        with pytest.raises(ga.ActorFailed):
            actor.submit(raises(ZeroDivisionError())).result(30.0)
        assert actor.submit(answer(3)).result(30.0) == 3
        eventually(lambda: ctx.stats()["scripted"].in_flight == 0)
        assert ctx.health().ready
    assert "a trace listener raised on request.completed" in caplog.text


def test_a_logger_that_raises_keeps_no_waiter_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if threading.current_thread() is not threading.main_thread():
                raise ZeroDivisionError("in a filter")
            return True

    refusing = Refusing()
    events.logger.addFilter(refusing)
    try:
        with caplog.at_level(logging.DEBUG, "gpu_actors.trace"), scripted() as (ctx, actor):
            assert actor.submit(launches(lambda: None, 2)).result(30.0) == 2
            assert actor.submit(answer(1)).result(30.0) == 1
            with pytest.raises(ga.DeadlineExceeded):
                actor.submit(lambda actor, call: None, timeout=0.01).result(30.0)
            assert actor.restarts == 0
            eventually(lambda: ctx.stats()["scripted"].in_flight == 0)
    finally:
        events.logger.removeFilter(refusing)


# Logging


def test_events_are_log_records_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gpu_actors.trace"), ga.open_context("mock") as ctx:
        ask(ctx).result(30.0)
        with pytest.raises(ga.InvalidRequest):
            ask(ctx, softcap=-1.0).result(30.0)
    records = [record for record in caplog.records if record.name == "gpu_actors.trace"]
    assert [record.event for record in records][:3] == ["request.accepted", "request.launched", "request.completed"]  # type: ignore[attr-defined]
    assert records[0].fields["message"] == "FlashForward"  # type: ignore[attr-defined]
    assert records[0].getMessage().startswith("request.accepted {'actor': 'flash_attn', 'request': 1")
    assert {record.levelno for record in records} == {logging.DEBUG}


def test_what_an_operator_must_see_is_logged_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan().lose_context(launch=1)
    with caplog.at_level(logging.WARNING, "gpu_actors.trace"), scripted(fault_plan=plan) as (ctx, actor):
        with pytest.raises(ga.ActorFailed):
            actor.submit(raises(ZeroDivisionError())).result(30.0)
        eventually(lambda: actor.restarts == 1 and actor.state == "running")
        with pytest.raises(ga.ContextLost):
            ask(ctx).result(30.0)
    levels = {record.event: record.levelname for record in caplog.records if record.name == "gpu_actors.trace"}  # type: ignore[attr-defined]
    assert levels == {"actor.restarted": "WARNING", "context.lost": "ERROR"}


# Off


def test_no_event_is_built_without_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **fields: Any) -> None:
        raise AssertionError(f"built {arguments}")

    monkeypatch.setattr(events, "TraceEvent", never)
    monkeypatch.setattr(Trace, "emit", never)
    assert not events.logger.isEnabledFor(logging.DEBUG)
    with scripted() as (ctx, actor):
        ask(ctx).result(30.0)
        actor.submit(answer(1)).result(30.0)
        with pytest.raises(ga.InvalidRequest):
            ask(ctx, softcap=-1.0).result(30.0)
        assert not ctx._children.trace.active()


def test_a_request_made_before_anybody_looked_stays_out_of_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    with scripted() as (_, actor):
        gate = Gate()
        reply = actor.submit(launches(gate))
        assert gate.entered.wait(30.0)
        with caplog.at_level(logging.DEBUG, "gpu_actors.trace"):
            gate.open()
            reply.result(30.0)
    assert not [record for record in caplog.records if record.name == "gpu_actors.trace"]


# Trace files


def load(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The events of a trace file, and the names of its tracks."""
    document = json.loads(path.read_text())
    tracks = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    return [event for event in document["traceEvents"] if event["ph"] != "M"], tracks


def balanced(recorded: list[dict[str, Any]]) -> None:
    """Check that every span that begins ends, in order, and that none ends without a beginning."""
    open_now: dict[tuple[str, str], float] = {}
    for event in recorded:
        identity = (event["cat"], event.get("id", ""))
        if event["ph"] == "b":
            assert identity not in open_now
            open_now[identity] = event["ts"]
        elif event["ph"] == "e":
            assert event["ts"] >= open_now.pop(identity)
    assert not open_now
    times = [event["ts"] for event in recorded]
    assert times == sorted(times)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def test_a_trace_file_is_balanced_named_and_in_order(path: Path) -> None:
    with ga.ChromeTrace(path) as trace, scripted(on_event=trace) as (ctx, actor):
        replies = [ask(ctx) for _ in range(20)] + [ask(ctx, softcap=-1.0)]
        replies.append(actor.submit(raises(ZeroDivisionError())))
        for reply in replies:
            eventually(reply.done)
        eventually(lambda: actor.restarts == 1)
    recorded, tracks = load(path)
    balanced(recorded)
    assert set(tracks.values()) == {"flash_attn", "scripted"}
    assert all(event["tid"] in tracks and event["pid"] == 1 for event in recorded)
    assert Counter(event["name"] for event in recorded if event["ph"] == "b") == {
        "FlashForward": 21,
        "launch oracle": 20,
        "function": 1,
    }
    assert [event["name"] for event in recorded if event["ph"] == "i"] == ["actor.restarted"]


def test_what_is_open_when_a_trace_is_written_is_closed_in_the_file(path: Path) -> None:
    trace = ga.ChromeTrace(path)
    with scripted(on_event=trace) as (_, actor):
        gate = Gate()
        reply = actor.submit(launches(gate))
        assert gate.entered.wait(30.0)
        eventually(lambda: ("launch", "scripted#1") in trace._open)
        trace.write()
        balanced(load(path)[0])
        gate.open()
        reply.result(30.0)
    trace.write()
    balanced(load(path)[0])


def test_events_that_cross_leave_the_file_balanced(path: Path) -> None:
    """A deadline may pass between a launch and its event; two compiles of one kernel may overlap."""
    trace = ga.ChromeTrace(path)

    def event(name: str, time: int, **fields: Any) -> None:
        trace(ga.TraceEvent(name, time * 1000, "t", fields))

    event("request.accepted", 1, actor="a", request=1, message="M")
    event("compile.started", 2, variant="v", digest="1", arch="sm_80")
    event("compile.started", 3, variant="v", digest="2", arch="sm_90a")
    event("request.failed", 5, actor="a", request=1, error=ga.DeadlineExceeded("x"))
    event("request.launched", 6, actor="a", request=1, key="k")
    event("request.compiling", 7, actor="a", request=1, key="k")
    event("compile.completed", 9, variant="v", digest="1", arch="sm_80", seconds=1.0, error=None)
    event("cache.hit", 4, variant="v", digest="1", layer="memory")
    trace.write()
    recorded, _ = load(path)
    balanced(recorded)
    ends = {event["id"]: event["ts"] for event in recorded if event["ph"] == "e"}
    assert ends == {"request:a#1": 5.0, "compile:v 1": 9.0, "compile:v 2": 9.0}


def compiled(trace: ga.ChromeTrace, number: int, start: int, stop: int) -> None:
    fields = {"variant": "v", "digest": str(number), "arch": "sm_80"}
    trace(ga.TraceEvent("compile.started", start * 1000, "t", fields))
    trace(ga.TraceEvent("compile.completed", stop * 1000, "t", {**fields, "seconds": 1.0, "error": None}))


def test_a_trace_keeps_the_latest_spans_and_counts_the_others(path: Path) -> None:
    trace = ga.ChromeTrace(path, max_spans=10)
    for number in range(100):
        compiled(trace, number, number, number + 1)
    assert len(trace._spans) == 10
    assert not trace._open
    trace.write()
    recorded, _ = load(path)
    balanced(recorded)
    assert [event["args"]["digest"] for event in recorded if event["ph"] == "b"] == [str(n) for n in range(90, 100)]
    assert json.loads(path.read_text())["otherData"] == {"dropped": 90}
    with pytest.raises(ga.InvalidRequest, match="max_spans=0: must be an int >= 1"):
        ga.ChromeTrace(path, max_spans=0)


def test_a_trace_that_cannot_be_finished_leaves_the_former_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("former")
    trace = ga.ChromeTrace(path)
    compiled(trace, 1, 1, 2)

    def full(opened: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        trace.write()
    assert path.read_text() == "former"
    assert list(path.parent.iterdir()) == [path]


def test_a_trace_is_encoded_piece_after_piece(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ga.ChromeTrace(path)
    for number in range(50):
        compiled(trace, number, number, number + 1)
    sizes: list[int] = []
    work = json.dumps

    def dumps(value: object) -> str:
        sizes.append(len(work(value)))
        return work(value)

    monkeypatch.setattr(chrome, "json", SimpleNamespace(dumps=dumps))
    trace.write()
    assert max(sizes) < 500
    assert sum(sizes) > 10_000


async def test_a_trace_is_written_off_the_loop(path: Path) -> None:
    threads: list[threading.Thread] = []

    class Noting(ga.ChromeTrace):
        def write(self) -> None:
            threads.append(threading.current_thread())
            super().write()

    async with Noting(path) as trace:
        compiled(trace, 1, 1, 2)
    assert threads
    assert threading.current_thread() not in threads
    assert len(load(path)[0]) == 2
    with pytest.raises(ga.WouldBlock, match="use async with"), ga.ChromeTrace(path):
        pass


def test_a_trace_through_a_link_replaces_what_it_leads_to(tmp_path: Path) -> None:
    target, link = tmp_path / "kept.json", tmp_path / "link.json"
    target.write_text("former")
    link.symlink_to(target)
    with ga.ChromeTrace(link):
        pass
    assert link.is_symlink()
    assert load(target) == ([], {})


# Unusual programs


def test_events_reach_the_log_beside_a_record_factory_that_sets_the_same_names(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logging.getLogRecordFactory()

    def factory(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = plain(*arguments, **options)
        record.event, record.fields, record.request_id = "the program's", {}, "none"
        return record

    logging.setLogRecordFactory(factory)
    try:
        with caplog.at_level(logging.DEBUG, "gpu_actors"), ga.open_context("mock") as ctx:
            ask(ctx).result(30.0)
    finally:
        logging.setLogRecordFactory(plain)
    records = [record for record in caplog.records if getattr(record, "event", "").startswith("request.")]
    events = ["request.accepted", "request.launched", "request.completed"]
    assert [vars(record)["event"] for record in records] == events
    assert all(vars(record)["fields"]["actor"] == "flash_attn" for record in records)
    assert {Path(record.pathname).name for record in records} == {"events.py"}


@pytest.mark.parametrize("kind", [ga.ChromeTrace, StreamedTrace])
def test_a_trace_is_written_where_it_was_named_and_not_where_the_program_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trace = kind("trace.json")
    monkeypatch.chdir(elsewhere)
    with trace, ga.open_context("mock", ga.ContextOptions(on_event=trace)) as ctx:
        ask(ctx).result(30.0)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["trace.json"]
    assert list(elsewhere.iterdir()) == []
