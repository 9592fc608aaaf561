"""examples/inference_server.py over real sockets, and as the processes that a user starts.

tests/server/http tests how every server answers hostile clients. The tests here cover what the example adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from support.modules import module_at
from support.served import Answered, Served
from support.service import eventually

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

EXAMPLE = Path(__file__).parents[2] / "examples" / "inference_server.py"
REFERENCE = Path(__file__).parents[1] / "data"
MOCK = ga.MockOptions(dtype="float32")
WARM_UP_LAUNCHES = 6


example = module_at(EXAMPLE)


class Running(Served):
    """The application on a port of its own, served from a thread."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("options", ga.ContextOptions(mock=MOCK))
        self.app = example.create_app(example.Settings(device="mock", **settings))
        super().__init__(self.app)

    @property
    def service(self) -> Any:
        return self.app.state.server

    def places(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        stats = self.service.admission.stats()
        return stats.running, stats.waiting

    def embed(self, content: Any, **headers: str) -> Answered:
        named = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        return self.ask("/embed", "POST", body=json.dumps(content), headers=named)


SETTINGS = {
    "max_running": 2, "max_waiting": 2, "queue_seconds": 600.0, "max_body_bytes": 20_000, "max_held_bytes": 30_000,
    "body_seconds": 500.0, "max_texts": 40, "max_text_chars": 5000, "default_timeout": 400.0, "leave_seconds": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running(**SETTINGS) as server:
        yield server


def test_clients_at_once_each_get_their_own_embeddings(running: Running) -> None:
    texts = json.loads((REFERENCE / "minilm_texts.json").read_text(encoding="utf-8"))
    reference = np.load(REFERENCE / "minilm_reference.npz")
    slices = [slice(start, start + 2) for start in (0, 2, 20)]
    with ThreadPoolExecutor(3) as pool:
        replies = pool.map(lambda rows: running.embed({"texts": texts[rows]}), slices)
    for rows, reply in zip(slices, replies, strict=True):
        np.testing.assert_allclose(reply.json["embeddings"], reference["embeddings"][rows], atol=2e-6, rtol=0)
        assert reply.json["tokens"] == reference["tokens"][rows].tolist()
        assert reply.json["truncated"] == [len(text) > 1400 for text in texts[rows]]
    assert 'gpu_actors_requests_total{actor="flash_attn",outcome="completed"}' in running.ask("/metrics").body.decode()
    assert (running.ask("/livez").status, running.ask("/readyz").json["ready"]) == (200, True)


def test_every_bound_is_that_of_the_settings(running: Running) -> None:
    admission, bodies, tokenizer = running.service.admission, running.service.bodies, running.service.embedder.tokenizer
    (guard,) = running.app.user_middleware
    assert (admission.places, admission.max_waiting, admission.queue_seconds) == (2, 2, 600.0)
    assert (bodies.max_bytes, bodies.max_held_bytes, bodies.seconds) == (20_000, 30_000, 500.0)
    assert (tokenizer.max_text_chars, guard.kwargs["default_timeout"], guard.kwargs["bodies"]) == (5000, 400.0, bodies)


@pytest.mark.parametrize(
    ("body", "headers", "status", "field", "reason"),
    [
        ([], {}, 400, "texts", "the body must be"),
        ({"texts": "one"}, {}, 400, "texts", "the body must be"),
        ({"texts": ["one", 2]}, {}, 400, "texts", "the body must be"),
        ({"texts": []}, {}, 400, "texts", "must hold 1 to 40 texts"),
        ({"texts": ["a"] * 41}, {}, 400, "texts", "must hold 1 to 40 texts"),
        ({"texts": ["a"]}, {"X_Deadline_Ms": "300001"}, 400, "X-Deadline-Ms", "must be"),
        ({"texts": ["a" * 20_000]}, {}, 413, "", ""),
    ],
)
def test_bad_requests_are_told_field_and_reason(
    running: Running, body: Any, headers: dict[str, str], status: int, field: str, reason: str
) -> None:
    reply = running.embed(body, **headers)
    assert (reply.status, reply.json.get("field", "")) == (status, field)
    assert reply.json.get("accepted", "").startswith(reason)
    assert reply.json["request_id"] == reply.headers["x-request-id"]


def test_few_are_worked_on_at_once_and_the_others_wait_in_order_or_get_429(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, asked, under_way, embedder = threading.Event(), [], Counter[str](), running.service.embedder

    async def embed(texts: list[str], *, deadline: float) -> Any:
        asked.extend(texts)
        under_way["now"] += 1
        under_way["most"] = max(under_way["most"], under_way["now"])
        await asyncio.to_thread(let_go.wait, 60.0)
        under_way["now"] -= 1
        return await embedder.embed(texts, deadline=deadline)

    monkeypatch.setattr(running.service, "embedder", SimpleNamespace(embed=embed))
    with ThreadPoolExecutor(4) as pool:
        try:
            replies = []
            for number in range(4):
                replies.append(pool.submit(running.embed, {"texts": [str(number)]}))
                eventually(lambda number=number: sum(running.places()) == number + 1)
            assert running.places() == (2, 2)
            refused = running.embed({"texts": ["refused"]})
            assert (refused.status, refused.error, refused.headers["retry-after"].isdigit()) == (
                429,
                "Overloaded",
                True,
            )
        finally:
            let_go.set()
        assert {reply.result().status for reply in replies} == {200}
    assert asked == ["0", "1", "2", "3"]
    assert under_way["most"] == 2


def test_clients_that_send_nothing_take_no_place(running: Running) -> None:
    lines = ("POST /embed HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 15")
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(running.raw(*lines, body=b'{"texts": ["on'))
        eventually(lambda: running.service.bodies.held_bytes == 6 * 14)
        assert running.places() == (0, 0)
        assert running.embed({"texts": ["one"]}).status == 200
    eventually(lambda: running.service.bodies.held_bytes == 0)


def test_a_deadline_that_passes_gets_504_and_frees_the_server() -> None:
    """The first launch for a client never ends."""
    plan = FaultPlan().hang(launch=WARM_UP_LAUNCHES + 1)
    options = ga.ContextOptions(mock=MOCK, fault_plan=plan, drain_timeout=0.1)
    with Running(options=options, leave_seconds=0.0) as server:
        start = time.monotonic()
        reply = server.embed({"texts": ["one"]}, X_Deadline_Ms="250")
        assert time.monotonic() - start >= 0.25
        assert (reply.status, reply.error) == (504, "DeadlineExceeded")
        eventually(lambda: server.places() == (0, 0))
        assert server.service.context.stats()["flash_attn"].launched <= WARM_UP_LAUNCHES + 1


# Processes


def metric_of(url: str, name: str) -> float:
    found = re.search(rf'{name}{{actor="flash_attn"}} (\S+)', httpx.get(f"{url}/metrics", timeout=60).text)
    return 0.0 if found is None else float(found[1])


@contextlib.contextmanager
def started(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Callable[[], str]]]:
    """Start the example as a process. Yields it once it is ready, its address, and a function that reads its log."""
    log = tmp_path / "log"
    command = [sys.executable, str(EXAMPLE), "--port", "0", "--probe-port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLE.parent.parent), "GPU_ACTORS_DEVICE": "mock"}
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, stdout=file, env=environment) as process:
        try:
            eventually(lambda: "running on" in log.read_text() or process.poll() is not None, 200)
            assert process.poll() is None, log.read_text()
            found = re.search(r"http://127.0.0.1:\d+", log.read_text())
            assert found is not None, log.read_text()
            yield process, found[0], log.read_text
        finally:
            process.kill()


def test_sigterm_is_told_by_readyz_before_the_listener_closes_and_answers_what_was_accepted(tmp_path: Path) -> None:
    with started(tmp_path, "--leave-seconds", "600") as (process, url, log):
        with httpx.Client(base_url=url, timeout=60) as client, ThreadPoolExecutor(1) as pool:
            process.send_signal(signal.SIGTERM)
            eventually(lambda: client.get("/readyz").status_code == 503)
            assert client.get("/readyz").json()["state"] == "draining"
            assert client.get("/livez").status_code == 200
            asking = pool.submit(client.post, "/embed", json={"texts": ["word " * 200] * 12})
            eventually(lambda: metric_of(url, "gpu_actors_launches_total") > WARM_UP_LAUNCHES)
            assert not asking.done()
            process.send_signal(signal.SIGTERM)
            assert len(asking.result(60).json()["embeddings"]) == 12
        process.wait(60)
        # Once uvicorn has shut down, it ends itself with the signal that it was sent.
        assert process.returncode in (0, -signal.SIGTERM)
        assert "Application shutdown complete" in log()


def test_workers_share_the_port_and_each_has_probes_of_its_own(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", "2", "--leave-seconds", "0") as (process, url, log):
        eventually(lambda: len(re.findall(r"probes on port (\d+)", log())) == 2, 200)
        ports = re.findall(r"probes on port (\d+)", log())
        assert httpx.post(f"{url}/embed", json={"texts": ["one"]}, timeout=60).status_code == 200
        name = "gpu_actors_requests_submitted_total"
        submitted = [metric_of(f"http://127.0.0.1:{port}", name) for port in ports]
        assert sorted(submitted) == [WARM_UP_LAUNCHES, 2 * WARM_UP_LAUNCHES]
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_server_without_a_named_device_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_ACTORS_DEVICE", raising=False)
    with pytest.raises(SystemExit, match=r"name a device, cuda, .* in --device or GPU_ACTORS_DEVICE"):
        example.from_environment()


def test_the_load_generator_tells_each_load() -> None:
    script = EXAMPLE.with_name("serving_load.py")
    options = ("--connections", "1", "3", "--seconds", "0.5", "--texts", "1", "--json")
    command = [sys.executable, str(script), "--device", "mock", *options, "--queue-seconds", "60"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLE.parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=True)
    found = json.loads(done.stdout)
    assert found["environment"]["cpus"] == os.cpu_count()
    assert found["server"] == ["--queue-seconds", "60"]
    assert [load["connections"] for load in found["loads"]] == [1, 3]
    assert {status for load in found["loads"] for status in load["statuses"]} <= {"200"}
    assert [row["connections"] for row in found["beside_the_first"]] == [1, 3]


def test_the_load_generator_compares_each_load_with_the_first_of_its_round() -> None:
    module = module_at(EXAMPLE.with_name("serving_load.py"))
    made = [module.Load(clients, 2.0, 1.0, Counter({"200": answers})) for clients, answers in ((1, 10), (3, 20)) * 2]
    made[3].statuses["200"] = 40
    rows = module.summary(made, 2)
    assert [(row["connections"], row["answers_a_second_ratio"]) for row in rows] == [(1, 1.0), (3, 3.0)]
    assert rows[1]["ratios_of_each_round"] == [[2.0, 4.0]] * 2
