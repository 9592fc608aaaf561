"""Partials: merges of edge cases, the rules for a shard of keys, the gradient of a merge, and refusals."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.cuda import FakeCuda
from fakes.tensor import DeviceTensor, HostTensor
from inside.reference import attention_forward

import gpu_actors as ga
from gpu_actors.partial import MergeGradients, Partial, empty, merge, merge_gradients

HEADS, KV_HEADS, DIM = 4, 2, 8


def random(*shape: int, seed: int = 0, dtype: Any = "float64") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def whole(rows: int, keys: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = (
        random(1, n, h, DIM, seed=i) for i, (n, h) in enumerate([(rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)])
    )
    return q * scale, k, v


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Partial:
    result = attention_forward(q, k, v, **options)
    return Partial(result.out, result.lse)


def assert_equal(left: Partial, right: Partial, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(left.out, right.out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(left.lse, right.lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shift", [-800.0, 800.0])
def test_an_lse_beyond_the_range_of_exp_is_merged(shift: float) -> None:
    q, k, v = whole(3, 10)
    parts = [attend(q, k[:, :4], v[:, :4]), attend(q, k[:, 4:], v[:, 4:])]
    merged = merge([Partial(part.out, part.lse + shift) for part in parts])
    expected = attend(q, k, v)
    np.testing.assert_allclose(merged.lse, expected.lse + shift, rtol=1e-12)
    np.testing.assert_allclose(merged.out, expected.out, rtol=1e-11)  # lse + 800 keeps 13 digits


def test_the_out_of_an_empty_partial_is_not_read() -> None:
    q, k, v = whole(3, 10)
    part = attend(q, k, v)
    hollow = Partial(np.full_like(part.out, np.nan), np.full_like(part.lse, -np.inf))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = merge([hollow, part, hollow])
    np.testing.assert_array_equal(merged.out, part.out)
    np.testing.assert_array_equal(merged.lse, part.lse)


def test_rows_without_any_key_are_zero_with_lse_minus_infinity() -> None:
    merged = merge([empty((2, 3, 4, 8)), empty((2, 3, 4, 8))])
    assert merged.out.dtype == merged.lse.dtype == np.float32
    assert not merged.out.any()
    assert np.isneginf(merged.lse).all()
    assert merged.lse.shape == (2, 4, 3)
    with_sinks = merge([empty((2, 3, 4, 8))], sinks=np.array([0.0, 1.0, -np.inf, 5.0]))
    assert not with_sinks.out.any()
    np.testing.assert_allclose(with_sinks.lse[0, :, 0], [0, 1, -np.inf, 5])


@pytest.mark.parametrize("where", ["out", "lse"])
def test_nan_in_a_row_that_a_partial_saw_stays_in_that_row(where: str) -> None:
    q, k, v = whole(3, 10)
    parts = [attend(q, k[:, :4], v[:, :4]), attend(q, k[:, 4:], v[:, 4:])]
    getattr(parts[0], where)[(0, 1, 2) if where == "out" else (0, 2, 1)] = np.nan
    merged = merge(parts)
    ruined = np.isnan(merged.out).all(axis=-1)
    assert ruined[0, 1, 2]
    assert ruined.sum() == 1


@pytest.mark.parametrize("batch", [(0, 3), (2, 0), (2, 3)], ids=["no sequence", "no row", "no dim"])
def test_partials_without_elements_are_merged(batch: tuple[int, int]) -> None:
    shape = (*batch, 4, 0 if batch == (2, 3) else 8)
    merged = merge([empty(shape), empty(shape)])
    assert merged.out.shape == shape
    assert merged.lse.shape == (batch[0], 4, batch[1])


@pytest.mark.parametrize("sink", [-800.0, 800.0])
def test_sinks_beyond_the_range_of_exp_are_merged(sink: float) -> None:
    q, k, v = whole(3, 10)
    sinks = np.full(HEADS, sink)
    assert_equal(merge([attend(q, k, v)], sinks=sinks), attend(q, k, v, sinks=sinks))


# The gradient of the merge itself


def test_its_gradient_is_that_of_five_point_differences() -> None:
    rows, sinks = 2, random(HEADS, seed=9)
    parts = [Partial(random(1, rows, HEADS, DIM, seed=i), random(1, HEADS, rows, seed=i + 20)) for i in range(3)]
    dout, dlse = random(1, rows, HEADS, DIM, seed=7), random(1, HEADS, rows, seed=8)
    found = merge_gradients(parts, dout, dlse, sinks=sinks)

    def loss() -> float:
        merged = merge(parts, sinks=sinks)
        return float(np.sum(merged.out * dout) + np.sum(merged.lse * dlse))

    pairs = [(part.out, grad.out) for part, grad in zip(parts, found.partials, strict=True)]
    pairs += [(part.lse, grad.lse) for part, grad in zip(parts, found.partials, strict=True)]
    pairs.append((sinks, found.dsinks))
    for array, gradient in pairs:
        assert gradient.shape == array.shape
        flat = array.reshape(-1)
        for at in range(0, flat.size, 3):
            kept, differences = flat[at], []
            for step in (-2e-3, -1e-3, 1e-3, 2e-3):
                flat[at] = kept + step
                differences.append(loss())
            flat[at] = kept
            expected = (differences[0] - 8 * differences[1] + 8 * differences[2] - differences[3]) / 12e-3
            # dsinks comes back in float32.
            assert gradient.reshape(-1)[at] == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_the_gradient_beside_an_infinite_out_is_no_number_and_warns_of_nothing(wrong: float) -> None:
    """Only its own row is affected. No warning is given, as on a GPU, so that a test that fails on warnings passes."""
    q, k, v = whole(3, 8)
    parts = [attend(q, k[:, a : a + 4], v[:, a : a + 4]) for a in (0, 4)]
    parts[1].out[0, 1, 2] = wrong
    dout = random(1, 3, HEADS, DIM, seed=7)
    dout[0, 1, 2, 0] = 0
    found = merge_gradients(parts, dout)
    for into in found.partials:
        lost = ~np.isfinite(into.lse)
        assert np.argwhere(lost).tolist() == [[0, 2, 1]]


def test_the_gradient_of_what_a_row_did_not_see_is_zero_and_reads_nothing() -> None:
    part = Partial(random(1, 2, HEADS, DIM), random(1, HEADS, 2, seed=1))
    hollow = Partial(np.full_like(part.out, np.nan), np.full_like(part.lse, -np.inf))
    dout = random(1, 2, HEADS, DIM, seed=7)
    found = merge_gradients([hollow, part], dout)
    assert isinstance(found, MergeGradients)
    assert found.dsinks is None
    assert not found.partials[0].out.any()
    assert not found.partials[0].lse.any()
    np.testing.assert_allclose(found.partials[1].out, dout)
    np.testing.assert_allclose(found.partials[1].lse, 0, atol=1e-12)
    nothing = merge_gradients([hollow, hollow], dout, sinks=np.full(HEADS, -np.inf))
    assert not any(grad.out.any() or grad.lse.any() for grad in nothing.partials)
    assert not nothing.dsinks.any()


# Dtypes, libraries, refusals


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 2**-8), ("float16", 2**-11), ("float32", 2**-24)])
def test_out_is_rounded_once_to_the_dtype_of_the_outs(dtype: str, unit: float) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    parts = [
        Partial(random(2, 5, HEADS, DIM, seed=i).astype(kind), random(2, HEADS, 5, seed=i + 20, dtype="float32"))
        for i in range(4)
    ]
    exact = merge(parts, out_dtype="float64")
    merged = merge(parts)
    assert merged.out.dtype == kind
    assert merged.lse.dtype == np.float32
    assert exact.lse.dtype == np.float64
    np.testing.assert_array_equal(merged.out, exact.out.astype(kind))
    assert np.abs(merged.out.astype(np.float64) - exact.out).max() <= unit * np.abs(exact.out).max()


def part(**changes: Any) -> Partial:
    return empty((1, 3, 4, 8))._replace(**changes)


@pytest.mark.parametrize(
    ("field", "arguments", "options"),
    [
        ("partials", [[]], {}),
        ("partials", [part()], {}),
        ("partials[1]", [[part(), (1, 2)]], {}),
        ("partials[0].lse", [[part(lse=None)]], {}),
        ("partials[0].lse", [[ga.AttentionOutput(part().out)]], {}),
        ("partials[1].out", [[part(), part(out=np.zeros((1, 3, 4, 9), np.float32))]], {}),
        ("partials[1].lse", [[part(), part(lse=np.zeros((1, 3, 4), np.float32))]], {}),
        ("partials[0].lse", [[part(lse=np.zeros((1, 4, 3), np.float16))]], {}),
        ("partials[0].out", [[part(out=np.zeros((3, 4), np.float32))]], {}),
        ("partials[0].out", [[part(out=np.zeros((1, 3, 4, 8), np.int32))]], {}),
        ("partials[0].out", [[part(out="no array")]], {}),
        ("out_dtype", [[part(), empty((1, 3, 4, 8), dtype="float16")]], {}),
        ("out_dtype", [[part()]], {"out_dtype": "int8"}),
        ("sinks", [[part()]], {"sinks": np.zeros(3)}),
        ("sinks", [[part()]], {"sinks": 1.0}),
    ],
)
def test_a_refusal_names_the_field(field: str, arguments: list[Any], options: dict[str, Any]) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        merge(*arguments, **options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "dout", "dlse"), [("dout", (1, 3, 4, 9), (1, 4, 3)), ("dlse", (1, 3, 4, 8), (1, 3, 4))]
)
def test_a_refusal_of_a_gradient_names_the_field(field: str, dout: tuple[int, ...], dlse: tuple[int, ...]) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        merge_gradients([part()], np.zeros(dout, np.float32), np.zeros(dlse, np.float32))
    assert caught.value.field == field


def test_an_array_on_a_gpu_is_refused_by_its_name() -> None:
    there = DeviceTensor(FakeCuda(), np.zeros((1, 3, 4, 8), np.float32))
    with pytest.raises(ga.InvalidRequest, match="must lie on the host, not on cuda:0") as caught:
        merge([part(), part(out=there)])
    assert caught.value.field == "partials[1].out"


def test_arrays_of_any_library_with_dlpack_come_in() -> None:
    q, k, v = whole(3, 10)
    given = [attend(q, k[:, :4], v[:, :4]), attend(q, k[:, 4:], v[:, 4:])]
    merged = merge([Partial(HostTensor(half.out), HostTensor(half.lse)) for half in given])
    assert_equal(merged, attend(q, k, v))


@pytest.mark.parametrize("shape", [(3, 4), (1, -3, 4, 8), 5, (1, 2.0, 3, 4)])
def test_the_shape_of_an_empty_partial_is_checked(shape: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match="rows, heads, head_dim_v"):
        empty(shape)


def test_a_partial_is_shown_in_one_line() -> None:
    assert repr(part()) == "Partial(out=ndarray float32[1, 3, 4, 8], lse=ndarray float32[1, 4, 3])"
