"""attention_backward: the gradients that every kernel's are compared with.

Z is the factor of each probability by dropout, A = Z P are the weights of the values, and dO is given:

    dV = A^T dO          dP = Z (dO V^T)          delta_i = sum_d dO_id O_id = sum_j P_ij dP_ij
    dS = P (dP - delta)  and through the softcap c: dS (1 - tanh(s / c)^2)
    dQ = scale dS K      dK = scale dS^T Q        dbias = dS, before the softcap's factor
    dsink = -sum_i exp(sink - lse_i) delta_i

Sources: FlashAttention-2 (arXiv 2307.08691, section 3.1), and the derivative of a softmax with one more logit, whose
value is 0. Gradients of broadcast operands are summed: dK and dV over the query heads of their group, dbias over batch
and heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Unpack

import numpy as np

from gpu_actors.errors import InvalidRequest
from gpu_actors.reference.arguments import Arguments, Array, AttentionOptions, ForwardOptions, Piece, pose
from gpu_actors.reference.forward import identity
from gpu_actors.reference.softmax import (
    Operands,
    Step,
    Values,
    capped_scores,
    exponentials,
    keep_factors,
    mask_scores,
    weighted_sum,
)

__all__ = [
    "GradientSums",
    "GradientTile",
    "Incoming",
    "ReferenceGradients",
    "attention_backward",
    "evaluate_backward",
    "gradient_tiles",
]

_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ReferenceGradients:
    """Gradients in the dtype of the computation, each shaped like its input.

    dbias and dsinks are None if there was no bias, or no sinks.
    """

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array | None = None,
    lse: Array | None = None,
    accumulate: Literal["float64", "float32"] = "float64",
    **options: Unpack[AttentionOptions],
) -> ReferenceGradients:
    """The gradients of sum(dout * out) by q, k, v, bias and sinks, where out is the output of `attention_forward`.

    dout: (batch, seqlen_q, heads, dim_v), or (total_q, heads, dim_v) for varlen. Inputs may have 8 bits.
    options: as in `AttentionOptions`.

    out, lse: the forward's results, in its shapes, instead of computing them anew. Kernels read both, so rounded
        results round the gradients. With out and lse of a larger attention that k and v are a part of, the gradients
        are those of this part. Either may be given alone.

    A row that sees no key, or whose LSE is -inf, has gradient 0 and adds nothing to other gradients. NaN and infinities
    of keys and values reach the gradients of the rows that see them. Those of a row reach its own gradient and the
    gradients of the keys that it sees. They follow IEEE arithmetic and reach no other gradients. Raises InvalidRequest
    as `attention_forward`.
    """
    arguments, incoming = pose(q, k, v, **options), Incoming(dout, out, lse)
    incoming.check(arguments)
    return evaluate_backward(arguments, incoming, np.dtype(accumulate))


@dataclass(frozen=True, slots=True)
class Incoming:
    """The inputs of backward besides the forward's arguments. If out or lse is None, it is computed."""

    dout: Array
    out: Array | None = None
    lse: Array | None = None

    def check(self, arguments: Arguments) -> None:
        """Raise InvalidRequest for an option without gradients, and for shapes that differ from the forward's."""
        for name in ForwardOptions.__annotations__.keys() - AttentionOptions.__annotations__.keys():
            if getattr(arguments, name) is not None:
                raise InvalidRequest(name, "an array", "has no gradient")
        shape = (*arguments.q.shape[:-1], arguments.v.shape[-1])
        lse = (*shape[:-3], shape[-2], shape[-3])
        for name, array, wanted in (("dout", self.dout, shape), ("out", self.out, shape), ("lse", self.lse, lse)):
            if array is not None and np.shape(array) != wanted:
                raise InvalidRequest(name, f"shape {np.shape(array)}", f"its shape is {wanted}")


