"""The oracle over caches: gather each sequence's keys and values, then `attention_forward` on packed sequences.

It never reads beyond a sequence's length: neither pages and table entries after its last page, nor rows after its last
key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.reference.arguments import Arguments, Array
from gpu_actors.reference.forward import ReferenceOutput, attention_forward, evaluate

__all__ = ["Gathered", "evaluate_cached", "gather_cache", "gather_caches", "gather_pages", "paged_attention_forward"]


class Gathered(NamedTuple):
    """Packed sequences. k, v: (total_k, heads_kv, dim). cu_seqlens_k: int32 (batch + 1,)."""

    k: Array
    v: Array
    cu_seqlens_k: Array


def gather_pages(
    k_cache: Array, v_cache: Array, block_table: Array, cache_seqlens: Array, cache_leftpad: Array | None = None
) -> Gathered:
    """The sequences in pools (num_blocks, page_size, heads_kv, dim), by block_table (batch, max_blocks).

    cache_leftpad: rows before each sequence's first key. cache_seqlens includes them.
    """
    page_size = k_cache.shape[1]

    def sequence(pool: Array, table: Array, first: int, last: int) -> Array:
        before = first // page_size
        pages = table[before : -(-last // page_size)]
        return pool[pages].reshape(-1, *pool.shape[2:])[first - before * page_size : last - before * page_size]

    bounds = _bounds(cache_seqlens, cache_leftpad)
    k, v = (
        [sequence(pool, table, *bound) for table, bound in zip(block_table, bounds, strict=True)]
        for pool in (k_cache, v_cache)
    )
    lengths = [last - first for first, last in bounds]
    return _packed(k, v, lengths, (k_cache.reshape(-1, *k_cache.shape[2:]), v_cache.reshape(-1, *v_cache.shape[2:])))


def gather_cache(
    k_cache: Array,
    v_cache: Array,
    cache_seqlens: Array,
    cache_leftpad: Array | None = None,
    cache_batch_idx: Array | None = None,
) -> Gathered:
    """The sequences in a dense cache (sequences, capacity, heads_kv, dim): all in order, or those of cache_batch_idx.

    cache_leftpad: as for `gather_pages`.
    """
    bounds = _bounds(cache_seqlens, cache_leftpad)
    places = range(len(bounds)) if cache_batch_idx is None else cache_batch_idx
    k, v = (
        [caches[place][first:last] for place, (first, last) in zip(places, bounds, strict=True)]
        for caches in (k_cache, v_cache)
    )
    lengths = [last - first for first, last in bounds]
    return _packed(k, v, lengths, (k_cache.reshape(-1, *k_cache.shape[2:]), v_cache.reshape(-1, *v_cache.shape[2:])))


def gather_caches(k_caches: Sequence[Array], v_caches: Sequence[Array], seq_lens: Array) -> Gathered:
    """The sequences, at least one, in an array (heads_kv, max_seq, dim) for each."""
    lengths = [int(length) for length in seq_lens]
    k, v = (
        [cache[:, :length].swapaxes(0, 1) for cache, length in zip(caches, lengths, strict=True)]
        for caches in (k_caches, v_caches)
    )
    return _packed(k, v, lengths, (k[0], v[0]))


def _bounds(lengths: Array, leftpad: Array | None) -> list[tuple[int, int]]:
    """The bounds of each sequence's keys among its rows: first, and last plus 1."""
    firsts = np.zeros(len(lengths), int) if leftpad is None else leftpad
    return [(int(first), int(last)) for first, last in zip(firsts, lengths, strict=True)]


def _packed(k: list[Array], v: list[Array], lengths: list[int], like: tuple[Array, Array]) -> Gathered:
    """Pack the sequences. like: rows of K and of V, whose dtype and shape count if the batch has no sequences."""
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Gathered(np.concatenate([like[0][:0], *k]), np.concatenate([like[1][:0], *v]), ends)


def paged_attention_forward(
    q: Array, cache: Gathered, *, cu_seqlens_q: Array | None = None, **options: Any
) -> ReferenceOutput:
    """`attention_forward` of new rows to sequences that were gathered from a cache.

    q: (batch, rows, heads, dim), or (total_q, heads, dim) with cu_seqlens_q: the last rows of each sequence.
    options: those of `attention_forward`. out is shaped like q with v's dim, lse (batch, heads, rows) or (heads,
    total_q). A sequence's result is bitwise the same alone and in any batch.
    """
    arrays = _packed_rows(q, cu_seqlens_q, options.pop("tree_mask", None))
    packed = attention_forward(k=cache.k, v=cache.v, cu_seqlens_k=cache.cu_seqlens_k, **arrays, **options)
    return packed if cu_seqlens_q is not None else _dense_rows(packed, q)


def evaluate_cached(
    problem: AttentionProblem,
    q: Array,
    cache: Gathered,
    cu_seqlens_q: Array | None,
    dtype: np.dtype,
    *,
    tree_mask: Array | None = None,
    **arrays: Any,
) -> ReferenceOutput:
    """`paged_attention_forward` of a checked problem, in ``dtype``. arrays: the other arrays of `Arguments`."""
    arrays |= _packed_rows(q, cu_seqlens_q, tree_mask)
    arguments = Arguments(problem=problem, k=cache.k, v=cache.v, cu_seqlens_k=cache.cu_seqlens_k, **arrays)
    packed = evaluate(arguments, dtype)
    return packed if cu_seqlens_q is not None else _dense_rows(packed, q)


def _packed_rows(q: Array, cu_seqlens_q: Array | None, tree_mask: Array | None) -> dict[str, Any]:
    if cu_seqlens_q is None:
        batch, rows = q.shape[:2]
        cu_seqlens_q = np.arange(batch + 1, dtype=np.int32) * np.int32(rows)
        q, tree_mask = q.reshape(-1, *q.shape[2:]), None if tree_mask is None else tree_mask.reshape(-1)
    return {"q": q, "cu_seqlens_q": cu_seqlens_q, "tree_mask": tree_mask}


def _dense_rows(packed: ReferenceOutput, q: Array) -> ReferenceOutput:
    """The output in the layout of a q whose first axis is the batch."""
    batch, rows = q.shape[:2]

    def dense(array: Array) -> Array:
        return array.reshape(batch, rows, *array.shape[1:])

    lse = packed.lse.reshape(len(packed.lse), batch, rows).swapaxes(0, 1)
    magnitude = None if packed.magnitude is None else dense(packed.magnitude)
    return ReferenceOutput(dense(packed.out), lse, magnitude)
