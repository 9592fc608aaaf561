"""Steps whose layers return their LSE, and steps over shared pages have the bits of requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases.cascades import CASES, Batch, Case
from fakes.tensor import HostTensor
from support.kv_cache import spec, wait
from support.steps import HEADS_Q, LAYERS, model

import gpu_actors as ga

IN_STEPS = [name for name in CASES if name != "a tree"]  # only requests take drafts
EMULATED = [("sm_80", "sinks, softcap and rows"), ("sm_80", "rotated"), ("sm_90a", "packed rows")]


def step_of(batch: Batch, asked: dict[str, Any]) -> ga.AttentionOutput:
    """The answer of a step of one layer to a request with new rows."""
    case = batch.case
    options = {name: value for name, value in asked.items() if name not in ("q", "k", "v", "cu_seqlens_q")}
    rows = case.rows if isinstance(case.rows, int) else list(case.rows)
    heads = asked["q"].shape[-2]
    step = wait(batch.cache.step(batch.seqs, heads_q=heads, rows=rows, append=case.new, dtype=case.dtype, **options))
    answer: ga.AttentionOutput = step.attend(0, asked["q"], asked.get("k"), asked.get("v"))
    wait(step.commit())
    return answer


def both_ways(case: Case, device: str, cascade: Any = True, **options: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Answers of three steps and of three requests, and the decisions on cascades in order."""
    events: list[Any] = []
    how = ga.ContextOptions(on_event=events.append, **options)
    steps, requests = [], []
    with (
        ga.open_context(device, how) as ctx,
        ctx.kv_cache(**case.spec, cascade=cascade) as cache,
        ctx.kv_cache(**case.spec, cascade=cascade) as twin,
    ):
        one, other = Batch(case, cache), Batch(case, twin)
        for _ in range(3):
            steps.append(step_of(one, one.request()))
            requests.append(wait(twin.attend(seqs=other.seqs, **other.request())))
    return steps, requests, [dict(event.fields) for event in events if event.name == "launch.cascade"]


def alike(steps: list[Any], requests: list[Any]) -> None:
    for step, request in zip(steps, requests, strict=True):
        np.testing.assert_array_equal(step.out.view(np.uint8), request.out.view(np.uint8))
        np.testing.assert_array_equal(step.lse, request.lse)


@pytest.mark.parametrize("name", IN_STEPS)
def test_a_step_reads_shared_pages_as_requests_do(name: str) -> None:
    steps, requests, decided = both_ways(CASES[name], "mock")
    alike(steps, requests)
    assert len(decided) == 6
    assert decided[::2] == decided[1::2]
    assert all(one["taken"] for one in decided)


@pytest.mark.parametrize(("arch", "name"), EMULATED)
def test_kernels_of_a_step_read_shared_pages_as_requests_do(arch: str, name: str) -> None:
    steps, requests, decided = both_ways(CASES[name], "emulated", arch=arch)
    alike(steps, requests)
    assert [one["taken"] for one in decided] == [True] * 6


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(options={"window_size": (12, 0)}), "does not see all keys"),
        (Case(options={"num_splits": 2}), "the same bits"),
        (Case(groups=((6, (0, 0)),)), "no neighbours begin with a whole page in common"),
    ],
    ids=["a window", "pinned splits", "no whole page"],
)
def test_a_step_says_why_it_is_no_cascade(case: Case, reason: str) -> None:
    steps, requests, decided = both_ways(case, "mock")
    alike(steps, requests)
    assert decided[::2] == decided[1::2]  # none once a fork has copied the page
    assert {(one["taken"], reason in one["reason"]) for one in decided} == {(False, True)}


def test_vllms_rule_decides_for_steps_too() -> None:
    shared = Case(groups=((259, (0,) * 8),))
    as_many_tiles = dataclasses.replace(shared, ratio=127)
    for case, taken in ((shared, True), (CASES["decode"], False), (as_many_tiles, False)):
        steps, requests, decided = both_ways(case, "mock", "auto")
        alike(steps, requests)
        assert [one["taken"] for one in decided] == [taken] * 6
    assert both_ways(shared, "mock", False)[2] == []


def test_a_step_that_is_planned_for_longer_ones_is_no_cascade() -> None:
    """A later step may replay its plan over sequences that share other pages."""
    events: list[Any] = []
    case = CASES["decode"]
    with (
        ga.open_context("mock", ga.ContextOptions(on_event=events.append)) as ctx,
        ctx.kv_cache(**case.spec, cascade=True) as cache,
    ):
        batch = Batch(case, cache)
        asked = batch.request()
        heads = asked["q"].shape[-2]
        for longest, cascades in ((200, 0), (None, 1)):
            step = wait(cache.step(batch.seqs, heads_q=heads, max_length=longest, return_lse=True))
            step.attend(0, asked["q"], asked["k"], asked["v"])
            wait(step.abort())
            assert [event.name for event in events].count("launch.cascade") == cascades


def test_layers_give_the_lse_that_a_request_gives() -> None:
    with model() as one:
        step = wait(one.cache.step(one.seqs, heads_q=HEADS_Q, layer_options={1: {"return_lse": True}}))
        q, (k, v) = one.rows.q(2, 1), one.rows.new(2, 1)
        out = np.empty_like(q)
        answers = [step.attend(layer, q, k, v, out=out if layer == 1 else None) for layer in range(LAYERS)]
        wait(step.commit())
        assert [isinstance(answer, ga.AttentionOutput) for answer in answers] == [layer == 1 for layer in range(LAYERS)]
        assert answers[1].out is out
        wanted = wait(one.cache.attend(q, one.seqs, layer=1, return_lse=True))
        np.testing.assert_array_equal(answers[1].lse, wanted.lse)
        np.testing.assert_array_equal(answers[1].out, wanted.out)
        again = wait(one.cache.step(one.seqs, heads_q=HEADS_Q, append=False, return_lse=True))
        foreign = again.attend(1, HostTensor(q))
        wait(again.abort())
        np.testing.assert_array_equal(foreign.lse, wanted.lse)


def test_a_step_in_another_process_gives_the_lse() -> None:
    with (
        ga.open_context("mock", isolation="process") as ctx,
        ctx.kv_cache(**spec(layers=2, cascade=True)) as cache,
    ):
        first = wait(cache.create())
        rng = np.random.default_rng(3)
        k, v = rng.standard_normal((2, 2, 19, 2, 16)).astype(np.float32)
        wait(cache.append(first, k, v))
        seqs = [first, wait(cache.fork(first))]
        q, (k, v) = rng.standard_normal((2, 1, 4, 16)).astype(np.float32), rng.standard_normal((2, 2, 1, 2, 16))
        new = k.astype(np.float32), v.astype(np.float32)
        step = wait(cache.step(seqs, heads_q=4, layer_options={0: {"return_lse": True}}))
        with_lse, alone = step.attend(0, q, *new), step.attend(1, q, *new)
        wait(step.commit())
        wanted = wait(cache.attend(q, seqs, layer=0, return_lse=True))
        np.testing.assert_array_equal(with_lse.out, wanted.out)
        np.testing.assert_array_equal(with_lse.lse, wanted.lse)
        np.testing.assert_array_equal(alone, wait(cache.attend(q, seqs, layer=1)).out)
