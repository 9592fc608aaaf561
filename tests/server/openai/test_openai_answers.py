"""Answers of OpenAI's API over real sockets: texts, streams, counts, log-probabilities, embeddings, models."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import write_model, write_tokenizer
from support.openai_server import CHAT, HELLO, STREAM, Serving, chat_text_of, text_of

from gpu_actors.generation import LlamaConfig, plain_logits

REFERENCE = Path(__file__).parents[2] / "data"
MINILM = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(models=("tiny", "minilm")) as running:
        yield running
        running.until_idle()


# Texts


def test_a_text_is_the_plain_models(serving: Serving) -> None:
    """Each token is the likeliest one, with the log-probability of the model in NumPy alone."""
    prompt = [256, *b"The quick brown fox"]
    answer = serving.complete(prompt=prompt, max_tokens=12, logprobs=5)
    found = answer["choices"][0]["logprobs"]
    model = serving.engine._model
    # All bytes that are no text show as U+FFFD in the answer, so the tokens are computed again here.
    tokens: list[int] = []
    for chosen, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        logits = plain_logits(model, np.array(prompt + tokens), np.float16)[-1].astype(np.float64)
        scores = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert chosen == pytest.approx(scores.max(), abs=2e-2)
        assert max(top.values()) == pytest.approx(scores.max(), abs=2e-2)
        tokens.append(int(scores.argmax()))
    text = bytes(token for token in tokens if token < 256).decode(errors="replace")
    assert answer["choices"][0]["text"] == text


def test_an_answer_has_every_field(serving: Serving) -> None:
    answer, other = serving.complete(), serving.chat()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 8, 14)
    assert other["id"].startswith("chatcmpl-")
    assert other["object"] == "chat.completion"
    assert other["choices"][0]["message"]["role"] == "assistant"
    assert other["usage"]["prompt_tokens"] == len("user: hello\nassistant: ")


def test_a_stream_is_the_same_text_in_pieces(serving: Serving) -> None:
    wanted = serving.complete(max_tokens=40)
    events = serving.stream("/v1/completions", {**HELLO, "max_tokens": 40})
    assert text_of(events) == wanted["choices"][0]["text"]
    assert len({event["id"] for event in events}) == 1
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 40
    assert all(event["usage"] is None for event in events[:-1])


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(serving: Serving) -> None:
    wanted = serving.chat(max_tokens=30)
    events = serving.stream("/v1/chat/completions", {**CHAT, "max_tokens": 30})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:-1])
    assert chat_text_of(events) == wanted["choices"][0]["message"]["content"]
    assert (events[-2]["choices"][0]["delta"], events[-2]["choices"][0]["finish_reason"]) == ({}, "length")
    assert events[-1]["usage"]["completion_tokens"] == 30


def test_a_stream_without_usage_does_not_name_it(serving: Serving) -> None:
    for path, content in (("/v1/completions", HELLO), ("/v1/chat/completions", CHAT)):
        answered = serving.post(path, {**content, "stream": True})
        assert b'"usage"' not in answered.body
        assert answered.body.endswith(b"data: [DONE]\n\n")
        assert answered.headers["x-accel-buffering"] == "no", "a proxy is told not to hold events back"


def test_one_seed_gives_one_text(serving: Serving) -> None:
    def text(**changes: Any) -> str:
        found: str = serving.complete(temperature=1.5, max_tokens=20, **changes)["choices"][0]["text"]
        return found

    assert text(seed=7) == text(seed=7) != text(seed=-8)
    assert text() != text(), "without a seed each text is another"
    assert text(top_p=1e-6, seed=1) == text(top_p=1e-6, seed=2), "only the likeliest token is left"


def test_a_text_ends_before_its_stop_string(serving: Serving) -> None:
    whole = serving.complete(max_tokens=60)["choices"][0]["text"]
    stop = whole[20:23]
    at = whole.find(stop)
    answer = serving.complete(max_tokens=60, stop=["never seen", stop])
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (whole[:at], "stop")
    assert answer["usage"]["completion_tokens"] < 60
    events = serving.stream("/v1/completions", {**HELLO, "max_tokens": 60, "stop": stop})
    assert text_of(events) == whole[:at]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"] | {"prompt_tokens_details": 0} == answer["usage"] | {"prompt_tokens_details": 0}


def test_a_prompt_that_begins_as_another_is_not_computed_again(serving: Serving) -> None:
    prompt = "A beginning that several requests have in common, "
    first, second = (serving.complete(prompt=prompt + last)["usage"] for last in ("one", "two"))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 48}
    assert second["prompt_tokens"] == len(prompt) + 4


def test_log_probabilities_of_a_message(serving: Serving) -> None:
    answer = serving.chat(logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for one in content:
        best = one["top_logprobs"][0]
        assert (one["token"], one["logprob"], one["bytes"]) == (best["token"], best["logprob"], best["bytes"])
        assert bytes(one["bytes"]).decode(errors="replace") == one["token"]
    events = serving.stream("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    pieces = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [one for piece in pieces if piece for one in piece["content"]] == content
    assert serving.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_what_clients_send_without_meaning_it_is_taken(serving: Serving) -> None:
    nothing = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "me", "stop": None}
    serving.complete(**nothing, best_of=1, echo=False, suffix=None, seed=None, stream=False)
    reply = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "annotations": []}
    asked = [*CHAT["messages"], reply, {"role": "user", "name": "Ada", "content": [{"type": "text", "text": "bye"}]}]
    neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "metadata": {"a": "b"}}
    answer = serving.chat(
        messages=asked, **nothing, **neutral, store=False, modalities=["text"], max_completion_tokens=3
    )
    assert answer["usage"]["prompt_tokens"] == len("user: hello\nassistant: Hi\nuser: bye\nassistant: ")
    assert answer["usage"]["completion_tokens"] == 3


# A user's own model


def test_a_folder_is_served_by_its_own_tokenizer_and_template(tmp_path: Path) -> None:
    folder = tmp_path / "cat"
    folder.mkdir()
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    said = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    tokenizer = write_tokenizer(folder, said, special=["<s>", "</s>"])
    config = LlamaConfig.tiny(vocab=258, hidden=32, layers=1, heads=4, kv_heads=4, head_dim=16)
    write_model(folder, config, bos_token_id=256, eos_token_id=257)
    with Serving(models=(str(folder),)) as serving:
        assert [card["id"] for card in serving.ask("/v1/models").json["data"]] == ["cat"]
        answer = serving.chat(model="cat", messages=[{"role": "user", "content": "the naïve cat 🙂"}], max_tokens=40)
        prompt = tokenizer.encode("<s>user=the naïve cat 🙂;", add_special_tokens=False).ids
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert prompt[0] == 256
        asked = {"model": "cat", "prompt": prompt, "max_tokens": 40, "temperature": 0}
        assert text_of(serving.stream("/v1/completions", asked)) == answer["choices"][0]["message"]["content"]
        wrong = serving.post("/v1/completions", {**asked, "prompt": [258]})
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "prompt[0]")
    (folder / "tokenizer_config.json").unlink()
    with Serving(models=(f"mine={folder}",)) as serving:
        messages = {"messages": CHAT["messages"]}
        for path, content in (("/v1/chat/completions", {**CHAT, "model": "mine"}), ("/tokenize", messages)):
            refused = serving.post(path, content)
            assert (refused.status, refused.json["error"]["param"]) == (400, "model")
            assert "has no chat template" in refused.json["error"]["message"]
        serving.complete(model="mine")


# Embeddings


def test_embeddings_are_the_references(serving: Serving) -> None:
    texts = json.loads((REFERENCE / "minilm_texts.json").read_text(encoding="utf-8"))[:8]
    reference = np.load(REFERENCE / "minilm_reference.npz")
    for encoding in ("float", "base64"):
        asked = {"model": MINILM, "input": texts, "encoding_format": encoding, "truncate": True}
        answer = serving.post("/v1/embeddings", asked).json
        assert [one["index"] for one in answer["data"]] == list(range(8))
        vectors = [one["embedding"] for one in answer["data"]]
        if encoding == "base64":
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        np.testing.assert_allclose(vectors, reference["embeddings"][:8], atol=2e-6, rtol=0)
        assert answer["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), int(reference["tokens"][:8].sum()))


def test_a_text_that_is_too_long_is_refused_or_cut_as_asked(serving: Serving) -> None:
    asked = {"model": MINILM, "input": ["short", "word " * 400]}
    refused = serving.post("/v1/embeddings", asked)
    assert (refused.status, refused.json["error"]["param"]) == (400, "input[1]")
    cut = serving.post("/v1/embeddings", {**asked, "truncate": True}).json
    assert cut["usage"]["prompt_tokens"] == 3 + 256
    one = serving.post("/v1/embeddings", {"model": MINILM, "input": "short", "dimensions": 384}).json
    np.testing.assert_allclose(one["data"][0]["embedding"], cut["data"][0]["embedding"], atol=1e-5)


# Models, probes, metrics


def test_models_are_listed_and_named(serving: Serving) -> None:
    cards = serving.ask("/v1/models").json["data"]
    assert [(card["id"], card["kind"], card["max_model_len"]) for card in cards] == [
        ("tiny", "generation", 4096),
        (MINILM, "embedding", 256),
    ]
    assert [(card["weights"], card["dtype"], card["cache_dtype"]) for card in cards] == [
        ("random", "float32", "float32"),
        (None, "float32", None),
    ]
    assert serving.ask(f"/v1/models/{MINILM}").json == cards[1]
    missing = serving.ask("/v1/models/a/b")
    assert (missing.status, missing.json["error"]["code"]) == (404, "NotFound")


def test_metrics_tell_of_texts_pages_and_times(serving: Serving) -> None:
    serving.complete()
    serving.until_idle()
    shown = dict(
        line.rsplit(" ", 1)
        for line in serving.ask("/metrics").body.decode().splitlines()
        if line.startswith("gpu_actors_") and "_bucket" not in line
    )
    assert float(shown['gpu_actors_texts_ended_total{reason="length"}']) >= 1
    assert float(shown['gpu_actors_text_tokens_total{kind="generated"}']) >= 8
    assert shown['gpu_actors_kv_pages{state="used"}'] == "0.0"
    ended = sum(float(value) for name, value in shown.items() if name.startswith("gpu_actors_texts_ended"))
    assert float(shown["gpu_actors_text_first_token_seconds_count"]) == ended
    assert float(shown["gpu_actors_text_queue_seconds_count"]) == ended
    assert float(shown["gpu_actors_text_step_rows_count"]) == float(shown["gpu_actors_text_steps_total"])
    assert shown['gpu_actors_texts{state="running"}'] == "0.0"
    assert shown['gpu_actors_embedding_requests{state="waiting"}'] == "0.0"
    assert "gpu_actors_admission_running" in shown


def test_no_request_imports_a_module() -> None:
    """Not even the first of its kind: an import blocks the loop for the disk's time, or forever in a fork."""
    with Serving(models=("tiny", "minilm")) as serving:
        before = set(sys.modules)
        serving.complete(logprobs=2)
        serving.chat(logprobs=True)
        serving.complete(echo=True, logprobs=1, max_tokens=0)
        serving.post("/detokenize", {"tokens": serving.post("/tokenize", {"prompt": "a"}).json["tokens"]})
        serving.stream("/v1/completions", HELLO)
        serving.stream("/v1/chat/completions", CHAT)
        serving.post("/v1/embeddings", {"model": MINILM, "input": "a", "encoding_format": "base64"})
        serving.post("/v1/completions", b"{")
        serving.post("/v1/completions", {**HELLO, **STREAM}, X_Deadline_Ms="0.001")
        serving.ask("/v1/models")
        serving.ask("/nothing")
        assert sorted(set(sys.modules) - before) == []


@pytest.mark.timeout(180)
def test_without_a_model_named_the_installed_ones_answer() -> None:
    with Serving(models=(), cache_mib=64) as serving:
        card = serving.ask("/v1/models/smollm2").json
        assert (card["weights"], card["dtype"], card["cache_dtype"]) == ("Q4_1, Q8_0", "float32", "float32")
        said = "<|im_start|>user\nHi<|im_end|>\nok  🙂 b"
        scored = serving.complete(model="smollm2", prompt=said, echo=True, logprobs=0, max_tokens=1)["choices"][0]
        offsets = scored["logprobs"]["text_offset"]
        assert offsets == [0, 12, 16, 17, 19, 29, 30, 32, 33, 35, len(said)]
        asked = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        events = serving.stream("/v1/chat/completions", {**asked, "temperature": 0, "max_tokens": 4})
        assert chat_text_of(events) == "The capital of France"
        assert serving.ask(f"/v1/models/{MINILM}").status == 200
