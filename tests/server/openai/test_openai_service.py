"""OpenAI's API under faults: clients that leave, too many clients, deadlines, failures, and the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.openai_server import CHAT, HELLO, MOCK, STREAM, Serving, events_of, text_of
from support.service import eventually
from support.streams import asking

import gpu_actors as ga
from gpu_actors.server.openai.server import JsonLines
from gpu_actors.server.openai.stream import Writer
from gpu_actors.testing import FaultPlan

pytestmark = pytest.mark.timeout(180)

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = {"model": "tiny", "prompt": "a long story", "max_tokens": 600, "stream": True, "temperature": 1, "seed": 3}
SLOW = ga.ContextOptions(mock=ga.MockOptions(dtype="float32", latency=0.01))
NEVER_ENDING = {**LONG, "temperature": 0}
"""Its likeliest tokens do not end it; at 20 ms a token it takes 12 s or more."""


def code_of(body: bytes) -> str:
    """The code of an error, or of the last event of a stream."""
    last = events_of(body)[-1] if body.startswith(b"data: ") else json.loads(body)
    code: str = last["error"]["code"]
    return code


def parallel(serving: Serving, contents: list[Any]) -> list[tuple[int, bytes]]:
    """The answers to requests that are sent at once, each on its own connection."""
    with contextlib.ExitStack() as stack:
        asked = [asking(serving.port, COMPLETIONS, content, begun=False) for content in contents]
        clients = [stack.enter_context(one) for one in asked]
        return [client.answer() for client in clients]


# Clients


def test_a_client_that_hangs_up_frees_its_text_and_pages() -> None:
    chat = {**{name: value for name, value in NEVER_ENDING.items() if name != "prompt"}, "messages": CHAT["messages"]}
    with Serving(options=SLOW) as serving:
        for path, content in ((COMPLETIONS, NEVER_ENDING), (CHATS, {**chat, "stream": False})):
            with asking(serving.port, path, content, begun=content["stream"]):
                eventually(lambda: serving.engine.pages()[1] < serving.engine.pages()[0])
            serving.until_idle()
        assert serving.engine.stats.ended["cancelled"] == 2
        text = serving.complete()["choices"][0]["text"]
        assert serving.complete(stop=text[1:3])["choices"][0]["finish_reason"] == "stop"
        serving.until_idle()
        assert (serving.engine.stats.ended["cancelled"], serving.engine.stats.ended["stop"]) == (2, 1)


def test_many_clients_that_hang_up_leave_nothing_behind() -> None:
    """They hang up before the first token, between tokens, and in the queue."""
    with Serving(options=SLOW, max_running=8) as serving:
        with contextlib.ExitStack() as stack:
            for number in range(18):
                stack.enter_context(asking(serving.port, COMPLETIONS, NEVER_ENDING, begun=number < 2))
        # Its answer comes after all earlier requests, so that texts that begin late end before the check.
        for _ in range(2):
            serving.complete()
            serving.until_idle()


def test_a_client_that_does_not_read_holds_no_pages_and_delays_nobody() -> None:
    serving = Serving()
    serving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by its connections
    with serving, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", serving.port))
        body = json.dumps({**NEVER_ENDING, "max_tokens": 300, "logprobs": 5}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        client.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        eventually(lambda: serving.engine.running == 1)
        serving.complete()
        eventually(lambda: serving.engine.running == 0, 150)
        assert serving.engine.stats.ended == {"length": 3}, "with the one of the start"
        assert serving.engine.pages()[1] == serving.engine.pages()[0]
        assert serving.state.admission.stats().running == 1, "its answer waits for it"


# Too many, too late


def test_requests_over_the_bound_get_429_and_when_to_return() -> None:
    """A waiting request gets it after a while."""
    with Serving(options=SLOW, max_running=2, max_waiting=1, queue_seconds=2.0) as serving:
        with asking(serving.port, COMPLETIONS, NEVER_ENDING), asking(serving.port, COMPLETIONS, NEVER_ENDING):
            assert serving.engine.running == 2
            with asking(serving.port, COMPLETIONS, NEVER_ENDING, begun=False) as waiting:
                eventually(lambda: serving.state.admission.stats().waiting == 1)
                for content in (NEVER_ENDING, {**NEVER_ENDING, "stream": False}):
                    refused = serving.post(COMPLETIONS, content)
                    assert refused.status == 429
                    assert int(refused.headers["retry-after"]) >= 1
                    error = refused.json["error"]
                    assert (error["type"], error["code"]) == ("rate_limit_error", "Overloaded")
                status, body = waiting.answer()
                assert (status, "within 2.0 s" in json.loads(body)["error"]["message"]) == (429, True), body
        serving.until_idle()
        serving.complete()


def test_the_time_in_front_of_the_engine_counts_as_time_in_the_queue() -> None:
    with Serving(options=SLOW, max_running=1, queue_seconds=600) as serving, ThreadPoolExecutor(1) as pool:
        meter = serving.engine.meter
        with asking(serving.port, COMPLETIONS, NEVER_ENDING):
            before = meter.queue.total
            waiting = pool.submit(serving.complete)
            eventually(lambda: serving.state.admission.stats().waiting == 1)
            time.sleep(0.3)
            assert meter.queue.total == before
        waiting.result()
        assert min(meter.queue.total, meter.first.total) >= before + 0.3


def test_more_texts_than_the_cache_has_pages_for_wait_and_are_all_answered() -> None:
    with Serving(cache_mib=1, queue_seconds=600) as serving:  # 128 pages of each of two layers hold six of these texts
        asked = [{**NEVER_ENDING, "prompt": "x" * (300 + n), "max_tokens": 20 + n, "stream": False} for n in range(10)]
        answers = parallel(serving, asked)
        assert {status for status, _ in answers} == {200}
        assert 1 < serving.engine.stats.most_texts < 10
        usages = [json.loads(body)["usage"] for _, body in answers]
        counts = [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages]
        assert counts == [(301 + n, 20 + n) for n in range(10)]
        serving.until_idle()


def test_a_text_for_which_the_cache_has_no_room_is_told_in_time() -> None:
    with Serving(options=SLOW, cache_mib=2, queue_seconds=1.0) as serving:
        with asking(serving.port, COMPLETIONS, {**NEVER_ENDING, "max_tokens": 2000}):
            asked = {**NEVER_ENDING, "max_tokens": 1000}
            for content in (asked, {**asked, "stream": False}):
                refused = serving.post(COMPLETIONS, content)
                assert (refused.status, refused.json["error"]["code"]) == (429, "Overloaded")
                assert "no room in the KV cache" in refused.json["error"]["message"]
            late = serving.post(COMPLETIONS, asked, X_Deadline_Ms="300")
            assert (late.status, late.json["error"]["code"]) == (504, "DeadlineExceeded")
        serving.until_idle()
        assert serving.engine.stats.ended["deadline"] == 1


def test_a_deadline_ends_a_stream_with_an_event_that_says_so() -> None:
    with Serving(options=SLOW, default_timeout=1.5) as serving:
        for headers in ({"X_Deadline_Ms": "2000"}, {}):  # the client's deadline, then the server's
            events = serving.stream(COMPLETIONS, NEVER_ENDING, **headers)
            error = events[-1]["error"]
            assert (error["type"], error["code"]) == ("timeout_error", "DeadlineExceeded")
            assert len(text_of(events[:-1])) > 0
        late = serving.post(COMPLETIONS, {**NEVER_ENDING, "stream": False}, X_Deadline_Ms="200")
        assert (late.status, late.json["error"]["code"]) == (504, "DeadlineExceeded")
        serving.until_idle()
        assert serving.engine.stats.ended == {"length": 1, "deadline": 3}, "no text was cancelled by its client"
        eventually(lambda: serving.traffic.routes()[COMPLETIONS].statuses == {200: 2, 504: 1})
        assert serving.traffic.routes()[COMPLETIONS].outcomes["deadline"] == 3


# Failures


def test_a_launch_that_fails_is_500_before_the_first_token_and_an_event_after_it() -> None:
    plan = FaultPlan().fail(launch=5).fail(launch=40)
    with Serving(options=ga.ContextOptions(mock=MOCK.mock, fault_plan=plan)) as serving:
        failed = serving.post(COMPLETIONS, LONG)
        assert (failed.status, failed.json["error"]["code"]) == (500, "LaunchError")
        events = serving.stream(COMPLETIONS, LONG)
        assert (events[-1]["error"]["type"], events[-1]["error"]["code"]) == ("server_error", "LaunchError")
        assert all("choices" in event for event in events[:-1])
        serving.until_idle()
        serving.complete()


def test_a_lost_context_ends_every_stream_and_readiness() -> None:
    plan = FaultPlan().lose_context(launch=40)
    with Serving(options=ga.ContextOptions(mock=MOCK.mock, fault_plan=plan)) as serving:
        answers = parallel(serving, [{**NEVER_ENDING, "prompt": f"number {n}", "max_tokens": 500} for n in range(6)])
        assert {(status, code_of(body)) for status, body in answers} <= {(200, "ContextLost"), (503, "ContextLost")}
        assert serving.post(COMPLETIONS, HELLO).status == 503
        assert serving.ask("/readyz").status == 503
        assert serving.ask("/livez").status == 503


def test_an_accident_is_an_event_that_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Serving() as serving:
        from gpu_actors.server.openai import completions

        next_text, count = completions.Detokenizer.next_text, 0

        async def broken(self: Any) -> str:
            nonlocal count
            count += 1
            if count == 3:
                raise KeyError("a secret")
            return await next_text(self)

        monkeypatch.setattr(completions.Detokenizer, "next_text", broken)
        events = serving.stream(COMPLETIONS, LONG)
        assert events[-1]["error"]["code"] == "InternalError"
        assert "secret" not in json.dumps(events)
        serving.until_idle()


def test_an_engine_whose_loop_fails_ends_every_text_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("rows were mislaid")

    with Serving(options=SLOW) as serving:
        with asking(serving.port, COMPLETIONS, NEVER_ENDING) as client:
            serving.engine._batcher.next_rows = broken
            last = events_of(client.answer()[1])[-1]["error"]
        assert (last["code"], last["type"]) == ("ActorStopped", "server_error")
        for content in (HELLO, {**HELLO, **STREAM}):
            refused = serving.post(COMPLETIONS, content)
            assert (refused.status, refused.json["error"]["code"]) == (503, "ActorStopped"), refused.body
        for probe in ("/readyz", "/livez"):
            answered = serving.ask(probe)
            assert (answered.status, "rows were mislaid" in answered.json["reason"]) == (503, True), answered.body
        assert serving.ask("/v1/models").json["data"][0]["id"] == "tiny"
    assert "the engine's loop failed" in caplog.text


def test_a_process_that_stood_still_past_the_deadline_ends_its_streams_in_a_whole_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After SIGSTOP, or without CPU time, all timers of the loop are due at once."""
    monkeypatch.setattr("gpu_actors.server.openai.stream._GRACE", 0.5)
    with Serving(options=SLOW) as serving:
        with asking(serving.port, COMPLETIONS, NEVER_ENDING, "X-Deadline-Ms: 2000") as client:
            probes = serving.server.config.app.state.gpu_actors.probes  # type: ignore[union-attr]
            probes._beating.get_loop().call_soon_threadsafe(time.sleep, 3.0)
            assert code_of(client.answer()[1]) == "DeadlineExceeded"
        serving.until_idle()


