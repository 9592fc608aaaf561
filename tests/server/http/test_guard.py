"""The guard over real sockets: clients' errors, and failures before and after the first byte."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from support.served import Served, until_closed
from support.service import eventually

import gpu_actors as ga
from gpu_actors import asgi
from gpu_actors.serving import Bodies, Exchange, Guard, client_of

BODIES = {"max_bytes": 100_000, "max_held_bytes": 150_000, "seconds": 600.0}


class Handlers:
    """Handlers that note how they end."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.cancelled = threading.Event()
        self.finished = threading.Event()
        self.seen: list[Any] = []

    async def plain(self, request: Request) -> Response:
        self.seen.append((asgi.deadline(request), asgi.request_id(request)))
        return PlainTextResponse("answer")

    async def body(self, request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def sleeps(self, request: Request) -> Response:
        if request.method == "POST":
            await request.body()
        return PlainTextResponse(await self._sleep())

    async def unread(self, request: Request) -> Response:
        return PlainTextResponse(await self._sleep())

    async def raises(self, request: Request) -> Response:
        raise ga.InvalidRequest("q", request.url.path, "must be another")

    async def broken(self, request: Request) -> Response:
        raise KeyError("a secret")

    async def group(self, request: Request) -> Response:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._overloaded())
        raise AssertionError

    async def stream(self, request: Request) -> Response:
        kind = request.query_params.get("error", "")

        async def pieces() -> Any:
            yield b"first"
            self.began.set()
            if kind == "ours":
                raise ga.ContextLost("gone")
            if kind:
                raise KeyError("a secret")
            yield (await self._sleep()).encode()

        return StreamingResponse(pieces())

    async def background(self, request: Request) -> Response:
        async def afterwards() -> None:
            self.began.set()
            await asyncio.sleep(0.5)
            self.finished.set()

        return PlainTextResponse("answer", background=BackgroundTask(afterwards))

    async def _overloaded(self) -> None:
        raise ga.Overloaded("full", 2.5)

    async def _sleep(self) -> str:
        self.began.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError

    def app(self, **options: Any) -> Starlette:
        names = ("plain", "body", "sleeps", "unread", "raises", "broken", "group", "stream", "background")
        routes = [Route(f"/{name}", getattr(self, name), methods=["GET", "POST"]) for name in names]
        return Starlette(routes=routes, **options)


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
def bodies() -> Bodies:
    return Bodies(**BODIES)  # type: ignore[arg-type]


@pytest.fixture
def served(handlers: Handlers, bodies: Bodies) -> Iterator[Served]:
    app = handlers.app()
    app.add_middleware(Guard, bodies=bodies)
    with Served(app) as running:
        yield running
        eventually(lambda: bodies.held_bytes == 0)


# Errors


def test_an_error_of_a_handler_is_a_problem_with_its_occurrence(served: Served) -> None:
    reply = served.ask("/raises", headers={"X-Request-Id": "job-7"})
    assert (reply.status, reply.error) == (400, "InvalidRequest")
    assert (reply.json["field"], reply.json["value"], reply.json["accepted"]) == ("q", "/raises", "must be another")
    assert (reply.json["instance"], reply.json["request_id"]) == ("/raises#job-7", "job-7")
    assert reply.headers["x-request-id"] == "job-7"
    assert "connection" not in reply.headers
    reply = served.ask("/group")
    assert (reply.status, reply.headers["retry-after"]) == (429, "3"), "of a task group's, its own error"


def test_an_error_that_is_not_ours_says_nothing_and_reaches_the_servers_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    reply = served.ask("/broken")
    assert (reply.status, reply.error, reply.json["title"]) == (500, "about:blank", "Internal Server Error")
    assert b"secret" not in reply.body
    eventually(lambda: "a secret" in caplog.text)


async def answer_it(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"handled {type(error).__name__}", status_code=500)


def test_an_application_that_answers_its_own_errors_goes_on_doing_so(handlers: Handlers) -> None:
    handlers_of_errors: list[dict[Any, Any]] = [{Exception: answer_it}, {500: answer_it}, {KeyError: answer_it}]
    for options, shown in (
        ({"debug": True}, b"a secret"),
        *(({"exception_handlers": given}, b"handled KeyError") for given in handlers_of_errors),
    ):
        app = handlers.app(**options)
        app.add_middleware(Guard)
        with Served(app) as served:
            reply = served.ask("/broken")
            assert (reply.status, shown in reply.body) == (500, True)


