"""examples/inference_server.py over real sockets: many clients, and everything that clients do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import numpy as np
import pytest
import uvicorn
from support.modules import module_at
from support.service import eventually

import gpu_actors as ga
from gpu_actors.serving import guard
from gpu_actors.testing import FaultPlan, MockClock

EXAMPLE = Path(__file__).parents[2] / "examples" / "inference_server.py"
REFERENCE = Path(__file__).parents[1] / "data"
JSON = {"Content-Type": "application/json"}
MOCK = ga.MockOptions(dtype="float32")
WARM_UP_LAUNCHES = 6


example = module_at(EXAMPLE)


class Running:
    """The application on a port of its own, served from a thread."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("options", ga.ContextOptions(mock=MOCK))
        self.app = example.create_app(example.Settings(device="mock", **settings))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app, log_config=None, lifespan="on", timeout_keep_alive=60)
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, args=([self.socket],))

    @property
    def service(self) -> Any:
        return self.app.state.server

    @property
    def running(self) -> int:
        running: int = self.service.admission.stats().running
        return running

    @property
    def waiting(self) -> int:
        waiting: int = self.service.admission.stats().waiting
        return waiting

    @property
    def launched(self) -> int:
        launched: int = self.service.context.stats()["flash_attn"].launched
        return launched - WARM_UP_LAUNCHES

    def __enter__(self) -> Self:
        self.thread.start()
        eventually(lambda: self.uvicorn.started or not self.thread.is_alive())
        assert self.uvicorn.started
        return self

    def __exit__(self, *_: object) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(30)
        self.socket.close()
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running(max_body_bytes=20_000, max_texts=40) as server:
        yield server


@pytest.fixture
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url, timeout=60, headers=JSON) as opened:
        yield opened


def named(reply: httpx.Response) -> str:
    """The name of the error that a reply tells of."""
    assert reply.headers["Content-Type"] == "application/problem+json"
    assert reply.json()["status"] == reply.status_code
    kind: str = reply.json()["type"]
    return kind.removeprefix("urn:gpu-actors:error:")


# Answers


async def test_clients_at_once_each_get_their_own_embeddings(client: httpx.AsyncClient) -> None:
    texts = json.loads((REFERENCE / "minilm_texts.json").read_text(encoding="utf-8"))
    reference = np.load(REFERENCE / "minilm_reference.npz")

    async def ask(rows: slice) -> None:
        reply = await client.post("/embed", json={"texts": texts[rows]})
        assert reply.status_code == 200
        content = reply.json()
        np.testing.assert_allclose(content["embeddings"], reference["embeddings"][rows], atol=2e-6, rtol=0)
        assert content["tokens"] == reference["tokens"][rows].tolist()
        assert content["truncated"] == [len(text) > 1400 for text in texts[rows]]

    await asyncio.gather(*(ask(slice(start, start + 4)) for start in range(0, 32, 4)))


async def test_a_request_id_is_made_or_kept_and_never_forged(client: httpx.AsyncClient) -> None:
    body = {"texts": ["one"]}
    made = {(await client.post("/embed", json=body)).headers["X-Request-Id"] for _ in range(2)}
    assert len(made) == 2
    kept = await client.post("/embed", json=body, headers={"X-Request-Id": "job-7.a"})
    assert kept.headers["X-Request-Id"] == "job-7.a"
    forged = await client.post("/embed", json=body, headers={"X-Request-Id": "x 200 OK"})
    assert re.fullmatch(r"[0-9a-f]{32}", forged.headers["X-Request-Id"])


async def test_metrics_count_what_was_answered(client: httpx.AsyncClient) -> None:
    assert (await client.post("/embed", json={"texts": ["counted"]})).status_code == 200
    metrics = await client.get("/metrics")
    assert metrics.status_code == 200
    assert 'gpu_actors_requests_total{actor="flash_attn",outcome="completed"}' in metrics.text
    assert 'gpu_actors_ready{device="mock"} 1.0' in metrics.text


async def test_livez_and_readyz_answer_200_while_the_context_is_well(client: httpx.AsyncClient) -> None:
    assert (await client.get("/livez")).status_code == 200
    ready = await client.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)


# Requests at fault


