"""The oracle's gradients against central differences of its forward, and against laws of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from cases.finite_differences import differences, disagreement
from cases.poison import poison_tail, poison_unseen

import gpu_actors as ga
from gpu_actors.errors import InvalidRequest
from gpu_actors.reference import (
    ReferenceGradients,
    attention_backward,
    attention_backward_low,
    attention_forward,
    backward,
)
from gpu_actors.testing import ForwardCase, random_forward

Array = npt.NDArray[Any]
SMALL = [(1, 1), (3, 5), (5, 3), (4, 4), (3, 1), (1, 6), (3, 0), (0, 4)]
HEADS = [(2, 2), (4, 2), (3, 1)]
TOLERANCE = 1e-10


def small_case(seed: int, **choices: Any) -> tuple[ForwardCase, Array]:
    """A problem small enough to differentiate by every element, in float64, with its dout."""
    given = {
        "dtype": "float64",
        "seqlens": SMALL[seed % len(SMALL)],
        "heads": HEADS[seed % len(HEADS)],
        "head_dim": 2 + seed % 2,
        "head_dim_v": 1 + seed % 3,
        "batch": 1 + seed % 2,
        "kind": "gaussian",
        "alignment": ("bottom_right", "top_left")[seed // 2 % 2],
        **choices,
    }
    case = random_forward(seed, **given)
    for name in ("bias", "sinks"):
        if name in case.options:
            case.options[name] = case.options[name].astype(np.float64)
    shape = (*case.q.shape[:-1], case.v.shape[-1])
    return case, np.random.default_rng(seed).standard_normal(shape)


def differentiable(case: ForwardCase) -> dict[str, Array]:
    arrays = {"q": case.q, "k": case.k, "v": case.v}
    return arrays | {name: case.options[name] for name in ("bias", "sinks") if name in case.options}


def by_name(gradients: ReferenceGradients) -> dict[str, Array]:
    named = {name: getattr(gradients, f"d{name}") for name in ("q", "k", "v", "bias", "sinks")}
    return {name: array for name, array in named.items() if array is not None}


def by_differences(case: ForwardCase, dout: Array) -> dict[str, Array]:
    def loss(arrays: Mapping[str, Array]) -> float:
        return float((attention_forward(**{**case.options, **arrays}).out * dout).sum())

    return differences(loss, differentiable(case))


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in range(24, 1048, 64))])
def test_every_option_agrees_with_central_differences(first: int) -> None:
    for seed in range(first, first + (64 if first else 24)):
        case, dout = small_case(seed)
        gradients = attention_backward(dout, *case.inputs, **case.options)
        assert disagreement(by_name(gradients), by_differences(case, dout)) < TOLERANCE, case.repro


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_the_gradient_of_a_bias_is_summed_over_what_it_is_broadcast_along(shape: tuple[int, int]) -> None:
    case, dout = small_case(0, seqlens=(3, 2), heads=(4, 2), head_dim=2, batch=2, varlen=False, features=("causal",))
    case.options["bias"] = np.random.default_rng(0).normal(size=(*shape, 3, 2))
    gradients = attention_backward(dout, *case.inputs, **case.options)
    assert disagreement(by_name(gradients), by_differences(case, dout)) < TOLERANCE


def test_tiles_of_any_height_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    always = ("causal", "softcap", "dropout", "sinks", "bias")
    case, dout = small_case(5, features=always, always=always, seqlens=(9, 11), varlen=False, heads=(4, 2))
    whole = by_name(attention_backward(dout, *case.inputs, **case.options))
    for size in (64, 500, 3000):
        monkeypatch.setattr(backward, "_BLOCK_BYTES", size)
        assert disagreement(by_name(attention_backward(dout, *case.inputs, **case.options)), whole) < 1e-13


# Absent rows and keys


def three_by_two() -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(0)
    q, dout = rng.normal(size=(2, 1, 3, 2, 4))
    k, v = rng.normal(size=(2, 1, 2, 2, 4))
    return dout, q, k, v


def test_a_row_without_keys_has_no_gradient_and_gives_none() -> None:
    dout, q, k, v = three_by_two()
    whole = attention_backward(dout, q, k, v, causal=True)
    assert np.all(whole.dq[:, 0] == 0)
    rest = attention_backward(dout[:, 1:], q[:, 1:], k, v, causal=True)
    assert disagreement(by_name(whole) | {"q": whole.dq[:, 1:]}, by_name(rest)) < 1e-15
    dout[:, 0], q[:, 0] = np.nan, np.inf
    spoiled = attention_backward(dout, q, k, v, causal=True)
    for name, gradient in by_name(spoiled).items():
        assert np.array_equal(gradient, by_name(whole)[name]), name


def test_packed_rows_past_the_last_sequence_get_and_give_nothing() -> None:
    case, dout = small_case(3, varlen=True, seqlens=(7, 9), batch=3, features=("causal", "sinks"))
    whole = attention_backward(dout, *case.inputs, **case.options)
    padded_dout = poison_tail(dout, 5)
    padded = attention_backward(padded_dout, *(poison_tail(array, 5) for array in case.inputs), **case.options)
    for name, gradient in by_name(padded).items():
        expected = by_name(whole)[name]
        assert np.array_equal(gradient[: len(expected)], expected)
        assert not gradient[len(expected) :].any()


# NaN and infinities


@pytest.mark.parametrize("seed", range(6))
def test_poison_that_no_row_sees_changes_no_bit(seed: int) -> None:
    alignment = ("bottom_right", "top_left")[seed % 2]
    seqlens = ((5, 14), (14, 5))[seed % 2]
    case, dout = small_case(seed, seqlens=seqlens, always=("causal", "window"), alignment=alignment)
    clean = by_name(attention_backward(dout, *case.inputs, **case.options))
    poisoned = poison_unseen(case)
    for name, gradient in by_name(attention_backward(dout, *poisoned.inputs, **case.options)).items():
        assert np.array_equal(gradient, clean[name]), name


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["k", "v", "q", "dout"])
def test_a_special_value_reaches_the_rows_and_keys_that_meet_it_and_no_others(which: str, value: float) -> None:
    """Causal, 6 rows and keys: key or row 3 of head 1 is special. Rows from 3 on see key 3; row 3 sees keys up to 3."""
    rng = np.random.default_rng(1)
    arrays = dict(zip(("dout", "q", "k", "v"), rng.normal(size=(4, 1, 6, 2, 4)), strict=True))
    arrays["k"] = np.abs(arrays["k"])  # so that an infinite q makes scores of +inf
    clean = attention_backward(**arrays, causal=True)
    arrays[which] = arrays[which].copy()
    arrays[which][0, 3, 1, 2] = value
    spoiled = attention_backward(**arrays, causal=True)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(spoiled, name)[:, :, 0], getattr(clean, name)[:, :, 0]), "the other head"
    if which in ("k", "v"):
        assert np.array_equal(spoiled.dq[:, :3], clean.dq[:, :3])
        assert not np.isfinite(spoiled.dq[0, 3:, 1]).all()
    else:
        assert np.array_equal(np.delete(spoiled.dq, 3, axis=1), np.delete(clean.dq, 3, axis=1))
        assert np.array_equal(spoiled.dk[:, 4:], clean.dk[:, 4:])
        assert np.array_equal(spoiled.dv[:, 4:], clean.dv[:, 4:])
        assert not np.isfinite(spoiled.dv[0, :4, 1]).all()
    assert np.isfinite(clean.dq).all()


# The forward's results


def test_given_results_are_used_in_place_of_computing_them() -> None:
    always = ("sinks", "dropout", "causal")
    case, dout = small_case(1, features=always, always=always, seqlens=(5, 7), varlen=False, batch=2)
    forward = attention_forward(*case.inputs, **case.options)
    alone = by_name(attention_backward(dout, *case.inputs, **case.options))
    given = attention_backward(dout, *case.inputs, out=forward.out, lse=forward.lse, **case.options)
    assert disagreement(by_name(given), alone) < 1e-13
    shifted = attention_backward(dout, *case.inputs, out=forward.out, lse=forward.lse + np.log(2), **case.options)
    np.testing.assert_allclose(shifted.dv, given.dv / 2, rtol=1e-12)


def test_a_row_whose_lse_is_minus_infinity_has_no_gradient() -> None:
    dout, q, k, v = three_by_two()
    forward = attention_forward(q, k, v)
    lse = forward.lse.copy()
    lse[..., 1] = -np.inf
    gradients = attention_backward(dout, q, k, v, out=forward.out, lse=lse)
    assert not gradients.dq[:, 1].any()
    keep = [0, 2]
    others = attention_backward(dout[:, keep], q[:, keep], k, v)
    np.testing.assert_allclose(gradients.dk, others.dk, rtol=0, atol=1e-14)


# Precision


def test_absent_sinks_and_rows_without_an_lse_have_no_gradient_of_sinks_whatever_comes_in() -> None:
    """A sink of -inf has gradient 0; a row that sees neither key nor sink adds nothing, even if its dout is NaN."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 2, 2, 3))
    dout[0, 0] = math.nan  # the row that sees no key
    options: dict[str, Any] = {"window_size": (0, 0), "sinks": np.array([-math.inf, 0.5])}
    spoiled = attention_backward(dout, q, k[:, 1:], v[:, 1:], **options).dsinks
    assert spoiled is not None
    assert spoiled[0] == 0
    v[0, 1, 0] = math.nan  # seen by a row whose sink is -inf
    found = attention_backward(np.ones_like(dout), q, k[:, 1:], v[:, 1:], **options).dsinks
    assert found is not None
    assert found[0] == 0
    assert math.isfinite(found[1])


