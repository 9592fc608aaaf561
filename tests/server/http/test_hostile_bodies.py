"""Every server of the package, its examples and its guides answers wrong bodies with a sentence, and never a 500."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI
from support.docs import examples
from support.modules import module_at
from support.openai_server import MOCK
from support.served import Answered, Served
from support.service import REPOSITORY

import gpu_actors as ga
from gpu_actors import asgi
from gpu_actors.openai_api import ServeSettings, create_app

JSON = "application/json"
DEEP = 5000


def guide() -> Any:
    """The application of docs/serving.md."""
    names: dict[str, Any] = {}
    for source in examples(REPOSITORY / "docs" / "serving.md")[:2]:
        exec(source, names)  # the page's own text
    return names["app"]


def embeddings() -> Any:
    example = module_at(REPOSITORY / "examples" / "inference_server.py")
    return example.create_app(example.Settings(device="mock", options=ga.ContextOptions(mock=MOCK.mock)))


def openai() -> Any:
    options = ga.ContextOptions(mock=MOCK.mock)
    return create_app(ServeSettings(device="mock", models=("tiny", "minilm"), options=options, default_max_tokens=4))


def fast() -> Any:
    app = FastAPI(lifespan=asgi.lifespan("mock"))
    app.add_middleware(asgi.Guard)

    @app.post("/echo")
    async def echo(content: Annotated[Any, Depends(asgi.json_body)]) -> Any:
        return content

    return app


SERVERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "guide": (guide, {"/attend": [1.0] * 8}),
    "embeddings": (embeddings, {"/embed": {"texts": ["one"]}}),
    "openai": (
        openai,
        {
            "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 1},
            "/v1/chat/completions": {
                "model": "tiny",
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 1,
            },
            "/v1/embeddings": {"model": "all-MiniLM-L6-v2", "input": "a"},
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [1]},
        },
    ),
    "fastapi": (fast, {"/echo": {"a": [1, "b"]}}),
}

# One of each kind; `test_json_bodies` has them all, without a server.
BODIES: dict[str, bytes] = {
    "half": b'{"a": [1',
    "half a character": b'{"a": "\xc3"}',
    "half a pair": b'{"texts": ["\\ud800"], "prompt": "\\ud800"}',
    "too large a float": b"[1e999]",
    "an int of a megabyte": b"[" + b"9" * (1 << 19) + b"]",
    "a key twice": b'{"texts": ["a"], "texts": 1, "prompt": "a", "prompt": 1, "input": "a", "input": 1}',
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep to the bound": b"[" * 32 + b"1" + b"]" * 32,
}

CONTENTS: list[Any] = [None, "text", [], {}, [[1.0]], [{}], ["a", 1], {"a": 1}, [1e300] * 8, [1e-320] * 8, [1.0] * 7]
CONTENTS += [[2**63] * 8, [1] * 10_000, {"": ""}, {"model": "tiny"}, {"prompt": {}}, {"messages": [[]]}]
VALUES: list[Any] = [None, True, -1, 10**19, "", {}, [[]], [{}], "a\u2028b", [None, 1]]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Served, dict[str, Any]]]:
    make, paths = SERVERS[request.param]
    with Served(make()) as served:
        yield served, paths


def sentence(answered: Answered) -> str:
    """The message of an error, which must be a client's error and have words."""
    assert 400 <= answered.status < 500, answered.body
    content = answered.json
    error = content.get("error", content)
    said: str = error.get("message") or error.get("detail") or ""
    assert len(said.split()) > 3, content
    assert len(answered.body) < 5000
    return said


def test_a_server_answers_what_is_sound(server: tuple[Served, dict[str, Any]]) -> None:
    served, paths = server
    for path, content in paths.items():
        answered = served.ask(path, "POST", body=json.dumps(content), headers={"Content-Type": JSON})
        assert answered.status == 200, answered.body


def test_a_body_at_fault_gets_a_sentence(server: tuple[Served, dict[str, Any]]) -> None:
    served, paths = server
    for path in paths:
        for name, body in BODIES.items():
            answered = served.ask(path, "POST", body=body, headers={"Content-Type": JSON})
            if name == "deep to the bound" and path == "/echo":
                assert answered.status == 200
            else:
                sentence(answered)


def test_a_body_of_another_type_gets_a_sentence(server: tuple[Served, dict[str, Any]]) -> None:
    served, paths = server
    for path, content in paths.items():
        for kind in ("text/plain", None):
            headers = {} if kind is None else {"Content-Type": kind}
            answered = served.ask(path, "POST", body=json.dumps(content), headers=headers)
            assert answered.status == 415
            assert "application/json" in sentence(answered)


def test_contents_of_wrong_types_get_a_sentence(server: tuple[Served, dict[str, Any]]) -> None:
    served, paths = server
    for path, sound in paths.items():
        wrong = CONTENTS if path != "/echo" else []
        if isinstance(sound, dict) and path != "/echo":
            wrong = [*wrong, *({**sound, name: value} for name in [*sound, "unknown"] for value in VALUES)]
        for content in wrong:
            answered = served.ask(path, "POST", body=json.dumps(content), headers={"Content-Type": JSON})
            if answered.status != 200:  # some are valid: a text may hold any character
                sentence(answered)
    answered = served.ask(path, "POST", body=json.dumps(paths[path]), headers={"Content-Type": JSON})
    assert answered.status == 200, "and it goes on"