@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        (b"not json", "body", "must be JSON"),
        (b"\xff\xfe", "body", "must be in UTF-8"),
        (b"[" * 10_000, "body", "must be JSON"),
        (b'{"texts": ["one"], "texts": []}', "body", "must be JSON"),
        (b"[]", "texts", "the body must be"),
        (b'{"texts": "one"}', "texts", "the body must be"),
        (b'{"texts": ["one", 2]}', "texts", "the body must be"),
        (b'{"texts": []}', "texts", "must hold 1 to 40 texts"),
        (json.dumps({"texts": ["a"] * 41}).encode(), "texts", "must hold 1 to 40 texts"),
        (b'{"texts": ["fine", "lone \\ud800"]}', "body", "must hold no half of a surrogate pair"),
    ],
)
async def test_bad_bodies_get_400_with_field_and_reason(
    body: bytes, field: str, reason: str, client: httpx.AsyncClient
) -> None:
    reply = await client.post("/embed", content=body)
    error = reply.json()
    assert (reply.status_code, named(reply), error["field"]) == (400, "InvalidRequest", field)
    assert error["accepted"].startswith(reason)
    assert error["request_id"] == reply.headers["X-Request-Id"]


@pytest.mark.parametrize(
    "value", ["0", "-5", "soon", "nan", "inf", "300001", "", "1e3", "1_000", "+5", "0x10", ".5", "5.", "1,5"]
)
async def test_deadlines_that_are_none_get_400(value: str, client: httpx.AsyncClient) -> None:
    reply = await client.post("/embed", json={"texts": ["one"]}, headers={"X-Deadline-Ms": value})
    assert (reply.status_code, reply.json()["field"]) == (400, "X-Deadline-Ms")


