"""The HTTP of one connection: heads that do not end, bodies left unread, HTTP/1.0, and clients that close one half."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from support.served import Served, until, until_closed
from support.service import eventually

from gpu_actors import asgi
from gpu_actors.server.http.protocol import Protocol


class Hasty(Protocol):
    head_seconds = 0.4


class State:
    """What the handlers have seen."""

    begun = ended = cancelled = 0


async def echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def ignore(_: Request) -> Response:
    return PlainTextResponse("early")


async def stream(_: Request) -> Response:
    async def parts() -> Any:
        for part in (b"one ", b"", b"two"):
            yield part

    return StreamingResponse(parts(), media_type="text/plain")


async def drip(_: Request) -> Response:
    async def parts() -> Any:
        while True:
            yield b"drop"
            await asyncio.sleep(0.1)

    return StreamingResponse(parts(), media_type="text/plain")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    state = State()

    async def slow(_: Request) -> Response:
        state.begun += 1
        try:
            await asyncio.sleep(0.8)
        except asyncio.CancelledError:
            state.cancelled += 1
            raise
        state.ended += 1
        return PlainTextResponse("late")

    handlers = {"echo": echo, "ignore": ignore, "stream": stream, "slow": slow, "drip": drip}
    app = Starlette(routes=[Route(f"/{name}", one, methods=["GET", "POST"]) for name, one in handlers.items()])
    app.state.seen = state
    app.add_middleware(asgi.Guard)
    with Served(app, lifespan="off", http=Hasty) as running:
        yield running


@pytest.fixture
def served(server: Served) -> Served:
    vars(seen(server)).clear()
    return server


def seen(served: Served) -> State:
    state: State = served.server.config.app.state.seen  # type: ignore[union-attr]
    return state


WHOLE = b"GET /ignore HTTP/1.1\r\nHost: x\r\n\r\n"
LATE: dict[str, list[bytes]] = {
    "nothing": [],
    "a letter": [b"G"],
    "a line": [b"GET /echo HTTP/1.1\r\n"],
    "a header that drips": [b"GET /echo HTTP/1.1\r\nHost: x\r\nX: ", *[b"a"] * 20],
    "empty lines that drip": [b"\r\n"] * 20,
}


def test_a_head_that_does_not_end_ends_the_connection(served: Served) -> None:
    def late(before: bytes, pieces: list[bytes]) -> tuple[bytes, float]:
        """The answer, and the time that it took."""
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
            if before:
                client.sendall(before)
                until(client, b"early")
            began = time.monotonic()
            client.settimeout(0.05)
            answer = b""
            for piece in pieces:
                client.sendall(piece)
                try:
                    answer = client.recv(1000)
                    break
                except TimeoutError:
                    continue
            client.settimeout(20)
            return answer + until_closed(client), time.monotonic() - began

    with ThreadPoolExecutor(10) as pool:
        found = {
            (which, name): pool.submit(late, before, pieces)
            for which, before in (("first", b""), ("second", WHOLE))
            for name, pieces in LATE.items()
            if pieces or not before  # a connection that has been answered may stay idle
        }
    for (_, name), one in found.items():
        answer, seconds = one.result()
        if b"G" in b"".join(LATE[name]):
            assert answer.startswith(b"HTTP/1.1 408 "), name
            assert b"connection: close" in answer
            assert answer.endswith(b"The headers did not arrive in time.")
        else:
            assert answer == b"", "no request has begun that it could answer"
        assert 0.3 < seconds < 10


def test_an_idle_connection_is_kept_for_longer_than_a_head_may_take(served: Served) -> None:
    with served.raw("GET /ignore HTTP/1.1", "Host: x") as client:
        until(client, b"early")
        time.sleep(0.7)
        client.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nagain")
        until(client, b"again")


def test_a_body_that_drips_after_its_answer_does_not_hold_the_connection(served: Served) -> None:
    with served.raw("POST /ignore HTTP/1.1", "Host: x", "Content-Length: 1000") as client:
        answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200 ")
        client.settimeout(0.05)

        def ended() -> bool:
            try:
                client.sendall(b"x")
                return client.recv(1000) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        eventually(ended, 20.0)


def test_a_body_that_breaks_off_writes_no_traceback(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    head, chunked = b"POST /echo HTTP/1.1\r\nHost: x\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
    for rest in (chunked + b"zz\r\n", chunked + b"5\r\nhe", b"Content-Length: 5\r\n\r\nhe") * 3:
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
            client.sendall(head + rest)
    assert served.ask("/ignore").body == b"early"
    eventually(lambda: not served.server.server_state.tasks)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", ["/stream", "/ignore"])
def test_no_other_version_gets_chunks(served: Served, path: str) -> None:
    for line in (f"GET {path} HTTP/1.0", f"GET {path} HTTP/2.0", f"GET {path}"):
        with served.raw(line) as client:
            head, _, body = until_closed(client).partition(b"\r\n\r\n")
        assert (b"chunked" in head.lower(), body) == (False, b"one two" if path == "/stream" else b"early")


def test_http_1_1_gets_chunks_still(served: Served) -> None:
    with served.raw("GET /stream HTTP/1.1", "Host: x", "Connection: close") as client:
        head, _, body = until_closed(client).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("path", "text"), [("/slow", b"late"), ("/echo", b"hello"), ("/stream", b"two")])
def test_a_client_that_closes_its_half_gets_its_answer(served: Served, version: str, path: str, text: bytes) -> None:
    lines = (f"POST {path} HTTP/{version}", "Host: x", "Content-Length: 5")
    with served.raw(*lines, body=b"hello") as client:
        client.shutdown(socket.SHUT_WR)
        answer = until_closed(client)
    final = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert final.startswith(b"HTTP/1.1 200 "), answer
    assert text in final
    assert version == "1.1" or final == answer, "HTTP/1.0 knows no interim answer"


def test_every_pipelined_request_of_such_a_client_is_answered(served: Served) -> None:
    asked = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
        client.sendall(asked)
        client.shutdown(socket.SHUT_WR)
        answer = until_closed(client)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.endswith(b"0\r\n\r\n")


def test_a_client_that_hangs_up_is_told_apart(served: Served) -> None:
    with served.raw("GET /slow HTTP/1.1", "Host: x"):
        eventually(lambda: seen(served).begun == 1)
    eventually(lambda: seen(served).cancelled == 1)
    assert seen(served).ended == 0


def test_half_a_request_of_a_client_that_sends_no_more_is_the_end(served: Served) -> None:
    for sent in (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe", b"GET /ech", b""):
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert until_closed(client) == b""


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
UPGRADES = {"h2c": H2C, "websocket": b"Connection: upgrade\r\nUpgrade: websocket\r\n"}


def posted(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    head = b"POST /echo HTTP/%s\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
    return head % (version, b"".join(headers), len(body)) + body


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
def test_a_request_that_asks_for_another_protocol_has_its_body(served: Served, upgrade: bytes) -> None:
    for body, cut in itertools.product((b"hello", WHOLE), (0, 60, -5)):
        sent = posted(body, upgrade)
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
            client.sendall(sent[:cut])
            time.sleep(0.05)
            client.sendall(sent[cut:] + posted(b"next", b"Connection: close\r\n"))
            answers = until_closed(client).split(b"HTTP/1.1 ")[1:]
        assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [body, b"next"], cut


def test_a_chunked_body_of_such_a_request_is_read_to_its_end(served: Served) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + H2C
    chunks = b"\r\n5\r\nhello\r\n0\r\nX-Checksum: 1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
        client.sendall(head + chunks + posted(b"next", H2C, version=b"1.0"))
        answers = until_closed(client).split(b"HTTP/1.1 ")[1:]
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [b"hello", b"next"]


def test_many_such_requests_in_one_piece_are_answered(served: Served) -> None:
    one = b"GET /ignore HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(one * 300 + WHOLE.replace(b"Host: x", b"Connection: close"))
        assert until_closed(client).count(b"early") == 301


@pytest.mark.parametrize("target", [b"example.com:443", b"/echo"])
def test_a_tunnel_is_refused_and_what_is_sent_into_it_is_no_request(served: Served, target: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
        client.sendall(b"CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n" % target + WHOLE)
        answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert b"early" not in answer


def test_a_head_behind_a_large_body_is_not_too_long(served: Served) -> None:
    body, following = b"x" * (71 << 10), posted(b"next", b"Connection: close\r\n")
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
        client.sendall(posted(body) + following[:40])
        time.sleep(0.05)
        client.sendall(following[40:])
        answers = until_closed(client).split(b"HTTP/1.1 ")[1:]
    assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [body, b"next"]


@pytest.mark.parametrize(
    "following",
    [
        b"GET /e",
        b"GET /ignore HTTP/1.1\r\nX: " + b"x" * (200 << 10),
        b"GET /ignore HTTP/1.1\r\nX: " + b"x" * (200 << 10) + b"\r\n\r\n" + WHOLE,
        b"no request\r\n\r\n",
        b"CONNECT /ignore HTTP/1.1\r\n\r\n",
        b"GET /ignore HTTP/1.1\r\nno header\r\n\r\n" + WHOLE,
    ],
    ids=["half of one", "too long", "too long, and its end", "no request", "a tunnel", "no header"],
)
def test_a_head_that_is_refused_does_not_cut_the_answer_before_it(served: Served, following: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        for begin in range(0, len(following), 30 << 10):
            time.sleep(0.03)
            client.sendall(following[begin : begin + (30 << 10)])
        answer = until_closed(client)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
    assert answer.endswith(b"late"), answer
    assert seen(served).ended == 1


def test_a_head_that_is_too_long_is_400(served: Served) -> None:
    with served.raw("GET /ignore HTTP/1.1", "Host: x", body=WHOLE[:-2] + b"X: ") as client:
        until(client, b"early")
        client.sendall(b"x" * (66 << 10))
        assert until_closed(client).endswith(b"The headers are too long.")


def test_a_body_that_is_wrong_puts_no_400_into_its_answer(served: Served) -> None:
    with served.raw("POST /drip HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") as client:
        answer = until(client, b"drop\r\n")
        client.sendall(b"zz\r\n")
        answer += until_closed(client)
    assert answer.count(b"HTTP/1.1 ") == 1
