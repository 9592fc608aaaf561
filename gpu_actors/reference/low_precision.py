"""attention_forward_low and attention_backward_low: the formulas as a plain implementation in the input dtype
computes them."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from gpu_actors.reference.arguments import Array, pose
from gpu_actors.reference.backward import Incoming, ReferenceGradients, evaluate_backward
from gpu_actors.reference.forward import ReferenceOutput, Rounding, evaluate, identity
from gpu_actors.reference.softmax import Step

__all__ = ["attention_backward_low", "attention_forward_low", "intermediate_dtype", "rounder"]

# Weights lie in [0, 1]. Scaled by a power of two below float8_e4m3fn's 448, they use the format's exponents.
_FP8_WEIGHT_SCALE = 256.0
_DROPPED_BITS = 13  # of float32's 24, so that 11 remain


def intermediate_dtype(dtype: str) -> str:
    """The dtype of intermediate results for inputs of ``dtype``: the same, or bfloat16 for 8-bit floats."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def rounder(dtype: str) -> Step:
    """Return a function that rounds float32 or float64 arrays to the nearest values of ``dtype``. The array's dtype
    stays.

    dtype: a NumPy or ml_dtypes name, or "tf32" (11 significant bits with the exponents of float32, ties
        away from 0), or "wide_float16" (float16's 11 bits with the exponents of float32, ties to even).
    """
    if dtype in ("tf32", "wide_float16"):
        return functools.partial(_round_11_bits, to_even=dtype == "wide_float16")
    if dtype == "float16":
        return _round_float16
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def round_to_target(array: Array) -> Array:
        if array.dtype == target:
            return array
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return array.astype(target).astype(array.dtype)

    return round_to_target


def _round_11_bits(array: Array, to_even: bool) -> Array:
    """Round to 11 significant bits. Ties go to even, or away from 0."""
    bits = array.astype(np.float32).view(np.uint32)
    below_half = np.uint32((1 << (_DROPPED_BITS - 1)) - 1)
    up = (bits >> _DROPPED_BITS) & np.uint32(1) if to_even else np.uint32(1)
    kept = np.uint32(0xFFFFFFFF << _DROPPED_BITS & 0xFFFFFFFF)
    rounded = ((bits + below_half + up) & kept).view(np.float32)
    return np.where(np.isfinite(array), rounded, array).astype(array.dtype)


def _round_float16(array: Array) -> Array:
    """Round to float16. Subnormal numbers are rounded by adding a number whose last place is theirs, because NumPy
    takes 15 times as long for an underflow, and most probabilities underflow."""
    if array.dtype == np.float16:
        return array
    normal, last_place = np.finfo(np.float16).smallest_normal, np.finfo(np.float16).smallest_subnormal
    anchor = array.dtype.type(1.5 * float(last_place) / np.finfo(array.dtype).eps)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.copysign((array + anchor) - anchor, array)
        return np.where(np.abs(array) < normal, sums, array).astype(np.float16).astype(array.dtype)


def attention_forward_low(
    q: Array,
    k: Array,
    v: Array,
    *,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    **options: Any,
) -> ReferenceOutput:
    """`attention_forward` with every intermediate result rounded: "pt" in the tolerance rule.

    Shapes and options are those of `attention_forward`. Matrix products accumulate in float32 (float64 for
    float64) and their results are rounded to ``dtype``. So are scaled q, capped and biased scores and the
    normalised probabilities, as in eager PyTorch.

    dtype: a name that `rounder` knows. By default q's own, or bfloat16 for 8-bit floats.
    weights_dtype: for kernels that feed 8-bit weights to the second product: exp(s - max) is rounded to it
        at a scale of 256, and normalised after the product. By default probabilities are rounded to
        ``dtype``.
    """
    dtype = intermediate_dtype(q.dtype.name) if dtype is None else dtype
    step = rounder(dtype)
    if weights_dtype is None:
        rounding = Rounding(step=step, weights=step, dropped=step, normalise_first=True)
    else:
        narrow = rounder(weights_dtype)

        def round_weights(weights: Array) -> Array:
            return narrow(weights * _FP8_WEIGHT_SCALE) / _FP8_WEIGHT_SCALE

        rounding = Rounding(step=step, weights=round_weights, dropped=identity, normalise_first=False)
    work = np.dtype(np.float64 if dtype == "float64" else np.float32)
    return evaluate(pose(q, k, v, **options), work, rounding=rounding)


def attention_backward_low(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    dtype: str | None = None,
    **options: Any,
) -> ReferenceGradients:
    """`attention_backward` with every intermediate result rounded to ``dtype``: "pt" in the rule for gradients.

    Shapes and options are those of `attention_backward`. Sums over rows, keys, heads and batch are taken in float32
    (float64 for float64) and rounded once. dtype: as in `attention_forward_low`.
    """
    dtype = intermediate_dtype(q.dtype.name) if dtype is None else dtype
    work = np.dtype(np.float64 if dtype == "float64" else np.float32)
    arguments, incoming = pose(q, k, v, **options), Incoming(dout, out, lse)
    incoming.check(arguments)
    return evaluate_backward(arguments, incoming, work, step=rounder(dtype))
