"""A step or a layer that cannot be taken is refused by the name of the field."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from support.kv_cache import PAGE, outcome, spec, wait
from support.steps import HEADS_Q, LAYERS, error_of, model

import gpu_actors as ga

ROPE = ga.Rope(dim=16, table_rows=4)
SHORT = {"rope": ROPE, "rope_cos": np.ones((4, 8), np.float32), "rope_sin": np.zeros((4, 8), np.float32)}
WIDE = np.zeros((2, 1, HEADS_Q, 16), np.float32)


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"heads_q": 0}, "heads_q", 0),
        ({"heads_q": "4"}, "heads_q", "4"),
        ({"heads_q": 3}, "heads_q", 3),
        ({"heads_q": 10**30}, "heads_q", 10**30),
        ({"heads_q": [4, 4, 3, 4]}, "heads_q[2]", 3),
        ({"heads_q": [4, 4, 4, 10**30]}, "heads_q[3]", 10**30),
        ({"rows": 0}, "rows", 0),
        ({"rows": True}, "rows", True),
        ({"rows": [1]}, "rows", [1]),
        ({"rows": [1, -1]}, "rows[1]", -1),
        ({"rows": ["a", 1]}, "rows[0]", "a"),
        ({"rows": [1, None]}, "rows[1]", None),
        ({"rows": [1, 1.5]}, "rows[1]", 1.5),
        ({"rows": [1, 10**30]}, "rows[1]", 10**30),
        ({"rows": 10**30}, "rows", 10**30),
        ({"heads_q": 2**40}, "heads_q", 2**40),
        ({"rows": 2**40}, "rows", 2**40),
        ({"max_length": 2**40}, "max_length", 2**40),
        # Sizes that are valid one by one, but together more than a process or a grid can hold.
        ({"heads_q": 2**31 - 2, "rows": 2**30 - 1}, "heads_q", 2**31 - 2),
        ({"heads_q": [4, 4, 4, 2**31 - 2], "rows": 2**30 - 1}, "heads_q[3]", 2**31 - 2),
        ({"heads_q": 2**24, "rows": 2**20, "append": False}, "seqs", 2),
        ({"rows": 2**30 - 1}, "seqs", 2**30 + PAGE),
        ({"rows": [np.int64(9), np.int64(1)], "max_length": 8}, "seqs[0]", "14 rows"),
        ({"rows": np.int64(4), "max_length": 8}, "seqs[0]", "9 rows"),
        ({"append": 1}, "append", 1),
        ({"dtype": "int8"}, "dtype", "int8"),
        ({"like": 5}, "like", "5"),
        ({"like": ["q"]}, "like", "['q']"),
        ({"like": {"lse": WIDE}}, "like", "lse"),
        ({"like": {"q": 5}}, "q", "int"),
        ({"like": {"k": WIDE}}, "k", "float32[2, 1, 4, 16]"),
        ({"like": {"out": WIDE[:1]}}, "out", "float32[1, 1, 4, 16]"),
        ({"like": {1: {"q": WIDE, "lse": WIDE}}}, "like[1]", "lse"),
        ({"like": {1: 5}}, "like[1]", "5"),
        ({"like": {LAYERS: {}}}, "like", LAYERS),
        ({"like": {2: {"q": 5}}}, "like[2].q", "int"),
        ({"like": {np.int64(2): {"q": 5}}}, "like[2].q", "int"),
        ({"like": {0: {"q": WIDE}, 2: {"k": WIDE}}}, "like[2].k", "float32[2, 1, 4, 16]"),
        ({"like": {3: {"out": WIDE[:1]}}}, "like[3].out", "float32[1, 1, 4, 16]"),
        ({"like": {3: {"q": WIDE}}, "layer_options": {3: {"softcap": -1.0}}}, "layer_options[3].softcap", -1.0),
        ({"layer_options": 5}, "layer_options", 5),
        ({"layer_options": {LAYERS: {}}}, "layer_options", LAYERS),
        ({"layer_options": {True: {}}}, "layer_options", True),
        ({"layer_options": {1: 5}}, "layer_options[1]", "5"),
        ({"layer_options": {1: {"sink": 2}}}, "layer_options[1]", "sink"),
        ({"layer_options": {1: {"q": WIDE}}}, "layer_options[1]", "q"),
        ({"layer_options": {1: {"layer": 2}}}, "layer_options[1]", "layer"),
        ({"layer_options": {1: {"seqs": []}}}, "layer_options[1]", "seqs"),
        ({"layer_options": {1: {"tokens": [[1], [1]]}}}, "layer_options[1]", "tokens"),
        ({"layer_options": {1: {"expect_length": [9, 9]}}}, "layer_options[1]", "expect_length"),
        ({"layer_options": {1: {"out": WIDE}}}, "layer_options[1]", "out"),
        ({"return_lse": 1}, "return_lse", 1),
        ({"layer_options": {1: {"window_size": (-5, 0)}}}, "layer_options[1].window_size", (-5, 0)),
        ({"layer_options": {1: {"sinks": np.ones(5, np.float32)}}}, "layer_options[1].sinks", "float32[5]"),
        ({"layer_options": {1: {"num_splits": 1000}}}, "layer_options[1].num_splits", 1000),
        ({"layer_options": {1: {"causal": True}}, "softcap": -1.0}, "softcap", -1.0),
        ({"layer_options": {1: SHORT}}, "layer_options[1].rope.table_rows", 4),
        ({"layer_options": {0: SHORT}}, "layer_options[0].rope.table_rows", 4),
        (
            {"layer_options": {3: {"bias": np.zeros((1, 1, 1, 6), np.float32)}}},
            "layer_options[3].bias",
            "float32[1, 1, 1, 6]",
        ),
        (SHORT, "rope.table_rows", 4),
        ({"window_size": []}, "window_size", []),
        ({"window_size": None}, "window_size", None),
        ({"softmax_scale": []}, "softmax_scale", []),
        ({"softcap": -1.0}, "softcap", -1.0),
        ({"causal": 1}, "causal", 1),
        ({"expect_length": [5, 5]}, "expect_length", [5, 5]),
        ({"expect_length": 5}, "expect_length", 5),
        ({"tokens": [1, 2, 3]}, "tokens", "[1, 2, 3]"),
        ({"append": False, "rope": ROPE}, "rope", ROPE),
    ],
)
def test_what_a_step_cannot_be_is_refused_by_name(options: dict[str, Any], field: str, value: Any) -> None:
    with model() as one:
        refusal = outcome(one.cache.step(one.seqs, **{"heads_q": HEADS_Q, **options}))
        assert isinstance(refusal, ga.InvalidRequest | ga.Unsupported)
        assert (refusal.field, refusal.value) == (field, value)
        one.check()


def test_more_rows_than_a_launch_counts_are_refused_by_name() -> None:
    with model() as one:
        seqs = [*one.seqs, wait(one.cache.create())]
        rows = [2**30 - 1] * 3
        refusal = outcome(one.cache.step(seqs, heads_q=HEADS_Q, rows=rows, append=False))
        assert isinstance(refusal, ga.InvalidRequest)
        assert (refusal.field, refusal.value) == ("rows", rows)
        wait(one.cache.free(seqs[-1]))
        for count in (2**30, 2**31, 2**40):
            wide = np.broadcast_to(np.float32(0), (LAYERS, count, 2, 16))
            refusal = outcome(one.cache.append(one.seqs[0], wide, wide))
            assert isinstance(refusal, ga.InvalidRequest)
            assert (refusal.field, refusal.value) == ("k", f"float32[{count}, 2, 16]")
        one.check()


def test_a_step_of_many_heads_takes_no_memory_before_its_layers() -> None:
    with model() as one:
        tracemalloc.start()
        try:
            step = one.step(append=False)
            wait(step.abort())
            step = wait(one.cache.step(one.seqs, heads_q=2**20, append=False))
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
        wait(step.abort())
        one.check()


def test_sequences_that_cannot_step_are_refused_by_name() -> None:
    with model() as one, one.ctx.kv_cache(**spec()) as other:
        foreign, freed = wait(other.create(), one.cache.create())
        wait(one.cache.free(freed))
        first = one.seqs[0]
        for seqs, field in (
            (first, "seqs"),
            (5, "seqs"),
            ([5], "seqs[0]"),
            ([first, foreign], "seqs[1]"),
            ([first, freed], "seqs[1]"),
            ([first, first], "seqs"),
        ):
            refusal = outcome(one.cache.step(seqs, heads_q=HEADS_Q))  # type: ignore[arg-type]
            assert isinstance(refusal, ga.InvalidRequest)
            assert refusal.field == field
        one.check()


def test_arrays_that_the_step_was_not_begun_for_are_refused_and_the_step_goes_on() -> None:
    with model() as one:
        step = one.step()
        q, (k, v) = one.rows.q(2, 1), one.rows.new(2, 1)
        pool = one.cache._find().groups[0].k_pool
        for arguments, options, field in (
            ((LAYERS, q, k, v), {}, "layer"),
            ((-1, q, k, v), {}, "layer"),
            ((True, q, k, v), {}, "layer"),
            (("0", q, k, v), {}, "layer"),
            ((0, None, k, v), {}, "q"),
            ((0, q), {}, "k"),
            ((0, q, k), {}, "v"),
            ((0, q[:1], k, v), {}, "q"),
            ((0, q.astype(np.float64), k, v), {}, "q"),
            ((0, q[..., ::-1], k, v), {}, "q"),
            ((0, q, k, v[:, :, :1]), {}, "v"),
            ((0, 5, k, v), {}, "q"),
            ((0, q, k, v), {"out": q}, "out"),
            ((0, q, k, v), {"out": k}, "out"),
            ((0, q, k, v), {"out": pool.reshape(-1)[: q.size].reshape(q.shape)}, "out"),
            ((0, q, k, v), {"c_kv": k}, "c_kv"),
            ((0, q, k, v), {"stream": "x"}, "stream"),
            ((0, q, k, v), {"stream": True}, "stream"),
        ):
            refusal = error_of(lambda arguments=arguments, options=options: step.attend(*arguments, **options))
            assert isinstance(refusal, ga.InvalidRequest)
            assert refusal.field == field
        step.attend(np.int64(0), q, k, v)
        one.attend(step, range(1, LAYERS))
        assert wait(step.commit()) == [6, PAGE + 1]
        one.cut(5, PAGE)
        one.check()


def test_a_part_without_rows_of_a_larger_array_is_an_array_without_rows() -> None:
    with model() as one:
        with one.step(rows=[0, 0]) as step:
            for layer in range(LAYERS):
                q, (k, v) = one.rows.q(4, 1)[:, 0], one.rows.new(4, 1)
                assert step.attend(layer, q[2:2], k[2:2, 0], v[2:2, 0]).shape == (0, HEADS_Q, q.shape[2])
        one.check()


def test_a_refused_array_says_what_the_step_takes_in_words_of_arrays() -> None:
    with model() as one:
        step = one.step()
        q, (k, v) = one.rows.q(2, 1), one.rows.new(2, 1)
        for wrong in (q.astype(np.float64), q[:, 0], np.zeros((2, 1, HEADS_Q, 32), np.float32)[..., ::2]):
            taken = r"must be float32 of shape \(2, 1, 4, 16\), contiguous, on the host, as this step was planned for"
            with pytest.raises(ga.InvalidRequest, match=taken):
                step.attend(0, wrong, k, v)
        wait(step.abort())
        wide = np.zeros((2, 1, HEADS_Q, 32), np.float32)[..., :16]
        step = one.step(like={"q": wide})
        with pytest.raises(ga.InvalidRequest, match=r"with strides of \(512, 0, 128, 4\) bytes"):
            step.attend(0, q, k, v)
        wait(step.abort())
        one.check()


async def test_a_block_that_would_wait_on_the_event_loop_is_refused_when_it_is_entered() -> None:
    async with ga.open_context("mock") as ctx, ctx.kv_cache(**spec(layers=LAYERS)) as cache:
        seq = await cache.create()
        step = await cache.step([seq], heads_q=HEADS_Q)
        entered = False
        with pytest.raises(ga.WouldBlock, match="use async with"), step:
            entered = True
        assert not entered
        await step.abort()
        assert cache.length(seq) == 0
