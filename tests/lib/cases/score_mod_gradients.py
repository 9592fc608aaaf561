"""Gradients of attention with a modification, from its formula alone, and the bounds of a kernel's errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from cases.score_mods import (
    BATCH,
    DIM,
    DOUT,
    FIRST,
    HEADS,
    HEADS_KV,
    OUT,
    SCALE,
    STATS,
    Case,
    K,
    Q,
    V,
    expected,
    forward_graph,
    scores_of,
)
from inside.reference import gradient_row_bound, record, rounder, row_bound

import gpu_actors as ga

DQ, DK, DV, DBIAS = 11, 12, 13, 14
STEP = 1e-6
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 0.0}


class Gradients(NamedTuple):
    """By uid: the gradient in float64, and each element's error bound for the rounding of a correct kernel."""

    values: dict[int, Any]
    rounding: dict[int, Any]


def backward_arrays(case: Case, seed: int = 0) -> dict[int, Any]:
    """The operands of backward: those of forward, its out and stats, and dout."""
    wanted = expected(case)
    dtype = case.arrays[Q].dtype
    dout = np.random.default_rng(100 + seed).standard_normal(wanted.out.shape).astype(dtype)
    return case.arrays | {OUT: wanted.out.astype(dtype), STATS: wanted.stats.astype(np.float32), DOUT: dout}


def backward_graph(case: Case) -> ga.OperationGraph:
    graph = ga.OperationGraph()
    scores, tensors = scores_of(graph, case)
    again = graph.matmul(graph.softmax(scores), tensors[V])
    dout, out = (graph.tensor(uid=uid, dims=again.dims, dtype=case.dtype) for uid in (DOUT, OUT))
    stats = graph.tensor(uid=STATS, dims=(*again.dims[:-1], 1), dtype="float32")
    wrt = [tensors[uid] for uid in (Q, K, V)] + ([tensors[FIRST]] if has_bias(case) else [])
    for uid, gradient in zip((DQ, DK, DV, DBIAS), graph.gradient(again, dout, wrt, (out, stats)), strict=False):
        graph.output(gradient, uid=uid, dtype=wrt[uid - DQ].dtype)
    return graph


def has_bias(case: Case) -> bool:
    return FIRST in case.arrays and case.arrays[FIRST].shape == (
        1,
        HEADS,
        case.arrays[Q].shape[2],
        case.modification.keys,
    )


def expected_gradients(case: Case, arrays: dict[int, Any]) -> Gradients:
    """FlashAttention-2's formulas (arXiv 2307.08691, section 3.1), with the modification's slope by differences."""
    q, k, v, dout = (arrays[uid].astype(np.float64) for uid in (Q, K, V, DOUT))
    k, v = (np.repeat(array, HEADS // HEADS_KV, axis=1) for array in (k, v))
    extras = [arrays[uid] for uid in sorted(arrays) if uid >= FIRST]
    scaled = SCALE * q @ k.swapaxes(-1, -2)
    formula = case.modification.formula
    scores = formula(scaled, extras)
    with np.errstate(invalid="ignore"):
        slope = (formula(scaled + STEP, extras) - formula(scaled - STEP, extras)) / (2 * STEP)
    slope = np.where(np.isneginf(scores), 0.0, slope)
    weights = np.exp(scores - np.where(np.isneginf(wanted := expected(case).stats), 0.0, wanted))
    dweights = dout @ v.swapaxes(-1, -2)
    # From the given output, whose rounding is not an error of the kernel.
    delta = (dout * arrays[OUT].astype(np.float64)).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - delta)
    dscaled = SCALE * dscores * slope
    # As in `gpu_actors.reference.gradient_tolerance`: what the operands' dtype costs, and what sums and exponentials
    # in fp32 do.
    lost, u = SMALLEST_NORMAL.get(case.dtype, 0.0), ROUNDOFF.get(case.dtype, 0.0)
    c = 4.0 * DIM**0.5 + 16.0
    norms = np.linalg.norm(q, axis=-1)[..., None] * np.linalg.norm(k, axis=-1)[:, :, None]
    e = 4.0 * (np.abs(np.where(np.isneginf(wanted), 0.0, wanted)) + 17.0) + 2.0 * DIM**0.5 * SCALE * norms
    sizes = np.abs(dout) @ np.abs(v).swapaxes(-1, -2) + (np.abs(dout) * np.abs(arrays[OUT])).sum(axis=-1, keepdims=True)
    summed = 2.0**-24 * weights * ((c + e) * np.abs(dweights - delta) + c * sizes)
    off = u * (np.abs(dscores) + lost) + summed
    size = SCALE * off * np.abs(slope)
    values = {DQ: dscaled @ k, DK: grouped(dscaled.swapaxes(-1, -2) @ q), DV: grouped(weights.swapaxes(-1, -2) @ dout)}
    rounding = {
        DQ: size @ np.abs(k),
        DK: grouped(size.swapaxes(-1, -2) @ np.abs(q)),
        DV: grouped((u * (weights + lost) + 2.0**-24 * (c + e) * weights).swapaxes(-1, -2) @ np.abs(dout)),
    }
    if has_bias(case):
        values[DBIAS] = dscores.sum(axis=0, keepdims=True)
        rounding[DBIAS] = off.sum(axis=0, keepdims=True)
    return Gradients(values, rounding)


def grouped(gradient: Any) -> Any:
    """Summed over the query heads of each KV head."""
    return gradient.reshape(BATCH, HEADS_KV, -1, *gradient.shape[2:]).sum(axis=2)


def check_gradients(case: Case, arrays: dict[int, Any], found: dict[int, Any]) -> None:
    """The rule of `gpu_actors.reference.gradient_tolerance`, for the gradients of a kernel on 16-bit operands."""
    wanted = expected_gradients(case, arrays)
    low = record(backward_graph(case), arrays, step=rounder(case.dtype)).values
    for uid, reference in wanted.values.items():
        rows = gradient_row_bound(reference, low[uid], case.dtype)
        bound = np.maximum(rows, wanted.rounding[uid] + ROUNDOFF[case.dtype] * np.abs(reference))
        error = np.abs(found[uid].astype(np.float64) - reference)
        assert (error <= bound).all(), f"gradient {uid}: {(error / bound).max():.2f} times the bound"


def check_forward(case: Case, found: dict[int, Any], mask: ga.Mask | None = None) -> None:
    """The rule of `gpu_actors.reference.tolerance`, row by row, with the formula as the reference.

    mask: the graph's mask, which the formula applies too.
    """
    wanted = expected(case)
    low = record(forward_graph(case, mask), case.arrays, step=rounder(case.dtype)).values
    bound = row_bound(wanted.out, low[OUT], case.dtype, 3.0)
    bound = np.maximum(bound, ROUNDOFF[case.dtype] * (wanted.magnitude + np.abs(wanted.out)))
    error = np.abs(found[OUT].astype(np.float64) - wanted.out)
    assert np.isfinite(found[OUT].astype(np.float64)).all()
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"
    np.testing.assert_array_equal(np.isneginf(found[STATS]), np.isneginf(wanted.stats))
    seen = np.isfinite(wanted.stats)
    np.testing.assert_allclose(found[STATS][seen], wanted.stats[seen], atol=1e-3, rtol=0)
