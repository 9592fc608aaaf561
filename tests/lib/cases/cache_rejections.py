"""Requests over caches that cannot be answered as asked, with what their refusals must say."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases.rejections import BF16, F8, F8_WIDE, Case, array, ints, unsupported

import gpu_actors as ga


def paged(**changes: Any) -> ga.PagedForward:
    """A sound request over pages: 2 sequences, 1 row each, pages of 16 keys."""
    sound: dict[str, Any] = {"q": array(2, 1, 4, 8), "k_cache": array(6, 16, 2, 8), "v_cache": array(6, 16, 2, 8)}
    sound |= {"block_table": ints(0, 1, 2, 3).reshape(2, 2), "cache_seqlens": ints(20, 30)}
    return ga.PagedForward(**{**sound, **changes})


def cached(**changes: Any) -> ga.PagedForward:
    """The same over a dense cache of 32 keys a sequence."""
    sound: dict[str, Any] = {"q": array(2, 1, 4, 8), "k_cache": array(2, 32, 2, 8), "v_cache": array(2, 32, 2, 8)}
    return ga.PagedForward(**{**sound, "cache_seqlens": ints(20, 30), **changes})


def decode(**changes: Any) -> ga.BatchedDecode:
    """A sound request of 2 sequences with room for 32 keys each."""
    sound: dict[str, Any] = {"q": array(2, 4, 8), "seq_lens": ints(20, 30)}
    sound |= {name: [array(2, 32, 8), array(2, 32, 8)] for name in ("k_caches", "v_caches")}
    return ga.BatchedDecode(**{**sound, **changes})


PAGED = {
    "empty pool": Case(
        paged(k_cache=array(0, 16, 2, 8), v_cache=array(0, 16, 2, 8)),
        "block_table",
        0,
        "must lie in the pool: 0 to -1",
    ),
    "places of pages": Case(
        paged(cache_batch_idx=ints(0, 1)), "cache_batch_idx", "int32[2]", "goes with a dense cache"
    ),
    "more padding than keys": Case(
        paged(cache_leftpad=ints(21, 0)), "cache_leftpad", 21, "at most the sequence's rows in the cache, 20"
    ),
    "pages of nothing": Case(
        paged(k_cache=array(6, 0, 2, 8), v_cache=array(6, 0, 2, 8)), "page_size", 0, "hold a key at least"
    ),
    "the pool's head_dim": Case(
        paged(k_cache=array(6, 16, 2, 16)), "k_cache", "float32[6, 16, 2, 16]", "must have q's head_dim, 8"
    ),
    "v_cache's pages": Case(
        paged(v_cache=array(5, 16, 2, 8)), "v_cache", "float32[5, 16, 2, 8]", "k_cache's blocks, page_size"
    ),
    "heads": Case(
        paged(k_cache=array(6, 16, 3, 8), v_cache=array(6, 16, 3, 8)),
        "k_cache",
        "float32[6, 16, 3, 8]",
        "of which q's 4",
    ),
    "chunk index": Case(paged(chunk_index=2, num_chunks=2), "chunk_index", 2, "must be an int in [0, 1]"),
    "negative chunk": Case(paged(chunk_index=-1), "chunk_index", -1, "must be an int in [0, 0]"),
    "no chunks": Case(paged(num_chunks=0), "num_chunks", 0, "must be an int >= 1"),
    "table's rows": Case(paged(block_table=ints(0, 1).reshape(1, 2)), "block_table", (1, 2), "must have 2 rows"),
    "table's dtype": Case(
        paged(block_table=np.zeros((2, 2), np.int64)), "block_table", "int64[2, 2]", "an array of int32"
    ),
    "table's columns": Case(paged(block_table=np.zeros((2, 0), np.int32)), "cache_seqlens", 30, "room for, 0"),
    "no lengths": Case(paged(cache_seqlens=None), "cache_seqlens", None, "must be an int32 array (batch,)"),
    "lengths of another batch": Case(paged(cache_seqlens=ints(1, 2, 3)), "cache_seqlens", "int32[3]", "shape (2,)"),
    "too many rows": Case(
        paged(q=array(9, 4, 8), cu_seqlens_q=ints(0, 4, 9), max_seqlen_q=4),
        "max_seqlen_q",
        4,
        "2 of so many rows hold 8, and q has 9",
    ),
    "softcap": Case(paged(softcap=-1.0), "softcap", -1.0, "must be >= 0"),
    "pages of fp32 for a bf16 query": unsupported(
        paged(q=array(2, 1, 4, 8, dtype=BF16)),
        "k_cache",
        "float32",
        "a cache holds q's dtype (bfloat16) or fp8",
        "bfloat16",
    ),
    "a page outside the pool": Case(
        paged(block_table=ints(0, 1, 2, 6).reshape(2, 2)), "block_table", 6, "page 1 of sequence 1 must lie in the pool"
    ),
    "a negative page": Case(
        paged(block_table=ints(-1, 1, 2, 3).reshape(2, 2)),
        "block_table",
        -1,
        "page 0 of sequence 0 must lie in the pool",
    ),
    "longer than its pages": Case(paged(cache_seqlens=ints(33, 30)), "cache_seqlens", 33, "room for, 32"),
    "a negative length": Case(paged(cache_seqlens=ints(1, -1)), "cache_seqlens", -1, "must not be negative"),
    "rows that do not add up": Case(
        paged(q=array(5, 4, 8), cu_seqlens_q=ints(0, 2, 4)), "cu_seqlens_q", 4, "must end with the number of rows, 5"
    ),
    "rows that end elsewhere": Case(
        paged(q=array(3, 4, 8), cu_seqlens_q=ints(0, 2, 4)), "cu_seqlens_q", 4, "must end with the number of rows, 3"
    ),
    "longest without bounds": Case(paged(max_seqlen_q=1), "max_seqlen_q", 1, "goes with cu_seqlens_q only"),
    "splits": Case(paged(num_splits=-1), "num_splits", -1, "must be an int in [0, 256]"),
    "a descale without fp8": Case(
        paged(k_descale=array(2, 2)),
        "k_descale",
        "float32[2, 2]",
        "fp8 inputs only, and k is float32",
    ),
    "q's descale under fp8 pages": Case(
        paged(
            q=array(2, 1, 4, 8, dtype=BF16),
            k_cache=array(6, 16, 2, 8, dtype=F8),
            v_cache=array(6, 16, 2, 8, dtype=F8),
            q_descale=array(2, 2),
        ),
        "q_descale",
        "float32[2, 2]",
        "and q is bfloat16",
    ),
    "fp8 pages for an fp32 query": unsupported(
        paged(k_cache=array(6, 16, 2, 8, dtype=F8), v_cache=array(6, 16, 2, 8, dtype=F8)),
        "k_cache",
        "float8_e4m3fn",
        "a cache holds q's dtype, float32",
        "float32",
    ),
    "descales by block of keys": unsupported(
        paged(
            q=array(2, 1, 4, 8, dtype=BF16),
            k_cache=array(6, 16, 2, 8, dtype=F8),
            v_cache=array(6, 16, 2, 8, dtype=F8),
            v_descale=array(6, 16, 2),
        ),
        "v_descale",
        "float32[6, 16, 2]",
        "a sequence has one factor a KV head",
        "float32[2, 2]",
    ),
    "pages of another fp8 than q": unsupported(
        paged(
            q=array(2, 1, 4, 8, dtype=F8),
            k_cache=array(6, 16, 2, 8, dtype=F8_WIDE),
            v_cache=array(6, 16, 2, 8, dtype=F8_WIDE),
        ),
        "k_cache",
        "float8_e5m2",
        "a cache holds q's dtype, float8_e4m3fn",
        "float8_e4m3fn",
    ),
    "a tree of 65": unsupported(
        paged(q=array(2, 65, 4, 8), tree_mask=array(2, 65, dtype=np.uint64)), "tree_mask", 65, "64 at most", 64
    ),
    "a tree's shape": Case(paged(tree_mask=array(2, 3, dtype=np.uint64)), "tree_mask", "uint64[2, 3]", "shape (2, 1)"),
    "a tree's dtype": Case(paged(tree_mask=array(2, 1)), "tree_mask", "float32[2, 1]", "array of uint64"),
    "a packed tree of bool": Case(
        paged(q=array(5, 4, 8), cu_seqlens_q=ints(0, 2, 5), tree_mask=array(5, 3, dtype=bool)),
        "tree_mask",
        "bool[5, 3]",
        "give bits with cu_seqlens_q",
    ),
    "out": Case(paged(out=array(2, 4, 8)), "out", "float32[2, 4, 8]", "shape (2, 1, 4, 8)"),
}

CACHED = {
    "a place below 0": Case(cached(cache_batch_idx=ints(0, -1)), "cache_batch_idx", -1, "of the cache: 0 to 1"),
    "a place past the cache": Case(cached(cache_batch_idx=ints(2, 0)), "cache_batch_idx", 2, "of the cache: 0 to 1"),
    "places of another batch": Case(cached(cache_batch_idx=ints(0)), "cache_batch_idx", "int32[1]", "shape (2,)"),
    "places in 64 bits": Case(
        cached(cache_batch_idx=ints(0, 1, dtype=np.int64)), "cache_batch_idx", "int64[2]", "array of int32"
    ),
    "places in a cache without room": Case(
        cached(k_cache=array(2, 0, 2, 8), v_cache=array(2, 0, 2, 8), cache_batch_idx=ints(0, 1)),
        "k_cache",
        "float32[2, 0, 2, 8]",
        "room for a key beside cache_batch_idx",
    ),
    "padding below 0": Case(cached(cache_leftpad=ints(0, -3)), "cache_leftpad", -3, "must not be negative"),
    "more padding than rows": Case(
        cached(cache_leftpad=ints(0, 31)), "cache_leftpad", 31, "at most the sequence's rows in the cache, 30"
    ),
    "padding of another batch": Case(cached(cache_leftpad=ints(0, 1, 2)), "cache_leftpad", "int32[3]", "shape (2,)"),
    "another batch": Case(
        cached(k_cache=array(3, 32, 2, 8), v_cache=array(3, 32, 2, 8)),
        "k_cache",
        "float32[3, 32, 2, 8]",
        "must have q's batch, 2",
    ),
    "no room": Case(cached(k_cache=array(2, 0, 2, 8), v_cache=array(2, 0, 2, 8)), "cache_seqlens", 30, "room for, 0"),
    "v_cache's rows": Case(
        cached(v_cache=array(2, 31, 2, 8)), "v_cache", "float32[2, 31, 2, 8]", "k_cache's batch, rows and heads"
    ),
    "longer than the capacity": Case(cached(cache_seqlens=ints(33, 30)), "cache_seqlens", 33, "room for, 32"),
    "heads": Case(
        cached(k_cache=array(2, 32, 3, 8), v_cache=array(2, 32, 3, 8)),
        "k_cache",
        "float32[2, 32, 3, 8]",
        "of which q's 4",
    ),
}

DECODE = {
    "rows": Case(decode(q=array(2, 1, 4, 8)), "q", "float32[2, 1, 4, 8]", "3 axes (batch, heads, head_dim)"),
    "too few caches": Case(decode(k_caches=[array(2, 32, 8)]), "k_caches", 1, "as many caches as q has sequences, 2"),
    "v_caches of another length": Case(
        decode(v_caches=[array(2, 32, 8), array(2, 31, 8)]),
        "v_caches[1]",
        (2, 31, 8),
        "must have k_caches' heads and max_seq, (2, 32)",
    ),
    "caches of two dims": Case(
        decode(k_caches=[array(2, 32, 8), array(2, 32, 16)]),
        "k_caches[1]",
        "float32[2, 32, 16]",
        "heads, head_dim and dtype of k_caches[0], float32[2, 32, 8]",
    ),
    "caches of two dtypes": Case(
        decode(k_caches=[array(2, 32, 8), array(2, 32, 8, dtype=BF16)]),
        "k_caches[1]",
        "bfloat16[2, 32, 8]",
        "heads, head_dim and dtype of k_caches[0], float32[2, 32, 8]",
    ),
    "longer than its own array": Case(
        decode(**{name: [array(2, 19, 8), array(2, 32, 8)] for name in ("k_caches", "v_caches")}),
        "seq_lens",
        20,
        "room for, 19",
    ),
    "one array for another batch": Case(
        decode(k_caches=array(3, 2, 32, 8)), "k_caches", "float32[3, 2, 32, 8]", "for each of 2 sequences"
    ),
    "a cache that is no array": Case(decode(k_caches=[array(2, 32, 8), 5]), "k_caches[1]", "int", "must be an array"),
    "no caches": Case(decode(v_caches=None), "v_caches", "NoneType", "must be an array"),
    "v's heads": Case(
        decode(v_caches=array(2, 1, 32, 8)), "v_caches", (1, 32, 8), "must have k_caches' heads and max_seq, (2, 32)"
    ),
    "heads": Case(decode(q=array(2, 5, 8)), "k_caches", "float32[2, 32, 8]", "of which q's 5 must be a whole"),
    "head_dim": Case(decode(q=array(2, 4, 16)), "k_caches", "float32[2, 32, 8]", "must have q's head_dim, 16"),
    "no room": Case(decode(k_caches=array(2, 2, 0, 8), v_caches=array(2, 2, 0, 8)), "seq_lens", 30, "room for, 0"),
    "longer than max_seq": Case(decode(seq_lens=ints(20, 33)), "seq_lens", 33, "room for, 32"),
    "a length beyond 31 bits": Case(
        decode(seq_lens=ints(20, (1 << 32) - 1, dtype=np.uint32)), "seq_lens", (1 << 32) - 1, "room for, 32"
    ),
    "no lengths": Case(decode(seq_lens=None), "seq_lens", None, "must be an int32 or uint32 array (batch,)"),
    "lengths in 64 bits": Case(
        decode(seq_lens=ints(20, 30, dtype=np.int64)), "seq_lens", "int64[2]", "array of int32 or uint32"
    ),
    "another dtype": unsupported(
        decode(q=array(2, 4, 8, dtype=BF16)), "k_caches", "float32", "q's dtype (bfloat16) or fp8", "bfloat16"
    ),
}

KINDS = {"paged": PAGED, "cached": CACHED, "decode": DECODE}
CASES = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}
