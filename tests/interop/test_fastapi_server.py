"""examples/fastapi_server.py over real sockets: it generates the tokens of the same model without a cache."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.modules import ROOT, module_at
from support.served import Served
from support.service import eventually

import gpu_actors as ga
from gpu_actors import asgi
from gpu_actors.testing import FaultPlan

torch = pytest.importorskip("torch", reason="the example's model is torch's")
PROMPTS = [[3, 14, 15, 9, 26], [1], [*range(40)], [5, 5, 5]]


class Running(Served):
    """The example on its own port, imported anew, with its own weights."""

    def __init__(self, **options: Any) -> None:
        self.example: Any = module_at(ROOT / "examples" / "fastapi_server.py")
        app = self.example.app
        app.router.lifespan_context = asgi.lifespan("mock", ga.ContextOptions(**options), prepare=self.prepare)
        super().__init__(app)

    @asynccontextmanager
    async def prepare(self, context: Any) -> AsyncIterator[dict[str, Any]]:
        async with self.example.prepare(context) as state:
            self.batch = state["batch"]
            yield state

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        reply = self.ask(
            "/generate",
            "POST",
            body=json.dumps({"tokens": prompt, "count": count}),
            headers={"Content-Type": "application/json"},
        )
        assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        events = reply.body.decode().removesuffix("\n\n").split("\n\n")
        return [int(event.removeprefix("data: ")) for event in events]

    def plain(self, prompt: list[int], count: int) -> list[int]:
        """The tokens by torch's attention over the whole text, computed anew for each token."""

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            heads = (x.transpose(0, 1) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1)

        tokens = list(prompt)
        for _ in range(count):
            tokens += self.batch.model.next_tokens([tokens], [0], attend)
        return tokens[len(prompt) :]

    def is_empty(self) -> bool:
        """Whether no text runs and no sequence holds a page."""
        stats = self.batch.cache.stats()
        return not self.batch.texts and (stats.sequences, stats.free_blocks) == (0, stats.blocks)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running() as server:
        yield server


def test_texts_that_run_together_each_get_their_own_tokens(running: Running) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(running.tokens, PROMPTS, [12, 30, 5, 64]))
    assert found == [running.plain(prompt, count) for prompt, count in zip(PROMPTS, [12, 30, 5, 64], strict=True)]
    assert len({token for tokens in found for token in tokens}) > 3
    eventually(running.is_empty)


def test_a_text_may_be_as_long_as_the_model_allows(running: Running) -> None:
    assert len(running.tokens([1] * 64, 64)) == 64


def test_a_client_that_leaves_frees_its_sequence(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves while a pass computes a token for it."""
    model, passes = running.batch.model, threading.Semaphore(1)
    whole = model.next_tokens

    def wait(*arguments: Any) -> Any:
        assert passes.acquire(timeout=60)
        return whole(*arguments)

    monkeypatch.setattr(model, "next_tokens", wait)
    with httpx.Client(base_url=running.url, timeout=60) as client:
        with client.stream("POST", "/generate", json={"tokens": [7], "count": 64}) as reply:
            lines = reply.iter_lines()  # kept, because its end closes the connection
            assert next(lines).startswith("data: ")
            (text,) = running.batch.texts
        eventually(lambda: not running.batch.texts)
        assert running.batch.cache.stats().sequences == 1, "a pass still has it"
        passes.release()
        eventually(running.is_empty)
    assert len(text.tokens) < text.end
    monkeypatch.undo()
    assert running.tokens([7], 2) == running.plain([7], 2), "others are served as before"


@pytest.mark.parametrize("body", [{"tokens": []}, {"tokens": [64]}, {"tokens": [1], "count": 65}], ids=str)
def test_a_prompt_that_the_model_cannot_read_is_refused(running: Running, body: dict[str, Any]) -> None:
    reply = running.ask("/generate", "POST", body=json.dumps(body), headers={"Content-Type": "application/json"})
    assert reply.status == 422
    assert running.is_empty()


def test_a_pass_that_fails_ends_its_texts_with_an_event() -> None:
    with Running(fault_plan=FaultPlan().fail(launch=5)) as server:
        reply = httpx.post(f"{server.url}/generate", json={"tokens": [1, 2]}, timeout=60)
        assert reply.text.startswith("data: ")
        assert reply.text.endswith("event: error\ndata: LaunchError\n\n")
        eventually(server.is_empty)
        assert server.tokens([1, 2], 3) == server.plain([1, 2], 3)
