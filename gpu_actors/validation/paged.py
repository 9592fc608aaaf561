"""From `PagedForward` and `BatchedDecode` messages to their `AttentionProblem`."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.requests import BatchedDecode, PagedForward
from gpu_actors.errors import Unsupported
from gpu_actors.fields import (
    FP8,
    describe,
    dtype_name,
    dtype_of,
    expect,
    flag,
    heads_ratio,
    integer,
    optional_array,
    output_dtype,
    shape_of,
)
from gpu_actors.validation.forward import (
    Sizes,
    bias_fields,
    check_beside_blocks,
    check_descales,
    check_out,
    check_steps,
    check_total,
    compute_of,
    lengths_of,
    longest,
    position_words,
    score_options,
    sequences,
    steps_of,
)

__all__ = ["MAX_TREE_ROWS", "check_bias", "check_cache_positions", "decode_problem", "own_positions", "paged_problem"]

MAX_TREE_ROWS = 64
MAX_SPLITS = 256  # more than any device can use; partial results take memory

_LEAST = 1 << 30
_OF_THE_CACHE = ("cache_batch_idx", "cache_leftpad")
_PAGES = "num_blocks, page_size, heads_kv, head_dim"
_DENSE = "batch, capacity, heads_kv, head_dim"
_POINTERS = "heads_kv, max_seq, head_dim"
_QUERY = "batch, rows, heads, head_dim"


def paged_problem(request: PagedForward) -> AttentionProblem:
    """The problem that a request states with its shapes, dtypes and options.

    `check_lengths` and `check_block_table` check each request's data.
    """
    check_beside_blocks(request)
    sizes = _paged_sizes(request)
    expect(request.cache_seqlens is not None, "cache_seqlens", None, "must be an int32 array (batch,)")
    optional_array("cache_seqlens", request.cache_seqlens, ((sizes.batch,),), ("int32",))
    chunks = integer("num_chunks", request.num_chunks, 1)
    integer("chunk_index", request.chunk_index, 0, chunks - 1)
    caches = (("k_cache", request.k_cache), ("v_cache", request.k_cache if sizes.latent else request.v_cache))
    for name in _OF_THE_CACHE:
        optional_array(name, getattr(request, name), ((sizes.batch,),), ("int32",))
    tree = _tree_mask(request.tree_mask, sizes, request.q)
    # A tree mask takes the place of causal among the new rows.
    causal = flag("causal", request.causal) and not tree
    return _problem(request, sizes, caches, causal, tree)


def decode_problem(request: BatchedDecode) -> AttentionProblem:
    batch, heads_q, head_dim = shape_of("q", request.q, "batch, heads, head_dim")
    k, shapes_k, own_k = _caches("k_caches", request.k_caches, request.q)
    v, shapes_v, own_v = _caches("v_caches", request.v_caches, request.q)
    listed = isinstance(request.v_caches, list | tuple)
    for index, (shape_k, shape_v) in enumerate(zip(shapes_k, shapes_v, strict=True)):
        agree = f"must have k_caches' heads and max_seq, {shape_k[:2]}"
        expect(shape_v[:2] == shape_k[:2], f"v_caches[{index}]" if listed else "v_caches", shape_v, agree)
    heads_kv, _, head_dim_k = shapes_k[0]
    max_seq = max(shape[1] for shape in shapes_k)
    sizes = Sizes(
        layout="pointers",
        batch=batch,
        seqlen_q=1,
        seqlen_k=max_seq,
        total_q=batch,
        total_k=batch * max_seq,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=shapes_v[0][2],
    )
    _check_heads_and_dims(sizes, head_dim_k, "k_caches", k)
    expect(request.seq_lens is not None, "seq_lens", None, "must be an int32 or uint32 array (batch,)")
    optional_array("seq_lens", request.seq_lens, ((batch,),), ("int32", "uint32"))
    return _problem(request, sizes, (("k_caches", k), ("v_caches", v)), False, False, own_k or own_v)


def _problem(
    request: PagedForward | BatchedDecode,
    sizes: Sizes,
    caches: tuple[tuple[str, Any], tuple[str, Any]],
    causal: bool,
    tree: bool,
    own_layouts: bool = False,
) -> AttentionProblem:
    matrix = tuple(getattr(request.bias, "shape", ()))
    if sizes.varlen_q and len(matrix) == 4:  # a bias has rows for the longest sequence, or more
        sizes = sizes._replace(seqlen_q=max(sizes.seqlen_q, int(matrix[2])))
    dtype, kv_dtype = _dtypes(request.q, caches)
    out_dtype = output_dtype(dtype, request.out_dtype)
    check_out(request, sizes.head_dim_v, out_dtype)
    of_the_cache: dict[str, Any] = {name: getattr(request, name, None) is not None for name in _OF_THE_CACHE}
    return AttentionProblem(
        **sizes._asdict(),
        dtype=dtype,
        kv_dtype=kv_dtype,
        out_dtype=out_dtype,
        compute=compute_of(dtype),
        **{**score_options(request, sizes.batch, sizes.heads_q, sizes.head_dim, out_dtype), "causal": causal},
        descales=check_descales(request, {"q": dtype, "k": kv_dtype, "v": kv_dtype}, (sizes.batch, sizes.heads_kv)),
        **_bias(request, sizes, dtype),
        tree_mask=tree,
        num_splits=integer("num_splits", request.num_splits, 0, MAX_SPLITS),
        **of_the_cache,
        own_layouts=own_layouts,
        **position_words(request, sizes.batch),
    )


def _bias(request: PagedForward | BatchedDecode, sizes: Sizes, dtype: str) -> dict[str, Any]:
    if request.bias is None:
        return {}
    shape = tuple(getattr(request.bias, "shape", ()))
    # The lengths of sequences are data: `check_bias` compares the bias's keys with them.
    keys = int(shape[-1]) if shape else sizes.seqlen_k
    reason = "must have at least the keys of the longest sequence, and one where all are empty"
    expect(keys >= 1 or not sizes.seqlen_k, "bias", describe(request.bias), reason)
    fields = bias_fields(request.bias, sizes, dtype, keys, one_row=isinstance(request, BatchedDecode))
    return {**fields, "bias_keys": keys}


def check_bias(problem: AttentionProblem, request: PagedForward | BatchedDecode) -> None:
    """Check that a bias has an element for each key."""
    paged = isinstance(request, PagedForward)
    lengths: Any = request.cache_seqlens if isinstance(request, PagedForward) else request.seq_lens
    padding = getattr(request, "cache_leftpad", None)
    longest_one = problem.seqlen_k
    if isinstance(lengths, np.ndarray) and (padding is None or isinstance(padding, np.ndarray)):
        longest_one = int((lengths.astype(np.int64) - (0 if padding is None else padding)).max(initial=0))
    reason = f"must have at least the keys of the longest sequence, {longest_one}"
    if not isinstance(lengths, np.ndarray):
        field = "cache_seqlens" if paged else "seq_lens"
        reason = f"must have all {longest_one} keys that a sequence can have where {field} lies on the device"
    expect(problem.bias_keys >= longest_one, "bias", describe(request.bias), reason)


def check_cache_positions(problem: AttentionProblem, request: PagedForward | BatchedDecode) -> None:
    """Check the positions of rows and keys, as far as they lie on the host."""
    keys: Any
    if isinstance(request, PagedForward):
        keys, rows = request.cache_seqlens, lengths_of(request.cu_seqlens_q, problem.seqlen_q)
        if request.cache_leftpad is not None:
            both = isinstance(keys, np.ndarray) and isinstance(request.cache_leftpad, np.ndarray)
            keys = keys - request.cache_leftpad if both else None
    else:
        keys, rows = request.seq_lens, 1
    keys = keys.astype(np.int64) if isinstance(keys, np.ndarray) else None
    check_steps("q_positions", request.q_positions, rows)
    check_steps("k_positions", request.k_positions, 1 if keys is None else keys)
    if request.q_positions is None and keys is not None and isinstance(request.k_positions, np.ndarray):
        first = own_positions(request.k_positions, keys, rows)[0]
        least = int(first.min(initial=0))
        reason = f"must leave the rows that no key stands for, which are more than the keys, above -{_LEAST}"
        expect(least > -_LEAST, "k_positions", least, reason)


def own_positions(k_positions: Any, keys: Any, rows: Any) -> tuple[Any, Any]:
    """The first position and the step of rows at the positions of their sequence's last keys, int64 (batch,).

    All arrays lie on the host. Rows before the first key continue the steps of the keys, also below 0.
    """
    first, step = steps_of(k_positions)
    return first + (keys - rows) * step, step


def _paged_sizes(request: PagedForward) -> Sizes:
    paged = request.block_table is not None
    axes = _PAGES if paged else _DENSE
    blocks, page_size, heads_kv, head_dim_k = shape_of("k_cache", request.k_cache, axes)
    values = request.v_cache
    latent = integer("latent_dim", request.latent_dim, 0)
    if latent:
        _check_latent(request, head_dim_k)
        values = request.k_cache
    blocks_v, page_v, heads_v, head_dim_v = shape_of("v_cache", values, axes)
    head_dim_v = latent or head_dim_v
    same = (blocks_v, page_v, heads_v) == (blocks, page_size, heads_kv)
    agree = "must have k_cache's blocks, page_size and heads" if paged else "must have k_cache's batch, rows and heads"
    expect(same, "v_cache", describe(request.v_cache), agree)
    if paged:
        expect(page_size >= 1, "page_size", page_size, "pages of k_cache must hold a key at least")
    batch, seqlen_q, total_q, heads_q, head_dim = _query_shape(request)
    if paged:
        given = request.cache_batch_idx
        reason = "goes with a dense cache: a block_table says which pages a sequence has"
        expect(given is None, "cache_batch_idx", None if given is None else describe(given), reason)
        table = shape_of("block_table", request.block_table, "batch, max_blocks")
        expect(table[0] == batch, "block_table", table, f"must have {batch} rows")
        optional_array("block_table", request.block_table, (table,), ("int32",))
        seqlen_k = table[1] * page_size
    else:
        chosen = request.cache_batch_idx is not None
        expect(chosen or blocks == batch, "k_cache", describe(request.k_cache), f"must have q's batch, {batch}")
        expect(
            page_size > 0 or not chosen,
            "k_cache",
            describe(request.k_cache),
            "must have room for a key beside cache_batch_idx",
        )
        seqlen_k, page_size = page_size, 0
    sizes = Sizes(
        layout="paged" if paged else "cache",
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        total_q=total_q,
        total_k=blocks * page_v,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        page_size=page_size,
        latent=latent > 0,
        varlen_q=request.cu_seqlens_q is not None,
    )
    _check_heads_and_dims(sizes, head_dim_k, "k_cache", request.k_cache)
    return sizes


def _check_latent(request: PagedForward, head_dim: int) -> None:
    """Check a latent cache, in which the first columns of keys are the values."""
    latent = request.latent_dim
    expect(request.v_cache is None, "v_cache", describe(request.v_cache), "and latent_dim both say what values are")
    expect(latent <= head_dim, "latent_dim", latent, f"must be at most k_cache's head_dim, {head_dim}")
    given = request.v_descale is None
    expect(given, "v_descale", describe(request.v_descale), "goes with v_cache: k_descale is a latent cache's")
    reason = "must be given for a latent cache: it follows from the heads before absorption"
    expect(request.softmax_scale is not None, "softmax_scale", None, reason)


def _query_shape(request: PagedForward) -> tuple[int, int, int, int, int]:
    if request.cu_seqlens_q is None:
        batch, rows, heads, head_dim = shape_of("q", request.q, _QUERY)
        total = batch * rows
        expect(request.max_seqlen_q is None, "max_seqlen_q", request.max_seqlen_q, "goes with cu_seqlens_q only")
    else:
        total, heads, head_dim = shape_of("q", request.q, "total, heads, head_dim")
        batch = sequences("cu_seqlens_q", request.cu_seqlens_q)
        given = request.max_seqlen_q
        rows = integer("max_seqlen_q", longest("cu_seqlens_q", request.cu_seqlens_q) if given is None else given, 0)
        check_total("q", total, batch, rows, given)
        rows = min(rows, total)
    return batch, rows, total, heads, head_dim


def _check_heads_and_dims(sizes: Sizes, head_dim_k: int, field: str, cache: Any) -> None:
    heads_ratio(sizes.heads_q, sizes.heads_kv, field, cache)
    expect(sizes.head_dim >= 1, "head_dim", sizes.head_dim, "must be >= 1")
    reason = f"must have q's head_dim, {sizes.head_dim}"
    expect(head_dim_k == sizes.head_dim, field, describe(cache), reason)
    expect(sizes.head_dim_v >= 1, field.replace("k_", "v_"), sizes.head_dim_v, "must have head_dim >= 1")


def _caches(field: str, caches: Any, q: Any) -> tuple[Any, list[tuple[int, ...]], bool]:
    """Return (an array with the caches' dtype, the shapes of all caches, whether they differ in capacity or strides).

    All caches of a list must have the heads, head_dim and dtype of the first one. An empty list counts as one cache
    like q. A single array holds a cache of the same shape for each sequence.
    """
    batch, heads, head_dim = q.shape
    if not isinstance(caches, list | tuple):
        shape = shape_of(field, caches, f"batch, {_POINTERS}")
        expect(shape[0] == batch, field, describe(caches), f"must have a cache for each of {batch} sequences")
        return caches, [shape[1:]] * max(1, batch), False
    expect(len(caches) == batch, field, len(caches), f"must be as many caches as q has sequences, {batch}")
    if not caches:
        return q, [(heads, 1, head_dim)], False
    first = caches[0]
    shapes = [shape_of(f"{field}[{index}]", cache, _POINTERS) for index, cache in enumerate(caches)]
    kind = (shapes[0][0], shapes[0][2], first.dtype)
    for index, (cache, shape) in enumerate(zip(caches, shapes, strict=True)):
        alike = (shape[0], shape[2], cache.dtype) == kind
        reason = f"must have the heads, head_dim and dtype of {field}[0], {describe(first)}"
        expect(alike, f"{field}[{index}]", describe(cache), reason)
    own = any((cache.shape, cache.strides) != (first.shape, first.strides) for cache in caches)
    return first, shapes, own


def _dtypes(q: Any, caches: tuple[tuple[str, Any], tuple[str, Any]]) -> tuple[str, str]:
    (k_field, k), (v_field, v) = caches
    dtype, kv_dtype = dtype_of("q", q), dtype_of(k_field, k)
    expect(dtype_of(v_field, v) == kv_dtype, v_field, describe(v), f"must have {k_field}'s dtype, {kv_dtype}")
    if kv_dtype != dtype and (kv_dtype not in FP8 or dtype not in ("float16", "bfloat16")):
        choices = f"q's dtype ({dtype}) or fp8" if dtype in ("float16", "bfloat16") else f"q's dtype, {dtype}"
        raise Unsupported(k_field, kv_dtype, f"a cache holds {choices}", dtype)
    return dtype, kv_dtype


def _tree_mask(mask: Any, sizes: Sizes, q: Any) -> bool:
    if mask is None:
        return False
    rows = sizes.seqlen_q
    if rows > MAX_TREE_ROWS:
        reason = f"a tree mask has a bit for each new row of a sequence, {MAX_TREE_ROWS} at most"
        raise Unsupported("tree_mask", rows, reason, MAX_TREE_ROWS)
    if dtype_name(mask) == "bool":
        reason = "a bool tree mask goes with q of (batch, rows, heads, head_dim); give bits with cu_seqlens_q"
        expect(not sizes.varlen_q, "tree_mask", describe(mask), reason)
        optional_array("tree_mask", mask, ((sizes.batch, rows, rows),), ("bool",))
    else:
        optional_array("tree_mask", mask, (tuple(map(int, q.shape[:-2])),), ("uint64", "int64", "bool"))
    return True
