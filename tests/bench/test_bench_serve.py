"""``gpu-actors bench serve``: it puts load on a real server and finds faults in its streams."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.cli import Run
from support.openai_server import Serving

import gpu_actors as ga
from gpu_actors.bench.hostile_clients import unkind_figures
from gpu_actors.bench.serve import COLUMNS, Load, _bound, _fault, measure, serving, table


def test_the_suite_loads_a_server_and_loses_nothing(run: Run) -> None:
    code, out, _ = run("bench", "serve", "--device", "mock", "--quick", "--json")
    assert code == 0
    figures = json.loads(out)
    assert all(figures["environment"][name] for name in ("date", "cpu", "cpus", "python", "uvicorn", "starlette"))
    assert [(one["connections"], one["impatient"]) for one in figures["deadlines"]] == [
        (16, False),
        (32, False),
        (32, True),
    ]
    assert all(one["goodput_a_second"] > 0 for one in figures["deadlines"])
    assert [one["beside"] for one in figures["unkind"]] == ["64 greedy"]
    rows = list(table(figures))
    assert [row[0] for row in rows] == ["1", "16", "16", "32", "32, impatient", "16 beside 64 greedy"]
    assert {len(row) for row in rows} == {len(COLUMNS)}
    loads = figures["loads"]
    assert loads.keys() == {"1", "16"}
    for load in loads.values():
        assert (load["faults"], load["errors"], load["statuses"].keys()) == (0, {}, {"200"})
        assert load["requests"] == load["statuses"]["200"]
        assert (load["lost"], load["doubled"], load["late"], load["deadline_s"]) == (0, 0, 0, 60.0)
        assert 0 < load["queue_median_at_most_s"] <= load["queue_p99_at_most_s"] <= load["deadline_s"]
        assert load["streams"] == load["statuses"]["200"] > 0
        assert load["first_token_median_s"] <= load["stream_median_s"] <= load["stream_p99_s"]


def test_every_client_of_many_gets_its_own_answers() -> None:
    """Some are refused and ask again. No answer is lost, doubled or another client's."""
    with Serving(max_running=16, max_waiting=8, queue_seconds=1.0) as server:
        load = asyncio.run(measure(server.port, 64, 1.0))
        server.until_idle()
    assert load.faults == []
    assert load.statuses.keys() <= {"200", "429"}
    assert load.statuses["429"] > 0
    assert len(load.whole) == load.statuses["200"] == len(load.names)
    assert load.errors == {}


def test_no_text_is_let_in_after_its_deadline() -> None:
    """Without a deadline each would wait for the seven others before it, at least six seconds."""
    slow = ga.ContextOptions(mock=ga.MockOptions(dtype="float32", latency=0.03))
    with Serving(options=slow, max_running=1, queue_seconds=600) as server:
        load = asyncio.run(measure(server.port, 8, 1.2, deadline=0.6))
        server.until_idle()
    assert load.faults == []
    assert load.requests == load.answered == load.statuses.total()
    assert load.statuses.keys() <= {"200", "429", "504"}
    assert load.statuses["429"] + load.statuses["504"] > 0
    assert load.queue is not None
    assert load.queue[math.inf] == load.queue[2.5] > 0


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with Serving() as one:
        yield one
        one.until_idle()


def test_unkind_clients_are_counted_apart_and_the_others_by_what_they_felt(server: Serving) -> None:
    prompts, heads = unkind_figures(measure, server.port, 0.5, ["huge prompts", "slow heads"])
    assert prompts["unkind"].keys() == {"400"}
    assert heads["unkind"].keys() <= {"open", "closed"}
    for load in (prompts, heads):
        assert (load["faults"], load["statuses"].keys()) == (0, {"200"})
        assert load["streams"] > 0


def test_impatient_clients_return_at_once_and_a_refusal_takes_its_time() -> None:
    with Serving(max_running=1, max_waiting=0) as server:
        patient = asyncio.run(measure(server.port, 4, 0.7))
        impatient = asyncio.run(measure(server.port, 4, 0.7, impatient=True))
        server.until_idle()
    assert patient.statuses["429"] < impatient.statuses["429"] == len(impatient.refused)
    assert patient.seconds < 3.0, "what is told to return later waits no longer than the load"
    assert impatient.in_time <= len(impatient.whole)


def test_quantiles_are_bounds_that_hold_for_so_many() -> None:
    counts = {0.1: 49, 1.0: 98, 10.0: 99, math.inf: 100}
    assert (_bound(counts, 0.49), _bound(counts, 0.5), _bound(counts, 0.99)) == (0.1, 1.0, 10.0)
    assert _bound(counts, 1.0) is None, "above all bounds"
    assert _bound({0.1: 0, math.inf: 0}, 0.5) is None
    assert _bound(None, 0.5) is None


def test_clients_that_think_ask_less_often(server: Serving) -> None:
    load = asyncio.run(measure(server.port, 4, 0.5, think=0.05))
    idle = asyncio.run(measure(server.port, 4, 0.2, think=1e9))
    assert (load.faults, idle.faults) == ([], [])
    assert load.statuses.keys() == {"200"}
    assert idle.statuses == {}, "no pause was over"


def events(*contents: Any, end: str = "data: [DONE]\n\n") -> bytes:
    return "".join(f"data: {json.dumps(content)}\n\n" for content in contents).encode() + end.encode()


def stream(name: str = "a", prompt: int = 3, tokens: int = 16, reason: str = "length") -> list[Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
    return [{"id": name, "choices": [{"finish_reason": reason}]}, {"id": name, "choices": [], "usage": usage}]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (events(*stream()), ""),
        (events(*stream(tokens=5, reason="stop")), ""),
        (events(*stream(), end=""), "no [DONE] at the end"),
        (events(*stream(), end="data: [DONE]\n"), "no [DONE] at the end"),
        (events(*stream("seen")), "events of another stream"),
        (events(stream()[0], stream("b")[1]), "events of another stream"),
        (events(*stream(prompt=4)), "an answer to another prompt"),
        (events(*stream(tokens=15)), "15 tokens"),
    ],
)
def test_a_stream_that_is_not_what_it_says_is_a_fault(body: bytes, fault: str) -> None:
    assert _fault(body, Load(1, names={"seen"}), 3) == fault


def test_an_error_in_a_stream_is_counted_by_its_name() -> None:
    load = Load(1)
    assert _fault(events({"error": {"code": "ActorStopped"}}), load, 3) == ""
    assert load.errors == {"ActorStopped": 1}


def test_a_server_that_does_not_start_is_told() -> None:
    with pytest.raises(RuntimeError, match="abacus"), serving("abacus"):
        pass
