"""gpu-actors serve as a process: how soon it answers, its errors when it cannot start, and how it exits."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.cli import Run
from support.generation import hugging_face_json
from support.openai_server import CHAT, STREAM, events_of
from support.serve_process import Process
from support.service import eventually, runs
from support.streams import asking
from support.timing import below, yardsticks

from gpu_actors import TraceEvent
from gpu_actors.cli.serve import serve
from gpu_actors.errors import InvalidRequest
from gpu_actors.generation import LlamaConfig

pytestmark = pytest.mark.timeout(240)

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@pytest.mark.perf
@pytest.mark.parametrize(("model", "limit"), [("tiny", 6_000), ("smollm2", 16_000)])
def test_the_first_token_of_a_stream_comes_soon(model: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 4 and 10 s on a machine whose yardstick is 0.63 ms.

    A user waits at a terminal meanwhile, so imports, weights and a cache may take no longer than that.
    """
    # With the bytecode that pip compiled, as for a user. With the tests' own folder, Transformers is compiled first.
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)

    def first_token() -> float:
        with Process("--model", model) as server:
            body = json.dumps({**CHAT, "model": model, "stream": True}).encode()
            asked = urllib.request.Request(f"http://127.0.0.1:{server.port}{CHATS}", body, JSON)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert answer.readline().startswith(b"data: ")
            return yardsticks(time.monotonic() - server.began)

    below(limit, first_token, tries=5)


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.sweep)])
def test_streams_end_in_a_complete_event_after_sigterm(count: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # The cache has pages for 500 texts of 100 tokens and their prompts. Longer texts would wait for pages, until their
    # 429. A text may reach its length before the signal, but there is no drain in which it could do so after it.
    content = {**CHAT, **STREAM, "max_tokens": 100, "temperature": 0}
    patient = ("--timeout", "600", "--queue-seconds", "600")
    options = ("--model", "tiny", "--max-running", "500", "--leave-seconds", "0.2", "--drain-seconds", "0", *patient)
    with Process(*options) as server, contextlib.ExitStack() as stack:
        asked = [asking(server.port, CHATS, {**content, "seed": number}, begun=False) for number in range(count)]
        clients = [stack.enter_context(one) for one in asked]
        for client in clients:
            client.begin()
            assert client.read.startswith(b"HTTP/1.1 200 "), client.read
        server.process.send_signal(signal.SIGTERM)
        answers = [client.answer() for client in clients]
        assert server.process.wait(60) == 0
    ends: list[str] = []
    for _, body in answers:
        events = events_of(body)
        ends.append(events[-1]["error"]["code"] if "error" in events[-1] else events[-2]["choices"][0]["finish_reason"])
    assert set(ends) <= {"ActorStopped", "length"}
    assert ends.count("ActorStopped") > count // 5, "they were cut off, not merely finished"
    lines = [json.loads(line) for line in server.log]
    assert len([line for line in lines if line.get("path") == CHATS and line["status"] == 200]) == count
    assert [line for line in lines if line["level"] not in ("INFO", "WARNING")] == []


def endless_head(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=100) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):  # reset once it has answered
            for _ in range(1 << 10):
                client.sendall(b"a" * (1 << 14))
            raise AssertionError("16 MiB of a header were taken")


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_streams_at_once(number: int) -> None:
    """Before that, the server ends a connection whose headers do not end, and refuses a foreign Host header."""
    options = ("--leave-seconds", "0", "--drain-seconds", "600", "--log", "text")
    with Process("--model", "tiny", *options) as server:
        endless_head(server.port)
        assert (status(server.port), status(server.port, host="evil.com")) == (200, 400)
        with asking(server.port, CHATS, {**CHAT, **STREAM, "max_tokens": 4000}) as client:
            server.process.send_signal(number)
            eventually(lambda: not listens(server.port))  # it has seen the signal
            server.process.send_signal(number)
            code, body = client.answer()
        assert (code, events_of(body)[-1]["error"]["code"]) == (200, "ActorStopped")
        assert server.process.wait(60) == 0
    assert any(line.startswith("INFO gpu_actors serving tiny (generation) on http://") for line in server.log)


