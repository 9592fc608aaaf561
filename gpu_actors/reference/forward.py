"""attention_forward: what every kernel's output is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpu_actors.reference.arguments import Arguments, Array, Piece
from gpu_actors.reference.softmax import Operands, Step, exponentials, keep_factors, masked_scores, weighted_sum

__all__ = ["EXACT", "ReferenceOutput", "Rounding", "attention_forward", "evaluate"]

# Scores of one tile: what several passes over them can keep in cache, and far below what memory would bear.
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """The result of a reference call, in the dtype that computed it and never rounded to the input's.

    out: (batch, seqlen_q, heads, dim_v), or (total_q, heads, dim_v) for varlen.
    lse: natural log, (batch, heads, seqlen_q), or (heads, total_q) for varlen; -inf for a row without keys.
    magnitude: sum over keys of P|V|, shaped like out, to which rounding P and V is proportional; or None.
    """

    out: Array
    lse: Array
    magnitude: Array | None = None


@dataclass(frozen=True, slots=True)
class Rounding:
    """What happens to intermediate results.

    step: applied to scores and to the sums over v. weights: to the softmax weights. dropped: to the weights
    after dropout. normalise_first: the weights are divided by their sum before all that, rather than the sums
    over v at the end.
    """

    step: Step
    weights: Step
    dropped: Step
    normalise_first: bool


def identity(array: Array) -> Array:
    """Leaves an intermediate result as it is."""
    return array


EXACT = Rounding(step=identity, weights=identity, dropped=identity, normalise_first=False)


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    alignment: Literal["bottom_right", "top_left"] = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    sink_tokens: int = 0,
    bias: Array | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    tree_mask: Array | None = None,
    accumulate: Literal["float64", "float32"] = "float64",
    with_magnitude: bool = False,
) -> ReferenceOutput:
    """softmax(mask(softcap(scale * q k^T) + ALiBi + bias)) v, straight from the formula.

    q (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_kv, dim), v (batch, seqlen_k, heads_kv, dim_v),
    any floating dtype, upcast to ``accumulate``; query head h reads KV head h // (heads // heads_kv).
    With cu_seqlens_q and cu_seqlens_k, integers (batch + 1,), the first two axes are packed into one; packed
    rows past the last sequence come out as rows that see no key.

    alignment: where the diagonal of causal, window_size and ALiBi lies when seqlen_q != seqlen_k.
    window_size: (left, right) keys around the diagonal, inclusive, -1 unbounded; causal is a right bound 0.
    sink_tokens: this many first keys are exempt from window_size, never from causal.
    softmax_scale: 1 / sqrt(dim) by default. softcap: c of c * tanh(s / c), 0 for none.
    alibi_slopes: (heads,) or (batch, heads); a key at distance d from the diagonal loses slope * d.
    bias: (batch or 1, heads or 1, seqlen_q, seqlen_k), added before the mask; dense only.
    sinks: (heads,) logits that join the softmax's denominator and the LSE.
    dropout_p, dropout_seed: probabilities whose Philox draw (`gpu_actors.philox`) falls below p are zeroed,
        the others scaled by 1 / (1 - p); the LSE does not notice.
    q_descale, k_descale, v_descale: (batch, heads_kv) factors of q, k and v.
    tree_mask: uint64, shaped like q without heads and dim: bit j of a row's number is set where it sees key j of
        the last seqlen_q keys of its sequence. Earlier keys are not its matter.

    A row that sees no key has out 0 and LSE -inf, or the sink's logit. NaN and infinities of keys, values
    or biases that a row does not see do not reach it; those that it sees do, as IEEE arithmetic has it.
    Raises InvalidRequest. Needs memory for the results, the upcast inputs of a sequence and a few 4 MB tiles.
    """
    arguments = Arguments(
        q=q,
        k=k,
        v=v,
        causal=causal,
        alignment=alignment,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        sink_tokens=sink_tokens,
        bias=bias,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        tree_mask=tree_mask,
    )
    return evaluate(arguments, np.dtype(accumulate), with_magnitude=with_magnitude)


def evaluate(
    arguments: Arguments, dtype: np.dtype, *, rounding: Rounding = EXACT, with_magnitude: bool = False
) -> ReferenceOutput:
    """The formula in ``dtype``, every intermediate result rounded as ``rounding`` says.

    Tiles depend on a sequence's own lengths and never on the batch around it: its result is bitwise the
    same alone.
    """
    seqlen_q = arguments.q.shape[-3]
    out = np.zeros((*arguments.q.shape[:-1], arguments.v.shape[-1]), dtype)
    lse = np.full((*out.shape[:-3], arguments.heads, seqlen_q), -np.inf, dtype)
    magnitude = np.zeros_like(out) if with_magnitude else None
    block = _BLOCK_BYTES // dtype.itemsize
    with np.errstate(all="ignore"):
        for piece in arguments.pieces(block):
            operands = Operands.load(arguments, piece, dtype, rounding.step)
            height = max(1, block // max(1, arguments.heads * piece.seqlen_k))
            for start in range(0, piece.seqlen_q, height):
                tile = slice(start, min(start + height, piece.seqlen_q))
                sums, tile_lse, tile_magnitude = _attend(arguments, operands, tile, rounding, with_magnitude)
                _token_major(arguments, piece, out)[:, tile] = sums.transpose(0, 3, 1, 2, 4)
                arguments.split_heads(piece.statistics(lse), 1)[..., tile] = tile_lse[..., 0]
                if magnitude is not None and tile_magnitude is not None:
                    _token_major(arguments, piece, magnitude)[:, tile] = tile_magnitude.transpose(0, 3, 1, 2, 4)
    return ReferenceOutput(out, lse, magnitude)


def _token_major(arguments: Arguments, piece: Piece, array: Array) -> Array:
    """The piece's part of an output, as (batch, rows, heads_kv, gqa_ratio, dim_v)."""
    return arguments.split_heads(piece.queries(array), 2)


def _attend(
    arguments: Arguments, operands: Operands, tile: slice, rounding: Rounding, with_magnitude: bool
) -> tuple[Array, Array, Array | None]:
    """(out, lse, magnitude) of a tile of rows, in the operands' layout."""
    rows = np.arange(tile.start, tile.stop)
    scores, visible = masked_scores(arguments, operands, rows, rounding.step)
    weights, total, lse = exponentials(scores, operands.sinks)
    divisor = np.where(total == 0, 1, total)
    if rounding.normalise_first:
        weights, divisor = weights / divisor, np.ones_like(divisor)
    weights = rounding.weights(weights)
    if arguments.dropout_p:
        weights = rounding.dropped(weights * keep_factors(arguments, operands.piece, rows, weights.dtype))
    sums = rounding.step(weighted_sum(weights, operands.values, visible) / divisor)
    magnitude = weights @ np.abs(operands.values.finite) / divisor if with_magnitude else None
    return sums, lse, magnitude
