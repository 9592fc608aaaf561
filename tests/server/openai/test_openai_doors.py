"""The way into the server and out of it: keys, sites, https, the port while models load, and waits at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from support.openai_server import CHAT, HELLO, MOCK, STREAM, Serving, body_of, events_of
from support.served import until, until_closed
from support.service import eventually
from support.streams import asking

import gpu_actors as ga
from gpu_actors.errors import InvalidRequest
from gpu_actors.openai_api import ServeSettings, Tls, create_app
from gpu_actors.server.openai import models, server
from gpu_actors.server.openai.requests import ChatRequest
from gpu_actors.server.openai.server import Server
from gpu_actors.server.openai.stream import Writer

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
KEY = "a-key-of-ours"
SLOW = ga.ContextOptions(mock=ga.MockOptions(dtype="float32", latency=0.02))


@pytest.fixture(scope="module")
def locked() -> Iterator[Serving]:
    with Serving(api_keys=(KEY,), cors_origins=("https://a.example",)) as running:
        yield running


def test_a_stranger_gets_openai_s_401_and_nothing_of_the_server(locked: Serving) -> None:
    for path in (COMPLETIONS, CHATS, "/tokenize"):
        refused = locked.post(path, HELLO)
        error = refused.json["error"]
        assert (refused.status, error["type"], error["code"]) == (401, "invalid_request_error", "invalid_api_key")
        assert "Authorization: Bearer" in error["message"]
    for path in ("/", "/metrics", "/status.json", "/status/events", "/status/page.css", "/v1/models", "/version"):
        assert locked.ask(path).status == 401, path
    for path in ("/livez", "/readyz", "/health"):
        assert locked.ask(path).status == 200, path


def test_a_client_with_a_key_gets_all(locked: Serving) -> None:
    assert locked.post(COMPLETIONS, HELLO, Authorization=f"Bearer {KEY}").status == 200
    for path in ("/", "/metrics", "/status.json", "/v1/models", "/version"):
        assert locked.ask(path, headers={"Authorization": f"Bearer {KEY}"}).status == 200, path


def test_pages_of_a_named_site_may_call_it(locked: Serving) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-deadline-ms"}
    leave = locked.ask(COMPLETIONS, "OPTIONS", headers=asked | {"Origin": "https://a.example"})
    assert (leave.status, leave.headers["access-control-allow-origin"]) == (200, "https://a.example")
    assert locked.ask(COMPLETIONS, "OPTIONS", headers=asked | {"Origin": "https://b.example"}).status == 400
    for key, status in ((KEY, 200), ("another-key", 401)):
        answered = locked.post(COMPLETIONS, HELLO, Authorization=f"Bearer {key}", Origin="https://a.example")
        assert (answered.status, answered.headers["access-control-allow-origin"]) == (status, "https://a.example")
        assert "x-request-id" in answered.headers["access-control-expose-headers"].lower()


def test_a_site_is_named_in_any_case() -> None:
    sites = ("HTTPS://A.Example", "http://[::1]:8080", "http://[::F]", "https://b.example:80", "http://c.example:443")
    with Serving(cors_origins=sites) as serving:
        for site in map(str.lower, sites):  # as browsers spell it
            assert serving.ask("/v1/models", headers={"Origin": site}).headers["access-control-allow-origin"] == site


NO_ORIGINS = ["a.com", "https://a.com/", "null", "https://*", "https://\xe4.com", "https://a.com:\u0661"]
NO_ORIGINS += ["https://a.com:443", "http://a.com:80", "HTTP://[::1]:80", "https://a.com:0443", "https://a.com:99999"]


def test_settings_of_doors_that_are_none() -> None:
    for field, given in (
        *(("api_keys", keys) for keys in (("short",), "a-key-of-another")),
        *(("allowed_hosts", hosts) for hosts in (("https://a.com",), "localhost")),
        *(("cors_origins", origins) for origins in ("*", *((origin,) for origin in NO_ORIGINS))),
        ("models", "tiny"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            ServeSettings(**{field: given})
        assert caught.value.field == field
    assert KEY not in repr(ServeSettings(api_keys=(KEY,)))


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(models=("tiny", "minilm")) as running:
        yield running


UNREAD = [
    (["POST /nowhere HTTP/1.1"], 404),
    (["GET /v1/completions HTTP/1.1"], 405),
    (["POST /v1/completions HTTP/1.1", "Content-Type: text/plain"], 415),
    (["POST /v1/completions HTTP/1.1", "X-Deadline-Ms: soon"], 400),
    (["POST /v1/completions HTTP/1.1", "Content-Length: 100000000"], 413),
]


@pytest.mark.parametrize(("lines", "status"), UNREAD, ids=str)
def test_an_error_that_leaves_a_body_unread_closes_the_connection(
    serving: Serving, lines: list[str], status: int
) -> None:
    """Otherwise the rest of the body would be read as the next request."""
    length = [] if any("Length" in line for line in lines) else ["Content-Length: 1000"]
    with serving.raw(*lines, "Host: x", *length, body=b"{") as client:
        head = client.recv(1 << 16)
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), head
        assert b"connection: close" in head.lower()
        client.settimeout(20)
        try:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            rest = client.recv(1 << 16)
        except ConnectionError:
            rest = b""
        assert b"200 OK" not in rest
    with serving.raw("POST /nowhere HTTP/1.1", "Host: x", "Content-Length: 2", body=b"{}") as client:
        assert b"connection: close" not in until(client, b"}}").lower(), "its body was read"
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


async def test_an_event_is_one_line_for_every_reader() -> None:
    """Python's splitlines, and so httpx, ends a line at any of ten characters."""
    sent_bytes = b""

    async def send(message: Any) -> None:
        nonlocal sent_bytes
        sent_bytes += message.get("body", b"")

    writer = Writer(send)
    said = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0x2028, 0x2029, 0xFFFD, 0x1F600])) + "é"
    await writer.write(ChatRequest.model_construct(user=said))
    first, second, *rest = sent_bytes.decode().splitlines()
    assert (second, rest) == ("", [])
    assert json.loads(first.removeprefix("data: "))["user"] == said


