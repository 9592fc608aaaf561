"""OpenAI's API where things go wrong: clients that leave, too many, deadlines, failures, a server that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from typing import Any

import pytest
from support.openai_server import CHAT, HELLO, MOCK, STREAM, Serving, body_of, events_of, sent, text_of
from support.service import eventually

import gpu_actors as ga
from gpu_actors.openai_api.server import JsonLines, Server
from gpu_actors.openai_api.stream import Writer
from gpu_actors.testing import FaultPlan

pytestmark = pytest.mark.timeout(180)

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = {"model": "tiny", "prompt": "a long story", "max_tokens": 4000, "stream": True, "temperature": 1, "seed": 3}
SLOW = ga.ContextOptions(mock=ga.MockOptions(dtype="float32", latency=0.01))
NEVER_ENDING = {**LONG, "temperature": 0}
"""Its likeliest tokens never end it; at some milliseconds a token it takes a minute."""


def parallel(serving: Serving, contents: list[Any], path: str = COMPLETIONS) -> list[tuple[int, bytes]]:
    """The answers to requests that are sent at once, each on a connection of its own."""

    async def one(content: Any) -> tuple[int, bytes]:
        async with sent(serving.port, path, content) as reader:
            return body_of(await reader.read())

    async def all_of_them() -> list[tuple[int, bytes]]:
        return await asyncio.gather(*(one(content) for content in contents))

    return asyncio.run(asyncio.wait_for(all_of_them(), 150))


# Clients


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_text_and_pages(path: str, stream: bool) -> None:
    with Serving(options=SLOW) as serving:
        content = {**NEVER_ENDING, "stream": stream}
        if path == CHATS:
            content = {**content, "messages": CHAT["messages"]}
            del content["prompt"]

        async def leave() -> None:
            async with sent(serving.port, path, content) as reader:
                if stream:
                    await reader.readuntil(b"data: ")
                await asyncio.to_thread(eventually, lambda: serving.engine.pages()[1] < serving.engine.pages()[0])

        asyncio.run(leave())
        serving.until_idle()
        assert serving.engine.stats.ended["cancelled"] == 1
        serving.complete()
        assert (
            serving.complete(stop=serving.complete()["choices"][0]["text"][1:3])["choices"][0]["finish_reason"]
            == "stop"
        )
        serving.until_idle()
        assert (serving.engine.stats.ended["cancelled"], serving.engine.stats.ended["stop"]) == (1, 1)


def test_many_clients_that_hang_up_leave_nothing_behind() -> None:
    """Before the first token, between tokens, and in the queue."""
    with Serving(options=SLOW, max_running=8) as serving:

        async def leave(number: int) -> None:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING) as reader:
                if number % 3:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(reader.readuntil(b"\n\n"), 0.02 * number)

        async def all_of_them() -> None:
            await asyncio.gather(*(leave(number) for number in range(30)))

        asyncio.run(all_of_them())
        # Its answer comes behind all that was sent before, so a text that begins late is seen to end too.
        serving.complete()
        serving.until_idle()
        serving.complete()
        serving.until_idle()


def test_a_client_that_does_not_read_holds_no_pages_and_delays_nobody() -> None:
    serving = Serving()
    serving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by its connections
    with serving, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", serving.port))
        body = json.dumps({**NEVER_ENDING, "max_tokens": 800}).encode()
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
    with Serving(options=SLOW, max_running=2, max_waiting=1, queue_seconds=600) as serving:

        async def fill() -> None:
            async with contextlib.AsyncExitStack() as stack:
                for running in (1, 2):
                    reader = await stack.enter_async_context(sent(serving.port, COMPLETIONS, NEVER_ENDING))
                    await reader.readuntil(b"data: ")
                    assert serving.engine.running == running
                await stack.enter_async_context(sent(serving.port, COMPLETIONS, NEVER_ENDING))
                await asyncio.to_thread(eventually, lambda: serving.state.admission.stats().waiting == 1)
                for content in (NEVER_ENDING, {**NEVER_ENDING, "stream": False}):
                    refused = await asyncio.to_thread(serving.post, COMPLETIONS, content)
                    assert refused.status == 429
                    assert int(refused.headers["retry-after"]) >= 1
                    error = refused.json["error"]
                    assert (error["type"], error["code"]) == ("rate_limit_error", "Overloaded")

        asyncio.run(fill())
        serving.until_idle()
        serving.complete()


def test_the_time_in_front_of_the_engine_counts_as_time_in_the_queue() -> None:
    with Serving(options=SLOW, max_running=1, queue_seconds=600) as serving:

        async def wait() -> None:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING) as reader:
                await reader.readuntil(b"data: ")
                before = serving.engine.meter.queue.total
                waiting = asyncio.create_task(asyncio.to_thread(serving.complete))
                await asyncio.to_thread(eventually, lambda: serving.state.admission.stats().waiting == 1)
                await asyncio.sleep(0.3)
                assert serving.engine.meter.queue.total == before
            await waiting
            assert serving.engine.meter.queue.total >= before + 0.3
            assert serving.engine.meter.first.total >= before + 0.3

        asyncio.run(wait())


def test_a_request_that_waits_for_too_long_gets_429() -> None:
    with Serving(options=SLOW, max_running=1, queue_seconds=1.0) as serving:

        async def fill() -> None:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING) as reader:
                await reader.readuntil(b"data: ")
                refused = await asyncio.to_thread(serving.post, COMPLETIONS, HELLO)
                assert (refused.status, refused.json["error"]["code"]) == (429, "Overloaded")

        asyncio.run(fill())
        serving.until_idle()


def test_more_texts_than_the_cache_has_pages_for_wait_and_are_all_answered() -> None:
    with Serving(cache_mib=1) as serving:  # 128 pages of each of two layers: six of these at once
        asked = [{**NEVER_ENDING, "prompt": "x" * (300 + n), "max_tokens": 20 + n, "stream": False} for n in range(20)]
        answers = parallel(serving, asked)
        assert {status for status, _ in answers} == {200}
        assert serving.engine.stats.most_texts < 20
        usages = [json.loads(body)["usage"] for _, body in answers]
        assert [usage["prompt_tokens"] for usage in usages] == [301 + n for n in range(20)]
        assert [usage["completion_tokens"] for usage in usages] == [20 + n for n in range(20)]
        serving.until_idle()


def test_a_text_for_which_the_cache_has_no_room_gets_429_in_time() -> None:
    with Serving(options=SLOW, cache_mib=2, queue_seconds=1.0) as serving:

        async def fill() -> None:
            async with sent(serving.port, COMPLETIONS, {**NEVER_ENDING, "max_tokens": 2000}) as reader:
                await reader.readuntil(b"data: ")
                for content in (NEVER_ENDING, {**NEVER_ENDING, "stream": False}):
                    asked = {**content, "max_tokens": 1000}
                    refused = await asyncio.to_thread(serving.post, COMPLETIONS, asked)
                    assert (refused.status, refused.json["error"]["code"]) == (429, "Overloaded")
                    assert "no room in the KV cache" in refused.json["error"]["message"]

        asyncio.run(fill())
        serving.until_idle()


def test_a_deadline_ends_a_stream_with_an_event_that_says_so() -> None:
    with Serving(options=SLOW) as serving:
        events = serving.stream(COMPLETIONS, NEVER_ENDING, X_Deadline_Ms="3000")
        error = events[-1]["error"]
        assert (error["type"], error["code"]) == ("timeout_error", "DeadlineExceeded")
        assert len(text_of(events[:-1])) > 0
        late = serving.post(COMPLETIONS, {**NEVER_ENDING, "stream": False}, X_Deadline_Ms="200")
        assert (late.status, late.json["error"]["code"]) == (504, "DeadlineExceeded")
        serving.until_idle()
        assert serving.engine.stats.ended == {"length": 1, "deadline": 2}, "neither text was cancelled by its client"
        eventually(lambda: serving.traffic.routes()[COMPLETIONS].statuses == {200: 1, 504: 1})
        assert serving.traffic.routes()[COMPLETIONS].outcomes["deadline"] == 2


def test_a_text_whose_deadline_passes_before_it_is_let_in_missed_it() -> None:
    with Serving(options=SLOW, cache_mib=2) as serving:

        async def fill() -> None:
            async with sent(serving.port, COMPLETIONS, {**NEVER_ENDING, "max_tokens": 2000}) as reader:
                await reader.readuntil(b"data: ")
                asked = {**NEVER_ENDING, "max_tokens": 1000}
                late = await asyncio.to_thread(serving.post, COMPLETIONS, asked, X_Deadline_Ms="300")
                assert (late.status, late.json["error"]["code"]) == (504, "DeadlineExceeded")

        asyncio.run(fill())
        serving.until_idle()
        assert serving.engine.stats.ended == {"length": 1, "deadline": 1, "cancelled": 1}


def test_a_deadline_that_would_pass_in_the_queue_is_429_for_a_stream_too() -> None:
    with Serving(options=SLOW, max_running=1) as serving:

        async def fill() -> None:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING) as reader:
                await reader.readuntil(b"data: ")
                late = await asyncio.to_thread(serving.post, COMPLETIONS, LONG, X_Deadline_Ms="100")
                assert (late.status, late.json["error"]["code"]) == (429, "Overloaded")

        asyncio.run(fill())
        serving.until_idle()


def test_a_timeout_holds_for_clients_that_send_no_deadline() -> None:
    with Serving(options=SLOW, default_timeout=3.0) as serving:
        assert serving.stream(COMPLETIONS, NEVER_ENDING)[-1]["error"]["code"] == "DeadlineExceeded"
        serving.until_idle()


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
        for status, body in answers:
            if status == 200:
                assert events_of(body)[-1]["error"]["code"] == "ContextLost"
            else:
                assert (status, json.loads(body)["error"]["code"]) == (503, "ContextLost")
        assert serving.post(COMPLETIONS, HELLO).status == 503
        assert serving.ask("/readyz").status == 503
        assert serving.ask("/livez").status == 503


def test_an_accident_is_an_event_that_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with Serving() as serving:
        from gpu_actors.openai_api import completions

        tell, count = completions.Telling.more, 0

        async def broken(self: Any) -> str:
            nonlocal count
            count += 1
            if count == 3:
                raise KeyError("a secret")
            return await tell(self)

        monkeypatch.setattr(completions.Telling, "more", broken)
        events = serving.stream(COMPLETIONS, LONG)
        assert events[-1]["error"]["code"] == "InternalError"
        assert "secret" not in json.dumps(events)
        serving.until_idle()


def test_an_engine_that_fails_by_accident_leaves_no_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its texts end, others are refused, and readiness says that something is wrong."""
    with Serving(options=SLOW) as serving:

        async def fail() -> bytes:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING) as reader:
                first = await reader.readuntil(b"data: ")
                monkeypatch.setattr(serving.engine._batcher, "next_rows", lambda: 1 / 0)
                return first + await asyncio.wait_for(reader.read(), 150)

        status, body = body_of(asyncio.run(fail()))
        assert (status, events_of(body)[-1]["error"]["type"]) == (200, "server_error")
        eventually(lambda: serving.ask("/readyz").status == 503)
        assert serving.post(COMPLETIONS, HELLO).status in (404, 503)
        monkeypatch.undo()