def test_workers_stream_survive_one_and_leave_no_process_behind() -> None:
    """If a worker is killed, only its own streams are lost. SIGTERM ends all others in order."""
    never_ending = {"model": "tiny", "max_tokens": 4000, "temperature": 0, "stream": True}
    options = ("--model", "tiny", "--workers", "2", "--leave-seconds", "0", "--drain-seconds", "1")
    with Process(*options) as server, contextlib.ExitStack() as stack:

        def asked(path: str, content: Any = None) -> Any:
            body = None if content is None else json.dumps(content).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", body, JSON)
            with urllib.request.urlopen(request, timeout=100) as answer:
                return json.load(answer)

        def workers() -> list[Any]:
            found: list[Any] = asked("/status.json")["workers"]
            return found

        def housed() -> list[int]:
            return [sum(cache["sequences"] for cache in worker["caches"] or ()) for worker in workers()]

        # Each prompt fills a page, so that its worker does not depend on chance.
        contents = [{**never_ending, "prompt": f"{number} " * 20} for number in range(8)]
        clients = [asking(server.port, COMPLETIONS, content, begun=False) for content in contents]
        pool = stack.enter_context(ThreadPoolExecutor(8))
        answers = [pool.submit(stack.enter_context(client).answer) for client in clients]
        eventually(lambda: sum(housed()) == 16 and min(housed()) > 0, 100)
        os.kill(workers()[0]["pid"], signal.SIGKILL)
        eventually(lambda: any(answer.done() for answer in answers), 100)  # those of the worker that was killed
        eventually(lambda: workers()[0]["generation"] == 2, 100)
        eventually(lambda: asked("/readyz")["state"] == "ready", 100)
        again = {"model": "tiny", "prompt": "again", "max_tokens": 4}
        assert asked(COMPLETIONS, again)["choices"][0]["finish_reason"]
        assert 0 < sum(answer.done() for answer in answers) < len(answers), "the other worker's go on"
        children = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
        server.process.send_signal(signal.SIGTERM)
        ended = [answer.result(100) for answer in answers]
        assert server.process.wait(100) == 0
    assert {status for status, _ in ended} <= {200, 503}, "503 where the first token had not come yet"
    errors = [(events_of(body)[-1] if status == 200 else json.loads(body))["error"] for status, body in ended]
    assert {error["code"] for error in errors} <= {"ActorStopped", "WorkerLost"}
    assert len(children) >= 2
    eventually(lambda: not any(runs(child) for child in children))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "/nowhere"), "config.json"),
        (("--model", "tiny", "--model", "tiny"), "the only one of its kind"),
        (("--model", "name="), "or NAME= and one of these"),
        (("--device", "abacus"), "device"),
        (("--log", "xml"), "--log"),
        (("--max-running", "0"), "max_running"),
        (("--queue-seconds", "-1"), "queue_seconds"),
        (("--timeout", "0"), "default_timeout"),
        (("--probe-port", "70000"), "port"),
        (("--port", "70000"), "70000"),
        (("--host", "nowhere.invalid"), "nowhere.invalid"),
        (("--model", "tiny", "--dtype", "int4"), "dtype"),
        (("--ssl-certfile", "/nowhere"), "ssl_certfile"),
    ],
    ids=lambda value: "=".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_served_ends_with_one_sentence_and_2(run: Run, options: tuple[str, ...], said: str) -> None:
    code, _, err = run("serve", "--device", "mock", "--port", "0", *options)
    assert code == 2, err
    last = err.splitlines()[-1]
    assert last.startswith("gpu-actors: ")
    assert said in last
    assert "Traceback" not in err
    assert not logging.getLogger("uvicorn.error").disabled  # other servers of the process still log


