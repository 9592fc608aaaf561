"""Later requests of a known kind are bound to their kind: they are checked and answered as the first one was."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from support.kv_cache import PAGE, Rows, attention, contents, opened, outcome, spec, wait
from support.service import eventually

import gpu_actors as ga
from gpu_actors import ServiceActor


def test_a_sequence_that_grows_over_pages_is_answered_right_at_each_length() -> None:
    rows = Rows()
    with opened() as (_, cache):
        seq, plain = wait(cache.create()), wait(cache.create())
        keys, values = (np.concatenate(part) for part in zip(*(rows.new(1) for _ in range(3 * PAGE)), strict=True))
        for length in range(1, 3 * PAGE + 1):
            k, v, q = keys[length - 1 :][:1], values[length - 1 :][:1], rows.q(1, 1)
            out = np.empty_like(q)
            wait(cache.append([plain], k[None], v[None]))
            assert wait(cache.attend(q, [seq], k=k[None], v=v[None], out=out)).out is out
            assert wait(cache.attend(q, [plain])).out.tobytes() == out.tobytes()
            np.testing.assert_allclose(out[0], attention(q[0], keys[:length], values[:length]), rtol=1e-5)
        for one in (seq, plain):
            np.testing.assert_array_equal(contents(cache, one), (keys, values))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"causal": 1}, "causal"),
        ({"window_size": (-1, False)}, "window_size"),
        ({"softcap": -1.0}, "softcap"),
        ({"softmax_scale": "1"}, "softmax_scale"),
        ({"expect_length": 7}, "expect_length"),
        ({"rope": ga.Rope(dim=32)}, "rope.dim"),
        ({"tokens": [[1, 2]]}, "tokens"),
        ({"q_positions": np.zeros((2, 2), np.int32)}, "q_positions"),
        ({"tree_mask": np.ones(3)}, "tree_mask"),
        ({"window_size": []}, "window_size"),
        ({"softmax_scale": []}, "softmax_scale"),
    ],
)
def test_what_is_wrong_with_a_later_request_is_refused(changes: dict[str, Any], field: str) -> None:
    rows = Rows()
    with opened() as (_, cache):
        seq = wait(cache.create())
        for _ in range(2):
            k, v = rows.new(1, 1)
            wait(cache.attend(rows.q(1, 1), [seq], k=k, v=v))
        before = cache.length(seq)
        k, v = rows.new(1, 1)
        error = outcome(cache.attend(rows.q(1, 1), [seq], k=k, v=v, **changes))
        assert isinstance(error, ga.RequestError)
        assert error.field == field
        assert cache.length(seq) == before


def test_a_later_request_may_not_name_a_sequence_twice_or_write_over_its_q() -> None:
    rows = Rows()
    with opened() as (_, cache):
        first, second = wait(cache.create(), cache.create())
        for _ in range(2):
            k, v = rows.new(2, 1)
            q = rows.q(2, 1)
            wait(cache.attend(q, [first, second], k=k, v=v, out=np.empty_like(q)))
        error = outcome(cache.attend(q, [first, first], k=k, v=v, out=np.empty_like(q)))
        assert isinstance(error, ga.InvalidRequest)
        assert error.field == "seqs"
        wide = np.zeros((3, *q.shape[1:]), np.float32)
        error = outcome(cache.attend(wide[:2], [first, second], k=k, v=v, out=wide[1:]))
        assert isinstance(error, ga.InvalidRequest)
        assert error.field == "out"
        assert (cache.length(first), cache.length(second)) == (2, 2)


def test_options_of_one_value_and_several_types_are_told_apart() -> None:
    rows = Rows()
    with opened() as (_, cache):
        seq = wait(cache.create())
        wait(cache.append(seq, *rows.new(4)))
        q = rows.q(1, 2)
        results = [wait(cache.attend(q, [seq], **options)).out for options in ({}, {"sink_tokens": 0}, {})]
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()
        for options in ({"sink_tokens": False}, {"num_splits": False}, {"attention_chunk": False}):
            assert isinstance(outcome(cache.attend(q, [seq], **options)), ga.RequestError), options
        windowed = wait(cache.attend(q, [seq], window_size=(1, 0))).out
        assert windowed.tobytes() != results[0].tobytes()


def test_a_kind_keeps_no_array_of_a_request() -> None:
    rows = Rows()
    with opened() as (_, cache):
        seq = wait(cache.create())
        for _ in range(3):
            q, (k, v) = rows.q(1, 1), rows.new(1, 1)
            kept = [weakref.ref(array) for array in (q, k, v)]
            wait(cache.attend(q, [seq], k=k, v=v))
            wait(cache.append([seq], k, v))
            del q, k, v
        gc.collect()
        wait(cache.attend(rows.q(1, 1, heads=2), [seq]))  # so that the actor and its stream release earlier ones
        assert [one() for one in kept] == [None] * 3


def test_a_kind_of_append_serves_tables_of_any_width() -> None:
    """One sequence and lists of sequences, which are different kinds, with rows that begin or end pages."""
    rows = Rows()
    with opened(num_blocks=40) as (_, cache):
        for listed in (False, True):
            seq = wait(cache.create())
            keys, values = (np.concatenate(part) for part in zip(*(rows.new(3) for _ in range(20)), strict=True))
            for start in range(0, 60, 3):
                k, v = keys[start : start + 3], values[start : start + 3]
                wait(cache.append([seq], k[None], v[None]) if listed else cache.append(seq, k, v))
            np.testing.assert_array_equal(contents(cache, seq), (keys, values))
            fork = wait(cache.fork(seq))
            wait(cache.append(fork, *rows.new(3)))
            np.testing.assert_array_equal(contents(cache, seq), (keys, values))


def test_a_closed_cache_lets_go_of_its_pool_without_a_collection() -> None:
    rows = Rows()
    gc.disable()
    try:
        with ga.open_context("mock") as ctx:
            with ctx.kv_cache(**spec()) as cache:
                seq = wait(cache.create())
                k, v = rows.new(1, 1)
                for _ in range(2):
                    wait(cache.attend(rows.q(1, 1), [seq], k=k, v=v), cache.append([seq], k, v))
                pool = weakref.ref(cache._find())
            eventually(lambda: pool() is None)
    finally:
        gc.enable()


def test_kernels_append_to_a_growing_table() -> None:
    """Rows are appended one after another, and by several requests in flight."""
    rows = Rows()
    options = ga.ContextOptions(arch="sm_80")
    with ga.open_context("emulated", options) as ctx, ctx.kv_cache(**spec(page_size=2, dtype="float16")) as cache:
        seq = wait(cache.create())
        kept = [tuple(side.astype(np.float16) for side in rows.new(1)) for _ in range(7)]
        for k, v in kept[:4]:
            wait(cache.append(seq, k, v))
        wait(*[cache.append(seq, k, v) for k, v in kept[4:]])
        for got, wanted in zip(contents(cache, seq), zip(*kept, strict=True), strict=True):
            np.testing.assert_array_equal(got, np.concatenate(wanted))


def test_q_is_the_first_input_which_decides_where_the_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    firsts: list[str] = []
    launch = ServiceActor.launch

    def noted(self: ServiceActor, calls: Any, made: Any, *arguments: Any) -> None:
        firsts.append(next(iter(made.inputs)))
        launch(self, calls, made, *arguments)

    monkeypatch.setattr(ServiceActor, "launch", noted)
    factors = np.ones(2, np.float32)
    rows = Rows()
    with opened(dtype="float8_e4m3fn", k_descale=factors, v_descale=factors) as (_, cache):
        seq = wait(cache.create())
        for _ in range(3):
            k, v = (side.astype(np.float16) for side in rows.new(1, 1))
            wait(cache.attend(rows.q(1, 1).astype(np.float16), [seq], k=k, v=v))
    assert firsts == ["q"] * 3
