"""The arguments of the oracle: a checked problem with its arrays, cut into pieces whose scores fit in cache.

A piece is one varlen sequence, or as many dense sequences as fit the block size. Its arrays share one
layout, (batch, heads_kv, gqa_ratio, rows, dim), in which GQA is a broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from gpu_actors.attention.key_mask import MASK_OPTIONS, MaskOptions
from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.requests import FlashForward
from gpu_actors.fields import optional_array
from gpu_actors.validation.forward import check_cu_seqlens, check_seed, forward_problem

__all__ = ["Arguments", "Array", "AttentionOptions", "ForwardOptions", "Piece", "pose"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Sequences of equal length, computed together.

    first: the batch index of the first sequence. stop: the index after the last sequence.
    tokens: the sequence's slices of the packed (query, key) rows, or None for a dense piece.
    """

    first: int
    stop: int
    tokens: tuple[slice, slice] | None
    seqlen_q: int
    seqlen_k: int

    def queries(self, array: Array) -> Array:
        """The piece of an array of rows: (batch, rows, heads, dim)."""
        return array[self.first : self.stop] if self.tokens is None else array[None, self.tokens[0]]

    def keys(self, array: Array) -> Array:
        """The piece of an array of keys: (batch, rows, heads_kv, dim)."""
        return array[self.first : self.stop] if self.tokens is None else array[None, self.tokens[1]]

    def statistics(self, array: Array) -> Array:
        """The piece of an array with a number per row and head: (batch, heads, rows)."""
        return array[self.first : self.stop] if self.tokens is None else array[None, :, self.tokens[0]]

    def tree_rows(self, array: Array) -> Array:
        """The tree masks (rows,) of a piece that is one sequence."""
        return array[self.first] if self.tokens is None else array[self.tokens[0]]

    def batched(self, array: Array) -> Array:
        """The piece of an array whose first axis is the batch, or 1."""
        return array if len(array) == 1 else array[self.first : self.stop]


class AttentionOptions(MaskOptions, total=False):
    """The options of the oracle, forward and backward, and those of `gpu_actors.attention.key_mask.KeyMask`.

    softmax_scale: 1 / sqrt(dim) by default. softcap: c of c * tanh(s / c), 0 for none.
    alibi_slopes: (heads,) or (batch, heads); a key at distance d from the diagonal loses slope * d.
    alibi_signed: whether d is negative for keys after the diagonal.
    sinks: (heads,) logits that join the softmax's denominator and the LSE.
    bias: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), added before the mask, or bool, True where keys count.
        For packed sequences row r and key j count within each sequence. The bias may have more rows and keys than the
        longest sequence.
    dropout_p, dropout_seed: probabilities whose Philox draw (`gpu_actors.attention.philox`) falls below p are zeroed,
        the others scaled by 1 / (1 - p); the LSE does not change.
    cu_seqlens_q, cu_seqlens_k: integers (batch + 1,), the bounds of packed sequences.
    q_positions, k_positions: integers (batch,) or (batch, 2): the position of a sequence's first row, or key, in a
        larger problem, and the step to the next, 1 by default. Masks, ALiBi and dropout count these positions.
    dropout_first_head, dropout_heads: the number of the first head and the number of heads, for dropout; 0 heads: the
        heads of q.
    """

    softmax_scale: float | None
    softcap: float
    alibi_slopes: Array | None
    sinks: Array | None
    bias: Array | None
    dropout_p: float
    dropout_seed: int
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    q_positions: Array | None
    k_positions: Array | None
    dropout_first_head: int
    dropout_heads: int
    alibi_signed: bool


