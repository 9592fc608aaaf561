"""What clients feel of each other: crowds with deadlines, greedy ones, prompts that cannot fit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from typing import Any

import pytest
from inside.bench import measure
from support.openai_server import CHAT, HELLO, STREAM, Serving, sent
from support.service import eventually

import gpu_actors as ga
from gpu_actors.openai_api.requests import ChatRequest

COMPLETIONS = "/v1/completions"
SLOW = ga.ContextOptions(mock=ga.MockOptions(dtype="float32", latency=0.01))
KEY = "Authorization: Bearer {}"
KEYS = ("greedy-one", "other-one", *(f"short-one-{number}" for number in range(8)))


def refusing(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything is tokenised."""

    def encode(self: Any, text: str) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenised")

    assert serving.state.models.generator is not None
    monkeypatch.setattr(type(serving.state.models.generator.tokenizer), "encode", encode)


@pytest.mark.parametrize(
    ("path", "content", "field"),
    [
        (COMPLETIONS, {**HELLO, "prompt": "word " * 700_000}, "prompt"),
        (COMPLETIONS, {**HELLO, "prompt": [1] * 200_000}, "prompt"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "word " * 700_000}]}, "messages"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "word " * 100}] * 100}, "messages"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    path: str, content: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Serving() as serving:
        refusing(serving, monkeypatch)
        refused = serving.post(path, content)
        assert refused.status == 400
        assert refused.json["error"]["param"] == field
        assert "must leave room for an answer" in refused.json["error"]["message"]


def test_prompts_that_take_long_to_read_delay_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with Serving() as serving:
        serving.complete()  # what it imports and compiles is there
        go, reading = threading.Event(), threading.Event()

        def slow(prompt: str) -> str:
            if len(prompt) > 100_000:
                reading.set()
                assert go.wait(60)
            return prompt

        read = ChatRequest.__pydantic_validator__.validate_json

        class Validator:
            def validate_json(self, body: Any, **options: Any) -> Any:
                slow(str(body))
                return read(body, **options)

        monkeypatch.setattr(ChatRequest, "__pydantic_validator__", Validator())
        long = {**CHAT, "messages": [{"role": "user", "content": "x" * 200_000}]}

        async def crowd() -> None:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(12):
                    await stack.enter_async_context(sent(serving.port, "/v1/chat/completions", long))
                await asyncio.to_thread(reading.wait, 60)
                for _ in range(3):
                    answered = await asyncio.to_thread(serving.complete)
                    assert answered["usage"]["completion_tokens"] == 8
                go.set()

        asyncio.run(crowd())
        serving.until_idle()


def test_one_greedy_client_does_not_starve_the_others() -> None:
    """64 prompts of 3,000 tokens, which take 12 s on an idle machine, and short ones that came later."""
    long = {**HELLO, "prompt": "long " * 600, "max_tokens": 64, **STREAM}
    with Serving(api_keys=KEYS) as serving:

        async def crowd() -> list[Any]:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(64):
                    await stack.enter_async_context(sent(serving.port, COMPLETIONS, long, KEY.format(KEYS[0])))
                await asyncio.to_thread(eventually, lambda: serving.engine.running >= 8)
                short = [
                    asyncio.to_thread(serving.post, COMPLETIONS, HELLO, Authorization=f"Bearer {key}")
                    for key in KEYS[2:]
                ]
                answers = await asyncio.gather(*short)
                assert serving.engine.stats.ended.get("length", 0) < 60, "the long ones still run"
                return answers

        answers = asyncio.run(crowd())
        assert [answer.status for answer in answers] == [200] * 8
        serving.until_idle()


def test_a_client_has_no_more_under_way_than_it_may() -> None:
    never_ending = {**HELLO, "max_tokens": 4000, **STREAM}
    with Serving(options=SLOW, max_per_client=1, api_keys=KEYS) as serving:

        async def crowd() -> None:
            async with sent(serving.port, COMPLETIONS, never_ending, KEY.format(KEYS[0])) as reader:
                await reader.readuntil(b"data: ")
                refused = await asyncio.to_thread(serving.post, COMPLETIONS, HELLO, Authorization=f"bearer  {KEYS[0]}")
                assert (refused.status, refused.json["error"]["code"]) == (429, "Overloaded")
                assert "1 requests of this client" in refused.json["error"]["message"]
                other = {"Authorization": f"Bearer {KEYS[1]}"}
                answered = await asyncio.to_thread(serving.post, COMPLETIONS, HELLO, **other)
                assert answered.status == 200

        asyncio.run(crowd())
        serving.until_idle()


def test_a_key_that_nothing_checks_makes_no_other_client() -> None:
    never_ending = {**HELLO, "max_tokens": 4000, **STREAM}
    with Serving(options=SLOW, max_per_client=1) as serving:

        async def crowd() -> None:
            async with sent(serving.port, COMPLETIONS, never_ending, KEY.format("made-up-1")) as reader:
                await reader.readuntil(b"data: ")
                refused = await asyncio.to_thread(serving.post, COMPLETIONS, HELLO, Authorization="Bearer made-up-2")
                assert (refused.status, refused.json["error"]["code"]) == (429, "Overloaded")

        asyncio.run(crowd())
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
    never_ending = {**HELLO, "max_tokens": 4000, **STREAM}
    with Serving(options=SLOW, max_running=1, queue_seconds=600) as serving:

        async def crowd() -> None:
            async with sent(serving.port, COMPLETIONS, never_ending) as reader:
                await reader.readuntil(b"data: ")
                began = time.monotonic()
                refused = await asyncio.to_thread(serving.post, COMPLETIONS, HELLO, X_Deadline_Ms="4000")
                assert time.monotonic() - began < 3.0
                assert refused.status == 429
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                assert json.loads(refused.body)["error"]["code"] == "Overloaded"

        asyncio.run(crowd())
        serving.until_idle()