@pytest.mark.parametrize("kind", ["ours", "other"])
def test_an_error_after_the_first_byte_breaks_the_stream_off(
    served: Served, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with served.raw(f"GET /stream?error={kind} HTTP/1.1", "Host: x") as client:
        got = until_closed(client)
    assert got.startswith(b"HTTP/1.1 200")
    assert b"5\r\nfirst\r\n" in got
    assert not got.endswith(b"0\r\n\r\n"), "an answer that breaks off must not look complete"
    eventually(lambda: ("ContextLost" if kind == "ours" else "a secret") in caplog.text)


# Deadlines


def test_a_handler_is_told_its_deadline_and_the_name_of_its_request(served: Served, handlers: Handlers) -> None:
    asked = time.monotonic()
    served.ask("/plain", headers={"X-Deadline-Ms": "60000.5"})
    served.ask("/plain")
    (deadline, first), (none, second) = handlers.seen
    assert asked + 60.0 <= deadline <= time.monotonic() + 60.001
    assert none is None
    assert first != second
    forged = served.ask("/plain", headers={"X-Request-Id": "x 200 OK"})
    assert re.fullmatch(r"[0-9a-f]{32}", forged.headers["x-request-id"])


def test_a_deadline_that_passes_cancels_the_handler(served: Served, handlers: Handlers) -> None:
    for path, method in (("/sleeps", "GET"), ("/sleeps", "POST"), ("/unread", "POST")):
        handlers.cancelled.clear()
        start = time.monotonic()
        reply = served.ask(path, method, headers={"X-Deadline-Ms": "700"})
        assert time.monotonic() - start >= 0.698
        assert (reply.status, reply.error) == (504, "DeadlineExceeded")
        assert handlers.cancelled.is_set()


def test_a_deadline_that_passes_before_the_handler_has_read_is_not_the_clients_fault(handlers: Handlers) -> None:
    """A body larger than the read-ahead waits for its handler, so the server does not know its end."""
    app = handlers.app()
    app.add_middleware(Guard, bodies=Bodies(max_bytes=1 << 20), default_timeout=1.0)
    with Served(app) as served:
        reply = served.ask("/unread", "POST", body=b"x" * 500_000)
    assert (reply.status, reply.error) == (504, "DeadlineExceeded"), "by the deadline of who names none"
    assert handlers.cancelled.is_set()


def test_a_deadline_that_passes_within_a_body_is_the_clients_fault(served: Served) -> None:
    with served.raw("POST /body HTTP/1.1", "Host: x", "Content-Length: 9", "X-Deadline-Ms: 200", body=b"x") as client:
        assert until_closed(client).startswith(b"HTTP/1.1 408")


def test_a_deadline_breaks_a_stream_off(served: Served, handlers: Handlers) -> None:
    with served.raw("GET /stream HTTP/1.1", "Host: x", "X-Deadline-Ms: 700") as client:
        got = until_closed(client)
    assert b"5\r\nfirst\r\n" in got
    assert not got.endswith(b"0\r\n\r\n")
    assert handlers.cancelled.is_set()


def test_a_deadline_ends_an_answer_that_the_client_does_not_read(handlers: Handlers, bodies: Bodies) -> None:
    """The server waits for the client before it sends the stream's empty end."""

    async def large(request: Request) -> Response:
        await request.body()

        async def pieces() -> Any:
            yield b"x" * (32 << 20)
            handlers.finished.set()

        return StreamingResponse(pieces())

    app = Starlette(routes=[Route("/", large, methods=["POST"])])
    app.add_middleware(Guard, bodies=bodies)
    lines = ("POST / HTTP/1.1", "Host: x", "X-Deadline-Ms: 2000", "Content-Length: 4")
    with Served(app) as served, served.raw(*lines, body=b"four"):
        eventually(handlers.finished.is_set)
        eventually(lambda: bodies.held_bytes == 0)


@pytest.mark.parametrize(
    "value",
    ["9" * 60_000, "1e400", "1e3", "1_000", "+5", ".5", "5.", "1,5", "\xb2", "0x10", "-1", "0", "300001", " ", "nan"],
)
def test_a_deadline_that_is_none_is_named_and_shown_shortly(served: Served, value: str) -> None:
    lines = b"GET /plain HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Deadline-Ms: %s\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(lines % value.encode("latin-1"))
        got = until_closed(client)
    assert got.startswith(b"HTTP/1.1 400"), got[:200]
    assert len(got) < 2000
    assert b'"field":"X-Deadline-Ms"' in got


def test_a_deadline_that_is_given_twice_is_refused(served: Served) -> None:
    lines = ("GET /plain HTTP/1.1", "Host: x", "X-Deadline-Ms: 5", "x-deadline-ms: 6", "Connection: close")
    with served.raw(*lines) as client:
        assert b'"value":"5, 6"' in until_closed(client)


# Clients that hang up


@pytest.mark.parametrize("line", ["GET /sleeps", "POST /sleeps", "POST /unread", "GET /stream"])
def test_a_client_that_hangs_up_cancels_the_work(served: Served, handlers: Handlers, line: str) -> None:
    body = b"four" if line.startswith("POST") else b""
    with served.raw(f"{line} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", body=body):
        eventually(handlers.began.is_set)
        assert not handlers.cancelled.is_set()
    eventually(handlers.cancelled.is_set)


def test_a_client_that_hangs_up_within_its_body_leaves_nothing_behind(served: Served, bodies: Bodies) -> None:
    with served.raw("POST /body HTTP/1.1", "Host: x", "Content-Length: 1000", body=b"x" * 400):
        eventually(lambda: bodies.held_bytes == 400)
    eventually(lambda: bodies.held_bytes == 0)
    assert served.ask("/body", "POST", body=b"1234").body == b"4"


def test_work_after_the_answer_is_not_cancelled(served: Served, handlers: Handlers) -> None:
    """A server reports "disconnect" once the answer is complete, and the deadline passes meanwhile."""
    reply = served.ask("/background", headers={"X-Deadline-Ms": "400"})
    assert (reply.status, reply.body) == (200, b"answer")
    eventually(handlers.finished.is_set)


# Bodies


def test_a_body_of_many_pieces_reaches_the_handler_whole(served: Served) -> None:
    assert served.ask("/body", "POST", body=b"x" * 100_000).body == b"100000"
    chunked = {"Transfer-Encoding": "chunked"}
    pieces = (b"x" * 9_000 for _ in range(11))
    assert served.ask("/body", "POST", body=pieces, encode_chunked=True, headers=chunked).body == b"99000"


def test_a_body_that_is_too_large_is_refused_before_the_handler_runs(served: Served, handlers: Handlers) -> None:
    reply = served.ask("/sleeps", "POST", body=b"x" * 100_001)
    assert (reply.status, reply.error, reply.headers["connection"]) == (413, "BodyTooLarge", "close")
    assert not handlers.began.is_set()


def test_a_client_that_waits_to_be_told_to_send_is_refused_at_once(served: Served) -> None:
    start = time.monotonic()
    with served.raw("POST /body HTTP/1.1", "Host: x", "Content-Length: 100001", "Expect: 100-continue") as client:
        got = until_closed(client)
    assert got.startswith(b"HTTP/1.1 413"), "and not 100 Continue"
    assert time.monotonic() - start < 30


def test_bodies_that_are_too_large_together_are_refused(served: Served, bodies: Bodies) -> None:
    with served.raw("POST /body HTTP/1.1", "Host: x", "Content-Length: 90000", body=b"x" * 80_000):
        eventually(lambda: bodies.held_bytes == 80_000)
        reply = served.ask("/body", "POST", body=b"x" * 80_000)
        assert (reply.status, reply.error, reply.headers["retry-after"]) == (429, "TooManyBodies", "1")
    eventually(lambda: bodies.held_bytes == 0)
    assert served.ask("/body", "POST", body=b"x" * 80_000).status == 200


def test_a_body_that_does_not_come_is_refused(handlers: Handlers) -> None:
    app = handlers.app()
    app.add_middleware(Guard, bodies=Bodies(seconds=0.1))
    with Served(app) as served, served.raw("POST /body HTTP/1.1", "Host: x", "Content-Length: 9", body=b"x") as client:
        assert until_closed(client).startswith(b"HTTP/1.1 408")


def test_a_handler_that_reads_late_makes_no_body_slow(bodies: Bodies) -> None:
    """A body larger than the read-ahead waits for its handler, which is not the client's fault."""

    async def late(request: Request) -> Response:
        await asyncio.sleep(1.2)
        return PlainTextResponse(str(len(await request.body())))

    app = Starlette(routes=[Route("/", late, methods=["POST"])])
    app.add_middleware(Guard, bodies=Bodies(seconds=0.7, max_bytes=1 << 20))
    with Served(app) as served:
        assert served.ask("/", "POST", body=b"x" * 500_000).body == b"500000"


@pytest.mark.parametrize("value", [0, -1, float("nan"), "1"])
def test_bounds_and_times_that_leave_nothing_are_refused(value: Any) -> None:
    for field in ("max_bytes", "max_held_bytes", "seconds"):
        with pytest.raises(ga.InvalidRequest, match=field):
            Bodies(**{field: value})
    for field in ("default_timeout", "longest_timeout"):
        for wrong in (value, float("inf")):
            with pytest.raises(ga.InvalidRequest, match=field):
                Guard(nothing, **{field: wrong})


# The log


def test_each_answer_has_a_line_that_a_path_cannot_forge(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gpu_actors.access"):
        served.ask("/plain%0aforged", headers={"X-Request-Id": "x" * 60_000})
        eventually(lambda: caplog.records)
        (record,) = [record for record in caplog.records if record.name == "gpu_actors.access"]
    assert record.getMessage().split()[1:4] == ["GET", "/plain%0Aforged", "404"]
    assert len(record.getMessage()) < 300
    assert record.__dict__["status"] == 404


# Below HTTP: cases that no client can cause


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    return


def http_scope(**more: Any) -> MutableMapping[str, Any]:
    return {"type": "http", "method": "GET", "path": "/", "headers": [], "http_version": "1.1", **more}


class Connection:
    """A server's side of one request. messages: what `receive` returns before it waits forever."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages) or [{"type": "http.request", "body": b"", "more_body": False}]
        self.sent: list[MutableMapping[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await asyncio.sleep(3600)
        return self.messages.pop(0)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)


def guarded(app: Callable[..., Awaitable[None]], **options: Any) -> Guard:
    return Guard(app, **options)


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_other_scopes_pass_untouched(kind: str) -> None:
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.append(arguments)
        raise ga.Overloaded("full")

    connection = Connection()
    scope = {"type": kind, "headers": [(b"x-deadline-ms", b"soon")]}
    with pytest.raises(ga.Overloaded):
        await guarded(app)(scope, connection.receive, connection.send)
    assert seen == [(scope, connection.receive, connection.send)]
    assert connection.sent == []


async def test_a_server_that_cancels_the_request_cancels_the_handler_and_answers_nothing() -> None:
    cancelled, began = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    connection, bodies = Connection({"type": "http.request", "body": b"four", "more_body": False}), Bodies()
    before = asyncio.all_tasks()
    task = asyncio.create_task(guarded(app, bodies=bodies)(http_scope(), connection.receive, connection.send))
    await began.wait()
    assert bodies.held_bytes == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (cancelled.is_set(), connection.sent, bodies.held_bytes) == (True, [], 0)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before, "no watcher is left"


async def test_the_outer_of_two_guards_guards() -> None:
    exchanges: list[Exchange] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchanges.append(scope["gpu_actors.exchange"])
        raise ga.Overloaded("full")

    connection, inner = Connection(), Bodies()
    inner.hold(0, 1)
    scope = http_scope(headers=[(b"x-request-id", b"one")])
    await guarded(guarded(app, bodies=inner))(scope, connection.receive, connection.send)
    start, _ = connection.sent
    assert start["status"] == 429
    assert [value for name, value in start["headers"] if name == b"x-request-id"] == [b"one"]
    assert [exchange.request_id for exchange in exchanges] == ["one"]


async def test_an_application_that_waits_for_the_end_of_the_connection_hears_of_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})
        while (await receive())["type"] != "http.disconnect":
            pass

    connection = Connection({"type": "http.request"}, {"type": "http.disconnect"})
    await asyncio.wait_for(guarded(app)(http_scope(), connection.receive, connection.send), 30)
    assert connection.sent[0]["status"] == 204


async def test_a_server_whose_receive_raises_is_as_one_whose_client_has_gone() -> None:
    class Broken(Connection):
        async def receive(self) -> dict[str, Any]:
            raise OSError("reset")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(3600)

    connection = Broken()
    await asyncio.wait_for(guarded(app)(http_scope(), connection.receive, connection.send), 30)
    assert connection.sent == []


async def test_http_2_gets_no_header_of_the_connection() -> None:
    connection = Connection({"type": "http.request", "body": b"x" * 9, "more_body": False})
    scope = http_scope(http_version="2", headers=[(b"content-length", b"9")])
    await guarded(nothing, bodies=Bodies(max_bytes=8))(scope, connection.receive, connection.send)
    names = {name for name, _ in connection.sent[0]["headers"]}
    assert connection.sent[0]["status"] == 413
    assert b"connection" not in names


def test_a_client_is_known_by_its_key_or_else_by_its_address() -> None:
    keyed = client_of({"headers": [(b"authorization", b"Bearer key")], "client": ("10.0.0.2", 1)})
    assert "key" not in keyed, "logs and pages may show it"
    for name, given in ((b"authorization", b"Bearer key"), (b"Authorization", b"bearer  key ")):
        assert client_of({"headers": [(name, given)], "client": ("10.0.0.1", 4711)}) == keyed
    other = client_of({"headers": [(b"authorization", b"Bearer other")], "client": ("10.0.0.1", 4711)})
    assert other not in (keyed, "10.0.0.1")
    for headers in ([(b"authorization", b"Basic key")], [(b"authorization", b"Bearer ")], []):
        assert client_of({"headers": headers, "client": ("10.0.0.1", 4711)}) == "10.0.0.1"
    assert client_of({"headers": [], "client": None}) == ""
