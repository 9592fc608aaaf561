"""How far attention's gradients may be from the oracle: the rule of `tolerance`, 3 max|pt - ref| for every gradient.

docs/testing.md ("Gradients") states and derives the bounds. The names in this module are those of its formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.reference import ReferenceGradients, attention_backward, attention_backward_low
from gpu_actors.reference.arguments import Arguments, Array, pose
from gpu_actors.reference.backward import GradientSums, GradientTile, Incoming, gradient_tiles
from gpu_actors.reference.forward import identity
from gpu_actors.reference.low_precision import intermediate_dtype, rounder
from gpu_actors.reference.tolerance import (
    COMPUTE,
    LOG_NEGLIGIBLE,
    SHIFT,
    UNIT_ROUNDOFF,
    compare,
    row_bound,
    row_max,
)

__all__ = [
    "GRADIENTS",
    "GradientBounds",
    "assert_gradients_close",
    "check_gradients",
    "gradient_bounds",
    "gradient_row_bound",
]

GRADIENTS: tuple[str, ...] = ("dq", "dk", "dv", "dbias", "dsinks")
_LEAST = {
    "float16": 2.0**-25,
    "bfloat16": 2.0**-134,
    "float32": 2.0**-150,
    "float64": 0.0,
}  # half of the subnormals' step
_TINY = {"float16": 2.0**-14, "bfloat16": 2.0**-126 / UNIT_ROUNDOFF["bfloat16"], "tf32": 0.0}


@dataclass(frozen=True, slots=True)
class GradientBounds:
    """The largest acceptable |gradient - reference| of each element. None if there is no such gradient."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None


def check_gradients(
    gradients: Any,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    repro: str = "",
    compute: str | None = None,
    **options: Any,
) -> float:
    """Raise AssertionError, naming the worst row and ``repro``, unless gradients agree with the oracle's.

    gradients: an object with dq, dk, dv, dbias, dsinks. dbias is None without a bias, dsinks without sinks.
    dout, q, k, v and options: those of `reference.attention_backward`.
    out, lse: the kernel's inputs, if the oracle should read the same. By default the oracle computes its own, and the
        bounds allow for the rounding of the kernel's.
    compute: "f16", "bf16" or "tf32" for float32 inputs that were multiplied in it. This function rounds them to it.
    Returns the largest |gradient - reference| / bound, below 1.
    """
    if compute is not None:
        step = rounder(COMPUTE[compute])
        dout, q, k, v = step(dout), step(q), step(k), step(v)
    oracle_options = {**options, "out": out, "lse": lse}
    reference = attention_backward(dout, q, k, v, **oracle_options)
    bounds = gradient_bounds(dout, q, k, v, reference=reference, compute=compute, **oracle_options)
    return assert_gradients_close(gradients, reference, bounds, repro)


def assert_gradients_close(
    gradients: Any, reference: ReferenceGradients, bounds: GradientBounds, repro: str = ""
) -> float:
    """`check_gradients` for gradients whose reference and bounds are known."""
    worst = 0.0
    for name in GRADIENTS:
        actual, expected, bound = (getattr(each, name) for each in (gradients, reference, bounds))
        if (actual is None) != (expected is None):
            raise AssertionError(f"{name} is {'missing' if actual is None else 'there unasked'}\n{repro}")
        if actual is not None:
            rounding = UNIT_ROUNDOFF[actual.dtype.name] * np.nan_to_num(np.abs(expected))
            rounding += _LEAST[actual.dtype.name]
            worst = max(worst, compare(name, actual, expected, bound + rounding, repro))
    return worst


def gradient_bounds(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    reference: ReferenceGradients | None = None,
    compute: str | None = None,
    **options: Any,
) -> GradientBounds:
    """The bounds of `attention_backward`'s gradients for these inputs and options. compute: as in `check_gradients`."""
    oracle_options = {**options, "out": out, "lse": lse}
    reference = attention_backward(dout, q, k, v, **oracle_options) if reference is None else reference
    dtype = intermediate_dtype(q.dtype.name) if compute is None else COMPUTE[compute]
    low = attention_backward_low(dout, q, k, v, dtype=dtype, **oracle_options)
    floor = _rounding(pose(q, k, v, **options), Incoming(dout, out, lse), dtype)

    def bound(name: str) -> Any:
        exact, rough, least = (getattr(each, name) for each in (reference, low, floor))
        if exact is None:
            return None
        rows = gradient_row_bound(exact, rough, dtype)
        return np.maximum(rows, np.where(np.isfinite(least), least, 0.0))

    return GradientBounds(*map(bound, GRADIENTS))


def gradient_row_bound(reference: Array, low: Array, dtype: str) -> Array:
    """The rule's first line, for rows along the last axis: shape (..., 1)."""
    return row_bound(reference, low, dtype, 3.0, np.minimum(SHIFT, row_max(reference)))


