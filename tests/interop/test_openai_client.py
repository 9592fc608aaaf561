"""OpenAI's client library against a server of this package: its requests are taken, and it reads every answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.openai_server import MOCK, Serving
from support.service import eventually

import gpu_actors as ga

openai: Any = pytest.importorskip("openai")

MINILM = "all-MiniLM-L6-v2"
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    options = ga.ContextOptions(mock=MOCK.mock)
    with Serving(models=("tiny", "minilm"), options=options) as running:
        yield running
        running.until_idle()


@pytest.fixture
def client(serving: Serving) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_it_lists_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", MINILM]
    assert client.models.retrieve("tiny").owned_by == "gpu_actors"


def test_it_completes(client: Any) -> None:
    whole = client.completions.create(model="tiny", prompt="hello", max_tokens=12, temperature=0, logprobs=3)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.token_logprobs) == whole.usage.completion_tokens == 12
    stream = client.completions.create(
        model="tiny", prompt="hello", max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == choice.text
    assert chunks[-1].usage.completion_tokens == 12


def test_it_chats(client: Any) -> None:
    asked = {"model": "tiny", "messages": SAID, "max_tokens": 12, "seed": 5, "temperature": 0.7, "top_p": 0.9}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    # The client sends a returned message back in the next turn.
    again = [*SAID, message.model_dump(), {"role": "user", "content": "and then?"}]
    client.chat.completions.create(model="tiny", messages=again, max_tokens=2)


def test_its_own_reader_of_streams_takes_ours(client: Any) -> None:
    asked = {"model": "tiny", "messages": SAID, "max_tokens": 12, "seed": 5}
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == client.chat.completions.create(**asked).choices[0].message.content


async def test_its_asynchronous_form_streams_too(serving: Serving) -> None:
    async with openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="tiny", messages=SAID, max_tokens=8, stream=True)
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert reasons[-1] in ("stop", "length")


def test_it_embeds(client: Any) -> None:
    """The client asks for base64 by default."""
    texts = json.loads((DATA / "minilm_texts.json").read_text(encoding="utf-8"))[:3]
    wanted = np.load(DATA / "minilm_reference.npz")["embeddings"][:3]
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=MINILM, input=texts, **options)
        np.testing.assert_allclose([one.embedding for one in answer.data], wanted, atol=2e-6, rtol=0)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_it_leaves_a_stream_in_the_middle(client: Any, serving: Serving) -> None:
    stream = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=3000, temperature=0, stream=True)
    next(iter(stream))
    stream.close()
    eventually(lambda: serving.engine.running == 0)
    serving.until_idle()


def test_it_knows_our_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="hello", n=2)
    assert (bad.value.param, bad.value.code, bad.value.type) == ("n", "Unsupported", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=SAID)
    assert missing.value.param == "model"
    with pytest.raises(openai.APIStatusError) as late:
        client.completions.create(
            model="tiny", prompt="a", max_tokens=3000, temperature=0, extra_headers={"X-Deadline-Ms": "50"}
        )
    assert late.value.status_code == 504
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=3000, temperature=0, stream=True, extra_headers={"X-Deadline-Ms": "300"}
    )
    with pytest.raises(openai.APIError, match="the deadline passed"):
        list(stream)


def test_it_is_refused_with_429_and_returns_as_it_is_told() -> None:
    slow = ga.ContextOptions(mock=ga.MockOptions(dtype="float32", latency=0.005))
    with Serving(options=slow, max_running=1, max_waiting=0) as serving:
        with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client:
            long = {"model": "tiny", "prompt": "a", "max_tokens": 60, "temperature": 0}
            stream = client.completions.create(**long, stream=True)
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(**long)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            patient = client.with_options(max_retries=5).completions.create(model="tiny", prompt="b", max_tokens=2)
            assert patient.usage.completion_tokens >= 1
            stream.close()
        serving.until_idle()
