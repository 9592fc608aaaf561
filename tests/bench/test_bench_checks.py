"""The checks before timing compare slices that are problems of their own, at the corners and elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_actors.bench.arrays import HostArrays, has_special
from gpu_actors.bench.cases import Case
from gpu_actors.bench.checks import check_backward, check_decode, check_forward, visible_part
from gpu_actors.reference import attention_backward, attention_forward


@pytest.mark.parametrize("window", [None, 0, 13])
@pytest.mark.parametrize("lengths", [(80, 80), (40, 100), (100, 40)])
def test_rows_and_their_keys_make_a_problem_of_their_own(lengths: tuple[int, int], window: int | None) -> None:
    case = Case(batch=1, rows=lengths[0], keys=lengths[1], heads=1, kv_heads=1, head_dim=16, causal=True, window=window)
    arrays = HostArrays()
    q, k, v = (arrays.random(shape, "float32") for shape in (case.q_shape, case.kv_shape, case.kv_shape))
    whole = attention_forward(q, k, v, **case.options()).out
    for start in (0, 17, lengths[0] - 5):
        rows = slice(start, min(start + 23, lengths[0]))
        keys = visible_part(case, rows)
        part = attention_forward(q[:, rows], k[:, keys], v[:, keys], **case.options()).out
        np.testing.assert_allclose(part, whole[:, rows], rtol=1e-12, atol=1e-12)


def test_the_check_reaches_the_corners() -> None:
    case = Case(batch=3, rows=150, keys=150, heads=4, kv_heads=2, head_dim=16)
    arrays = HostArrays()
    q, k, v = (arrays.random(shape, case.dtype) for shape in (case.q_shape, case.kv_shape, case.kv_shape))
    out = attention_forward(q, k, v).out.astype(q.dtype)
    assert check_forward(case, q, k, v, out).slices == 9
    for corner in ((0, 0, 0), (0, -1, 0), (-1, 0, -1), (-1, -1, -1)):
        bad = out.copy()
        bad[corner] += 1
        with pytest.raises(AssertionError, match="out is wrong"):
            check_forward(case, q, k, v, bad)


def test_a_decodes_check_gathers_each_sequence() -> None:
    case = Case(kind="decode", batch=3, rows=2, keys=50, heads=4, kv_heads=2, head_dim=16, causal=True)
    arrays = HostArrays()
    q, k, v = (arrays.random(shape, case.dtype) for shape in (case.q_shape, case.kv_shape, case.kv_shape))
    out = attention_forward(q, k, v, causal=True).out.astype(q.dtype)
    assert check_decode(case, q, lambda number: (k[number], v[number]), out).worst < 1
    with pytest.raises(AssertionError, match="out is wrong"):
        check_decode(case, q, lambda number: (k[0], v[0]), out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_poison_is_found_in_every_format(dtype: str) -> None:
    arrays = HostArrays()
    assert has_special(arrays.poisoned((3, 5), dtype))
    usual = arrays.random((3, 5), dtype)
    assert not has_special(usual)
    usual[1, 1] = np.nan
    assert has_special(usual)


def gradients_of(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = HostArrays()
    shapes = {"q": case.q_shape, "k": case.kv_shape, "v": case.kv_shape, "dout": case.q_shape}
    operands = {name: arrays.random(shape, case.dtype) for name, shape in shapes.items()}
    inputs = (operands["q"], operands["k"], operands["v"])
    forward = attention_forward(*inputs, **case.options())
    operands |= {"out": forward.out.astype(operands["q"].dtype), "lse": forward.lse.astype(np.float32)}
    exact = attention_backward(operands["dout"], *inputs, **case.options())
    return operands, {name: getattr(exact, name).astype(operands["q"].dtype) for name in ("dq", "dk", "dv")}


@pytest.mark.parametrize(
    "case",
    [
        Case(kind="backward", batch=2, rows=140, keys=140, heads=4, kv_heads=2, head_dim=16, causal=True),
        Case(kind="backward", batch=1, rows=140, keys=140, heads=2, kv_heads=2, head_dim=16),
        Case(kind="backward", batch=1, rows=140, keys=140, heads=2, kv_heads=1, head_dim=16, causal=True, window=30),
    ],
    ids=lambda case: case.name,
)
def test_right_gradients_pass_and_a_wrong_corner_of_each_does_not(case: Case) -> None:
    operands, gradients = gradients_of(case)
    assert check_backward(case, operands, gradients).worst < 1
    for name in ("dq", "dk", "dv"):
        for corner in ((0, 0, 0, 3), (-1, -1, -1, 3)):
            bad = {**gradients, name: gradients[name].copy()}
            bad[name][corner] += 1
            with pytest.raises(AssertionError, match=f"{name} is wrong"):
                check_backward(case, operands, bad)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_gradients_of_a_wrong_forward_are_found(name: str) -> None:
    case = Case(kind="backward", batch=1, rows=100, keys=100, heads=1, kv_heads=1, head_dim=16)
    operands, _ = gradients_of(case)
    operands[name] = (operands[name].astype(np.float32) + 0.3).astype(operands[name].dtype)
    inputs = (operands["q"], operands["k"], operands["v"])
    exact = attention_backward(operands["dout"], *inputs, out=operands["out"], lse=operands["lse"])
    gradients = {one: getattr(exact, one).astype(operands["q"].dtype) for one in ("dq", "dk", "dv")}
    with pytest.raises(AssertionError, match="is wrong"):
        check_backward(case, operands, gradients)
