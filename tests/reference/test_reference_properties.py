"""What holds of any attention holds of the oracle. `tests/properties/test_relations.py` has more, of the service."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside.testing import SEQLENS

from gpu_actors.reference import attention_forward, forward
from gpu_actors.testing import ForwardCase, random_forward

Array = npt.NDArray[Any]


def assert_same(actual: Array, expected: Array, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def draw_case(seed: int, **choices: Any) -> ForwardCase:
    rng = np.random.default_rng(seed)
    seqlens = (int(rng.integers(1, 12)), int(rng.integers(1, 24)))
    return random_forward(seed, **{"dtype": "float64", "seqlens": seqlens, "head_dim": 5, **choices})


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_an_output_lies_between_the_smallest_and_largest_value(seed: int) -> None:
    case = draw_case(seed, features=("causal", "window", "softcap", "alibi", "sinks", "bias"), always=("sinks",))
    result = attention_forward(*case.inputs, **case.options)
    low, high = min(case.v.min(initial=0), 0), max(case.v.max(initial=0), 0)
    assert result.out.min() >= low - 1e-12
    assert result.out.max() <= high + 1e-12


@settings(max_examples=40, deadline=None)
@given(seeds, st.booleans())
def test_a_sequence_in_a_batch_is_bitwise_the_sequence_alone(seed: int, varlen: bool) -> None:
    features = ("causal", "window", "sink_tokens", "scale", "softcap", "sinks")
    case = draw_case(seed, varlen=varlen, batch=3, features=features, alignment="bottom_right")
    together = attention_forward(*case.inputs, **case.options)
    alone = {name: value for name, value in case.options.items() if not name.startswith("cu_seqlens")}
    row = key = 0
    for b, (rows, keys) in enumerate(case.seqlens):
        if varlen:
            part = (
                case.q[None, row : row + rows],
                case.k[None, key : key + keys],
                case.v[None, key : key + keys],
            )
            mine = together.out[None, row : row + rows], together.lse[None, :, row : row + rows]
        else:
            part = case.q[b : b + 1], case.k[b : b + 1], case.v[b : b + 1]
            mine = together.out[b : b + 1], together.lse[b : b + 1]
        single = attention_forward(*part, **alone)
        assert np.array_equal(single.out, mine[0])
        assert np.array_equal(single.lse, mine[1])
        row, key = row + rows, key + keys


@pytest.mark.parametrize("seed", range(8))
def test_tiles_of_any_size_give_the_same_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_forward(seed, dtype="float32", seqlens=(40, 33), head_dim=8, batch=3)
    whole = attention_forward(*case.inputs, **case.options)
    for size in (1, 3000, 40_000):
        monkeypatch.setattr(forward, "_BLOCK_BYTES", size)
        tiled = attention_forward(*case.inputs, **case.options)
        assert_same(tiled.out, whole.out)
        assert_same(tiled.lse, whole.lse)


@pytest.mark.parametrize("seqlens", SEQLENS)
def test_float32_accumulation_is_float64_to_single_precision(seqlens: tuple[int, int]) -> None:
    case = random_forward(seqlens[0], dtype="float32", seqlens=seqlens, head_dim=40, batch=1, kind="gaussian")
    double = attention_forward(*case.inputs, **case.options)
    single = attention_forward(*case.inputs, **case.options, accumulate="float32")
    assert single.out.dtype == single.lse.dtype == np.float32
    assert_same(single.out, double.out, 2e-5)
    assert_same(single.lse, double.lse, 2e-5)
