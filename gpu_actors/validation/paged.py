"""From a `PagedForward` message to its `AttentionProblem`."""

from __future__ import annotations

import math
from typing import Any, Literal

from gpu_actors.errors import Unsupported
from gpu_actors.problem import AttentionProblem
from gpu_actors.requests import PagedForward
from gpu_actors.validation.fields import (
    FP8,
    describe,
    dtype_of,
    expect,
    flag,
    heads_ratio,
    integer,
    optional_array,
    real,
    shape_of,
    window,
)
from gpu_actors.validation.forward import longest

__all__ = ["paged_problem"]

_CACHE = "num_blocks, page_size, heads_kv, head_dim"


def paged_problem(request: PagedForward) -> AttentionProblem:
    """The problem that a request poses. Raises `InvalidRequest` and `Unsupported`."""
    blocks, page_size, heads_kv, head_dim_k = shape_of("k_cache", request.k_cache, _CACHE)
    blocks_v, page_v, heads_v, head_dim_v = shape_of("v_cache", request.v_cache, _CACHE)
    expect(blocks >= 1, "k_cache", describe(request.k_cache), "must have at least one page: the pool is empty")
    same = (blocks_v, page_v, heads_v) == (blocks, page_size, heads_kv)
    expect(same, "v_cache", describe(request.v_cache), "must have k_cache's blocks, page_size and heads")
    _check_page_size(page_size)
    batch, seqlen_q, total_q, heads_q, head_dim = _query_shape(request)
    heads_ratio(heads_q, heads_kv)
    reason = f"must have q's head_dim, {head_dim}"
    expect(head_dim_k == head_dim, "k_cache", describe(request.k_cache), reason)
    table = shape_of("block_table", request.block_table, "batch, max_blocks")
    expect(table[0] == batch and table[1] >= 1, "block_table", table, f"must have {batch} rows and >= 1 column")
    optional_array("block_table", request.block_table, (table,), ("int32",))
    expect(request.cache_seqlens is not None, "cache_seqlens", None, "must be an int32 array (batch,)")
    optional_array("cache_seqlens", request.cache_seqlens, ((batch,),), ("int32",))
    chunks = integer("num_chunks", request.num_chunks, 1)
    integer("chunk_index", request.chunk_index, 0, chunks - 1)
    dtype, kv_dtype = dtype_of("q", request.q), dtype_of("k_cache", request.k_cache)
    expect(dtype_of("v_cache", request.v_cache) == kv_dtype, "v_cache", describe(request.v_cache), "as k_cache")
    if kv_dtype != dtype and kv_dtype not in FP8:
        raise Unsupported("kv_dtype", kv_dtype, f"pages hold q's dtype ({dtype}) or fp8", dtype)
    softcap = real("softcap", request.softcap)
    expect(softcap >= 0, "softcap", softcap, "must be >= 0; 0 leaves the scores as they are")
    scale = request.softmax_scale
    out_dtype = "bfloat16" if dtype in FP8 else dtype
    return AttentionProblem(
        layout="paged",
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=table[1] * page_size,
        total_q=total_q,
        total_k=blocks * page_size,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=out_dtype,
        compute={"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}.get(dtype, "fp8"),
        softmax_scale=1.0 / math.sqrt(head_dim) if scale is None else real("softmax_scale", scale),
        causal=flag("causal", request.causal),
        window=window(request.window_size),
        softcap=softcap,
        alibi=_alibi(request.alibi_slopes, batch, heads_q),
        sinks=optional_array("sinks", request.sinks, ((heads_q,),), ("float32", out_dtype)) is not None,
        sink_tokens=integer("sink_tokens", request.sink_tokens, 0),
        return_lse=flag("return_lse", request.return_lse),
        page_size=page_size,
    )


def _check_page_size(page_size: int) -> None:
    if page_size < 8 or page_size % 8:
        nearest = max(8, 8 * round(page_size / 8))
        raise Unsupported("page_size", page_size, "pages hold a multiple of 8 rows", nearest)


def _query_shape(request: PagedForward) -> tuple[int, int, int, int, int]:
    if request.cu_seqlens_q is None:
        batch, rows, heads, head_dim = shape_of("q", request.q, "batch, rows, heads, head_dim")
        total = batch * rows
    else:
        total, heads, head_dim = shape_of("q", request.q, "total, heads, head_dim")
        batch = shape_of("cu_seqlens_q", request.cu_seqlens_q, "batch + 1")[0] - 1
        optional_array("cu_seqlens_q", request.cu_seqlens_q, ((batch + 1,),), ("int32",))
        given = request.max_seqlen_q
        rows = integer("max_seqlen_q", longest("cu_seqlens_q", request.cu_seqlens_q) if given is None else given, 1)
        expect(total <= batch * rows, "q", total, f"has more rows than batch * max_seqlen_q = {batch * rows}")
    expect(batch >= 1, "q", describe(request.q), "must hold at least one sequence: the batch is empty")
    expect(rows >= 1, "q", describe(request.q), "must have at least one row a sequence")
    expect(head_dim >= 1, "head_dim", head_dim, "must be >= 1")
    return batch, rows, total, heads, head_dim


def _alibi(slopes: Any, batch: int, heads: int) -> Literal["heads", "batch"] | None:
    given = optional_array("alibi_slopes", slopes, ((heads,), (batch, heads)), ("float32",))
    if given is None:
        return None
    return "heads" if len(given) == 1 else "batch"