def _rounding(arguments: Arguments, incoming: Incoming, dtype: str) -> ReferenceGradients:
    work = np.dtype(np.float64)
    single, narrow = GradientSums(arguments, work), GradientSums(arguments, work)
    with np.errstate(all="ignore"):
        wide = 2.0 * UNIT_ROUNDOFF["float64"] if dtype == "float64" else UNIT_ROUNDOFF["float32"]
        for tile in gradient_tiles(arguments, incoming, work, identity):
            _add(single, arguments, tile, *_accumulation(arguments, tile), slack=4.0, unit=wide)
            if dtype not in ("float32", "float64"):
                _add(narrow, arguments, tile, *_narrow(tile, dtype, incoming.out is not None), slack=0.0)
        pairs = (single.gradients(), wide), (narrow.gradients(), UNIT_ROUNDOFF[dtype])

        def total(name: str) -> Any:
            return None if getattr(pairs[0][0], name) is None else sum(getattr(g, name) * unit for g, unit in pairs)

        return ReferenceGradients(*map(total, GRADIENTS))


def _add(
    sums: GradientSums,
    arguments: Arguments,
    tile: GradientTile,
    scores: Array,
    weights: Array,
    delta: Array,
    slack: float,
    unit: float = 0.0,
) -> None:
    """Add a tile's terms to the sums.

    slack: the error of the softcap's factor near 0, in units, because its tanh is itself rounded.
    unit: the factor that the bound is multiplied by later. The errors of the softcap's factor and of the gradient
        multiply. This matters if both are near 0, for example in a row that sees one key.
    """
    unscaled = scores
    if tile.slope is not None:
        scores = scores * (np.abs(_visible(tile, tile.slope)) + slack * unit) + slack * np.abs(tile.dbias)
    # Rows and keys of hidden pairs may be NaN. They must not enter the sums.
    operands = (tile.q, tile.operands.k, tile.dout)
    q, k, dout = (np.where(np.isfinite(array), np.abs(array), 0.0) for array in operands)
    sums.add(tile, scores, weights, q, k, dout, scale=abs(arguments.problem.softmax_scale))
    sums.add_reduced(tile, unscaled, -delta)


def _narrow(tile: GradientTile, dtype: str, out_given: bool) -> tuple[Array, Array, Array]:
    """(W, A', d) of docs/testing.md for 16-bit kernels."""
    out = np.zeros_like(tile.delta) if out_given else np.abs(tile.dout * tile.out).sum(axis=-1, keepdims=True)
    tiny = _visible(tile, np.full_like(tile.probabilities, _TINY[dtype]))
    underflow = tiny if dtype == "float16" else tiny * (1.0 + np.abs(_visible(tile, tile.dprobabilities - tile.delta)))
    return np.abs(tile.dbias) + tile.probabilities * out + underflow, np.abs(tile.weights) + tiny, out


def _accumulation(arguments: Arguments, tile: GradientTile) -> tuple[Array, Array, Array]:
    """(W, A', D / p) of docs/testing.md for float32 sums."""
    dim, dim_v = arguments.q.shape[-1], arguments.v.shape[-1]
    problem = arguments.problem
    rows, keys = arguments.q.size // (problem.heads_q * dim), arguments.k.size // (problem.heads_kv * dim)
    terms = 4.0 * max(rows * problem.gqa_ratio, keys, dim, dim_v) ** 0.5 + 16.0
    q_length, k_length = (np.linalg.norm(array, axis=-1, keepdims=True) for array in (tile.q, tile.operands.k))
    lse = np.where(np.isfinite(tile.lse), np.abs(tile.lse), 0.0) + LOG_NEGLIGIBLE
    relative = _visible(tile, terms + 4.0 * lse + 2.0 * dim**0.5 * q_length * k_length.swapaxes(-1, -2))
    products = np.abs(tile.dout) @ np.abs(tile.operands.values.finite.swapaxes(-1, -2))
    out = np.abs(tile.dout * tile.out).sum(axis=-1, keepdims=True)
    delta = (tile.weights * relative * (products + out)).sum(axis=-1, keepdims=True) + terms * out
    scale = np.maximum(1.0, 1.0 / (1.0 - problem.dropout_p))
    spread = _visible(tile, relative * np.abs(tile.dprobabilities - tile.delta) + terms * scale * products + delta)
    of_sink = relative.max(axis=-1, keepdims=True, initial=terms)
    return tile.probabilities * spread, tile.weights * relative, of_sink * np.abs(tile.delta) + delta


def _visible(tile: GradientTile, pairs: Array) -> Array:
    """``pairs`` with 0 for hidden pairs, whose keys may be NaN."""
    return pairs if tile.visible is None else np.where(tile.visible, pairs, 0.0)
