"""The ways in which evaluation harnesses score: echo with logprobs, and the endpoints of vLLM."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.openai_server import CHAT, HELLO, STREAM, Serving, text_of
from support.streams import asking

import gpu_actors as ga
from gpu_actors.generation import plain_logits
from gpu_actors.server.openai.state import State

COMPLETIONS = "/v1/completions"
LONG = [256, *(number * 7 % 250 for number in range(300))]  # more tokens than a step has rows


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving() as running:
        yield running
        running.until_idle()


def wanted(serving: Serving, tokens: list[int]) -> list[float]:
    """The log probabilities of all tokens but the first, by the model in NumPy alone."""
    logits = plain_logits(serving.engine._model, np.array(tokens), np.float16).astype(np.float64)[:-1]
    logits -= logits.max(axis=-1, keepdims=True)
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return [float(row[token]) for row, token in zip(scores, tokens[1:], strict=True)]


@pytest.mark.parametrize(("tokens", "new"), [([5], 3), ([256, 7], 0), ([256, *b"The quick brown fox"], 1), (LONG, 3)])
def test_the_scores_of_a_prompt_are_the_plain_models(serving: Serving, tokens: list[int], new: int) -> None:
    for again in range(2):  # the second time its pages are cached
        if again:
            serving.complete(prompt=tokens, max_tokens=1)
        answer = serving.complete(prompt=tokens, max_tokens=new, echo=True, logprobs=1)
        found = answer["choices"][0]["logprobs"]
        assert {len(column) for column in found.values()} == {len(tokens) + new}
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        assert found["token_logprobs"][1 : len(tokens)] == pytest.approx(wanted(serving, tokens), abs=2e-2)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        assert all(one <= top for one, top in zip(found["token_logprobs"][1:], best, strict=True))
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(tokens), new)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "each row was computed"
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prompts_that_are_scored_at_once_have_the_same_scores(serving: Serving) -> None:
    prompts = [[256, *(number * part % 250 for number in range(20 * part))] for part in (1, 3, 5, 8)]

    def scores(prompt: list[int]) -> list[float]:
        answer = serving.complete(prompt=prompt, max_tokens=1, echo=True, logprobs=0)
        found: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"][1:-1]
        return found

    with ThreadPoolExecutor(4) as pool:
        for prompt, found in zip(prompts, pool.map(scores, prompts), strict=True):
            assert found == pytest.approx(wanted(serving, prompt), abs=2e-2)


def test_a_text_begins_with_its_prompt(serving: Serving) -> None:
    alone = serving.complete()["choices"][0]["text"]
    for prompt in ("hello", [256, *b"hello"]):
        echoed = serving.complete(prompt=prompt, echo=True)["choices"][0]
        assert echoed["text"] == f"hello{alone}"
        assert echoed["logprobs"] is None
        assert serving.complete(prompt=prompt, echo=True, max_tokens=0)["choices"][0]["text"] == "hello"
        assert serving.complete(prompt=prompt, echo=False)["choices"][0]["text"] == alone
    found = serving.complete(prompt="Text", echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]
    assert (found["tokens"], found["text_offset"]) == (["", *"Text"], [0, 0, 1, 2, 3])


def test_a_stream_begins_with_its_prompt(serving: Serving) -> None:
    for new in (0, 6):
        asked = {**HELLO, "echo": True, "logprobs": 1, "max_tokens": new}
        whole = serving.complete(**asked)["choices"][0]
        events = serving.stream(COMPLETIONS, asked)
        assert text_of(events) == whole["text"]
        pieces = [event["choices"][0]["logprobs"] for event in events[:-1]]
        for name, column in whole["logprobs"].items():
            assert [one for piece in pieces for one in piece[name]] == column


@pytest.mark.parametrize("settings", [{}, {"cache_mib": 1}], ids=["positions", "pages"])
def test_a_prompt_that_is_scored_may_be_as_long_as_a_text(settings: Any) -> None:
    with Serving(**settings) as serving:
        longest = serving.ask("/v1/models/tiny").json["max_model_len"]
        asked = {**HELLO, "prompt": [97] * longest, "echo": True, "max_tokens": 0}
        answer = serving.complete(**asked)
        assert (answer["usage"]["prompt_tokens"], answer["choices"][0]["text"]) == (longest, "a" * longest)
        for changes in ({"max_tokens": 1}, {"max_tokens": None}, {"prompt": [97] * (longest + 1)}):
            answered = serving.post(COMPLETIONS, {**asked, **changes})
            assert (answered.status, answered.json["error"]["param"]) == (400, "prompt")


def test_a_prompt_that_cannot_be_scored_costs_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with Serving() as serving:
        model = serving.engine._model
        logits = model.logits

        def broken(x: Any) -> Any:
            found = logits(x)
            return found * np.nan if len(x) > 1 else found

        monkeypatch.setattr(type(model), "logits", lambda _, x: broken(x))
        answered = serving.post(COMPLETIONS, {**HELLO, "echo": True, "logprobs": 1})
        assert (answered.status, answered.json["error"]["code"]) == (500, "LaunchError")
        assert serving.complete()["choices"][0]["finish_reason"] == "length"
        serving.until_idle()


# The endpoints of vLLM


def test_a_text_is_cut_into_its_tokens_and_back(serving: Serving) -> None:
    whole = serving.post("/tokenize", {"model": "tiny", "prompt": "héllo"}).json
    assert whole == {"count": 7, "max_model_len": 4096, "tokens": [256, *"héllo".encode()], "token_strs": None}
    assert serving.post("/tokenize", {"prompt": "hi", "add_special_tokens": False}).json["tokens"] == [*b"hi"]
    assert serving.post("/tokenize", {"prompt": ""}).json["tokens"] == [256]
    chat = serving.post("/tokenize", {"messages": CHAT["messages"]}).json["tokens"]
    assert bytes(chat) == b"user: hello\nassistant: "
    assert len(chat) == serving.chat()["usage"]["prompt_tokens"]
    assert serving.post("/detokenize", {"tokens": whole["tokens"]}).json == {"prompt": "héllo"}
    assert serving.post("/detokenize", {"model": "tiny", "tokens": []}).json == {"prompt": ""}


ECHO = {**HELLO, "echo": True}
MESSAGES = CHAT["messages"]
NAMED: list[tuple[str, Any, str]] = [
    *((COMPLETIONS, {**HELLO, "max_tokens": 0, **changes}, "max_tokens") for changes in ({}, {"echo": False})),
    (COMPLETIONS, {**ECHO, "max_tokens": -1}, "max_tokens"),
    *((COMPLETIONS, {**HELLO, "echo": value}, "echo") for value in (1, "yes")),
    (COMPLETIONS, {**ECHO, "logprobs": 6}, "logprobs"),
    *((COMPLETIONS, {**ECHO, "prompt": prompt}, "prompt") for prompt in (["a", "b"], "a" * 4096)),
    *(("/tokenize", content, "prompt") for content in ({}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 1})),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "model": "b"}, "model"),
    *(("/tokenize", {"prompt": "a" * 4097, "add_special_tokens": value}, "prompt") for value in (True, False)),
    ("/tokenize", {"messages": [{"role": "user", "content": "a" * 4097}]}, "messages"),
    *(("/detokenize", content, "tokens") for content in ({}, {"tokens": "a"}, {"tokens": [97] * 4097})),
    *(("/detokenize", {"tokens": [value]}, "tokens[0]") for value in (258, 10**30)),
    *(("/detokenize", {"tokens": [1, value]}, "tokens[1]") for value in (-1, True)),
]


@pytest.mark.parametrize(("path", "content", "field"), NAMED, ids=lambda value: str(value)[:60])
def test_what_is_no_text_and_no_tokens_is_named(serving: Serving, path: str, content: Any, field: str) -> None:
    answered = serving.post(path, content)
    assert (answered.status, answered.json["error"]["param"]) == (404 if field == "model" else 400, field)


TEXTS = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [97]}}


def test_texts_are_not_cut_for_one_who_may_have_no_more() -> None:
    asked = {**HELLO, **STREAM, "max_tokens": 4000}
    with (
        Serving(max_per_client=1, api_keys=("client-one", "client-two")) as serving,
        asking(serving.port, COMPLETIONS, asked, "Authorization: Bearer client-one"),
    ):
        for path, content in TEXTS.items():
            refused = serving.post(path, content, Authorization="Bearer client-one")
            assert (refused.status, refused.json["error"]["code"]) == (429, "Overloaded")
            assert serving.post(path, content, Authorization="Bearer client-two").status == 200


def test_texts_are_cut_and_spelled_by_the_readers_of_their_size(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, threads = [], []
    readers_of, dumps = State.readers_of, json.dumps

    def of(state: State, size: int) -> Any:
        sizes.append(size)
        return readers_of(state, size)

    def noted(content: Any) -> str:
        threads.append(threading.current_thread().name)
        return dumps(content)

    monkeypatch.setattr(State, "readers_of", of)
    monkeypatch.setattr("gpu_actors.server.openai.vllm.json", SimpleNamespace(dumps=noted))
    bodies = {path: json.dumps(content).encode() + b" " * 70_000 for path, content in TEXTS.items()}
    assert [serving.post(path, body).status for path, body in bodies.items()] == [200, 200]
    assert set(sizes) == set(map(len, bodies.values()))
    assert threads == ["AnyIO worker thread"] * 2


def test_health_is_readiness_without_a_body() -> None:
    with Serving() as serving:
        assert (serving.ask("/health").status, serving.ask("/health").body) == (200, b"")
        serving.server.config.app.state.gpu_actors.probes.leave()  # type: ignore[union-attr]
        assert serving.ask("/health").status == 503
        assert serving.ask("/version").json == {"version": ga.__version__}


# The surface is closed


KINDS: dict[str, list[tuple[str, Any]]] = {
    "several texts": [("n", value) for value in (True, 2, 0, 1.0, "1", [1])],
    "calls of tools": [(name, [{}]) for name in ("tools", "functions")],
    "a grammar": [("guided_json", {}), ("grammar", "root"), ("regex", ""), ("structured_outputs", {"json": {}})],
    "change logits": [
        *((name, 1) for name in ("top_k", "min_p", "repetition_penalty")),
        *(("presence_penalty", 0.1), ("frequency_penalty", -1), ("logit_bias", {"1": 1})),
    ],
    "score prompts": [("prompt_logprobs", 1)],
    "think aloud": [("reasoning_effort", "low")],
    "keep what they answer": [("previous_response_id", "a")],
}


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_says_which_servers_have_it(serving: Serving, path: str, kind: str) -> None:
    for field, value in KINDS[kind]:
        answered = serving.post(path, {**(HELLO if path == COMPLETIONS else CHAT), field: value})
        error = answered.json["error"]
        assert (answered.status, error["param"]) == (400, field), answered.body
        assert kind in error["accepted"]
        assert "have it" in error["message"]


@pytest.mark.parametrize(
    ("base", "changes", "field", "kind"),
    [
        (HELLO, {"best_of": 2}, "best_of", "several texts"),
        (HELLO, {"prompt": ["a", "b"]}, "prompt", "several texts"),
        (HELLO, {"suffix": " "}, "suffix", "fill in the middle"),
        *((CHAT, {"store": value}, "store", "keep what they answer") for value in (True, 0)),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format.type", "a grammar"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "calls of tools"),
        (CHAT, {"modalities": ["audio"]}, "modalities[0]", "hear, see or speak"),
        (CHAT, {"messages": [{**MESSAGES[0], "tool_call_id": "b"}]}, "messages[0].tool_call_id", "calls of tools"),
    ],
    ids=str,
)
def test_a_refusal_says_it_wherever_the_field_lies(
    serving: Serving, base: Any, changes: Any, field: str, kind: str
) -> None:
    path = COMPLETIONS if base is HELLO else "/v1/chat/completions"
    error = serving.post(path, {**base, **changes}).json["error"]
    assert error["param"] == field
    assert kind in error["accepted"]


def test_a_field_that_asks_for_nothing_is_taken(serving: Serving) -> None:
    changes: dict[str, Any] = {"n": None, "logit_bias": None, "stream": False, "seed": None}
    serving.complete(**changes, suffix="")
    serving.chat(**changes, tool_choice="none")


def test_the_longest_body_of_errors_is_told_by_its_first(serving: Serving) -> None:
    """A body within the bounds on JSON gets one error, not one for each field."""
    many = {str(number): 1 for number in range(30_000)}
    for changes, field in (
        ({"metadata": many}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        (many, "0"),
        ({"messages": [many]}, "messages[0].role"),
    ):
        answered = serving.post("/v1/chat/completions", {**CHAT, **changes})
        assert (answered.status, answered.json["error"]["param"]) == (400, field)
    assert len(json.dumps(answered.json)) < 2000