async def test_bodies_over_the_bound_get_413_whether_or_not_they_say_so(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LINGER", 30.0)  # or a slow client would be reset before it has read the answer
    body = json.dumps({"texts": ["x" * 3_000_000]}).encode()

    async def unannounced() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    for content in (body, unannounced()):
        reply = await client.post("/embed", content=content)
        assert (reply.status_code, named(reply)) == (413, "BodyTooLarge")
        assert reply.headers["Connection"] == "close"


async def test_a_body_that_does_not_arrive_by_the_deadline_gets_408(running: Running) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    lines = ["POST /embed HTTP/1.1", "Host: x", "Content-Type: application/json", "X-Deadline-Ms: 200"]
    writer.write("\r\n".join([*lines, "Content-Length: 50", "", "{"]).encode())
    status = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    assert status.split()[1] == b"408"
    eventually(lambda: running.service.bodies.held_bytes == 0)


# Too much, too late, gone


async def test_requests_over_the_bound_get_429_and_the_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with Running(max_running=2, max_waiting=0, default_timeout=600) as server:
        embedder, refused = server.service.embedder, threading.Event()

        async def embed(texts: list[str], *, deadline: float) -> Any:
            await asyncio.to_thread(refused.wait, 60.0)
            return await embedder.embed(texts, deadline=deadline)

        monkeypatch.setattr(server.service, "embedder", SimpleNamespace(embed=embed))
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = [asyncio.ensure_future(client.post("/embed", json={"texts": ["one"]})) for _ in range(6)]
            await asyncio.to_thread(eventually, lambda: sum(reply.done() for reply in asked) == 4)
            refused.set()
            replies = await asyncio.gather(*asked)
            statuses = sorted(reply.status_code for reply in replies)
            assert statuses == [200, 200, 429, 429, 429, 429]
            refusals = [reply for reply in replies if reply.status_code == 429]
            # Two run, a second each: one client may return after that, and each later one half a second later.
            told = sorted(int(reply.headers["Retry-After"]) for reply in refusals)
            assert told[0] == 1
            assert told[-1] <= 3
            assert {named(reply) for reply in refusals} == {"Overloaded"}
            assert (await client.post("/embed", json={"texts": ["one"]})).status_code == 200


class Held:
    """An embedder that answers once it is released, and records what it is asked for."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.asked: list[str] = []
        self.peak = self.under_way = 0
        self._embedder = server.service.embedder
        monkeypatch.setattr(server.service, "embedder", SimpleNamespace(embed=self.embed))

    async def embed(self, texts: list[str], *, deadline: float) -> Any:
        self.asked += texts
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        try:
            await asyncio.to_thread(self.let_go.wait, 60.0)
            return await self._embedder.embed(texts, deadline=deadline)
        finally:
            self.under_way -= 1


async def test_few_requests_are_worked_on_at_once_and_the_others_wait_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Running(max_running=2, queue_seconds=600, default_timeout=600) as server:
        held = Held(server, monkeypatch)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = []
            for number in range(12):
                asked.append(asyncio.ensure_future(client.post("/embed", json={"texts": [str(number)]})))
                there = lambda number=number: server.running + server.waiting == number + 1  # noqa: E731
                await asyncio.to_thread(eventually, there)
            assert (server.running, server.waiting) == (2, 10)
            held.let_go.set()
            assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}
        assert held.asked == [str(number) for number in range(12)]
        assert held.peak == 2


async def test_a_request_that_waits_for_too_long_gets_429_and_costs_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with Running(max_running=1, queue_seconds=0.05, default_timeout=600) as server:
        held = Held(server, monkeypatch)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            first = asyncio.ensure_future(client.post("/embed", json={"texts": ["first"]}))
            await asyncio.to_thread(eventually, lambda: server.running == 1)
            late = await client.post("/embed", json={"texts": ["late"]})
            assert (late.status_code, late.headers["Retry-After"]) == (429, "1")
            assert "did not come to this request within 0.05 s" in late.json()["detail"]
            held.let_go.set()
            assert (await first).status_code == 200
        assert held.asked == ["first"]


async def test_a_client_that_hangs_up_leaves_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with Running(max_running=1, queue_seconds=600, default_timeout=600) as server:
        held = Held(server, monkeypatch)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            first = asyncio.ensure_future(client.post("/embed", json={"texts": ["first"]}))
            await asyncio.to_thread(eventually, lambda: server.running == 1)
            gone = asyncio.ensure_future(client.post("/embed", json={"texts": ["gone"]}))
            await asyncio.to_thread(eventually, lambda: server.waiting == 1)
            gone.cancel()
            await asyncio.to_thread(eventually, lambda: server.waiting == 0)
            held.let_go.set()
            assert (await first).status_code == 200
        assert held.asked == ["first"]
        await asyncio.to_thread(eventually, lambda: server.service.bodies.held_bytes == 0)


@contextlib.asynccontextmanager
async def unfinished(port: int, sent: bytes, *headers: str) -> AsyncIterator[asyncio.StreamReader]:
    """A client that has announced more than it sends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = ["POST /embed HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {len(sent) + 1}")
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + sent)
    try:
        yield reader
    finally:
        writer.close()


async def test_clients_that_send_nothing_take_no_place() -> None:
    with Running(max_running=1, max_waiting=0, body_seconds=600, default_timeout=600) as server:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                await stack.enter_async_context(unfinished(server.port, b'{"texts": ["on'))
            await asyncio.to_thread(eventually, lambda: server.service.bodies.held_bytes == 8 * 14)
            assert (server.running, server.waiting) == (0, 0)
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                assert (await client.post("/embed", json={"texts": ["one"]})).status_code == 200
        await asyncio.to_thread(eventually, lambda: server.service.bodies.held_bytes == 0)


async def test_a_long_deadline_does_not_stretch_the_reading() -> None:
    with Running(body_seconds=0.1) as server:
        async with unfinished(server.port, b"{", "X-Deadline-Ms: 300000") as reader:
            status = await asyncio.wait_for(reader.readline(), 60)
        assert status.split()[1] == b"408"


async def test_bodies_that_are_too_large_together_are_refused_until_there_is_room() -> None:
    with Running(max_held_bytes=1000, body_seconds=600, default_timeout=600) as server:
        body = b'{"texts": ["' + b"x" * 300 + b'"]}'
        async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=JSON) as client:
            async with unfinished(server.port, b"{" + b" " * 799):
                await asyncio.to_thread(eventually, lambda: server.service.bodies.held_bytes == 800)
                refused = await client.post("/embed", content=body)
                assert (refused.status_code, named(refused)) == (429, "TooManyBodies")
                assert refused.headers["Retry-After"] == "1"
                assert refused.headers["Connection"] == "close"
            await asyncio.to_thread(eventually, lambda: server.service.bodies.held_bytes == 0)
            assert (await client.post("/embed", content=body)).status_code == 200