# https


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*made, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


class Own:
    """The command's own server in a thread, on the port that it opens itself."""

    def __init__(self, tls: Tls | None = None, **settings: Any) -> None:
        # No text is refused for its expected time on this machine.
        patient = {"leave_seconds": 0.0, "default_timeout": 3600.0}
        app = create_app(
            ServeSettings(**{"device": "mock", "models": ("tiny",), "options": MOCK, **patient, **settings})
        )
        self.state = app.state.openai_api
        self.server = Server(self.state, app, tls)
        self.listener = server._bind("127.0.0.1", 0)
        self.port: int = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.server.run([self.listener])
        except SystemExit:
            pass

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def until_started(self) -> Own:
        eventually(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        self.listener.close()
        assert not self.thread.is_alive()

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except ConnectionRefusedError:
            return False
        return True


def test_a_client_names_an_address_only_through_a_proxy_that_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        clients.append(scope["client"][0])

    headers = [(b"x-forwarded-for", b"203.0.113.7")]
    for trusted in (None, "127.0.0.1"):
        monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
        if trusted is not None:
            monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
        served = Server(create_app(ServeSettings(device="mock", models=("tiny",))).state.openai_api, app)
        scope = {"type": "http", "client": ("127.0.0.1", 1), "scheme": "http", "headers": headers}
        asyncio.run(served.config.loaded_app(scope, None, None))
    assert clients == ["127.0.0.1", "203.0.113.7"]


def test_https_is_served_with_a_certificate(pair: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=str(pair[0]))
    with Own(Tls(*pair)) as own:
        own.until_started()
        url = f"https://127.0.0.1:{own.port}"
        with urllib.request.urlopen(f"{url}/readyz", timeout=60, context=trusting) as answer:
            assert json.load(answer)["ready"] is True
        asked = urllib.request.Request(
            url + COMPLETIONS, json.dumps(HELLO).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60, context=trusting) as answer:
            assert json.load(answer)["choices"][0]["finish_reason"] == "length"
        # nginx keeps an idle connection for 60 s: the server must not be the first to end it.
        assert own.server.config.timeout_keep_alive > 60


def test_a_client_without_a_certificate_is_refused_where_one_is_asked_for(pair: tuple[Path, Path]) -> None:
    alone = ssl.create_default_context(cafile=str(pair[0]))
    known = ssl.create_default_context(cafile=str(pair[0]))
    known.load_cert_chain(*pair)
    with Own(Tls(*pair, ca_certs=pair[0])) as own:
        url = f"https://127.0.0.1:{own.until_started().port}/livez"
        with urllib.request.urlopen(url, timeout=60, context=known) as answer:
            assert answer.status == 200
        with pytest.raises(OSError, match=r"(?i)certificate|reset|alert|closed"):
            urllib.request.urlopen(url, timeout=60, context=alone)


def test_files_that_are_no_certificate_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    app = create_app(ServeSettings(device="mock"))
    (tmp_path / "bad.pem").write_text("nothing")
    for files in ((pair[0],), (pair[1], pair[0]), (tmp_path / "bad.pem",), (tmp_path / "none.pem",), (tmp_path,)):
        with pytest.raises(InvalidRequest, match="cannot be used") as caught:
            Server(app.state.openai_api, app, Tls(*files))
        assert (caught.value.field, str(files[0]) in str(caught.value.value)) == ("ssl_certfile", True)


# The port and the models


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Loading of models waits until this is set."""
    event, load = threading.Event(), models.load_model

    def slow(*arguments: Any, **options: Any) -> Any:
        assert event.wait(60)
        return load(*arguments, **options)

    monkeypatch.setattr(models, "load_model", slow)
    yield event
    event.set()


def test_the_port_opens_when_the_models_answer(held: threading.Event) -> None:
    with Own() as own:
        for _ in range(5):
            assert not own.listens(), "a check of the port would take it for ready"
            time.sleep(0.05)
        held.set()
        eventually(own.listens)
        with urllib.request.urlopen(f"http://127.0.0.1:{own.port}/readyz", timeout=60) as answer:
            assert answer.status == 200


def test_a_signal_ends_the_loading(held: threading.Event) -> None:
    with Own() as own:
        eventually(lambda: own.server._opening is not None)
        began = time.monotonic()
        own.server.handle_exit(signal.SIGTERM, None)
        own.thread.join(20)
        assert not own.thread.is_alive()
        assert time.monotonic() - began < 10, "the model would load for 60 s"
        assert (own.server.started, own.server.failure) == (False, None)


def test_a_port_that_another_server_has_opened_meanwhile_is_named(held: threading.Event) -> None:
    with Own() as own:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", own.port))
            other.listen()
            held.set()
            own.thread.join(60)
        assert isinstance(own.server.failure, InvalidRequest)
        assert str(own.port) in str(own.server.failure)


# The end


def test_what_waits_is_answered_at_once_and_what_runs_goes_on() -> None:
    asked = {**HELLO, **STREAM, "max_tokens": 40}
    with Own(options=SLOW, max_running=1, max_embedding=1, drain_seconds=60.0) as own:
        own.until_started()
        with (
            asking(own.port, COMPLETIONS, asked) as running,
            asking(own.port, COMPLETIONS, asked, begun=False) as one,
            asking(own.port, CHATS, CHAT, begun=False) as other,
        ):
            eventually(lambda: own.state.admission.stats().waiting == 2)
            own.server.should_exit = True
            for waiting in (one, other):
                status, body = waiting.answer()
                assert (status, json.loads(body)["error"]["code"]) == (503, "ActorStopped")
                assert b"retry-after:" in waiting.read.lower()
            assert own.state.models.generator.engine.running == 1, "they did not wait for it"
            status, body = running.answer()
    assert (status, b"ActorStopped" in body, b'"finish_reason":"length"' in body) == (200, False, True)


def test_a_text_that_waits_for_pages_is_answered_at_once() -> None:
    """A running text ends in a whole event when its time is over."""
    with Own(options=SLOW, cache_mib=2, drain_seconds=1.0) as own:
        own.until_started()
        most = {**HELLO, **STREAM, "max_tokens": 1900}
        with (
            asking(own.port, COMPLETIONS, most) as running,
            asking(own.port, COMPLETIONS, most, begun=False) as waiting,
        ):
            eventually(lambda: own.state.models.generator.engine.waiting == 1)
            own.server.should_exit = True
            status, body = waiting.answer()
            assert (status, json.loads(body)["error"]["code"]) == (503, "ActorStopped")
            status, body = running.answer()
            assert (status, events_of(body)[-1]["error"]["code"]) == (200, "ActorStopped")


def test_probes_that_leave_end_the_waits() -> None:
    """SIGTERM does so too, before the server stops listening; requests that need not wait are still taken."""
    with Serving(options=SLOW, max_running=1) as serving:
        probes = serving.server.config.app.state.gpu_actors.probes  # type: ignore[union-attr]
        with asking(serving.port, COMPLETIONS, {**HELLO, **STREAM, "max_tokens": 4000}):
            with asking(serving.port, COMPLETIONS, HELLO, begun=False) as waiting:
                eventually(lambda: serving.state.admission.stats().waiting == 1)
                probes.leave()
                assert waiting.answer()[0] == 503
            refused = serving.post(COMPLETIONS, HELLO)
            assert (refused.status, refused.json["error"]["code"]) == (503, "ActorStopped"), "it would wait"
        serving.until_idle()
        assert serving.complete()["choices"][0]["finish_reason"] == "length"


def test_half_a_body_does_not_keep_the_server() -> None:
    bodies = {COMPLETIONS: HELLO, "/v1/embeddings": {"model": "minilm", "input": "a"}, "/tokenize": {"prompt": "a"}}
    with Own(drain_seconds=60.0) as own, contextlib.ExitStack() as stack:
        own.until_started()
        clients = []
        for path, content in bodies.items():
            clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", own.port), timeout=20)))
            lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 60", "", ""]
            clients[-1].sendall("\r\n".join(lines).encode() + json.dumps(content).encode()[:10])
        eventually(lambda: len(own.server.server_state.tasks) == 3)
        own.server.should_exit = True
        for answer in map(until_closed, clients):
            status, body = body_of(answer)
            assert (status, json.loads(body)["error"]["code"]) == (503, "ActorStopped")
            assert b"connection: close" in answer.lower()
        own.thread.join(20)
        assert not own.thread.is_alive(), "the server waits for the rest"


def test_a_body_may_take_a_moment_once_the_server_leaves() -> None:
    body = json.dumps(HELLO).encode()
    lines = (f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close")
    with Serving() as serving:
        serving.server.config.app.state.gpu_actors.probes.leave()  # type: ignore[union-attr]
        with serving.raw(*lines, f"Content-Length: {len(body)}", body=body[:10]) as client:
            time.sleep(0.2)
            client.sendall(body[10:])
            assert body_of(until_closed(client))[0] == 200
