"""From queries and keys to softmax weights, and from weights to a sum over values, one tile of rows at a
time.

``step`` is applied to intermediate results: the identity for the oracle, rounding to a dtype for the results
that the tolerance rule measures errors by. Arrays are (batch, heads_kv, gqa_ratio, rows, keys or dim).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gpu_actors.attention.philox import dropout_keep
from gpu_actors.reference.arguments import Arguments, Array, Piece

__all__ = [
    "Operands",
    "Step",
    "Values",
    "capped_scores",
    "exponentials",
    "keep_factors",
    "mask_scores",
    "masked_scores",
    "product",
    "weighted_sum",
]

Step: TypeAlias = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class Values:
    """The right side of a masked product, split so that 0 * NaN cannot happen for a masked pair.

    finite: v (batch, heads_kv, 1, seqlen_k, dim_v) with every NaN and infinity replaced by 0.
    keys: indices of the keys whose v has a NaN or infinity. rest: v at these keys.
    In the backward's products, which sum over rows, q or dout replaces v, and rows replace keys.
    """

    finite: Array
    keys: Array
    rest: Array

    @classmethod
    def split(cls, v: Array) -> Values:
        good = np.isfinite(v)
        keys = np.flatnonzero(~good.all(axis=(0, 1, 2, 4)))
        return cls(v if keys.size == 0 else np.where(good, v, 0), keys, v[..., keys, :])


@dataclass(frozen=True, slots=True)
class Operands:
    piece: Piece
    q: Array
    k: Array
    values: Values
    alibi: Array | None
    sinks: Array | None
    bias: Array | None

    @classmethod
    def load(cls, arguments: Arguments, piece: Piece, dtype: np.dtype, step: Step) -> Operands:
        """Load a piece. q is scaled by softmax_scale first, so that low precision is least likely to overflow."""
        q = _head_major(piece.queries(arguments.q), dtype)
        k = _head_major(piece.keys(arguments.k), dtype)
        v = _head_major(piece.keys(arguments.v), dtype)
        q = arguments.split_heads(q, 1)
        q = _descaled(q, arguments.q_descale, piece) * dtype.type(arguments.problem.softmax_scale)
        k = _descaled(k[:, :, None], arguments.k_descale, piece)
        v = _descaled(v[:, :, None], arguments.v_descale, piece)
        alibi, sinks, bias = arguments.alibi_slopes, arguments.sinks, arguments.bias
        if alibi is not None:
            alibi = arguments.split_heads(piece.batched(np.atleast_2d(alibi)), 1)
            alibi = alibi.astype(dtype)[..., None, None]
        if sinks is not None:
            sinks = arguments.split_heads(np.asarray(sinks), 0).astype(dtype)[..., None, None]
        if bias is not None:
            bias = piece.batched(bias)[:, :, : piece.seqlen_q, : piece.seqlen_k]
            bias = bias[:, :, None] if bias.shape[1] == 1 else arguments.split_heads(bias, 1)
        return cls(piece, step(q), step(k), Values.split(step(v)), alibi, sinks, bias)


def _head_major(array: Array, dtype: np.dtype) -> Array:
    return array.swapaxes(1, 2).astype(dtype, order="C")


def _descaled(array: Array, descale: Array | None, piece: Piece) -> Array:
    if descale is None:
        return array
    factors = descale[piece.first : piece.stop, :, None, None, None]
    scaled: Array = array * factors.astype(array.dtype)
    return scaled


def masked_scores(arguments: Arguments, operands: Operands, rows: Array, step: Step) -> tuple[Array, Array | None]:
    """The scores of a tile of rows, -inf where masked, and the mask itself (None if nothing is masked)."""
    return mask_scores(arguments, operands, rows, capped_scores(arguments, operands, rows, step)[0], step)


def capped_scores(arguments: Arguments, operands: Operands, rows: Array, step: Step) -> tuple[Array, Array | None]:
    """The scaled scores of a tile of rows after the softcap and before ALiBi and bias, and the arguments of its tanh.

    The arguments are None without a softcap.
    """
    tile, cap = slice(int(rows[0]), int(rows[-1]) + 1), arguments.problem.softcap
    scores = step(product(operands.q[..., tile, :], operands.k.swapaxes(-1, -2), arguments.problem.invariant))
    if not cap:
        return scores, None
    shares = step(scores / cap)
    return step(step(np.tanh(shares)) * cap), shares


def mask_scores(
    arguments: Arguments, operands: Operands, rows: Array, scores: Array, step: Step
) -> tuple[Array, Array | None]:
    """Apply ALiBi, bias and mask to `capped_scores`, which may be overwritten. Returns the scores and the mask."""
    piece, tile, problem = operands.piece, slice(int(rows[0]), int(rows[-1]) + 1), arguments.problem
    own, keys = arguments.positions(piece, rows)
    if operands.alibi is not None:
        distance = problem.key_distance(rows, piece.seqlen_q, piece.seqlen_k)
        if arguments.positioned:
            distance = own[:, None] - keys
        if not problem.alibi_signed:
            distance = np.abs(distance)
        scores = step(scores - step(operands.alibi * distance.astype(scores.dtype)))
    if operands.bias is not None:
        bias = operands.bias if operands.bias.shape[-2] == 1 else operands.bias[..., tile, :]
        hides = bias.dtype == np.bool_
        scores = np.where(bias, scores, -np.inf) if hides else step(scores + bias.astype(scores.dtype))
    if arguments.positioned:
        visible = problem.visible_positions(own[:, None], keys)
    else:
        visible = problem.visible_keys(rows, piece.seqlen_q, piece.seqlen_k)
    if arguments.tree_mask is not None:
        bits = piece.tree_rows(arguments.tree_mask)[tile]
        visible = _hide_by_tree(visible, bits, piece.seqlen_q, piece.seqlen_k)
    if visible is not None:
        np.copyto(scores, -np.inf, where=~visible)
    return scores, visible


def _hide_by_tree(visible: Array | None, bits: Array, seqlen_q: int, seqlen_k: int) -> Array:
    """``visible`` (R, seqlen_k) without the new keys that a row's tree mask hides.

    bits: uint64 (R,), the tree masks of the rows. The last seqlen_q keys are new; bit j is new key j.
    """
    keys = np.arange(max(0, seqlen_k - seqlen_q), seqlen_k)
    held = np.ones((bits.size, seqlen_k), dtype=np.bool_) if visible is None else visible.copy()
    shifts = (keys - (seqlen_k - seqlen_q)).astype(np.uint64)
    held[:, keys] &= (bits.astype(np.uint64)[:, None] >> shifts & np.uint64(1)).astype(np.bool_)
    return held


def product(a: Array, b: Array, in_order: bool) -> Array:
    """a @ b. in_order: each sum adds its terms in order, so that no bit depends on the sizes of a and b.

    NumPy's own product sums in blocks that depend on shapes.
    """
    if not in_order:
        plain: Array = a @ b
        return plain
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = np.zeros(shape, a.dtype)
    for index in range(a.shape[-1]):
        total += a[..., index, None] * b[..., index, None, :]
    return total


def exponentials(scores: Array, sinks: Array | None, in_order: bool = False) -> tuple[Array, Array, Array]:
    """exp(s - max), which overwrites the scores, its row sums and the natural log-sum-exp, both (..., rows, 1).

    in_order: as in `product`.

    A learned sink is one more logit of the row: it joins the maximum, the sum and the LSE. A row that
    sees nothing has sum 0 and LSE -inf.
    """
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    shift = np.where(np.isneginf(largest), 0, largest).astype(scores.dtype)
    scores -= shift
    weights = np.exp(scores, out=scores)
    if in_order and weights.shape[-1]:
        total = np.cumsum(weights, axis=-1)[..., -1:]
    else:
        total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - shift)
    return weights, total, shift + np.log(total)


def keep_factors(arguments: Arguments, piece: Piece, rows: Array, dtype: np.dtype) -> Array:
    """Dropout's factors of a tile's probabilities: 0 or 1 / (1 - p)."""
    problem = arguments.problem
    sequences = np.arange(piece.first, piece.stop)[:, None] * (problem.dropout_heads or problem.heads_q)
    indices = sequences + problem.dropout_first_head + np.arange(problem.heads_q)
    heads = indices.reshape(-1, problem.heads_kv, problem.gqa_ratio)
    own, keys = arguments.positions(piece, rows)
    if arguments.positioned:
        keep = dropout_keep(problem.dropout_p, arguments.dropout_seed, heads, own, keys)
    else:
        keep = dropout_keep(problem.dropout_p, arguments.dropout_seed, heads, rows, piece.seqlen_k)
    factors: Array = keep * dtype.type(1.0 / (1.0 - problem.dropout_p))
    return factors


def weighted_sum(weights: Array, values: Values, visible: Array | None, in_order: bool = False) -> Array:
    """weights @ v. A NaN or infinity of v reaches only the rows that see its key.

    For these rows products are IEEE's: a weight that dropout or underflow made 0 still turns an infinity
    into NaN. Weights have any sign, and are 0 where masked. in_order: as in `product`.
    """
    total = product(weights, values.finite, in_order)
    if values.keys.size == 0:
        return total
    weights = weights[..., values.keys]
    seen = np.ones(weights.shape, bool) if visible is None else np.broadcast_to(visible[:, values.keys], weights.shape)
    groups = (weights > 0, weights < 0, weights == 0)
    reaching, turning, dead = ((seen & chosen).astype(total.dtype) for chosen in groups)
    infinite = np.isinf(values.rest).astype(total.dtype)
    for sign in (np.inf, -np.inf):
        same, opposite = ((values.rest == other).astype(total.dtype) for other in (sign, -sign))
        total += np.where(reaching @ same + turning @ opposite > 0, sign, 0).astype(total.dtype)
    spoiled = seen.astype(total.dtype) @ np.isnan(values.rest).astype(total.dtype) + dead @ infinite
    total[spoiled > 0] = np.nan
    return total