# Leaving


class Leaving(Serving):
    """Served by the server of the command, whose end the test decides."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        app = self.server.config.app
        self.server = Server(self.state, app)


def test_streams_end_in_a_complete_event_when_the_server_leaves() -> None:
    count = 60
    with Leaving(options=SLOW, drain_seconds=0.3) as serving:
        begun = threading.Semaphore(0)

        async def read(seed: int) -> bytes:
            content = {**LONG, **STREAM, "max_tokens": 400, "temperature": 0 if seed % 2 else 1, "seed": seed}
            async with sent(serving.port, COMPLETIONS, content) as reader:
                first = await reader.readuntil(b"data: ")
                begun.release()
                return first + await reader.read()

        async def read_all() -> list[bytes]:
            return await asyncio.wait_for(asyncio.gather(*(read(seed) for seed in range(count))), 150)

        def leave() -> None:
            for _ in range(count):
                begun.acquire()
            serving.server.should_exit = True

        leaving = threading.Thread(target=leave, daemon=True)
        leaving.start()
        answers = [body_of(raw) for raw in asyncio.run(read_all())]
        leaving.join()
    assert {status for status, _ in answers} == {200}
    codes = []
    for _, body in answers:
        last = events_of(body)[-1]
        codes.append(last["error"]["code"] if "error" in last else "ended")
    assert codes.count("ActorStopped") >= count // 2
    assert set(codes) <= {"ActorStopped", "ended"}


def test_a_short_text_is_finished_before_the_server_leaves() -> None:
    with Leaving(options=SLOW, drain_seconds=60.0) as serving:

        async def leave() -> bytes:
            async with sent(
                serving.port, COMPLETIONS, {**LONG, **STREAM, "max_tokens": 20, "temperature": 0}
            ) as reader:
                first = await reader.readuntil(b"data: ")
                serving.server.should_exit = True
                return first + await reader.read()

        status, body = body_of(asyncio.run(leave()))
        events = events_of(body)
        assert (status, events[-1]["usage"]["completion_tokens"]) == (200, 20)


def test_who_waits_for_a_place_when_the_texts_are_ended_gets_503() -> None:
    with Leaving(options=SLOW, max_running=1, drain_seconds=0.2) as serving:

        async def leave() -> list[bytes]:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING) as reader:
                await reader.readuntil(b"data: ")
                async with sent(serving.port, COMPLETIONS, LONG) as waiting:
                    await asyncio.to_thread(eventually, lambda: serving.state.admission.stats().waiting == 1)
                    serving.server.should_exit = True
                    return [await reader.read(), await waiting.read()]

        _, waited = asyncio.run(leave())
        status, body = body_of(waited)
        assert (status, json.loads(body)["error"]["code"]) == (503, "ActorStopped")


def test_an_idle_connection_outlives_what_clients_keep() -> None:
    """httpx and so the openai package keep one for 5 s, nginx for 60 s: the server must not be the first to end it."""
    with Leaving() as serving:
        assert serving.server.config.timeout_keep_alive > 60


# The log


def test_a_line_of_the_access_log_is_json_with_the_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpu_actors.access")
    with Serving() as serving:
        serving.stream(COMPLETIONS, HELLO)
        eventually(lambda: caplog.records)
        serving.post(COMPLETIONS, {**HELLO, "n": 2}, X_Request_Id="mine")
        eventually(lambda: len(caplog.records) >= 2)
    good, bad = (json.loads(JsonLines().format(record)) for record in caplog.records[:2])
    assert (good["status"], good["model"], good["path"], good["method"]) == (200, "tiny", COMPLETIONS, "POST")
    assert (good["prompt_tokens"], good["completion_tokens"], good["finish"]) == (6, 8, "length")
    assert 0 < good["queue_ms"] <= good["first_token_ms"] <= good["milliseconds"]
    assert (bad["status"], bad["error"], bad["request_id"]) == (400, "Unsupported", "mine")
    assert "hello" not in json.dumps([good, bad]), "no text of a client is logged"
    assert (
        caplog.records[0].getMessage().endswith("finish=length") or "first_token_ms=" in caplog.records[0].getMessage()
    )


def test_the_log_says_of_a_client_that_it_hung_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpu_actors.access")
    with Serving(options=SLOW) as serving:

        async def leave() -> None:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING) as reader:
                await reader.readuntil(b"data: ")

        asyncio.run(leave())
        serving.until_idle()
        eventually(lambda: caplog.records)
    line = json.loads(JsonLines().format(caplog.records[0]))
    assert (line["status"], line["gone"], line["finish"]) == (200, True, "none")


def test_an_engine_whose_loop_fails_ends_every_text_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with Serving(options=SLOW) as serving:

        async def fail() -> bytes:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING) as reader:
                began = await reader.readuntil(b"data: ")

                def broken() -> None:
                    raise RuntimeError("rows were mislaid")

                serving.engine._batcher.next_rows = broken
                return began + await reader.read()

        body = body_of(asyncio.run(asyncio.wait_for(fail(), 150)))[1]
        last = events_of(body)[-1]["error"]
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
    """As after SIGSTOP, or on a machine without CPU time: every timer of the loop is due at once."""
    monkeypatch.setattr("gpu_actors.openai_api.stream._GRACE", 0.5)
    with Serving(options=SLOW) as serving:

        async def late() -> bytes:
            async with sent(serving.port, COMPLETIONS, NEVER_ENDING, "X-Deadline-Ms: 3000") as reader:
                began = await reader.readuntil(b"data: ")
                probes = serving.server.config.app.state.gpu_actors.probes  # type: ignore[union-attr]
                probes._beating.get_loop().call_soon_threadsafe(time.sleep, 4.5)
                return began + await reader.read()

        body = body_of(asyncio.run(asyncio.wait_for(late(), 150)))[1]
        assert events_of(body)[-1]["error"]["code"] == "DeadlineExceeded"
        serving.until_idle()


async def test_a_stream_whose_status_could_not_be_sent_has_not_begun() -> None:
    """A connection that still sends an earlier answer delays the status, and the deadline may pass meanwhile."""

    async def stuck(_: Any) -> None:
        await asyncio.sleep(30)

    writer = Writer(stuck)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.write_text("x"), 0.01)
    assert not writer.begun
