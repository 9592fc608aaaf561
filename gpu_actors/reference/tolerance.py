"""How far an attention output may be from the oracle: the usual rule for each row, or a bound of the rounding errors.

docs/testing.md ("How far a result may be from the oracle") states the bounds with their sources and derives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.errors import InvalidRequest
from gpu_actors.reference import ReferenceOutput, attention_forward, attention_forward_low
from gpu_actors.reference.arguments import Array
from gpu_actors.reference.low_precision import intermediate_dtype, rounder

__all__ = ["Bounds", "assert_output_close", "check_output", "forward_bounds", "round_inputs", "row_bound"]

LSE_TOLERANCE, LSE_RELATIVE = 1e-3, 2.0**-22
CUT_UNIT, CUT_UNITS, CUT_TERMS = 2.0**-13, 4.0, 32  # for Hopper's products of 8-bit elements
UNIT_ROUNDOFF = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "tf32": 2.0**-11,
    "float32": 2.0**-24,
    "float64": 2.0**-53,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
COMPUTE = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "tf32": "tf32"}
_LINEAR_IN_SCORES = ("softmax_scale", "softcap", "alibi_slopes", "bias", "sinks")
SHIFT = 0.3
LOG_NEGLIGIBLE = 17.0  # exp(-17) < 2^-24


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest acceptable errors.

    out: |out - ref|, shaped like out.
    lse: |lse - ref|, a number or shaped like lse.
    """

    out: Array
    lse: float | Array = LSE_TOLERANCE


def row_bound(reference: Array, low: Array, dtype: str, factor: float, shift: float | Array = SHIFT) -> Array:
    """The rule's first line, for rows along the last axis: shape (..., 1).

    reference: the float64 result.
    low: the same result computed in ``dtype``. Elements that overflowed are left out; this can only tighten the bound.
    factor: the factor of max|low - reference|: 2 for outputs, 3 for gradients and with softcap.
    shift: the number that the rule adds to the result and subtracts again in ``dtype``.
    """
    to_dtype = rounder(dtype)
    with np.errstate(all="ignore"):
        rounded = to_dtype(reference)
        shifted = to_dtype(to_dtype(rounded + shift) - shift) - rounded
        if dtype == "float64":
            shifted = np.zeros_like(shifted)
        return factor * row_max(low - reference) + 2.0 * row_max(shifted)


def row_max(array: Array) -> Array:
    """The largest finite magnitude of each row along the last axis: (..., 1)."""
    finite = np.where(np.isfinite(array), np.abs(array), 0.0)
    largest: Array = finite.max(axis=-1, keepdims=True, initial=0.0)
    return largest


def round_inputs(q: Array, k: Array, v: Array, compute: str) -> tuple[Array, Array, Array]:
    """q, k, v rounded to the dtype of ``compute`` ("f16", "bf16", "tf32"), but stored as float32.

    This rounding is no error, because the oracle gets the rounded inputs too.
    """
    step = rounder(COMPUTE[compute])
    return step(q), step(k), step(v)


