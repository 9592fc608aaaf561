"""attention_forward: the output that every kernel's is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Unpack

import numpy as np

from gpu_actors.attention.key_mask import KeyMask, MaskOptions
from gpu_actors.reference.arguments import Arguments, Array, ForwardOptions, Piece, pose
from gpu_actors.reference.softmax import Operands, Step, exponentials, keep_factors, masked_scores, weighted_sum

__all__ = ["EXACT", "ReferenceOutput", "Rounding", "attention_forward", "evaluate", "visible_keys"]

# The scores of one tile. Several passes over them stay in cache, and many tiles fit into memory.
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """The result of a reference call, in the dtype of the computation and not rounded to the input's dtype.

    out: (batch, seqlen_q, heads, dim_v), or (total_q, heads, dim_v) for varlen.
    lse: natural log, (batch, heads, seqlen_q), or (heads, total_q) for varlen; -inf for a row without keys.
    magnitude: the sum over keys of P|V|, shaped like out, or None. Errors by rounding P and V are proportional to it.
    """

    out: Array
    lse: Array
    magnitude: Array | None = None


@dataclass(frozen=True, slots=True)
class Rounding:
    """How intermediate results are rounded.

    step: applied to q, k, v, scores and the sums over v. weights: applied to the softmax weights. dropped: applied
    to the weights after dropout. normalise_first: whether the weights are divided by their sum before they are
    rounded, rather than the sums over v at the end.
    """

    step: Step
    weights: Step
    dropped: Step
    normalise_first: bool


def identity(array: Array) -> Array:
    return array


EXACT = Rounding(step=identity, weights=identity, dropped=identity, normalise_first=False)


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    accumulate: Literal["float64", "float32"] = "float64",
    with_magnitude: bool = False,
    **options: Unpack[ForwardOptions],
) -> ReferenceOutput:
    """softmax(mask(softcap(scale * q k^T) + ALiBi + bias)) v, computed by the formula.

    q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_kv, dim), v (batch, seqlen_k, heads_kv, dim_v),
    any floating dtype, upcast to ``accumulate``; query head h reads KV head h // (heads // heads_kv).
    With cu_seqlens_q and cu_seqlens_k, integers (batch + 1,), the first two axes are packed into one. Packed
    rows after the last sequence have the results of rows that see no key.

    options: as in `ForwardOptions`.

    A row that sees no key has out 0, and its LSE is -inf, or the sink's logit. NaN and infinities of keys, values
    or biases do not reach rows that do not see them. They reach the others as IEEE arithmetic requires.
    Raises InvalidRequest as a request would, except for dtypes. It needs memory for the results, the upcast inputs
    of a sequence and a few 4 MB tiles.
    """
    return evaluate(pose(q, k, v, **options), np.dtype(accumulate), with_magnitude=with_magnitude)


def evaluate(
    arguments: Arguments, dtype: np.dtype, *, rounding: Rounding = EXACT, with_magnitude: bool = False
) -> ReferenceOutput:
    """The formula in ``dtype``, with every intermediate result rounded by ``rounding``.

    Tiles depend on a sequence's own lengths and never on its batch, so its result is bitwise the same alone.
    """
    seqlen_q = arguments.q.shape[-3]
    out = np.zeros((*arguments.q.shape[:-1], arguments.v.shape[-1]), dtype)
    lse = np.full((*out.shape[:-3], arguments.problem.heads_q, seqlen_q), -np.inf, dtype)
    magnitude = np.zeros_like(out) if with_magnitude else None
    block = _BLOCK_BYTES // dtype.itemsize
    with np.errstate(all="ignore"):
        for piece in arguments.pieces(block):
            operands = Operands.load(arguments, piece, dtype, rounding.step)
            height = max(1, block // max(1, arguments.problem.heads_q * piece.seqlen_k))
            for start in range(0, piece.seqlen_q, height):
                tile = slice(start, min(start + height, piece.seqlen_q))
                sums, tile_lse, tile_magnitude = _attend(arguments, operands, tile, rounding, with_magnitude)
                _token_major(arguments, piece, out)[:, tile] = sums.transpose(0, 3, 1, 2, 4)
                arguments.split_heads(piece.statistics(lse), 1)[..., tile] = tile_lse[..., 0]
                if magnitude is not None and tile_magnitude is not None:
                    _token_major(arguments, piece, magnitude)[:, tile] = tile_magnitude.transpose(0, 3, 1, 2, 4)
    return ReferenceOutput(out, lse, magnitude)


def _token_major(arguments: Arguments, piece: Piece, array: Array) -> Array:
    return arguments.split_heads(piece.queries(array), 2)


def _attend(
    arguments: Arguments, operands: Operands, tile: slice, rounding: Rounding, with_magnitude: bool
) -> tuple[Array, Array, Array | None]:
    """(out, lse, magnitude) of a tile of rows, in the operands' layout."""
    rows = np.arange(tile.start, tile.stop)
    scores, visible = masked_scores(arguments, operands, rows, rounding.step)
    in_order = arguments.problem.invariant
    weights, total, lse = exponentials(scores, operands.sinks, in_order)
    divisor = np.where(total == 0, 1, total)
    if rounding.normalise_first:
        weights, divisor = weights / divisor, np.ones_like(divisor)
    weights = rounding.weights(weights)
    if arguments.problem.dropout_p:
        weights = rounding.dropped(weights * keep_factors(arguments, operands.piece, rows, weights.dtype))
    sums = rounding.step(weighted_sum(weights, operands.values, visible, in_order) / divisor)
    magnitude = weights @ np.abs(operands.values.finite) / divisor if with_magnitude else None
    return sums, lse, magnitude


def visible_keys(rows: Array, seqlen_q: int, seqlen_k: int, **mask: Unpack[MaskOptions]) -> Array | None:
    """`KeyMask.visible_keys` of the mask with these options. Raises as `KeyMask`."""
    return KeyMask(**mask).visible_keys(rows, seqlen_q, seqlen_k)
