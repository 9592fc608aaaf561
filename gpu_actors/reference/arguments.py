"""The arguments of a reference call: checked once, then cut into pieces whose scores fit in cache.

A piece is one varlen sequence, or as many dense sequences as the block size takes. Its arrays share one
layout, (batch, heads_kv, gqa_ratio, rows, dim), in which GQA is a broadcast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_actors.attention.key_mask import MASK_OPTIONS, KeyMask, MaskOptions
from gpu_actors.attention.philox import dropout_threshold
from gpu_actors.errors import InvalidRequest

__all__ = ["SCALARS", "Arguments", "Array", "AttentionOptions", "ForwardOptions", "Piece"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Sequences of equal length, computed together.

    first: index in the batch of the first sequence. stop: one past the last.
    tokens: the sequence's slices of the packed (query, key) rows, or None for a dense piece.
    """

    first: int
    stop: int
    tokens: tuple[slice, slice] | None
    seqlen_q: int
    seqlen_k: int

    def queries(self, array: Array) -> Array:
        """This piece of a query-side array, as (batch, rows, heads, dim)."""
        return array[self.first : self.stop] if self.tokens is None else array[None, self.tokens[0]]

    def keys(self, array: Array) -> Array:
        """This piece of a key-side array, as (batch, rows, heads_kv, dim)."""
        return array[self.first : self.stop] if self.tokens is None else array[None, self.tokens[1]]

    def statistics(self, array: Array) -> Array:
        """This piece of an LSE-like array, as (batch, heads, rows)."""
        return array[self.first : self.stop] if self.tokens is None else array[None, :, self.tokens[0]]

    def tree_rows(self, array: Array) -> Array:
        """The tree masks (rows,) of a piece of one sequence."""
        return array[self.first] if self.tokens is None else array[self.tokens[0]]

    def batched(self, array: Array) -> Array:
        """This piece of an array whose first axis is the batch, or 1."""
        return array if len(array) == 1 else array[self.first : self.stop]