def forward_bounds(
    q: Array,
    k: Array,
    v: Array,
    *,
    reference: ReferenceOutput | None = None,
    compute: str | None = None,
    weights_dtype: str | None = None,
    **options: Any,
) -> Bounds:
    """The bounds of `attention_forward`'s output for these inputs and options.

    reference: the oracle's answer with ``with_magnitude=True``, if the caller has it.
    compute: "f16", "bf16" or "tf32" for float32 inputs that are multiplied in it: pass them rounded by `round_inputs`.
        By default the inputs' own dtype, or bfloat16 for 8-bit floats.
    weights_dtype: for kernels that round the softmax weights to an 8-bit float: see `attention_forward_low`.
    """
    if reference is None or reference.magnitude is None:
        reference = attention_forward(q, k, v, with_magnitude=True, **options)
    assert reference.magnitude is not None
    dtype = intermediate_dtype(q.dtype.name) if compute is None else COMPUTE[compute]
    low = attention_forward_low(q, k, v, dtype=dtype, weights_dtype=weights_dtype, **options)
    rows = row_bound(reference.out, low.out, dtype, 3.0 if options.get("softcap") else 2.0)
    with np.errstate(invalid="ignore"):
        if dtype in ("float32", "float64"):
            floor = _accumulation_bound(q, k, v, reference, dtype, options)
        else:
            floor = UNIT_ROUNDOFF[dtype] * (reference.magnitude + np.abs(reference.out))
        if weights_dtype is not None:
            floor = floor + _weights_bound(q, k, v, reference, weights_dtype, options)
    out = np.maximum(rows, np.where(np.isfinite(floor), floor, 0.0))
    largest = np.where(np.isfinite(reference.lse), np.abs(reference.lse), 0.0)
    lse = np.maximum(LSE_TOLERANCE, LSE_RELATIVE * largest)
    return Bounds(out, lse if weights_dtype is None else np.maximum(lse, _cut_scores_bound(q, k, options)))


def _accumulation_bound(
    q: Array, k: Array, v: Array, reference: ReferenceOutput, dtype: str, options: dict[str, Any]
) -> Array:
    """The first-order bound of docs/testing.md, for float32 and float64."""
    for name in ("q_descale", "k_descale", "v_descale"):
        if options.get(name) is not None:
            raise InvalidRequest(name, "an array", "the bounds of float32 and float64 know no descales")
    scale = options.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    q_norm, k_norm = (np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True) for x in (q, k))
    magnitude, out = reference.magnitude, np.abs(reference.out)
    assert magnitude is not None
    # With the columns |k_j||V_j| and |k_j| as v, magnitudes are the sums over keys that the bound needs.
    columns = np.concatenate([k_norm * v.astype(np.float64), k_norm], axis=-1)
    weighted = attention_forward(q, k, columns, with_magnitude=True, **options).magnitude
    assert weighted is not None
    dot_products = 2.0 * q.shape[-1] ** 0.5 * scale * q_norm * (weighted[..., :-1] + weighted[..., -1:] * out)
    lse = np.abs(np.moveaxis(reference.lse, -2, -1))[..., None]
    scores = np.where(np.isfinite(lse), lse, 0.0) + LOG_NEGLIGIBLE
    relative = 4.0 * _longest(k, options) ** 0.5 + 16.0 + 4.0 * scores
    oracle = 2.0 if dtype == "float64" else 1.0
    bound: Array = oracle * UNIT_ROUNDOFF[dtype] * (relative * (magnitude + out) + dot_products)
    return bound


def _weights_bound(
    q: Array, k: Array, v: Array, reference: ReferenceOutput, weights_dtype: str, options: dict[str, Any]
) -> Array:
    """Six standard deviations of the error by rounding each weight separately: 2.5 u sqrt(sum P^2 V^2).

    Doubled scores have the weights P^2, up to a factor that follows from the two LSEs.
    """
    linear = {name: options[name] for name in _LINEAR_IN_SCORES if options.get(name) is not None}
    doubled = {name: 2.0 * np.asarray(value, np.float64) for name, value in linear.items()}
    doubled["softmax_scale"] = doubled.get("softmax_scale", 2.0 * q.shape[-1] ** -0.5)
    if options.get("v_descale") is not None:
        doubled["v_descale"] = np.square(options["v_descale"].astype(np.float64))
    squares = attention_forward(q, k, np.square(v.astype(np.float64)), **{**options, **doubled})
    factor = np.exp(squares.lse - 2.0 * reference.lse) / (1.0 - options.get("dropout_p", 0.0))
    variance = squares.out * np.moveaxis(factor, -2, -1)[..., None]
    bound: Array = 2.5 * UNIT_ROUNDOFF[weights_dtype] * np.sqrt(np.nan_to_num(variance))
    return bound


