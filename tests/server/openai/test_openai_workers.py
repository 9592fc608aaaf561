"""OpenAI's API over several workers: where texts run, and the cost of a lost worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterator

import pytest
from support.openai_server import Serving
from support.service import eventually, runs
from support.streams import asking

import gpu_actors as ga
from gpu_actors.remote import RemoteContext
from gpu_actors.server.openai.engines import Engines

pytestmark = pytest.mark.timeout(180)

OPTIONS = ga.ContextOptions(
    mock=ga.MockOptions(dtype="float32"), restart=ga.RestartPolicy(max_restarts=100, backoff=0.0)
)
SLOW = ga.ContextOptions(
    mock=ga.MockOptions(dtype="float32", latency=0.01), restart=ga.RestartPolicy(max_restarts=100, backoff=0.0)
)
WORKERS = ("worker-1", "worker-2")
LONG = {"model": "tiny", "max_tokens": 2000, "stream": True, "temperature": 0}


def engines_of(serving: Serving) -> Engines:
    assert isinstance(serving.engine, Engines)
    return serving.engine


def process_of(serving: Serving, name: str) -> int:
    context = engines_of(serving)._pool.workers[name]
    assert isinstance(context, RemoteContext)
    assert context.pid is not None
    return context.pid


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """Two workers. Leaving ends every process."""
    with Serving(models=("tiny", "minilm"), workers=2, options=OPTIONS) as running:
        pids = [process_of(running, name) for name in WORKERS]
        yield running
        running.until_idle()
    eventually(lambda: not any(runs(pid) for pid in pids))


@pytest.fixture(scope="module")
def alone() -> Iterator[Serving]:
    with Serving(models=("tiny", "minilm")) as running:
        yield running


def test_it_answers_as_one_context_and_uses_every_worker(serving: Serving, alone: Serving) -> None:
    workers, engines = engines_of(serving)._pool.workers, engines_of(serving)

    def least() -> int:
        return min(context.stats()["kv_cache"].submitted for context in workers.values())

    begun = serving.engine.stats.tokens - alone.engine.stats.tokens
    # A short prompt goes to one of two idle workers at random.
    for number in itertools.takewhile(lambda number: number < 4 or least() <= 20, range(200)):
        prompt = f"{number} begins"
        assert serving.complete(prompt=prompt)["choices"] == alone.complete(prompt=prompt)["choices"]
    assert serving.chat()["choices"] == alone.chat()["choices"]
    assert engines.longest == alone.engine.longest
    assert engines.pages()[0] == 2 * alone.engine.pages()[0]
    assert least() > 20
    assert engines.stats.tokens == alone.engine.stats.tokens + begun


def test_a_prompt_goes_where_its_beginning_is(serving: Serving) -> None:
    engines = engines_of(serving)
    for number in range(4):
        cached = engines.stats.cached
        prompt = str(number) * 64
        serving.complete(prompt=prompt)
        serving.complete(prompt=prompt + " and more")
        assert engines.stats.cached >= cached + 48


def test_a_lost_worker_costs_its_own_texts() -> None:
    with Serving(workers=2, options=SLOW) as serving, contextlib.ExitStack() as stack:
        engines = engines_of(serving)
        asked = [
            asking(serving.port, "/v1/completions", {**LONG, "prompt": f"{n} " * 20}, begun=False) for n in range(8)
        ]
        clients = [stack.enter_context(one) for one in asked]
        eventually(lambda: engines.running == 8)
        eventually(lambda: engines.stats.tokens > 60)
        homes = {name: engine.running for name, engine in engines._engines.items()}
        assert min(homes.values()) > 0
        os.kill(process_of(serving, "worker-1"), signal.SIGKILL)
        eventually(lambda: engines.running == homes["worker-2"])
        # The others go on, and new texts are answered.
        ready = serving.ask("/readyz")
        assert (ready.status, ready.json["ready"], set(ready.json["workers"])) == (200, True, set(WORKERS))
        assert ready.json["workers"]["worker-2"]["state"] == "ready"
        assert serving.complete()["choices"][0]["finish_reason"]
        eventually(lambda: len(engines._engines) == 2)
        for engine in engines:
            for text, generation in list(engine._generations.items()):
                text.cancelled = True
                generation.end("length")
        answers = [client.answer() for client in clients]
        assert {status for status, _ in answers} == {200}
        lost = [body for _, body in answers if b'"error"' in body]
        ended = [body for _, body in answers if b'"finish_reason":"length"' in body]
        assert len(lost) + len(ended) == 8
        assert lost
        assert ended
        assert all(body.endswith(b"\n\n") for _, body in answers)
        # The next generation of the worker generates too.
        before = engines._pool.workers["worker-1"].stats()["kv_cache"].submitted

        def generates() -> bool:
            return engines._pool.workers["worker-1"].stats()["kv_cache"].submitted > before

        for number in itertools.takewhile(lambda _: not generates(), range(200)):
            serving.complete(prompt=f"{number} again")
        assert generates()
        eventually(lambda: engines.running == engines.waiting == 0)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ga.InvalidRequest, match="workers"):
        Serving(workers=-1)
    with pytest.raises(AssertionError, match="startup failed"), Serving(workers=2, device="cuda:97"):
        pass


def test_an_embedding_is_that_of_one_context(serving: Serving, alone: Serving) -> None:
    asked = {"model": "all-MiniLM-L6-v2", "input": ["a text", "another one"]}
    wanted = alone.post("/v1/embeddings", asked).json["data"]
    for _ in range(4):
        answered = serving.post("/v1/embeddings", asked)
        assert answered.status == 200
        assert answered.json["data"] == wanted
    text = serving.ask("/metrics").body.decode()
    for name in WORKERS:
        completed = f'gpu_actors_requests_total{{actor="flash_attn",outcome="completed",worker="{name}"}} (.*)'
        (line,) = re.findall(completed, text)
        assert float(line) > 5
        assert f'gpu_actors_generation{{device="mock",worker="{name}"}} 1.0' in text
    assert text.count("# TYPE gpu_actors_generation gauge") == 1
    assert "gpu_actors_texts" in text
    assert serving.ask("/livez").status == 200
