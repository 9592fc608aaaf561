"""Requests over caches that are refused, with what each refusal must say."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases.rejections import BF16, F8, F8_WIDE, Case, array, ints

import gpu_actors as ga


def paged(**changes: Any) -> ga.PagedForward:
    """A valid request over pages: 2 sequences, 1 row each, pages of 16 keys."""
    sound: dict[str, Any] = {"q": array(2, 1, 4, 8), "k_cache": array(6, 16, 2, 8), "v_cache": array(6, 16, 2, 8)}
    sound |= {"block_table": ints(0, 1, 2, 3).reshape(2, 2), "cache_seqlens": ints(20, 30)}
    return ga.PagedForward(**{**sound, **changes})


def cached(**changes: Any) -> ga.PagedForward:
    """A valid request over a dense cache of 32 keys a sequence."""
    sound: dict[str, Any] = {"q": array(2, 1, 4, 8), "k_cache": array(2, 32, 2, 8), "v_cache": array(2, 32, 2, 8)}
    return ga.PagedForward(**{**sound, "cache_seqlens": ints(20, 30), **changes})


def decode(**changes: Any) -> ga.BatchedDecode:
    """A valid request of 2 sequences with room for 32 keys each."""
    sound: dict[str, Any] = {"q": array(2, 4, 8), "seq_lens": ints(20, 30)}
    sound |= {name: [array(2, 32, 8), array(2, 32, 8)] for name in ("k_caches", "v_caches")}
    return ga.BatchedDecode(**{**sound, **changes})


PAGED = {
    "table's dtype": Case(paged(block_table=np.zeros((2, 2), np.int64)), "block_table", "an array of int32"),
    "empty pool": Case(
        paged(k_cache=array(0, 16, 2, 8), v_cache=array(0, 16, 2, 8)),
        "block_table",
        "must lie in the pool: 0 to -1",
        value=0,
    ),
    "places of pages": Case(paged(cache_batch_idx=ints(0, 1)), "cache_batch_idx", "goes with a dense cache"),
    "more padding than keys": Case(
        paged(cache_leftpad=ints(21, 0)), "cache_leftpad", "at most the sequence's rows in the cache, 20", value=21
    ),
    "pages of nothing": Case(
        paged(k_cache=array(6, 0, 2, 8), v_cache=array(6, 0, 2, 8)), "page_size", "hold a key at least", value=0
    ),
    "v_cache's pages": Case(paged(v_cache=array(5, 16, 2, 8)), "v_cache", "k_cache's blocks, page_size"),
    "chunk index": Case(paged(chunk_index=2, num_chunks=2), "chunk_index", "must be an int in [0, 1]"),
    "no chunks": Case(paged(num_chunks=0), "num_chunks", "must be an int >= 1"),
    "table's rows": Case(paged(block_table=ints(0, 1).reshape(1, 2)), "block_table", "must have 2 rows", value=(1, 2)),
    "table's columns": Case(paged(block_table=np.zeros((2, 0), np.int32)), "cache_seqlens", "room for, 0", value=30),
    "no lengths": Case(paged(cache_seqlens=None), "cache_seqlens", "must be an int32 array (batch,)"),
    "too many rows": Case(
        paged(q=array(9, 4, 8), cu_seqlens_q=ints(0, 4, 9), max_seqlen_q=4),
        "max_seqlen_q",
        "2 of so many rows hold 8, and q has 9",
    ),
    "pages of fp32 for a bf16 query": Case(
        paged(q=array(2, 1, 4, 8, dtype=BF16)),
        "k_cache",
        "a cache holds q's dtype (bfloat16) or fp8",
        value="float32",
        nearest="bfloat16",
    ),
    "a page outside the pool": Case(
        paged(block_table=ints(0, 1, 2, 6).reshape(2, 2)),
        "block_table",
        "page 1 of sequence 1 must lie in the pool",
        value=6,
    ),
    "longer than its pages": Case(paged(cache_seqlens=ints(33, 30)), "cache_seqlens", "room for, 32", value=33),
    "a negative length": Case(paged(cache_seqlens=ints(1, -1)), "cache_seqlens", "must not be negative", value=-1),
    "a negative page": Case(
        paged(block_table=ints(-1, 1, 2, 3).reshape(2, 2)),
        "block_table",
        "page 0 of sequence 0 must lie in the pool",
        value=-1,
    ),
    "rows that end elsewhere": Case(
        paged(q=array(3, 4, 8), cu_seqlens_q=ints(0, 2, 4)), "cu_seqlens_q", "with the number of rows, 3", value=4
    ),
    "rows that do not add up": Case(
        paged(q=array(5, 4, 8), cu_seqlens_q=ints(0, 2, 4)),
        "cu_seqlens_q",
        "must end with the number of rows, 5",
        value=4,
    ),
    "longest without bounds": Case(paged(max_seqlen_q=1), "max_seqlen_q", "goes with cu_seqlens_q only"),
    "splits": Case(paged(num_splits=-1), "num_splits", "must be an int in [0, 256]"),
    "fp8 pages for an fp32 query": Case(
        paged(k_cache=array(6, 16, 2, 8, dtype=F8), v_cache=array(6, 16, 2, 8, dtype=F8)),
        "k_cache",
        "a cache holds q's dtype, float32",
        value="float8_e4m3fn",
        nearest="float32",
    ),
    "descales by block of keys": Case(
        paged(
            q=array(2, 1, 4, 8, dtype=BF16),
            k_cache=array(6, 16, 2, 8, dtype=F8),
            v_cache=array(6, 16, 2, 8, dtype=F8),
            v_descale=array(6, 16, 2),
        ),
        "v_descale",
        "a sequence has one factor a KV head",
        nearest="float32[2, 2]",
    ),
    "pages of another fp8 than q": Case(
        paged(
            q=array(2, 1, 4, 8, dtype=F8),
            k_cache=array(6, 16, 2, 8, dtype=F8_WIDE),
            v_cache=array(6, 16, 2, 8, dtype=F8_WIDE),
        ),
        "k_cache",
        "a cache holds q's dtype, float8_e4m3fn",
        value="float8_e5m2",
        nearest="float8_e4m3fn",
    ),
    "a tree of 65": Case(
        paged(q=array(2, 65, 4, 8), tree_mask=array(2, 65, dtype=np.uint64)),
        "tree_mask",
        "64 at most",
        value=65,
        nearest=64,
    ),
    "a tree's shape": Case(paged(tree_mask=array(2, 3, dtype=np.uint64)), "tree_mask", "shape (2, 1)"),
    "a packed tree of bool": Case(
        paged(q=array(5, 4, 8), cu_seqlens_q=ints(0, 2, 5), tree_mask=array(5, 3, dtype=bool)),
        "tree_mask",
        "give bits with cu_seqlens_q",
    ),
}

CACHED = {
    "a place below 0": Case(cached(cache_batch_idx=ints(0, -1)), "cache_batch_idx", "of the cache: 0 to 1", value=-1),
    "a place past the cache": Case(
        cached(cache_batch_idx=ints(2, 0)), "cache_batch_idx", "of the cache: 0 to 1", value=2
    ),
    "places in a cache without room": Case(
        cached(k_cache=array(2, 0, 2, 8), v_cache=array(2, 0, 2, 8), cache_batch_idx=ints(0, 1)),
        "k_cache",
        "room for a key beside cache_batch_idx",
    ),
    "padding below 0": Case(cached(cache_leftpad=ints(0, -3)), "cache_leftpad", "must not be negative", value=-3),
    "more padding than rows": Case(
        cached(cache_leftpad=ints(0, 31)), "cache_leftpad", "at most the sequence's rows in the cache, 30", value=31
    ),
    "another batch": Case(
        cached(k_cache=array(3, 32, 2, 8), v_cache=array(3, 32, 2, 8)), "k_cache", "must have q's batch, 2"
    ),
    "no room": Case(
        cached(k_cache=array(2, 0, 2, 8), v_cache=array(2, 0, 2, 8)), "cache_seqlens", "room for, 0", value=30
    ),
    "v_cache's rows": Case(cached(v_cache=array(2, 31, 2, 8)), "v_cache", "k_cache's batch, rows and heads"),
    "longer than the capacity": Case(cached(cache_seqlens=ints(33, 30)), "cache_seqlens", "room for, 32", value=33),
}

DECODE = {
    "head_dim": Case(decode(q=array(2, 4, 16)), "k_caches", "must have q's head_dim, 16", value="float32[2, 32, 8]"),
    "no head_dim": Case(decode(q=array(2, 4, 0), k_caches=array(2, 2, 32, 0)), "head_dim", "must be >= 1", value=0),
    "too few caches": Case(
        decode(k_caches=[array(2, 32, 8)]), "k_caches", "as many caches as q has sequences, 2", value=1
    ),
    "v_caches of another length": Case(
        decode(v_caches=[array(2, 32, 8), array(2, 31, 8)]),
        "v_caches[1]",
        "must have k_caches' heads and max_seq, (2, 32)",
        value=(2, 31, 8),
    ),
    "caches of two dims": Case(
        decode(k_caches=[array(2, 32, 8), array(2, 32, 16)]),
        "k_caches[1]",
        "heads, head_dim and dtype of k_caches[0], float32[2, 32, 8]",
    ),
    "longer than its own array": Case(
        decode(**{name: [array(2, 19, 8), array(2, 32, 8)] for name in ("k_caches", "v_caches")}),
        "seq_lens",
        "room for, 19",
        value=20,
    ),
    "one array for another batch": Case(decode(k_caches=array(3, 2, 32, 8)), "k_caches", "for each of 2 sequences"),
    "a cache that is no array": Case(
        decode(k_caches=[array(2, 32, 8), 5]), "k_caches[1]", "must be an array", value="int"
    ),
    "no room": Case(
        decode(k_caches=array(2, 2, 0, 8), v_caches=array(2, 2, 0, 8)), "seq_lens", "room for, 0", value=30
    ),
    "longer than max_seq": Case(decode(seq_lens=ints(20, 33)), "seq_lens", "room for, 32", value=33),
    "a length beyond 31 bits": Case(
        decode(seq_lens=ints(20, (1 << 32) - 1, dtype=np.uint32)), "seq_lens", "room for, 32", value=(1 << 32) - 1
    ),
    "no lengths": Case(decode(seq_lens=None), "seq_lens", "must be an int32 or uint32 array (batch,)"),
}

KINDS = {"paged": PAGED, "cached": CACHED, "decode": DECODE}
CASES = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}