def test_single_precision_is_near_and_low_precision_lies_on_its_grid() -> None:
    case = random_forward(5, dtype="bfloat16", seqlens=(40, 50), head_dim=16, kind="gaussian")
    dout = np.random.default_rng(0).normal(size=(*case.q.shape[:-1], 16)).astype(ml_dtypes.bfloat16)
    exact = by_name(attention_backward(dout, *case.inputs, **case.options))
    single = by_name(attention_backward(dout, *case.inputs, accumulate="float32", **case.options))
    low = by_name(attention_backward_low(dout, *case.inputs, **case.options))
    for name, wanted in exact.items():
        scale = np.abs(wanted).max()
        assert single[name].dtype == np.float32
        assert 0 < np.abs(single[name] - wanted).max() < 1e-5 * scale
        assert np.array_equal(low[name], low[name].astype(ml_dtypes.bfloat16).astype(np.float32))
        assert 2.0**-12 * scale < np.abs(low[name] - wanted).max() < 0.1 * scale


def test_low_precision_of_double_is_the_oracle() -> None:
    case, dout = small_case(6, seqlens=(20, 30))
    exact = by_name(attention_backward(dout, *case.inputs, **case.options))
    assert disagreement(by_name(attention_backward_low(dout, *case.inputs, **case.options)), exact) < 1e-13