async def test_a_stream_whose_status_could_not_be_sent_has_not_begun() -> None:
    """A connection that still sends an earlier answer delays the status beyond the deadline."""

    async def stuck(_: Any) -> None:
        await asyncio.sleep(30)

    writer = Writer(stuck)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.write_text("x"), 0.01)
    assert not writer.started


# The log


def test_a_line_of_the_access_log_is_json_with_the_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpu_actors.access")
    with Serving(options=SLOW) as serving:
        serving.stream(COMPLETIONS, HELLO)
        eventually(lambda: caplog.records)
        serving.post(COMPLETIONS, {**HELLO, "n": 2}, X_Request_Id="mine")
        eventually(lambda: len(caplog.records) >= 2)
        with asking(serving.port, COMPLETIONS, NEVER_ENDING):
            pass
        eventually(lambda: len(caplog.records) >= 3)
    good, bad, gone = (json.loads(JsonLines().format(record)) for record in caplog.records[:3])
    assert (good["status"], good["model"], good["path"], good["method"]) == (200, "tiny", COMPLETIONS, "POST")
    assert (good["prompt_tokens"], good["completion_tokens"], good["finish"]) == (6, 8, "length")
    assert 0 < good["queue_ms"] <= good["first_token_ms"] <= good["milliseconds"]
    assert (bad["status"], bad["error"], bad["request_id"]) == (400, "Unsupported", "mine")
    assert "hello" not in json.dumps([good, bad]), "no text of a client is logged"
    assert "first_token_ms=" in caplog.records[0].getMessage()
    assert (gone["status"], gone["gone"], gone["finish"]) == (200, True, "none")