async def test_a_long_text_costs_no_more_than_its_bound(running: Running, client: httpx.AsyncClient) -> None:
    assert running.service.embedder.tokenizer.max_text_chars == running.service.settings.max_text_chars
    text = "pack " * 2000
    reply = await client.post("/embed", json={"texts": [text, text[:8190]]})
    first, second = reply.json()["embeddings"]
    assert reply.json()["truncated"] == [True, True]
    np.testing.assert_allclose(first, second, atol=1e-6)


async def test_a_full_mailbox_of_the_service_is_a_429_as_well() -> None:
    """The first request's first launch ends when the clock says so; until then one other finds room."""
    clock = MockClock()
    plan = FaultPlan().delay(1.0, WARM_UP_LAUNCHES + 1)
    options = ga.ContextOptions(mock=MOCK, mailbox_capacity=1, max_in_flight=1, fault_plan=plan, clock=clock)
    with Running(options=options) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = [asyncio.ensure_future(client.post("/embed", json={"texts": ["one"]})) for _ in range(6)]
            await asyncio.to_thread(eventually, lambda: sum(reply.done() for reply in asked) == 4)
            clock.advance(1.0)
            replies = await asyncio.gather(*asked)
    statuses = {reply.status_code for reply in replies}
    assert statuses == {200, 429}
    assert {reply.headers.get("Retry-After") for reply in replies if reply.status_code == 429} == {"1"}


def hung(**settings: Any) -> Running:
    """A server whose first launch for a client never ends."""
    plan = FaultPlan().hang(launch=WARM_UP_LAUNCHES + 1)
    return Running(options=ga.ContextOptions(mock=MOCK, fault_plan=plan, drain_timeout=0.1), **settings)


async def test_a_deadline_that_passes_gets_504_and_frees_the_server() -> None:
    with hung() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            start = time.monotonic()
            reply = await client.post("/embed", json={"texts": ["one"]}, headers={"X-Deadline-Ms": "250"})
            assert time.monotonic() - start >= 0.25
            assert (reply.status_code, named(reply)) == (504, "DeadlineExceeded")
            eventually(lambda: server.running == 0)
            assert server.launched <= 1


