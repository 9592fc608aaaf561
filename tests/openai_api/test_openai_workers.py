"""OpenAI's API over several workers: where texts live, and what a worker that is lost costs."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from typing import Any

import pytest
from support.openai_server import Serving, body_of, sent
from support.service import eventually, runs

import gpu_actors as ga
from gpu_actors.openai_api.engines import Engines
from gpu_actors.remote import RemoteContext

pytestmark = pytest.mark.timeout(180)

OPTIONS = ga.ContextOptions(
    mock=ga.MockOptions(dtype="float32"), restart=ga.RestartPolicy(max_restarts=100, backoff=0.0)
)
SLOW = ga.ContextOptions(
    mock=ga.MockOptions(dtype="float32", latency=0.01), restart=ga.RestartPolicy(max_restarts=100, backoff=0.0)
)
LONG = {"model": "tiny", "max_tokens": 2000, "stream": True, "temperature": 0}


def engines_of(serving: Serving) -> Engines:
    assert isinstance(serving.engine, Engines)
    return serving.engine


def process_of(serving: Serving, name: str) -> int:
    context = engines_of(serving)._pool.workers[name]
    assert isinstance(context, RemoteContext)
    assert context.pid is not None
    return context.pid


def test_it_answers_as_one_context_and_uses_every_worker() -> None:
    with Serving() as alone, Serving(workers=2, options=OPTIONS) as serving:
        workers = engines_of(serving)._pool.workers

        def least() -> int:
            return min(context.stats()["kv_cache"].submitted for context in workers.values())

        # A short prompt goes to either of two idle workers by lot.
        for number in itertools.takewhile(lambda number: number < 8 or least() <= 20, range(200)):
            prompt = f"{number} begins"
            assert serving.complete(prompt=prompt)["choices"] == alone.complete(prompt=prompt)["choices"]
        assert serving.chat()["choices"] == alone.chat()["choices"]
        engines = engines_of(serving)
        assert engines.longest == alone.engine.longest
        assert engines.pages()[0] == 2 * alone.engine.pages()[0]
        assert least() > 20
        assert engines.stats.tokens == alone.engine.stats.tokens + 2  # of the second engine's warm-up
        serving.until_idle()


def test_a_prompt_goes_where_its_beginning_is() -> None:
    with Serving(workers=3, options=OPTIONS) as serving:
        engines = engines_of(serving)
        for number in range(4):
            cached = engines.stats.cached
            prompt = str(number) * 64
            serving.complete(prompt=prompt)
            serving.complete(prompt=prompt + " and more")
            assert engines.stats.cached >= cached + 48


def test_a_lost_worker_costs_its_own_texts() -> None:
    with Serving(workers=2, options=SLOW) as serving:
        engines = engines_of(serving)

        async def read(number: int) -> Any:
            async with sent(serving.port, "/v1/completions", {**LONG, "prompt": f"{number} " * 20}) as reader:
                status, body = body_of(await reader.read())
                return status, body.decode()

        async def all_of_them() -> list[Any]:
            reading = [asyncio.create_task(read(number)) for number in range(12)]
            await asyncio.to_thread(eventually, lambda: engines.running == 12)
            await asyncio.to_thread(eventually, lambda: engines.stats.tokens > 100)
            homes = {name: engine.running for name, engine in engines._engines.items()}
            assert min(homes.values()) > 0
            os.kill(process_of(serving, "worker-1"), signal.SIGKILL)
            await asyncio.to_thread(eventually, lambda: engines.running == homes["worker-2"])
            # The others go on, and new texts are answered.
            assert serving_is_ready(await asyncio.to_thread(serving.ask, "/readyz"))
            status, _ = await asyncio.to_thread(lambda: (serving.complete(), None))
            assert status["choices"][0]["finish_reason"]
            await asyncio.to_thread(eventually, lambda: len(engines._engines) == 2)
            for engine in engines:
                for text, generation in list(engine._generations.items()):
                    text.cancelled = True
                    generation.end("length")
            return [await one for one in reading]

        answers = asyncio.run(asyncio.wait_for(all_of_them(), 150))
        assert {status for status, _ in answers} == {200}
        lost = [body for _, body in answers if '"error"' in body]
        ended = [body for _, body in answers if '"finish_reason":"length"' in body]
        assert len(lost) + len(ended) == 12
        assert lost
        assert ended
        assert all(body.endswith("\n\n") for _, body in answers)
        # The next generation of the worker generates too.
        before = engines._pool.workers["worker-1"].stats()["kv_cache"].submitted

        def generates() -> bool:
            return engines._pool.workers["worker-1"].stats()["kv_cache"].submitted > before

        for number in itertools.takewhile(lambda _: not generates(), range(200)):
            serving.complete(prompt=f"{number} again")
        assert generates()
        eventually(lambda: engines.running == engines.waiting == 0)


def serving_is_ready(answered: Any) -> bool:
    content = answered.json
    assert set(content["workers"]) == {"worker-1", "worker-2"}
    return answered.status == 200 and bool(content["ready"]) and content["workers"]["worker-2"]["state"] == "ready"


def test_metrics_and_probes_tell_of_every_worker() -> None:
    with Serving(workers=2, options=OPTIONS) as serving:
        serving.complete()
        text = serving.ask("/metrics").body.decode()
        for name in ("worker-1", "worker-2"):
            assert f'gpu_actors_generation{{device="mock",worker="{name}"}} 1.0' in text
        assert text.count("# TYPE gpu_actors_generation gauge") == 1
        assert "gpu_actors_texts" in text
        assert serving.ask("/livez").status == 200


def test_leaving_ends_every_process() -> None:
    with Serving(workers=2, options=OPTIONS) as serving:
        pids = [process_of(serving, name) for name in ("worker-1", "worker-2")]
        serving.complete()
    eventually(lambda: not any(runs(pid) for pid in pids))


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ga.InvalidRequest, match="workers"):
        Serving(workers=-1)
    with pytest.raises(AssertionError, match="startup failed"), Serving(workers=2, device="cuda:97"):
        pass


def test_an_embedding_is_that_of_one_context() -> None:
    asked = {"model": "all-MiniLM-L6-v2", "input": ["a text", "another one"]}
    with Serving(models=("minilm",)) as alone, Serving(models=("minilm",), workers=2, options=OPTIONS) as serving:
        wanted = alone.post("/v1/embeddings", asked).json["data"]
        for _ in range(6):
            answered = serving.post("/v1/embeddings", asked)
            assert answered.status == 200
            assert answered.json["data"] == wanted
        text = serving.ask("/metrics").body.decode()
        for name in ("worker-1", "worker-2"):
            (line,) = re.findall(
                f'gpu_actors_requests_total{{actor="flash_attn",outcome="completed",worker="{name}"}} (.*)', text
            )
            assert float(line) > 5
