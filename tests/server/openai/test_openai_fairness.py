"""How clients affect each other: crowds with deadlines, greedy clients, prompts that cannot fit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from inside.bench import measure
from support.openai_server import CHAT, HELLO, STREAM, Serving
from support.service import eventually
from support.streams import asking

import gpu_actors as ga
from gpu_actors.server.openai.requests import ChatRequest

COMPLETIONS = "/v1/completions"
SLOW = ga.ContextOptions(mock=ga.MockOptions(dtype="float32", latency=0.01))
NEVER_ENDING = {**HELLO, "max_tokens": 4000, **STREAM}
KEY = "Authorization: Bearer {}"
KEYS = ("greedy-one", "other-one", *(f"short-one-{number}" for number in range(8)))


def refusing(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tokenising fail."""

    def encode(self: Any, text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenised")

    assert serving.state.models.generator is not None
    monkeypatch.setattr(type(serving.state.models.generator.tokenizer), "encode", encode)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    chats, long = "/v1/chat/completions", "word " * 700_000
    with Serving() as serving:
        refusing(serving, monkeypatch)
        for path, content, field in (
            (COMPLETIONS, {**HELLO, "prompt": long}, "prompt"),
            (COMPLETIONS, {**HELLO, "prompt": [1] * 200_000}, "prompt"),
            (chats, {**CHAT, "messages": [{"role": "user", "content": long}]}, "messages"),
            (chats, {**CHAT, "messages": [{"role": "user", "content": "word " * 100}] * 100}, "messages"),
        ):
            refused = serving.post(path, content)
            assert (refused.status, refused.json["error"]["param"]) == (400, field)
            assert "must leave room for an answer" in refused.json["error"]["message"]


def test_prompts_that_take_long_to_read_delay_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    go, reading, read = threading.Event(), threading.Event(), ChatRequest.__pydantic_validator__.validate_json

    class Validator:
        def validate_json(self, body: Any, **options: Any) -> Any:
            if len(body) > 100_000:
                reading.set()
                assert go.wait(60)
            return read(body, **options)

    monkeypatch.setattr(ChatRequest, "__pydantic_validator__", Validator())
    long = {**CHAT, "messages": [{"role": "user", "content": "x" * 200_000}]}
    with Serving() as serving:
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(asking(serving.port, "/v1/chat/completions", long, begun=False))
            assert reading.wait(60)
            for _ in range(3):
                assert serving.complete()["usage"]["completion_tokens"] == 8
            go.set()
        serving.until_idle()


def test_one_greedy_client_does_not_starve_the_others() -> None:
    """One client sends 24 prompts of 1,500 tokens; short prompts of others come later."""
    with Serving(api_keys=KEYS) as serving, ThreadPoolExecutor(8) as pool:
        with contextlib.ExitStack() as stack:
            for number in range(24):
                long = {**HELLO, **STREAM, "prompt": f"{number} " + "long " * 300}
                headers = KEY.format(KEYS[0])
                stack.enter_context(asking(serving.port, COMPLETIONS, long, headers, begun=False))
            eventually(lambda: serving.engine.running >= 8)
            short = list(
                pool.map(lambda key: serving.post(COMPLETIONS, HELLO, Authorization=f"Bearer {key}"), KEYS[2:])
            )
            assert serving.engine.stats.ended.get("length", 0) < 8 + 12, "the long ones still run"
        assert [answer.status for answer in short] == [200] * 8
        serving.until_idle()


@pytest.mark.parametrize("checked", [True, False])
def test_a_client_has_no_more_under_way_than_it_may(checked: bool) -> None:
    """Without a check of keys, another key is not another client."""
    with Serving(options=SLOW, max_per_client=1, api_keys=KEYS if checked else ()) as serving:
        with asking(serving.port, COMPLETIONS, NEVER_ENDING, KEY.format(KEYS[0])):
            refused = serving.post(COMPLETIONS, HELLO, Authorization=f"bearer  {KEYS[0]}")
            assert (refused.status, refused.json["error"]["code"]) == (429, "Overloaded")
            assert "1 requests of this client" in refused.json["error"]["message"]
            other = serving.post(COMPLETIONS, HELLO, Authorization=f"Bearer {KEYS[1]}")
            assert other.status == (200 if checked else 429)
        serving.until_idle()


def test_a_crowd_with_short_deadlines_is_answered_or_refused_and_what_is_begun_is_finished() -> None:
    with Serving(max_running=8, max_waiting=8) as serving:
        load = asyncio.run(measure(serving.port, 64, 2.0, deadline=5.0, impatient=True))
        serving.until_idle()
    assert load.faults == []
    assert load.statuses.keys() <= {"200", "429", "504"}
    assert load.statuses["429"] > 0
    assert load.in_time > load.errors.total()


def test_a_request_whose_work_would_miss_its_deadline_is_refused_at_once_with_a_time() -> None:
    with Serving(options=SLOW, max_running=1, queue_seconds=600) as serving:
        with asking(serving.port, COMPLETIONS, NEVER_ENDING):
            for content in (HELLO, {**HELLO, **STREAM}):
                began = time.monotonic()
                refused = serving.post(COMPLETIONS, content, X_Deadline_Ms="4000")
                assert time.monotonic() - began < 3.0
                assert (refused.status, refused.json["error"]["code"]) == (429, "Overloaded")
                assert 1 <= int(refused.headers["retry-after"]) <= 60
        serving.until_idle()