def evaluate_backward(
    arguments: Arguments, incoming: Incoming, dtype: np.dtype, *, step: Step = identity
) -> ReferenceGradients:
    """The formulas in ``dtype``. Every intermediate result is passed through ``step``."""
    sums = GradientSums(arguments, dtype)
    with np.errstate(all="ignore"):
        for tile in gradient_tiles(arguments, incoming, dtype, step):
            q, k, scale = tile.q, tile.operands.k, arguments.problem.softmax_scale
            sums.add(tile, tile.dscores, tile.weights, q, k, tile.dout, scale=scale, step=step)
            sums.add_reduced(tile, tile.dbias, tile.delta)
        return sums.gradients(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTile:
    """A tile of rows, with all arrays between its inputs and its gradients.

    Arrays are (batch, heads_kv, gqa_ratio, rows, keys or dim). q is scaled. weights: probabilities after dropout.
    dbias: the gradient of a score with bias; dscores: of a score before the softcap. delta, lse: (..., rows, 1).
    """

    operands: Operands
    rows: slice
    visible: Array | None
    q: Array
    dout: Array
    out: Array
    probabilities: Array
    weights: Array
    dprobabilities: Array
    dbias: Array
    dscores: Array
    slope: Array | None
    delta: Array
    lse: Array


def gradient_tiles(arguments: Arguments, incoming: Incoming, dtype: np.dtype, step: Step) -> Iterator[GradientTile]:
    """Every row of every sequence once, in tiles that fit in cache and depend on no other sequence."""
    block = _BLOCK_BYTES // dtype.itemsize
    for piece in arguments.pieces(block):
        operands = Operands.load(arguments, piece, dtype, step)
        given = _Given.load(arguments, piece, incoming, dtype, step)
        height = max(1, block // max(1, arguments.problem.heads_q * piece.seqlen_k))
        for start in range(0, piece.seqlen_q, height):
            yield _tile(arguments, operands, given, slice(start, min(start + height, piece.seqlen_q)), step)


@dataclass(frozen=True, slots=True)
class _Given:
    dout: Array
    out: Array | None
    lse: Array | None

    @classmethod
    def load(cls, arguments: Arguments, piece: Piece, incoming: Incoming, dtype: np.dtype, step: Step) -> _Given:
        def head_major(array: Array) -> Array:
            heads_first = piece.queries(array).swapaxes(1, 2).astype(dtype, order="C")
            return step(arguments.split_heads(heads_first, 1))

        out, lse = incoming.out, incoming.lse
        if lse is not None:
            lse = arguments.split_heads(piece.statistics(lse), 1)[..., None].astype(dtype)
        return cls(head_major(incoming.dout), None if out is None else head_major(out), lse)


def _tile(arguments: Arguments, operands: Operands, given: _Given, tile: slice, step: Step) -> GradientTile:
    rows = np.arange(tile.start, tile.stop)
    dout = given.dout[..., tile, :]
    probabilities, slope, visible, lse = _probabilities(arguments, operands, given, rows, step)
    dprobabilities = step(_dot_values(dout, operands.values))
    weights = probabilities
    if arguments.problem.dropout_p:
        factors = keep_factors(arguments, operands.piece, rows, probabilities.dtype)
        weights = step(probabilities * factors)
        dprobabilities = step(dprobabilities * factors)
    out = given.out
    out = step(weighted_sum(weights, operands.values, visible)) if out is None else out[..., tile, :]
    delta = (dout * out).sum(axis=-1, keepdims=True)
    dbias = step(probabilities * (dprobabilities - delta))
    dscores = dbias if slope is None else step(dbias * slope)
    if visible is not None:
        dbias, dscores = (np.where(visible, array, 0) for array in (dbias, dscores))
    return GradientTile(
        operands=operands,
        rows=tile,
        visible=visible,
        q=operands.q[..., tile, :],
        dout=dout,
        out=out,
        probabilities=probabilities,
        weights=weights,
        dprobabilities=dprobabilities,
        dbias=dbias,
        dscores=dscores,
        slope=slope,
        delta=delta,
        lse=lse,
    )


def _dot_values(dout: Array, values: Values) -> Array:
    """dout v^T. Masked pairs may have any value: their gradients are cleared later."""
    products: Array = dout @ values.finite.swapaxes(-1, -2)
    if values.keys.size:
        spoiled = (~np.isfinite(values.rest)).sum(axis=-1)[..., None, :] > 0
        special = dout @ values.rest.swapaxes(-1, -2)
        products[..., values.keys] = np.where(spoiled, special, products[..., values.keys])
    return products


def _probabilities(
    arguments: Arguments, operands: Operands, given: _Given, rows: Array, step: Step
) -> tuple[Array, Array | None, Array | None, Array]:
    """(probabilities, the softcap's derivative or None, the visible pairs or None, lse)."""
    capped, shares = capped_scores(arguments, operands, rows, step)
    slope = None if shares is None else _slope_of_tanh(shares, capped / arguments.problem.softcap, step)
    scores, visible = mask_scores(arguments, operands, rows, capped, step)
    if given.lse is None:
        weights, total, lse = exponentials(scores, operands.sinks)
        probabilities = weights / np.where(total == 0, 1, total)
    else:
        lse = given.lse[..., int(rows[0]) : int(rows[-1]) + 1, :]
        probabilities = np.where(np.isneginf(lse), 0, _exp_of_difference(scores, lse))
    if visible is not None:
        probabilities = np.where(visible, probabilities, 0)
    return step(probabilities), slope, visible, lse


def _exp_of_difference(scores: Array, lse: Array) -> Array:
    """exp(scores - lse), a weight, which exceeds 1 only by the LSE's rounding.

    For large scores this rounding leaves no correct digits: a weight above e has none, and is cut off there.
    """
    return np.asarray(np.exp(np.minimum(scores - lse, 1)))


def _slope_of_tanh(x: Array, tanh: Array, step: Step) -> Array:
    """1 - tanh^2. If ``step`` rounds, the rounded tanh is squared, as in a framework; else nothing cancels."""
    if step is not identity:
        return step(1 - np.square(tanh))
    decay = np.exp(-2 * np.abs(x))
    slope: Array = 4 * decay / np.square(1 + decay)
    return slope


class GradientSums:
    """Gradients in the caller's layout. Each tile adds its share."""

    def __init__(self, arguments: Arguments, dtype: np.dtype) -> None:
        self._arguments = arguments
        self._dq, self._dk, self._dv = (
            np.zeros(array.shape, dtype) for array in (arguments.q, arguments.k, arguments.v)
        )
        bias, sinks = arguments.bias, arguments.sinks
        self._dbias = None if bias is None or bias.dtype == np.bool_ else np.zeros(bias.shape, dtype)
        self._dsinks = None if sinks is None else np.zeros(np.shape(sinks), dtype)

    def add(
        self,
        tile: GradientTile,
        dscores: Array,
        weights: Array,
        q: Array,
        k: Array,
        dout: Array,
        *,
        scale: float,
        step: Step = identity,
    ) -> None:
        """Add scale * dscores k to dq, dscores^T q to dk (q is scaled already), and weights^T dout to dv."""
        arguments, piece = self._arguments, tile.operands.piece
        backwards = None if tile.visible is None else tile.visible.T
        dq = step(step(weighted_sum(dscores, Values.split(k), tile.visible)) * dscores.dtype.type(scale))
        dk = weighted_sum(dscores.swapaxes(-1, -2), Values.split(q), backwards).sum(axis=2)
        dv = weighted_sum(weights.swapaxes(-1, -2), Values.split(dout), backwards).sum(axis=2)
        arguments.split_heads(piece.queries(self._dq), 2)[:, tile.rows] = dq.transpose(0, 3, 1, 2, 4)
        for total, share in ((self._dk, dk), (self._dv, dv)):
            keys = piece.keys(total)
            keys += share.swapaxes(1, 2)

    def add_reduced(self, tile: GradientTile, dbias: Array, delta: Array) -> None:
        arguments, piece = self._arguments, tile.operands.piece
        if self._dbias is not None:
            share = dbias.reshape(dbias.shape[0], arguments.problem.heads_q, *dbias.shape[3:])
            axes = tuple(axis for axis in (0, 1, 2) if self._dbias.shape[axis] == 1)
            rows = piece.batched(self._dbias)[:, :, tile.rows if self._dbias.shape[2] > 1 else slice(None)]
            rows = rows[..., : piece.seqlen_k]
            rows += share.sum(axis=axes, keepdims=True)
        if self._dsinks is not None and tile.operands.sinks is not None:
            sinks = tile.operands.sinks
            # A sink of -inf has no gradient, and a row whose LSE is -inf adds none, for any delta.
            absent = np.isneginf(sinks) | np.isneginf(tile.lse)
            shares = np.where(absent, 0, _exp_of_difference(sinks, tile.lse) * delta)
            self._dsinks -= shares.sum(axis=(0, 3, 4)).reshape(-1)

    def gradients(self, step: Step = identity) -> ReferenceGradients:
        optional = (None if array is None else step(array) for array in (self._dbias, self._dsinks))
        return ReferenceGradients(step(self._dq), step(self._dk), step(self._dv), *optional)