class AttentionOptions(MaskOptions, total=False):
    """The options of the oracle, forward and backward, with those of `gpu_actors.attention.key_mask.KeyMask`.

    softmax_scale: 1 / sqrt(dim) by default. softcap: c of c * tanh(s / c), 0 for none.
    alibi_slopes: (heads,) or (batch, heads); a key at distance d from the diagonal loses slope * d.
    alibi_signed: d is below 0 right of the diagonal.
    sinks: (heads,) logits that join the softmax's denominator and the LSE.
    bias: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), added before the mask, or bool, True where keys count.
        Of packed sequences row r and key j of each are those of its own, and the longest may have fewer of both.
    dropout_p, dropout_seed: probabilities whose Philox draw (`gpu_actors.attention.philox`) falls below p are zeroed,
        the others scaled by 1 / (1 - p); the LSE does not change.
    cu_seqlens_q, cu_seqlens_k: integers (batch + 1,), the bounds of packed sequences.
    q_positions, k_positions: integers (batch,) or (batch, 2): the place of a sequence's first row, or key, in a larger
        problem, and the step to the next, 1 by default. Masks, ALiBi and dropout mean these places.
    dropout_first_head, dropout_heads: the number that dropout gives the first head, among how many; 0: those of q.
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
    """`AttentionOptions` and those that have no gradient.

    q_descale, k_descale, v_descale: (batch, heads_kv) factors of q, k and v.
    tree_mask: uint64, shaped like q without heads and dim: bit j of a row's number is set where it sees key j of
        the last seqlen_q keys of its sequence. It says nothing of earlier keys.
    """

    q_descale: Array | None
    k_descale: Array | None
    v_descale: Array | None
    tree_mask: Array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(KeyMask):
    """What `attention_forward` was given: see there and `ForwardOptions`.

    Raises `InvalidRequest`, which names the argument at fault.
    """

    q: Array
    k: Array
    v: Array
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    bias: Array | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    q_descale: Array | None = None
    k_descale: Array | None = None
    v_descale: Array | None = None
    tree_mask: Array | None = None
    q_positions: Array | None = None
    k_positions: Array | None = None
    dropout_first_head: int = 0
    dropout_heads: int = 0
    alibi_signed: bool = False

    def __post_init__(self) -> None:
        KeyMask.__post_init__(self)
        self._check_layout()
        if not (self.softcap >= 0.0 and math.isfinite(self.softcap)):
            raise InvalidRequest("softcap", self.softcap, "positive, or 0 for none")
        if self.dropout_p:
            dropout_threshold(self.dropout_p)
        batch, heads, heads_kv = self.batch, self.heads, self.heads_kv
        _check_shape("sinks", self.sinks, (heads,))
        _check_shape("alibi_slopes", self.alibi_slopes, (heads,), (batch, heads))
        for name in ("q_descale", "k_descale", "v_descale"):
            _check_shape(name, getattr(self, name), (batch, heads_kv))
        _check_shape("tree_mask", self.tree_mask, self.q.shape[:-2])
        for name in ("q_positions", "k_positions"):
            _check_shape(name, getattr(self, name), (batch,), (batch, 2))
        if self.bias is not None:
            rows, keys = (self.q.shape[1], self.k.shape[1]) if not self.varlen else self._longest(self.bias)
            _check_shape("bias", self.bias, *itertools.product((1, batch), (1, heads), (1, rows), (keys,)))

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1

    @property
    def heads(self) -> int:
        return int(self.q.shape[-2])

    @property
    def heads_kv(self) -> int:
        return int(self.k.shape[-2])

    @property
    def gqa_ratio(self) -> int:
        return self.heads // self.heads_kv

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.softmax_scale is None else self.softmax_scale

    @property
    def positioned(self) -> bool:
        """Whether each sequence has positions of its own."""
        return self.q_positions is not None or self.k_positions is not None

    def positions(self, piece: Piece, rows: Array) -> tuple[Array, Array]:
        """Where rows of a piece of one sequence stand, (R,), and its keys, (seqlen_k,)."""
        keys = np.arange(piece.seqlen_k)
        if not self.positioned:
            return rows, keys
        return _steps(self.q_positions, piece.first, rows), _steps(self.k_positions, piece.first, keys)

    def split_heads(self, array: Array, axis: int) -> Array:
        """A view in which the axis of query heads is two: (heads_kv, gqa_ratio)."""
        shape = (*array.shape[:axis], self.heads_kv, self.gqa_ratio, *array.shape[axis + 1 :])
        return array.reshape(shape)

    def pieces(self, block_elements: int) -> Iterator[Piece]:
        """Every sequence exactly once, dense ones together while their scores stay below block_elements."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            seqlen_q, seqlen_k = self.q.shape[1], self.k.shape[1]
            step = max(1, block_elements // max(1, self.heads * seqlen_q * seqlen_k))
            if self.tree_mask is not None or self.positioned:
                step = 1  # every sequence has a mask of its own
            for first in range(0, self.batch, step):
                stop = min(first + step, self.batch)
                yield Piece(first=first, stop=stop, tokens=None, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            return
        ends_q, ends_k = (np.asarray(ends).tolist() for ends in (self.cu_seqlens_q, self.cu_seqlens_k))
        for index in range(self.batch):
            rows, keys = slice(*ends_q[index : index + 2]), slice(*ends_k[index : index + 2])
            yield Piece(
                first=index,
                stop=index + 1,
                tokens=(rows, keys),
                seqlen_q=rows.stop - rows.start,
                seqlen_k=keys.stop - keys.start,
            )

    def _longest(self, bias: Array) -> tuple[int, int]:
        """The rows and keys that a bias of packed sequences must have: its own, where the longest sequence fits."""
        least = [
            int(np.diff(np.asarray(ends).astype(np.int64)).max(initial=0))
            for ends in (self.cu_seqlens_q, self.cu_seqlens_k)
        ]
        own = bias.shape[2:] if bias.ndim == 4 else (0, 0)
        return max(least[0], own[0]), max(least[1], own[1])

    def _check_layout(self) -> None:
        dims = 3 if self.varlen else 4
        layout = "(total, heads, dim)" if self.varlen else "(batch, rows, heads, dim)"
        for name in ("q", "k", "v"):
            array = getattr(self, name)
            if array.ndim != dims:
                raise InvalidRequest(name, _describe(array), f"the layout here is {layout}")
        q, k, v = self.q, self.k, self.v
        if k.shape[:-1] != v.shape[:-1]:
            raise InvalidRequest("v", _describe(v), f"k and v differ in the last axis only, and k is {k.shape}")
        if k.shape[-1] != q.shape[-1] or (not self.varlen and k.shape[0] != q.shape[0]):
            raise InvalidRequest("k", _describe(k), f"batch and head_dim are those of q, {q.shape}")
        if self.heads_kv == 0 or self.heads % self.heads_kv:
            raise InvalidRequest("k", _describe(k), f"{self.heads} query heads need a divisor of that many KV heads")
        if (self.cu_seqlens_q is None) != (self.cu_seqlens_k is None):
            raise InvalidRequest("cu_seqlens_k", self.cu_seqlens_k, "varlen takes cu_seqlens_q and cu_seqlens_k")
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            _check_ends("cu_seqlens_q", self.cu_seqlens_q, len(q))
            _check_ends("cu_seqlens_k", self.cu_seqlens_k, len(k))
            if len(self.cu_seqlens_q) != len(self.cu_seqlens_k):
                raise InvalidRequest("cu_seqlens_k", len(self.cu_seqlens_k), "as long as cu_seqlens_q")


SCALARS: tuple[str, ...] = (
    *MASK_OPTIONS,
    "softmax_scale",
    "softcap",
    "dropout_p",
    "dropout_first_head",
    "dropout_heads",
    "alibi_signed",
)
"""The options that are numbers, without the seed, which changes from request to request of one problem."""


def _steps(positions: Array | None, sequence: int, indices: Array) -> Array:
    if positions is None:
        return indices
    first, step = (*np.atleast_1d(positions[sequence]).astype(np.int64), 1)[:2]
    stepped: Array = first + indices * step
    return stepped


def _describe(array: Array) -> str:
    return f"{array.dtype.name}{array.shape}"


def _check_shape(name: str, array: Array | None, *accepted: tuple[int, ...]) -> None:
    if array is not None and np.shape(array) not in accepted:
        shapes = " or ".join(str(shape) for shape in dict.fromkeys(accepted))
        raise InvalidRequest(name, f"shape {np.shape(array)}", f"its shape is {shapes}")


def _check_ends(name: str, ends: Array, total: int) -> None:
    ends = np.asarray(ends)
    if ends.ndim != 1 or ends.size == 0 or ends.dtype.kind not in "iu":
        raise InvalidRequest(name, _describe(ends), "a vector of batch + 1 integers")
    if ends[0] != 0 or np.any(ends[1:] < ends[:-1]) or ends[-1] > total:
        reason = f"starts at 0, never falls and ends within the {total} packed rows"
        raise InvalidRequest(name, ends.tolist(), reason)
