"""What clients send at fault: each gets a typed error in OpenAI's form: the field, the value and what is accepted."""

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


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (COMPLETIONS, {**HELLO, LONG: 1}),
        (CHATS, {**CHAT, "messages": [{"role": "user", "content": "a", LONG: 1}]}),
        (CHATS, {**CHAT, "metadata": {LONG: 1}}),
        (EMBEDDINGS, {**EMBED, LONG: 1}),
        ("/tokenize", {"prompt": "a", LONG: 1}),
    ],
    ids=["a completion", "a message", "metadata", "embeddings", "tokenize"],
)
def test_a_name_that_a_client_made_up_comes_back_short(serving: Serving, path: str, content: Any) -> None:
    error = refused(serving, path, content)
    assert "kkk" in error["param"]
    assert len(error["param"]) < 200
    assert error["accepted"] in error["message"], "the reason is there too"


BOTH: list[tuple[str, Any, str]] = [
    *(("temperature", value, "must be") for value in (NAN, INFINITY, -INFINITY, -0.1, 2.1, "1", True, [], 10**400)),
    *(("top_p", value, "must be") for value in (0, -1, 1.01, NAN, "0.5", {})),
    *(("seed", value, "must be") for value in (1.5, "1", True, 1 << 63, -(1 << 64))),
    *(("max_tokens", value, "must be") for value in (0, -1, 1.5, "5", True, 5000, 1 << 31, 10**30, NAN)),
    *(("n", value, "must be") for value in (0, 2, "1", 1.5, 10**20)),
    *(("stream", value, "must be a valid boolean") for value in (1, "true", [])),
    *(("stop", value, "must be a string or up to 16") for value in (1, [1], [""], "", ["a"] * 17, "a" * 257, {})),
    *((name, value, "must be") for name in ("presence_penalty", "frequency_penalty") for value in (0.5, -1, NAN)),
    ("logit_bias", {"50256": -100}, "must have at most 0 items"),
    ("stream_options", {"include_usage": True}, "must be left out unless stream is true"),
    ("stream_options.include_usage", None, "must be a valid boolean"),
    ("user", 1, "must be a valid string"),
    ("model", 1, "must be a valid string"),
    ("model", None, "must be a valid string"),
    ("guided_json", {}, "is not a field that this server knows"),
    ("top_k", 5, "is not a field that this server knows"),
    ("__class__", "x", "is not a field that this server knows"),
]


@pytest.mark.parametrize(("path", "base"), [(COMPLETIONS, HELLO), (CHATS, CHAT)], ids=["plain", "chat"])
@pytest.mark.parametrize(("field", "value", "accepted"), BOTH, ids=lambda value: repr(value)[:30])
def test_a_wrong_value_is_named_with_what_is_accepted(
    serving: Serving, path: str, base: Any, field: str, value: Any, accepted: str
) -> None:
    content = {**base, field: value}
    if "." in field:
        content = {**base, "stream": True, "stream_options": {"include_usage": "yes"}}
    error = refused(serving, path, content)
    assert error["param"] == field
    assert error["accepted"].startswith(accepted)
    assert "value" in error
    assert field in error["message"]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([""], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({"text": "a"}, "prompt"),
        ([1.5], "prompt"),
        ([True], "prompt"),
        ([1, "a"], "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([258], "prompt[0]"),
        ([1, -1], "prompt[1]"),
        ([10**30], "prompt[0]"),
        ("a" * 4096, "prompt"),
        ([1] * 4096, "prompt"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_prompts_that_are_none(serving: Serving, value: Any, field: str) -> None:
    error = refused(serving, COMPLETIONS, {**HELLO, "prompt": value})
    assert error["param"] == field
    assert error["accepted"].startswith("must ")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "image": "b"}]}, "messages[0].image"),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 1 << 40}, "max_completion_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"store": True}, "store"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_conversations_that_are_none(serving: Serving, changes: Any, field: str) -> None:
    assert refused(serving, CHATS, {**CHAT, **changes})["param"] == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
    ],
)
def test_completions_that_are_not_done_here(serving: Serving, changes: Any, field: str) -> None:
    assert refused(serving, COMPLETIONS, {**HELLO, **changes})["param"] == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [1, 2]}, "input"),
        ({"input": [[1, 2]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": ["a"] * 5}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 256}, "dimensions"),
        ({"dimensions": "384"}, "dimensions"),
        ({"truncate": 1}, "truncate"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_embeddings_that_are_none(serving: Serving, changes: Any, field: str) -> None:
    assert refused(serving, EMBEDDINGS, {**EMBED, **changes})["param"] == field


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, EMBEDDINGS])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"\x00" * 100,
        json.dumps(HELLO).encode() + b" x",
        json.dumps(HELLO).encode("utf-16"),
    ],
    ids=lambda body: repr(body[:12]),
)
def test_bodies_that_are_no_object(serving: Serving, path: str, body: bytes) -> None:
    error = refused(serving, path, body)
    assert (error["param"], error["value"]) == ("body", f"{len(body)} bytes")
    assert error["accepted"].startswith("must be ")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, EMBEDDINGS])
def test_a_body_that_is_too_long_is_413_in_the_same_form(serving: Serving, path: str) -> None:
    error = refused(serving, path, {**HELLO, "prompt": "x" * 300_000}, status=413)
    assert error["code"] == "BodyTooLarge"


@pytest.mark.parametrize(
    ("path", "content"), [(COMPLETIONS, HELLO), (CHATS, CHAT), (EMBEDDINGS, EMBED)], ids=["plain", "chat", "embed"]
)
def test_a_model_that_is_not_here_is_404(serving: Serving, path: str, content: Any) -> None:
    for name in ("gpt-4o", "", "a" * 10_000, "tiny\n"):
        error = refused(serving, path, {**content, "model": name}, status=404)
        assert (error["param"], error["code"]) == ("model", "NotFound")


def test_a_model_is_not_asked_for_what_it_does_not_do(serving: Serving) -> None:
    assert refused(serving, COMPLETIONS, {**HELLO, "model": EMBED["model"]}, 404)["accepted"] == "must be tiny"
    assert refused(serving, EMBEDDINGS, {**EMBED, "model": "tiny"}, 404)["accepted"] == "must be all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/v1/x", "GET", 404), (COMPLETIONS, "GET", 405), ("/x", "GET", 404)]
)
def test_paths_and_methods_that_are_not_there(serving: Serving, path: str, method: str, status: int) -> None:
    answered = serving.ask(path, method)
    assert (answered.status, answered.json["error"]["type"]) == (status, "invalid_request_error")


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "3600001"])
def test_a_deadline_that_is_none_is_named(serving: Serving, value: str) -> None:
    answered = serving.post(COMPLETIONS, HELLO, X_Deadline_Ms=value)
    assert (answered.status, answered.json["error"]["param"]) == (400, "X-Deadline-Ms")


def test_the_longest_text_that_is_taken_is_answered(serving: Serving) -> None:
    """The bound that refusals name is the one that holds."""
    answer = serving.complete(prompt="a" * 4090, max_tokens=5)
    assert answer["usage"]["total_tokens"] == 4096
    error = refused(serving, COMPLETIONS, {**HELLO, "prompt": "a" * 4090, "max_tokens": 6})
    assert (error["param"], error["accepted"]) == (
        "max_tokens",
        "must be from 1 to 5: 4091 of 4096 tokens are the prompt's",
    )