def status(port: int, key: str = "", host: str = "localhost") -> int:
    headers = {"Authorization": f"Bearer {key}", "Host": host}
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=100) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_keys_come_from_every_source_and_strangers_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal ends an idle server, which exits with 0."""
    (tmp_path / "keys").write_text("# ours\n\nkey-of-a-file\n  another-of-it  \n")
    monkeypatch.setenv("GPU_ACTORS_API_KEY", "key-of-the-environment another-one")
    with Process("--model", "tiny", "--leave-seconds", "0", "--api-key-file", str(tmp_path / "keys")) as server:
        for key in ("key-of-a-file", "another-of-it", "key-of-the-environment", "another-one"):
            assert (status(server.port, key), status(server.port, key, "evil.com")) == (200, 200)
        assert (status(server.port, "# ours"), status(server.port, "key")) == (401, 401)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 0
    assert not any("key-of" in line for line in server.log)


def test_a_door_that_would_stand_open_by_mistake_opens_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_ACTORS_API_KEY", raising=False)
    for options, variable, said in (
        ({"api_key": [""]}, None, "api_keys"),
        ({"api_key": ["secret with a space"]}, None, "api_keys"),
        ({"api_key_file": Path("/nowhere")}, None, "/nowhere"),
        ({"api_key_file": Path("/dev/null")}, None, "must hold a key"),
        ({"allowed_host": ["https://a.com"]}, None, "allowed_hosts"),
        ({"cors_origin": ["a.com"]}, None, "cors_origins"),
        ({"ssl_keyfile": Path("/nowhere")}, None, "--ssl-certfile"),
        ({}, " ", "GPU_ACTORS_API_KEY"),
        ({}, "short", "api_keys"),
    ):
        if variable is not None:
            monkeypatch.setenv("GPU_ACTORS_API_KEY", variable)
        with pytest.raises(InvalidRequest, match=said) as caught:
            serve(device="mock", port=0, **options)
        assert "secret" not in f"{caught.value}"


def test_a_port_that_is_taken_and_a_folder_without_weights_are_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_json(LlamaConfig.tiny())))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, said in ((("tiny", "--port", port), port), ((tmp_path, "--port", "0"), "model.safetensors")):
            code, _, err = run("serve", "--device", "mock", "--model", *options)
            assert (code, said in err.splitlines()[-1]) == (2, True), err


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_a_model_of_torch_names_the_extra_where_torch_is_missing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "gpu_actors.generation.torch_engine", raising=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    code, _, err = run("serve", "--device", "mock", "--port", "0", "--model", tmp_path, "--engine", engine)
    last = err.splitlines()[-1]
    assert (code, "torch is not installed: pip install" in last, "serve-torch" in last) == (2, True, True), err
    assert ("model_type" in last) == (engine == "auto")


def test_the_server_has_the_hang_timeout_of_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    def serve(settings: Any, host: str, port: int, **_: Any) -> None:
        given.append(settings.options.hang_timeout)

    monkeypatch.setattr("gpu_actors.server.openai.serve", serve)
    for options in ([], ["--hang-seconds", "7.5"]):
        code, _, complaint = run("serve", "--device", "mock", *options)
        assert code == 0, complaint
    assert given == [None, 7.5]


def test_a_trace_is_open_while_the_server_runs(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def serve(settings: Any, host: str, port: int, **_: Any) -> None:
        assert path.read_text() == "[\n"
        settings.options.on_event(TraceEvent("actor.failed", 0, "main", {"actor": "nvrtc"}))

    monkeypatch.setattr("gpu_actors.server.openai.serve", serve)
    code, _, complaint = run("serve", "--device", "mock", "--trace", path)
    assert code == 0, complaint
    assert "actor.failed" in {record["name"] for record in json.loads(path.read_text())}
