"""Doors: which clients a server lets in, by which names they may call it, and its answers to others."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from support.served import Answered, Served, until

from gpu_actors import asgi
from gpu_actors.errors import InvalidRequest
from gpu_actors.serving import Doors, Unauthorized, client_of, problem

KEYS = ("first-key", "second-key-+/=")


async def answer(_: Request) -> Response:
    return PlainTextResponse("in")


async def who(request: Request) -> Response:
    return PlainTextResponse(asgi.client(request))


def application(**doors: Any) -> Starlette:
    paths = ("/", "/v1/x", "/metrics", "/livez", "/readyz", "/health", "/livez/x")
    app = Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in paths])
    app.add_route("/who", who)
    app.add_middleware(Doors, **doors)
    app.add_middleware(asgi.Guard)
    return app


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with Served(application(keys=KEYS), lifespan="off") as served:
        yield served


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


@pytest.mark.parametrize("given", [*(f"Bearer {key}" for key in KEYS), "bearer   first-key", "BEARER first-key "])
def test_a_client_with_a_key_is_let_in(locked: Served, given: str) -> None:
    for method in ("GET", "POST"):
        assert locked.ask("/v1/x", method, headers={"Authorization": given}).body == b"in"


NO_KEYS = [
    *(None, "", "Bearer", "Bearer ", "Bearer first", "Bearer first-key2", "Bearer FIRST-KEY", "first-key"),
    *("Bearer first-key, Bearer second-key-+/=", "Digest first-key", "Basic first-key", "Basic !!!"),
    *(basic("third-key"), basic(""), "Bearer " + "x" * 10_000, "Bearer f\xefrst-key"),
]


def test_a_client_without_a_key_is_not(locked: Served) -> None:
    for given, path in ((None, "/"), (None, "/v1/x"), (None, "/nowhere"), *((given, "/livez/x") for given in NO_KEYS)):
        refused = locked.ask(path, headers={} if given is None else {"Authorization": given})
        assert (refused.status, refused.error) == (401, "Unauthorized"), given
        assert refused.headers["www-authenticate"].startswith("Bearer, Basic realm=")
        assert "first-key" not in refused.body.decode()


def test_a_client_is_called_by_the_key_that_was_checked_or_else_by_its_address(locked: Served) -> None:
    key = f"Bearer {KEYS[0]}"
    named = client_of({"headers": [(b"authorization", key.encode())]})
    assert locked.ask("/who", headers={"Authorization": key}).body == named.encode()
    assert locked.ask("/who", headers={"Authorization": basic(KEYS[0])}).body == b"127.0.0.1"
    with Served(application(), lifespan="off") as served:
        assert served.ask("/who", headers={"Authorization": key}).body == b"127.0.0.1"


def test_two_keys_in_two_headers_are_none(locked: Served) -> None:
    with locked.raw("GET / HTTP/1.1", "Host: x", *["Authorization: Bearer first-key"] * 2) as client:
        assert client.recv(1000).startswith(b"HTTP/1.1 401 ")


def test_a_browser_is_asked_for_the_key_where_it_only_looks(locked: Served) -> None:
    """A page of another site could make a browser send a POST with remembered credentials."""
    for key in KEYS:
        assert locked.ask("/", headers={"Authorization": basic(key)}).body == b"in"
        assert locked.ask("/v1/x", "POST", headers={"Authorization": basic(key)}).status == 401


def test_probes_are_open(locked: Served) -> None:
    for path in ("/livez", "/readyz", "/health", "/health?a=b"):
        assert locked.ask(path).status == 200
    assert locked.ask("//livez").status == 401


def test_a_body_is_not_read_for_a_stranger(locked: Served) -> None:
    with locked.raw("POST /v1/x HTTP/1.1", "Host: x", "Content-Length: 1000000", "Expect: 100-continue") as client:
        said = client.recv(1 << 16)
    assert said.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in said


def test_what_opens_no_door_is_refused_by_name_and_no_key_is_shown() -> None:
    for key in ("", "short", "with a space", "line\nbreak", "\xe4\xf6\xfc\xe4\xf6\xfc\xe4\xf6", "tab\ttab\t"):
        with pytest.raises(InvalidRequest) as caught:
            Doors(lambda *_: None, keys=("good-key", key))  # type: ignore[arg-type, return-value]
        assert caught.value.value == "key 2 of 2"
        assert "good-key" not in str(caught.value)
    for field, given in (("keys", "one-key-of-ours"), ("hosts", "localhost"), ("open_paths", "/livez")):
        with pytest.raises(InvalidRequest, match="must be several texts, not one") as caught:
            Doors(lambda *_: None, **{field: given})  # type: ignore[arg-type, return-value]
        assert caught.value.field == field
        assert "one-key" not in str(caught.value)
    for host in ("", "a.com:80", "https://a.com", "*.*.com", "a.*", "a b", ".a.com", "[::1]"):
        with pytest.raises(InvalidRequest, match="must be a name without a port"):
            Doors(lambda *_: None, hosts=(host,))  # type: ignore[arg-type, return-value]


def called(served: Served, host: str) -> Answered:
    return served.ask("/", headers={"Host": host})


def test_only_its_own_names_call_the_server() -> None:
    with Served(application(hosts=("api.Example.com", "*.internal.net")), lifespan="off") as served:
        own = ["api.example.com", "API.example.com:8000", "api.example.com.", "a.internal.net", "b.a.internal.net:1"]
        plain = ["[::1]:80", "10.0.0.7", "localhost", "localhost:8000", "gpu-1", "a_b", f"127.0.0.1:{served.port}"]
        for host in own + plain:
            assert called(served, host).status == 200, host
        strangers = ["evil.com", "example.com", "xapi.example.com", "internal.net", "api.example.com.evil.com"]
        strangers += ["evil.com:80", "api.example.com:80:80", "localhost.evil.com", "127.0.0.1.evil.com", "", "a b"]
        strangers += ["[::1", "evil.com#localhost", "localhost@evil.com", "\xe4.example.com"]
        for host in strangers:
            refused = called(served, host)
            assert (refused.status, refused.error, refused.json["field"]) == (400, "InvalidRequest", "Host"), host
            assert "api.example.com" in refused.json["accepted"]
        with served.raw("GET / HTTP/1.0") as client:
            until(client, b"in"), "who names no host calls no other's"
    for hosts in ((), ("*",), ("a.com", "*")):
        with Served(application(hosts=hosts), lifespan="off") as served:
            assert called(served, "evil.com").status == 200


def test_other_servers_answer_alike() -> None:
    answer = problem(Unauthorized("no key"))
    assert (answer.status, answer.headers["WWW-Authenticate"].partition(",")[0]) == (401, "Bearer")
