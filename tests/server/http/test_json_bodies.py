"""JSON bodies: what is refused before parsing, what is no JSON, and what a handler gets."""

from __future__ import annotations

import json

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from support.served import Served

from gpu_actors import asgi
from gpu_actors.errors import InvalidRequest
from gpu_actors.server.http.bodies import MAX_DEPTH, MAX_NESTS, MAX_VALUES, check_json, expect_json
from gpu_actors.serving import WrongContentType, read_json

MIB = 1 << 20


def listed(one: bytes, size: int = MIB) -> bytes:
    return b'{"a":[' + b",".join([one] * (size // (len(one) + 1))) + b"]}"


HOSTILE = {
    "keys": b"{" + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}",
    "keys within": b'{"a":{' + b",".join(b'"%d":1' % number for number in range(100_000)) + b"}}",
    "objects": listed(b"{}"),
    "lists": listed(b"[]"),
    "values": listed(b"1"),
    "texts": listed(b'""'),
    "depth": b"[" * MIB + b"]" * MIB,
    "ends": b"[" * (MAX_DEPTH + 1) + b"]" * MIB,
    "colons": b":" * MIB,
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_body_of_too_many_things_is_not_parsed(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be JSON of at most"):
        check_json(body)


@pytest.mark.parametrize(
    "text",
    [
        "{[:,]}" * 100_000,
        '\\"{[:,' * 100_000,
        "\\\\" * 100_000 + ":" * 100_000,
        "x" * MIB,
        "\\u007b:" * 100_000,
    ],
    ids=lambda text: text[:6],
)
def test_what_a_text_holds_does_not_count(text: str) -> None:
    body = f'{{"a": "{text}"}}'
    assert read_json(body.encode()) == json.loads(body)


@pytest.mark.parametrize("rest", [b'"' + b'\\"' * MIB, b'"' + b'\\"' * MIB + b"\\", b'"' * MIB, b'"a' * MIB])
def test_a_text_that_does_not_end_is_read_once(rest: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be JSON"):
        read_json(b"[" * MAX_DEPTH + b":" + rest)


def test_what_is_at_the_bounds_is_taken() -> None:
    assert len(read_json(json.dumps(list(range(MAX_VALUES + 1))).encode())) == MAX_VALUES + 1
    many = {str(number): [] for number in range((MAX_NESTS - 1) // 2)}
    assert read_json(json.dumps(many).encode()) == many
    deep = b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH
    assert read_json(deep) == json.loads(deep)
    for body in (json.dumps(list(range(MAX_VALUES + 2))), json.dumps(many | {"a": [], "b": []}), f"[{deep.decode()}]"):
        with pytest.raises(InvalidRequest, match="at most"):
            read_json(body.encode())


NO_JSON = {
    "must be JSON": [b"", b"{", b"[1,]", b"{} {}", b"\xef\xbb\xbf{}"],
    "must be in UTF-8": [b"\xff\xfe{\x00}\x00", b'"\xed\xa0\x80"', b'{"a": "\xc3"}', bytes(range(256))],
    "half of a surrogate pair": [b'"\\ud800"', b'{"\\udfff": 1}'],
    "NaN is no finite number": [b"NaN"],
    "-Infinity is no finite number": [b"[-Infinity]"],
    "1e999 is no finite number": [b"[1e999]"],
    "has more than 64 bits": [b"[18446744073709551616]", b"[-9223372036854775809]", b"1" * MIB],
    "'a' is given twice": [b'{"a": 1, "a": 1}'],
    "'' is given twice": [b'[{"b": {"": 1, "": 2}}]'],
}


@pytest.mark.parametrize("said", NO_JSON)
def test_what_is_no_json_is_told_in_a_sentence(said: str) -> None:
    for body in NO_JSON[said]:
        with pytest.raises(InvalidRequest) as caught:
            read_json(body)
        assert (caught.value.field, caught.value.value) == ("body", f"{len(body)} bytes")
        assert said in caught.value.reason
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "body", [b"null", b"[]", b' {"a": [1, -2.5e3, "\\ud83d\\ude00", "\xc3\xa4", true]} ', b"18446744073709551615"]
)
def test_what_is_json_is_read(body: bytes) -> None:
    assert read_json(body) == json.loads(body)


FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")


def test_a_page_of_another_site_cannot_make_a_browser_send_it() -> None:
    """A browser sends the types of forms without asking the server (Fetch, 2.2.2)."""
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/problem+json"):
        expect_json(kind)
    for kind in (None, "", *FORMS, "text/json", "json", "*/*"):
        with pytest.raises(WrongContentType, match="must be application/json"):
            expect_json(kind)


def test_a_handler_gets_what_the_body_holds_and_its_errors_are_answered() -> None:
    async def echo(request: Request) -> JSONResponse:
        return JSONResponse(await asgi.json_body(request))

    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    app.add_middleware(asgi.Guard)
    said = {"Content-Type": "application/json"}
    with Served(app, lifespan="off") as served:
        for content in ([1, 2], {"a": "x" * 100_000}):
            assert served.ask("/", "POST", body=json.dumps(content), headers=said).json == content
        for body in (b"{", b'{"a":"' + b"x" * 100_000):
            wrong = served.ask("/", "POST", body=body, headers=said)
            assert (wrong.status, wrong.error, wrong.json["field"]) == (400, "InvalidRequest", "body")
        for headers in ({}, {"Content-Type": "text/plain"}):
            refused = served.ask("/", "POST", body=b"[]", headers=headers)
            assert (refused.status, refused.error) == (415, "WrongContentType")
            assert "application/json" in refused.json["detail"]
