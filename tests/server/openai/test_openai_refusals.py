"""Faulty requests get a typed error in OpenAI's form, with the field, the value and what is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.openai_server import CHAT, HELLO, Serving

COMPLETIONS, CHATS, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
EMBED = {"model": "all-MiniLM-L6-v2", "input": "text"}
NAN, INFINITY = float("nan"), float("inf")


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(models=("tiny", "minilm"), max_body_bytes=200_000, max_inputs=4) as running:
        yield running
        running.until_idle()
        assert running.engine.stats.ended.keys() <= {"length", "stop"}, "no refusal has begun a text"


def refused(serving: Serving, path: str, content: Any, status: int = 400) -> dict[str, Any]:
    answered = serving.post(path, content)
    assert answered.status == status, answered.body
    assert answered.headers["content-type"] == "application/json"
    assert answered.json.keys() == {"error"}
    error: dict[str, Any] = answered.json["error"]
    assert {"message", "type", "param", "code", "request_id"} <= error.keys()
    assert error["request_id"] == answered.headers["x-request-id"]
    assert error["type"] == "invalid_request_error"
    assert len(answered.body) < 4000, "an error does not repeat a whole request"
    return error


LONG = "k" * 100_000


def test_a_name_that_a_client_made_up_comes_back_short(serving: Serving) -> None:
    for path, content in (
        (COMPLETIONS, {**HELLO, LONG: 1}),
        (CHATS, {**CHAT, "messages": [{"role": "user", "content": "a", LONG: 1}]}),
        (CHATS, {**CHAT, "metadata": {LONG: 1}}),
        (EMBEDDINGS, {**EMBED, LONG: 1}),
        ("/tokenize", {"prompt": "a", LONG: 1}),
    ):
        error = refused(serving, path, content)
        assert "kkk" in error["param"]
        assert len(error["param"]) < 200
        assert error["accepted"] in error["message"], "the reason is there too"


BOTH: list[tuple[str, Any, str]] = [
    *(("temperature", value, "must be") for value in (NAN, -INFINITY, -0.1, 2.1, "1", True, [], 10**400)),
    *(("top_p", value, "must be") for value in (0, 1.01, NAN, "0.5", {})),
    *(("seed", value, "must be") for value in (1.5, "1", True, 1 << 63, -(1 << 64))),
    *(("max_tokens", value, "must be") for value in (0, -1, 1.5, "5", True, 5000, 10**30, NAN)),
    *(("stream", value, "must be a valid boolean") for value in (1, "true")),
    *(("stop", value, "must be a string or up to 16") for value in (1, [1], [""], "", ["a"] * 17, "a" * 257, {})),
    ("frequency_penalty", NAN, "must be"),
    ("stream_options", {"include_usage": True}, "must be left out unless stream is true"),
    ("stream_options.include_usage", None, "must be a valid boolean"),
    *((name, 1, "must be a valid string") for name in ("user", "model")),
    ("__class__", "x", "is not a field that this server knows"),
]


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, HELLO), (CHATS, CHAT)], ids=["plain", "chat"])
def test_a_wrong_value_is_named_with_what_is_accepted(serving: Serving, path: str, base: Any) -> None:
    for field, value, accepted in BOTH:
        content = {**base, field: value}
        if "." in field:
            content = {**base, "stream": True, "stream_options": {"include_usage": "yes"}}
        error = refused(serving, path, content)
        assert error["param"] == field, (field, value)
        assert error["accepted"].startswith(accepted), (field, value)
        assert "value" in error
        assert field in error["message"]


NO_PROMPTS: list[Any] = ["", [], [[]], [""], None, 5, {"text": "a"}, [1.5], [True], [1, "a"], [[1], [2]]]


@pytest.mark.parametrize("value", [*NO_PROMPTS, "a" * 4096, [1] * 4096], ids=lambda value: repr(value)[:30])
def test_prompts_that_are_none(serving: Serving, value: Any) -> None:
    error = refused(serving, COMPLETIONS, {**HELLO, "prompt": value})
    assert error["param"] == "prompt"
    assert error["accepted"].startswith("must ")


USER = {"role": "user", "content": "a"}
# Faults of each kind of request.
WRONG: list[tuple[str, Any, Any, str]] = [
    *(
        (COMPLETIONS, HELLO, {"prompt": prompt}, f"prompt[{n}]")
        for prompt, n in (([258], 0), ([1, -1], 1), ([10**30], 0))
    ),
    *((COMPLETIONS, HELLO, {"logprobs": value}, "logprobs") for value in (6, True)),
    *((CHATS, CHAT, {"messages": value}, "messages") for value in ([], "hello", {}, [{**USER, "content": "a" * 5000}])),
    *((CHATS, CHAT, {"messages": [value]}, "messages[0].role") for value in ({}, {**USER, "role": "tool"})),
    *(
        (CHATS, CHAT, {"messages": [{"role": "user", **content}]}, "messages[0].content")
        for content in (
            *({}, {"content": None}, {"content": []}, {"content": [{"type": "image_url"}]}),
            {"content": [{"type": "text", "text": 1}]},
        )
    ),
    (CHATS, CHAT, {"messages": ["hello"]}, "messages[0]"),
    (CHATS, CHAT, {"messages": [{**USER, "image": "b"}]}, "messages[0].image"),
    (CHATS, CHAT, {"messages": [{**USER, "role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    *((CHATS, CHAT, {"max_completion_tokens": value}, "max_completion_tokens") for value in (0, 1 << 40)),
    (CHATS, CHAT, {"logprobs": 1}, "logprobs"),
    *(
        (CHATS, CHAT, changes, "top_logprobs")
        for changes in ({"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 1})
    ),
    *((EMBEDDINGS, EMBED, {"input": value}, "input") for value in (None, [], [1, 2], [[1, 2]], ["a", 1], ["a"] * 5)),
    *((EMBEDDINGS, EMBED, {"input": value}, f"input[{n}]") for value, n in (("", 0), (["a", ""], 1))),
    (EMBEDDINGS, EMBED, {"encoding_format": "int8"}, "encoding_format"),
    *((EMBEDDINGS, EMBED, {"dimensions": value}, "dimensions") for value in (256, "384")),
    (EMBEDDINGS, EMBED, {"truncate": 1}, "truncate"),
]


@pytest.mark.parametrize(("path", "base", "changes", "field"), WRONG, ids=lambda value: str(value)[:50])
def test_what_is_none_of_its_kind_is_named(serving: Serving, path: str, base: Any, changes: Any, field: str) -> None:
    assert refused(serving, path, {**base, **changes})["param"] == field


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, EMBEDDINGS])
def test_bodies_that_are_no_object(serving: Serving, path: str) -> None:
    for body in (
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"model": "\xff"}',
        b"[" * 100_000,
        json.dumps(HELLO).encode() + b" x",
    ):
        error = refused(serving, path, body)
        assert (error["param"], error["value"]) == ("body", f"{len(body)} bytes")
        assert error["accepted"].startswith("must be ")
    assert refused(serving, path, {**HELLO, "prompt": "x" * 300_000}, status=413)["code"] == "BodyTooLarge"


def test_a_model_that_is_not_here_is_404(serving: Serving) -> None:
    for path, content in ((COMPLETIONS, HELLO), (CHATS, CHAT), (EMBEDDINGS, EMBED)):
        for name in ("gpt-4o", "", "a" * 10_000, "tiny\n"):
            error = refused(serving, path, {**content, "model": name}, status=404)
            assert (error["param"], error["code"]) == ("model", "NotFound")


def test_a_model_is_not_asked_for_what_it_does_not_do(serving: Serving) -> None:
    assert refused(serving, COMPLETIONS, {**HELLO, "model": EMBED["model"]}, 404)["accepted"] == "must be tiny"
    assert refused(serving, EMBEDDINGS, {**EMBED, "model": "tiny"}, 404)["accepted"] == "must be all-MiniLM-L6-v2"


def test_paths_methods_and_deadlines_that_are_none(serving: Serving) -> None:
    for path, status in (("/v1/x", 404), (COMPLETIONS, 405), ("/x", 404)):
        answered = serving.ask(path)
        assert (answered.status, answered.json["error"]["type"]) == (status, "invalid_request_error")
    for value in ("0", "soon", "3600001"):
        answered = serving.post(COMPLETIONS, HELLO, X_Deadline_Ms=value)
        assert (answered.status, answered.json["error"]["param"]) == (400, "X-Deadline-Ms")


def test_the_longest_text_that_is_taken_is_answered(serving: Serving) -> None:
    """The bound that refusals name is exact."""
    answer = serving.complete(prompt="a" * 4090, max_tokens=5)
    assert answer["usage"]["total_tokens"] == 4096
    error = refused(serving, COMPLETIONS, {**HELLO, "prompt": "a" * 4090, "max_tokens": 6})
    assert (error["param"], error["accepted"]) == (
        "max_tokens",
        "must be from 1 to 5: 4091 of 4096 tokens are the prompt's",
    )