def _cut_scores_bound(q: Array, k: Array, options: dict[str, Any]) -> Array:
    """The error of the LSE by the truncated sums of scores, shaped like the LSE: see docs/testing.md.

    With k as v the output is the weighted mean of the keys, and its products with q are the means of the terms.
    """
    plain = {name: value for name, value in options.items() if name != "dropout_p"}
    descales = [plain.get(name) for name in ("q_descale", "k_descale") if plain.get(name) is not None]
    plain["v_descale"] = np.prod([np.asarray(factor, np.float64) for factor in descales], axis=0) if descales else None
    scale = plain.get("softmax_scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = attention_forward(q, k, k, **plain).out
        terms = q.astype(np.float64) * mean
        steps = np.split(terms, range(CUT_TERMS, q.shape[-1], CUT_TERMS), axis=-1)
        sums = np.abs(np.cumsum([step.sum(axis=-1) for step in steps], axis=0))
        largest = np.maximum(sums, [np.abs(step).max(axis=-1) for step in steps])
        cut = CUT_UNITS * CUT_UNIT * scale * largest.sum(axis=0)
    bound: Array = np.moveaxis(np.nan_to_num(cut, posinf=0.0), -1, -2)
    return bound


def _longest(k: Array, options: dict[str, Any]) -> int:
    ends = options.get("cu_seqlens_k")
    return int(k.shape[1]) if ends is None else int(np.diff(np.asarray(ends)).max(initial=0))


def assert_output_close(
    out: Array, lse: Array | None, reference: ReferenceOutput, bounds: Bounds, repro: str = ""
) -> float:
    """Raise AssertionError, naming the worst row and ``repro``, unless out and lse lie within the bounds.

    out: shaped like ``reference.out``, any floating dtype. lse: shaped like ``reference.lse``, or None.
    Returns the largest |out - ref| / bound, below 1.
    """
    worst = compare("out", out, reference.out, bounds.out, repro)
    if lse is not None:
        compare("lse", lse[..., None], reference.lse[..., None], np.asarray(bounds.lse)[..., None], repro)
    return worst


def check_output(
    out: Array,
    lse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    repro: str = "",
    compute: str | None = None,
    weights_dtype: str | None = None,
    **options: Any,
) -> float:
    """`assert_output_close` against the oracle's answer for these inputs and options.

    compute, weights_dtype: see `forward_bounds`. This function rounds the inputs to ``compute``.
    """
    if compute is not None:
        q, k, v = round_inputs(q, k, v, compute)
    reference = attention_forward(q, k, v, with_magnitude=True, **options)
    bounds = forward_bounds(q, k, v, reference=reference, compute=compute, weights_dtype=weights_dtype, **options)
    return assert_output_close(out, lse, reference, bounds, repro)


def compare(name: str, actual: Array, expected: Array, bound: Array, repro: str) -> float:
    """Raise AssertionError with the worst row (along the last axis) unless |actual - expected| <= bound.

    Returns the largest |actual - expected| / bound.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name} has shape {actual.shape} instead of {expected.shape}\n{repro}")
    actual = actual.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        special = ~(np.isfinite(actual) & np.isfinite(expected))
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        error = np.where(special, np.where(same, 0.0, np.inf), np.abs(actual - expected))
        bad = ~(error <= bound)
        ratio = np.where(error == 0.0, 0.0, error / bound)
    if not bad.any():
        return float(ratio.max(initial=0.0))
    worst = np.unravel_index(int(np.where(bad, ratio, -1.0).argmax()), ratio.shape)
    row = tuple(int(index) for index in worst[:-1])
    limit = np.broadcast_to(bound, ratio.shape)[worst]
    raise AssertionError(
        f"{name} is wrong in {int(bad.any(axis=-1).sum())} of {bad[..., 0].size} rows. Worst is row {row}, "
        f"element {int(worst[-1])}: {actual[worst]:.9g} instead of {expected[worst]:.9g}, an error of "
        f"{error[worst]:.3g} where {limit:.3g} is allowed\n{repro}"
    )