@pytest.mark.parametrize("field", ["dout", "out", "lse"])
def test_results_of_another_shape_are_refused_by_name(field: str) -> None:
    dout, q, k, v = three_by_two()
    given = {"dout": dout, "out": dout, "lse": np.zeros((1, 2, 3)), field: np.zeros((1, 3, 2))}
    with pytest.raises(InvalidRequest) as refusal:
        attention_backward(given.pop("dout"), q, k, v, **given)
    assert refusal.value.field == field


@pytest.mark.parametrize("sign", [1, -1])
def test_the_slope_of_a_softcap_that_is_reached_is_not_rounded_to_0(sign: int) -> None:
    """tanh(25) is 1 in float64. Its derivative, 1 / cosh(25)^2 = 4 / (e^25 + e^-25)^2, is 7.7e-22."""
    q, k = np.full((1, 1, 1, 1), 5.0), np.full((1, 2, 1, 1), sign * 5.0)
    v, dout = np.array([1.0, -1.0]).reshape(1, 2, 1, 1), np.ones((1, 1, 1, 1))
    found = attention_backward(dout, q, k, v, softmax_scale=1.0, softcap=1.0)
    # Both weights are 1/2 and dP is +-1, so dS is +-1/2 times the slope, and dK is dS times q.
    slope = 4.0 / (math.exp(25.0) + math.exp(-25.0)) ** 2
    np.testing.assert_allclose(found.dk.ravel(), [2.5 * slope, -2.5 * slope], rtol=1e-12)


# If a far number hides a whole row, a float32 LSE has no digits left for its scores


@pytest.mark.parametrize("sinks", [None, np.full(2, -1e10, np.float32)])
@pytest.mark.parametrize("low", [-1e9, float(np.finfo(np.float32).min)])
def test_gradients_of_rows_that_a_far_number_hides_are_finite(low: float, sinks: Any) -> None:
    rng = np.random.default_rng(0)
    dout, q, k, v = (rng.standard_normal((1, 16, 2, 64)).astype(np.float16) for _ in range(4))
    q, k = 10 * q, 10 * k  # scores of hundreds, far below the resolution of the hidden row's LSE
    bias = np.zeros((1, 1, 16, 16), np.float32)
    bias[:, :, 5] = low
    with ga.open_context("mock") as ctx:
        answer = ctx.flash_attn.forward(q, k, v, bias=bias, sinks=sinks, return_lse=True).result(30.0)
        gradients = ctx.flash_attn.backward(dout, q, k, v, answer.out, answer.lse, bias=bias, sinks=sinks).result(30.0)
        weights = np.abs(dout).sum(1, dtype=np.float64)  # dV if each weight were 1
    for name in ("dq", "dk", "dv", "dbias"):
        assert np.isfinite(getattr(gradients, name)).all(), name
    assert (np.abs(gradients.dv) <= 3.0 * weights[:, None]).all(), "no weight is above e"
