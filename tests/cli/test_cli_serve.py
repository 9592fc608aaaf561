"""gpu-actors serve as a process: how soon it answers, what it says when it cannot start, and how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from support.cli import Run
from support.openai_server import CHAT, STREAM, body_of, events_of, sent
from support.service import eventually, runs

from gpu_actors.cli.serve import serve
from gpu_actors.errors import InvalidRequest

pytestmark = pytest.mark.timeout(240)

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


class Process:
    """The command on a free port. log: the lines of its standard error so far."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "gpu_actors.cli", "serve", "--device", "mock", "--port", "0", *options]
        self.log: list[str] = []
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._listening = threading.Event()
        self._reading = threading.Thread(target=self._read)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "http://" in line:
                self._listening.set()
        self._listening.set()

    def __enter__(self) -> Self:
        self._reading.start()
        assert self._listening.wait(120)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", "".join(self.log))
        assert found, self.log
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def leave(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(120)
        self._reading.join()
        return code


@pytest.mark.perf
@pytest.mark.parametrize(("model", "seconds"), [("tiny", 5.0), ("smollm2", 10.0)])
def test_the_first_token_of_a_stream_comes_soon(model: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Someone who tries it looks at a terminal meanwhile: imports, weights and a cache may take no longer than that."""
    # As a user has it, with the bytecode that pip compiled: with the tests' own, Transformers is compiled first.
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    with Process("--model", model) as server:
        body = json.dumps({**CHAT, "model": model, "stream": True}).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{server.port}{CHATS}", body, JSON)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")
        assert time.monotonic() - server.began < seconds


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.sweep)])
def test_streams_end_in_a_complete_event_after_sigterm(count: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # The cache has pages for 500 texts of 100 tokens and their prompts. Longer ones would wait for pages, until their
    # 429. No text ends by itself, and there is no drain in which it could reach its length.
    content = {**CHAT, **STREAM, "max_tokens": 100, "temperature": 0}
    patient = ("--timeout", "600", "--queue-seconds", "600")
    options = ("--model", "tiny", "--max-running", "500", "--leave-seconds", "0.2", "--drain-seconds", "0", *patient)
    with Process(*options) as server:
        begun = 0

        async def read(number: int) -> bytes:
            nonlocal begun
            async with sent(server.port, CHATS, {**content, "seed": number}) as reader:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 "), head
                first = head + await reader.readuntil(b"data: ")
                begun += 1
                if begun == count:
                    server.process.send_signal(signal.SIGTERM)
                return first + await reader.read()

        async def read_all() -> list[bytes]:
            return await asyncio.wait_for(asyncio.gather(*(read(number) for number in range(count))), 200)

        answers = [body_of(raw) for raw in asyncio.run(read_all())]
        assert server.process.wait(60) == 0
    assert {status for status, _ in answers} == {200}
    ends: list[str] = []
    for _, body in answers:
        events = events_of(body)
        ends.append(events[-1]["error"]["code"] if "error" in events[-1] else events[-2]["choices"][0]["finish_reason"])
    assert set(ends) <= {"ActorStopped", "stop", "length"}
    assert ends.count("ActorStopped") > count // 5, "they were cut off, not merely finished"
    lines = [json.loads(line) for line in server.log]
    assert len([line for line in lines if line.get("path") == CHATS and line["status"] == 200]) == count
    assert [line for line in lines if line["level"] not in ("INFO", "WARNING")] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_well_by_either_signal(number: int) -> None:
    """And before that, it ends a connection whose headers do not end."""
    with Process("--model", "tiny", "--leave-seconds", "0", "--log", "text") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=100) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
            with contextlib.suppress(ConnectionError):  # reset once it has answered
                for _ in range(1 << 10):
                    client.sendall(b"a" * (1 << 14))
                raise AssertionError("16 MiB of a header were taken")
        assert server.leave(number) == 0
    assert any(line.startswith("INFO gpu_actors serving tiny (generation) on http://") for line in server.log)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_streams_at_once(number: int) -> None:
    with Process("--model", "tiny", "--leave-seconds", "0", "--drain-seconds", "600") as server:

        async def interrupt() -> bytes:
            async with sent(server.port, CHATS, {**CHAT, **STREAM, "max_tokens": 4000, "temperature": 0}) as reader:
                first = await reader.readuntil(b"data: ")
                server.process.send_signal(number)
                await asyncio.to_thread(eventually, lambda: not listens(server.port))  # it has seen the signal
                server.process.send_signal(number)
                return first + await asyncio.wait_for(reader.read(), 120)

        status, body = body_of(asyncio.run(interrupt()))
        assert (status, events_of(body)[-1]["error"]["code"]) == (200, "ActorStopped")
        assert server.process.wait(60) == 0


def test_workers_stream_survive_one_and_leave_no_process_behind() -> None:
    """Over a real socket: a worker that is killed costs its own streams, and SIGTERM ends all others well."""
    never_ending = {"model": "tiny", "max_tokens": 4000, "temperature": 0, "stream": True}
    options = ("--model", "tiny", "--workers", "2", "--leave-seconds", "0", "--drain-seconds", "1")
    with Process(*options) as server:

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

        async def read(number: int) -> bytes:
            # Long enough for a page, whose place among the workers does not depend on chance.
            content = {**never_ending, "prompt": f"{number} " * 20}
            async with sent(server.port, COMPLETIONS, content) as reader:
                return await reader.read()

        async def go() -> list[bytes]:
            streams = [asyncio.create_task(read(number)) for number in range(12)]
            await asyncio.to_thread(eventually, lambda: sum(housed()) == 24 and min(housed()) > 0, 100)
            os.kill(workers()[0]["pid"], signal.SIGKILL)
            lost, _ = await asyncio.wait(streams, timeout=100, return_when=asyncio.FIRST_COMPLETED)
            assert lost, "the streams of the worker that was killed hang"
            await asyncio.to_thread(eventually, lambda: workers()[0]["generation"] == 2, 100)
            await asyncio.to_thread(eventually, lambda: asked("/readyz")["state"] == "ready", 100)
            again = {"model": "tiny", "prompt": "again", "max_tokens": 4}
            assert (await asyncio.to_thread(asked, COMPLETIONS, again))["choices"][0]["finish_reason"]
            assert 0 < sum(stream.done() for stream in streams) < len(streams), "the other worker's go on"
            children.extend(child.pid for child in psutil.Process(server.process.pid).children(recursive=True))
            server.process.send_signal(signal.SIGTERM)
            return await asyncio.wait_for(asyncio.gather(*streams), 100)

        children: list[int] = []
        answers = [body_of(raw) for raw in asyncio.run(go())]
        assert server.process.wait(100) == 0
    assert {status for status, _ in answers} <= {200, 503}, "503 where the first token had not come yet"
    errors = [(events_of(body)[-1] if status == 200 else json.loads(body))["error"] for status, body in answers]
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
    assert not logging.getLogger("uvicorn.error").disabled  # other servers of the process go on to log


def test_keys_come_from_every_source_and_strangers_stay_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And pages that make their name mean this machine stay out of a server without keys."""
    (tmp_path / "keys").write_text("# ours\n\nkey-of-a-file\n  another-of-it  \n")

    def status(port: int, key: str, host: str = "localhost") -> int:
        headers = {"Authorization": f"Bearer {key}", "Host": host}
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers=headers)
            with urllib.request.urlopen(request, timeout=100) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    monkeypatch.setenv("GPU_ACTORS_API_KEY", "key-of-the-environment another-one")
    with Process("--model", "tiny", "--api-key-file", str(tmp_path / "keys")) as server:
        for key in ("key-of-a-file", "another-of-it", "key-of-the-environment", "another-one"):
            assert (status(server.port, key), status(server.port, key, "evil.com")) == (200, 200)
        assert (status(server.port, "# ours"), status(server.port, "key")) == (401, 401)
    assert not any("key-of" in line for line in server.log)
    monkeypatch.delenv("GPU_ACTORS_API_KEY")
    with Process("--model", "tiny") as server:
        assert (status(server.port, ""), status(server.port, "", "evil.com")) == (200, 400)


@pytest.mark.parametrize(
    ("options", "variable", "said"),
    [
        ({"api_key": [""]}, None, "api_keys"),
        ({"api_key": ["secret with a space"]}, None, "api_keys"),
        ({"api_key_file": Path("/nowhere")}, None, "/nowhere"),
        ({"api_key_file": Path("/dev/null")}, None, "must hold a key"),
        ({}, " ", "GPU_ACTORS_API_KEY"),
        ({}, "short", "api_keys"),
        ({"allowed_host": ["https://a.com"]}, None, "allowed_hosts"),
        ({"cors_origin": ["a.com"]}, None, "cors_origins"),
        ({"ssl_keyfile": Path("/nowhere")}, None, "--ssl-certfile"),
    ],
    ids=str,
)
def test_a_door_that_would_stand_open_by_mistake_opens_no_server(
    options: dict[str, Any], variable: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPU_ACTORS_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("GPU_ACTORS_API_KEY", variable)
    with pytest.raises(InvalidRequest) as caught:
        serve(device="mock", port=0, **options)
    assert said in f"{caught.value}"
    assert "secret" not in f"{caught.value}"


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "gpu_actors.cli",
            "serve",
            "--device",
            "mock",
            "--model",
            "tiny",
            "--port",
            port,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, port in done.stderr) == (2, True)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    from support.generation import hugging_face_json

    from gpu_actors.generation import LlamaConfig

    (tmp_path / "config.json").write_text(json.dumps(hugging_face_json(LlamaConfig.tiny())))
    command = [sys.executable, "-m", "gpu_actors.cli", "serve", "--device", "mock", "--model", str(tmp_path)]
    done: Any = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, "model.safetensors" in done.stderr) == (2, True)


def test_the_server_has_the_hang_timeout_of_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    def serve(settings: Any, host: str, port: int, **_: Any) -> None:
        given.append(settings.options.hang_timeout)

    monkeypatch.setattr("gpu_actors.openai_api.serve", serve)
    for options in ([], ["--hang-seconds", "7.5"]):
        code, _, complaint = run("serve", "--device", "mock", *options)
        assert code == 0, complaint
    assert given == [None, 7.5]