async def test_the_deadline_bounds_the_encoder_too_and_is_handed_to_the_service(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []

    async def oblivious(_: list[str], *, deadline: float) -> None:
        left.append(deadline - time.monotonic())
        await asyncio.Event().wait()

    monkeypatch.setattr(running.service, "embedder", SimpleNamespace(embed=oblivious))
    start = time.monotonic()
    reply = await client.post("/embed", json={"texts": ["one"]}, headers={"X-Deadline-Ms": "2000"})
    assert reply.status_code == 504
    assert time.monotonic() - start >= 2.0
    assert 0.0 < left[0] <= 2.0


async def test_a_client_that_hangs_up_cancels_its_work() -> None:
    with hung() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = b'{"texts": ["one"]}'
        lines = ["POST /embed HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        eventually(lambda: server.launched >= 1)
        assert server.running == 1
        writer.close()
        await writer.wait_closed()
        eventually(lambda: server.running == 0)
        assert reader.at_eof() or not await reader.read()


# The device and the end


async def test_a_lost_context_gets_503_and_is_not_ready() -> None:
    plan = FaultPlan().lose_context(launch=WARM_UP_LAUNCHES + 2)
    with Running(options=ga.ContextOptions(mock=MOCK, fault_plan=plan)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for _ in range(2):
                reply = await client.post("/embed", json={"texts": ["one"]})
                assert (reply.status_code, named(reply)) == (503, "ContextLost")
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["state"]) == (503, "failed")
            assert "lost" in ready.json()["reason"]
            live = await client.get("/livez")
            assert (live.status_code, live.json()["alive"]) == (503, False)
            assert "lost" in live.json()["reason"]


async def test_an_unexpected_error_gets_500_and_keeps_its_details_to_the_log(
    running: Running, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(running.service, "embedder", SimpleNamespace(embed=broken))
    reply = await client.post("/embed", json={"texts": ["one"]})
    assert (reply.status_code, named(reply)) == (500, "about:blank")
    assert "a secret" not in reply.text
    await asyncio.to_thread(eventually, lambda: "a secret" in caplog.text)


def launches_of(client: httpx.Client) -> float:
    found = re.search(r'gpu_actors_launches_total{actor="flash_attn"} (\S+)', client.get("/metrics").text)
    return 0.0 if found is None else float(found[1])


@contextlib.contextmanager
def started(log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The example as a process, once it has said that it is ready."""
    command = [sys.executable, str(EXAMPLE), "--port", "0", "--probe-port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLE.parent.parent), "GPU_ACTORS_DEVICE": "mock"}
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, stdout=file, env=environment) as process:
        try:
            eventually(lambda: "running on" in log.read_text() or process.poll() is not None, 200)
            assert process.poll() is None, log.read_text()
            yield process
        finally:
            process.kill()


def test_sigterm_is_told_by_readyz_before_the_listener_closes_and_answers_what_was_accepted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(log, "--leave-seconds", "600") as process:
        found = re.search(r"http://127.0.0.1:(\d+)", log.read_text())
        assert found is not None, log.read_text()
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx.Client(base_url=found[0], timeout=60))
            process.send_signal(signal.SIGTERM)
            eventually(lambda: client.get("/readyz").status_code == 503)
            assert client.get("/readyz").json()["state"] == "draining"
            assert client.get("/livez").status_code == 200
            answers: list[httpx.Response] = []
            texts = ["word " * 200] * 30
            asking = threading.Thread(target=lambda: answers.append(client.post("/embed", json={"texts": texts})))
            asking.start()
            eventually(lambda: launches_of(client) > WARM_UP_LAUNCHES)
            assert not answers
            process.send_signal(signal.SIGTERM)
            asking.join(60)
        assert answers[0].status_code == 200
        assert len(answers[0].json()["embeddings"]) == 30
        process.wait(60)
    # uvicorn ends by the signal that it was sent, once it has shut down.
    assert process.returncode in (0, -signal.SIGTERM)
    assert "Application shutdown complete" in log.read_text()


def test_workers_share_the_port_and_each_has_probes_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(log, "--workers", "2", "--leave-seconds", "0") as process:
        eventually(lambda: len(re.findall(r"probes on port (\d+)", log.read_text())) == 2, 200)
        ports = re.findall(r"probes on port (\d+)", log.read_text())
        found = re.search(r"http://127.0.0.1:(\d+)", log.read_text())
        assert found is not None, log.read_text()
        assert httpx.post(f"{found[0]}/embed", json={"texts": ["one"]}, timeout=60).status_code == 200

        def submitted(port: str) -> float:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
            count = re.search(r'gpu_actors_requests_submitted_total{actor="flash_attn"} (\S+)', text)
            assert count is not None
            return float(count[1])

        assert sorted(map(submitted, ports)) == [WARM_UP_LAUNCHES, 2 * WARM_UP_LAUNCHES]
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_server_without_a_named_device_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_ACTORS_DEVICE", raising=False)
    with pytest.raises(SystemExit, match=r"name a device, cuda, .* in --device or GPU_ACTORS_DEVICE"):
        example.from_environment()


def test_the_load_generator_tells_each_load_and_compares_it_with_the_first_of_its_round(tmp_path: Path) -> None:
    script = EXAMPLE.with_name("serving_load.py")
    options = ("--connections", "1", "3", "--rounds", "2", "--seconds", "0.5", "--texts", "1", "--json")
    command = [sys.executable, str(script), "--device", "mock", *options, "--queue-seconds", "60"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLE.parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=True)
    found = json.loads(done.stdout)
    assert found["environment"]["cpus"] == os.cpu_count()
    assert found["server"] == ["--queue-seconds", "60"]
    assert [load["connections"] for load in found["loads"]] == [1, 3, 1, 3]
    assert {status for load in found["loads"] for status in load["statuses"]} <= {"200"}
    assert [row["connections"] for row in found["beside_the_first"]] == [1, 3]