class ForwardOptions(AttentionOptions, total=False):
    """`AttentionOptions`, and the options that the backward does not take.

    q_descale, k_descale, v_descale: (batch, heads_kv) factors of q, k and v.
    tree_mask: uint64, shaped like q without heads and dim: bit j of a row's number says whether the row sees key j of
        the last seqlen_q keys of its sequence. It does not affect earlier keys.
    """

    q_descale: Array | None
    k_descale: Array | None
    v_descale: Array | None
    tree_mask: Array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A problem, which has the options, and its arrays: those of `ForwardOptions`. It checks nothing.

    For a problem over a cache, q, k and v are packed.
    """

    problem: AttentionProblem
    q: Array
    k: Array
    v: Array
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    bias: Array | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    q_descale: Array | None = None
    k_descale: Array | None = None
    v_descale: Array | None = None
    tree_mask: Array | None = None
    q_positions: Array | None = None
    k_positions: Array | None = None
    dropout_seed: int = 0

    @property
    def positioned(self) -> bool:
        return self.q_positions is not None or self.k_positions is not None

    def positions(self, piece: Piece, rows: Array) -> tuple[Array, Array]:
        """The positions of rows (R,) of a piece that is one sequence, and of its keys (seqlen_k,)."""
        keys = np.arange(piece.seqlen_k)
        if not self.positioned:
            return rows, keys
        return _steps(self.q_positions, piece.first, rows), _steps(self.k_positions, piece.first, keys)

    def split_heads(self, array: Array, axis: int) -> Array:
        """A view in which the axis of query heads is two axes: (heads_kv, gqa_ratio)."""
        problem = self.problem
        return array.reshape(*array.shape[:axis], problem.heads_kv, problem.gqa_ratio, *array.shape[axis + 1 :])

    def pieces(self, block_elements: int) -> Iterator[Piece]:
        """Every sequence exactly once. Dense sequences share a piece while their scores stay below block_elements."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            seqlen_q, seqlen_k = self.q.shape[1], self.k.shape[1]
            step = max(1, block_elements // max(1, self.problem.heads_q * seqlen_q * seqlen_k))
            if self.tree_mask is not None or self.positioned:
                step = 1  # each sequence has its own mask
            for first in range(0, self.problem.batch, step):
                stop = min(first + step, self.problem.batch)
                yield Piece(first=first, stop=stop, tokens=None, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            return
        ends_q, ends_k = (np.asarray(ends).tolist() for ends in (self.cu_seqlens_q, self.cu_seqlens_k))
        for index in range(self.problem.batch):
            rows, keys = slice(*ends_q[index : index + 2]), slice(*ends_k[index : index + 2])
            yield Piece(
                first=index,
                stop=index + 1,
                tokens=(rows, keys),
                seqlen_q=rows.stop - rows.start,
                seqlen_k=keys.stop - keys.start,
            )


class _Stated(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


_SCALARS = (
    *MASK_OPTIONS,
    "softmax_scale",
    "softcap",
    "dropout_p",
    "dropout_first_head",
    "dropout_heads",
    "alibi_signed",
)


def pose(q: Array, k: Array, v: Array, **options: Unpack[ForwardOptions]) -> Arguments:
    """The arguments of a call. The problem is that of a request with these shapes and options.

    The oracle takes any mix of dtypes, so validation gets dtypes that a request may have in place of the real ones.
    """
    arrays: dict[str, Any] = dict(options)
    scalars: dict[str, Any] = {name: arrays.pop(name) for name in _SCALARS if name in arrays}
    scalars["dropout_heads"] = scalars.get("dropout_heads") or None
    bias, ends_q, ends_k = arrays.get("bias"), _bounds(arrays, "cu_seqlens_q"), _bounds(arrays, "cu_seqlens_k")
    spare_q, spare_k = _rows_past(ends_q, q), _rows_past(ends_k, k)
    request = FlashForward(
        q=_stated(q, "float64", spare_q),
        k=_stated(k, "float64", spare_k),
        v=_stated(v, "float64", spare_k),
        alibi_slopes=_stated(arrays.get("alibi_slopes"), "float32"),
        sinks=_stated(arrays.get("sinks"), "float32"),
        bias=_stated(bias, "bool" if bias is not None and bias.dtype == np.bool_ else "float32"),
        cu_seqlens_q=ends_q,
        cu_seqlens_k=ends_k,
        q_positions=_stated(arrays.get("q_positions"), "int32"),
        k_positions=_stated(arrays.get("k_positions"), "int32"),
        **scalars,
    )
    problem = forward_problem(request)
    check_seed(arrays.get("dropout_seed", 0))
    if problem.layout == "varlen":
        check_cu_seqlens("cu_seqlens_q", np.asarray(arrays["cu_seqlens_q"]), problem.total_q, problem.seqlen_q)
        check_cu_seqlens("cu_seqlens_k", np.asarray(arrays["cu_seqlens_k"]), problem.total_k, problem.seqlen_k)
    for name in ("q_descale", "k_descale", "v_descale"):
        factors = _stated(arrays.get(name), "float32")
        optional_array(name, factors, ((problem.batch, problem.heads_kv),), ("float32",))
    optional_array("tree_mask", _stated(arrays.get("tree_mask"), "uint64"), (q.shape[:-2],), ("uint64",))
    return Arguments(problem=problem, q=q, k=k, v=v, **arrays)


def _stated(array: Array | None, dtype: str, spare: int = 0) -> Any:
    """The shape and dtype of an array, for validation. spare: the rows to leave out of the shape."""
    if array is None:
        return None
    shape = np.shape(array)
    return _Stated((shape[0] - spare, *shape[1:]) if spare and shape else shape, dtype)


def _bounds(arrays: Mapping[str, Any], name: str) -> Any:
    """Sequence bounds as a request has them, int32, from integers of any width."""
    if arrays.get(name) is None:
        return None
    ends = np.asarray(arrays[name])
    return ends.astype(np.int32) if ends.dtype.kind in "iu" else ends


def _rows_past(ends: Array | None, array: Array) -> int:
    """The number of rows after the last sequence, which belong to no problem. 0 without valid bounds."""
    if ends is None or ends.dtype != np.int32 or ends.ndim != 1 or not ends.size or not array.ndim:
        return 0
    return max(0, len(array) - max(0, int(ends[-1])))


def _steps(positions: Array | None, sequence: int, indices: Array) -> Array:
    if positions is None:
        return indices
    first, step = (*np.atleast_1d(positions[sequence]).astype(np.int64), 1)[:2]
    stepped: Array = first + indices * step
    return stepped
