"""Packs a request over a cache into the DecodeParams struct that all three decode kernels take.

The struct is declared once, in kernels_cu/decode/params.cuh after the Params of kernels_cu/common/params.cuh, and read
from there.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.decode.schedule import ITEM_UNITS, min_units
from gpu_actors.kernels.decode.variant import row_tiles
from gpu_actors.kernels.params import (
    ITEMSIZES,
    Binder,
    Operand,
    ParamsLayout,
    divider,
    forward_operands,
    forward_scalars,
    launch_values,
    struct_layout,
)
from gpu_actors.kernels.program import NO_VALUES, Values

__all__ = ["CHUNK", "decode_layout", "pack_cache_layouts", "pack_decode", "pack_pointers", "pack_split", "rows_refusal"]

_ATTENTION = "attention."
_SCRATCH = ("plan", "sums", "partial_out", "partial_sums", "cache_layouts")
CHUNK = 16
"""Bytes that a cp.async copies, and a multiple of which its addresses are."""


decode_layout = functools.partial(struct_layout, "DecodeParams", "common/params.cuh", "decode/params.cuh")


def pack_decode(
    problem: AttentionProblem, key: DispatchKey, ranges: int, buffers: Mapping[str, Buffer], values: Values = NO_VALUES
) -> bytes:
    """The parameters of the kernels of a launch over a cache.

    key: of any of the kernels. ranges: that the work is split into.
    buffers: by name, of shapes as in `AttentionProblem`, any outer strides:
        q, out (batch, seqlen_q, heads_q, dim), or (total_q, heads_q, dim) where varlen_q, with cu_seqlens_q int32
        (batch + 1,); lse float32 (batch, heads_q, seqlen_q), or (heads_q, total_q), where return_lse.
        cache_seqlens int32 (batch,).
        k_cache, v_cache: (blocks, page_size, heads_kv, dim) with block_table int32 (batch, columns) where paged,
        (batch, seqlen_k, heads_kv, dim) where "cache". Where "pointers": k_ptrs, v_ptrs uint64 (batch,) of arrays
        (heads_kv, seqlen_k, dim), and k_cache.0 and v_cache.0, whose strides hold for all.
        alibi_slopes float32 (heads_q,) or (batch, heads_q); sinks (heads_q,) float32 or of the output's dtype;
        tree_mask uint64 (batch, seqlen_q) or (total_q,); k_descale, v_descale float32 (batch, heads_kv).
        plan int32 (ranges + 1, 4); sums int64, partial_out, partial_sums float32, where the launch has them.
    Raises InvalidRequest for an operand that is missing or not as described. Rows of caches must begin at multiples of
    16 bytes.
    """
    ranged = {"ranges": ranges, "min_units": min_units(key)}
    packed = _pack(problem, key.row_tile, problem.num_splits, buffers, ranged)
    _check_rows(problem, buffers, CHUNK)
    return packed


def pack_split(
    problem: AttentionProblem, key: DispatchKey, splits: int, buffers: Mapping[str, Buffer], values: Values = NO_VALUES
) -> bytes:
    """The parameters of the kernels that cut every item into pieces of equal length: of decode_simple and its merge.

    splits: the most pieces of an item. buffers: as of `pack_decode`; partial_out and partial_sums are float64 where q
    is. Rows of caches may begin anywhere. Raises as `pack_decode`.
    """
    packed = _pack(problem, key.row_tile, splits, buffers, {})
    _check_rows(problem, buffers, ITEMSIZES[problem.kv_dtype])
    return packed


def _pack(
    problem: AttentionProblem, row_tile: int, splits: int, buffers: Mapping[str, Buffer], more: Mapping[str, int]
) -> bytes:
    scratch = {name: buffers[name].address for name in _SCRATCH if name in buffers}
    own = launch_values(problem, buffers, prefix=_ATTENTION)
    return _binder(problem, row_tile, splits).pack(buffers, {**own, **more, **scratch})


def _check_rows(problem: AttentionProblem, buffers: Mapping[str, Buffer], alignment: int) -> None:
    if problem.layout != "pointers":
        for name in ("k_cache",) if problem.latent else ("k_cache", "v_cache"):
            _check_alignment(name, buffers[name], (0, 1, 2), alignment)


def pack_pointers(problem: AttentionProblem, side: str, alignment: int, buffers: Mapping[str, Buffer]) -> bytes:
    """The addresses of a batch's cache arrays, uint64 (batch,). side: "k_cache" or "v_cache".

    alignment: bytes, at multiples of which rows begin. Raises InvalidRequest for an array that is not as the first,
    unless they have layouts of their own, or whose rows begin elsewhere.
    """
    first = buffers[f"{side}.0"]
    addresses = []
    for index in range(problem.batch):
        name = f"{side}.{index}"
        buffer = buffers[name]
        alike = (buffer.shape, buffer.strides, buffer.dtype) == (first.shape, first.strides, first.dtype)
        if not (alike or problem.own_layouts):
            raise InvalidRequest(name, f"{buffer.shape}, {buffer.strides}", f"must be laid out as {side}.0")
        _check_alignment(name, buffer, (0, 1), alignment)
        addresses.append(buffer.address)
    return struct.pack(f"<{len(addresses)}Q", *addresses)


def pack_cache_layouts(problem: AttentionProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The strides and capacities of a batch's cache arrays: CacheLayout of kernels_cu/decode/params.cuh, (batch,).

    Raises InvalidRequest for an array of another shape or dtype, or whose last axis has gaps.
    """
    packed = []
    for index in range(problem.batch):
        k, v = (buffers[f"{side}_cache.{index}"] for side in "kv")
        for name, one, dim in (("k", k, problem.head_dim), ("v", v, problem.head_dim_v)):
            wanted = (problem.heads_kv, k.shape[1], dim)
            if one.shape != wanted or one.dtype != problem.kv_dtype or (dim > 1 and one.strides[2] != 1):
                given = f"{one.dtype}{list(one.shape)}, strides {one.strides}"
                reason = f"must be {problem.kv_dtype} of shape {wanted}, the last axis contiguous"
                raise InvalidRequest(f"{name}_cache.{index}", given, reason)
        packed.append(struct.pack("<5q", *k.strides[:2], *v.strides[:2], k.shape[1]))
    return b"".join(packed)


@functools.lru_cache(maxsize=1024)
def _binder(problem: AttentionProblem, row_tile: int, splits: int) -> Binder:
    layout = decode_layout()
    scalars = forward_scalars(problem, _ATTENTION) | {
        "batch": problem.batch,
        "capacity": problem.seqlen_k,
        "row_tiles": row_tiles(problem, row_tile),
        "splits": splits,
        "item_units": ITEM_UNITS,
    }
    if problem.cache_batch_idx:
        scalars["cache_sequences"] = problem.total_k // problem.seqlen_k
    if problem.page_size:
        factor, shift = divider(problem.page_size)
        scalars |= {"page_size": problem.page_size, "page_factor": factor, "page_shift": shift}
    return Binder.of(layout, _operands(problem, layout), scalars)


def _operands(p: AttentionProblem, layout: ParamsLayout) -> Iterator[Operand]:
    yield from forward_operands(p, layout, _ATTENTION)
    operand = layout.operand
    yield operand("cache_seqlens", ".", (p.batch,), "int32", field="seq_lens")
    for name in ("cache_batch_idx", "cache_leftpad"):
        if getattr(p, name):
            yield operand(name, ".", (p.batch,), "int32")
    if p.tree_mask:
        shape = (p.total_q,) if p.varlen_q else (p.batch, p.seqlen_q)
        yield operand("tree_mask", "r" if p.varlen_q else "br", shape, "uint64")
    if p.layout == "paged":
        yield operand("block_table", ("table_stride", "."), (p.batch, p.seqlen_k // p.page_size), "int32")
    if p.layout == "pointers":
        for side, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
            axes = (f"{_ATTENTION}{side}_strides.head", f"{_ATTENTION}{side}_strides.row", ".")
            if not p.own_layouts:
                yield operand(f"{side}_cache.0", axes, (p.heads_kv, p.seqlen_k, dim), p.kv_dtype, field="")
            yield operand(f"{side}_ptrs", ".", (p.batch,), "uint64")


def _check_alignment(name: str, cache: Buffer, axes: tuple[int, ...], alignment: int) -> None:
    strides = [cache.strides[axis] * ITEMSIZES[cache.dtype] for axis in axes if cache.shape[axis] > 1]
    reason = rows_refusal(cache.address, strides, alignment)
    if reason is not None:
        raise InvalidRequest(name, f"address {cache.address:#x}, strides {cache.strides}", reason)


def rows_refusal(address: int, strides: Sequence[int], alignment: int = CHUNK) -> str | None:
    """Why a kernel cannot follow the rows of a cache, or None.

    strides: in bytes, of the axes of more than one. alignment: bytes, at multiples of which rows must begin.
    """
    if address % alignment or any(stride % alignment for stride in strides):
        return f"rows of a cache must begin at multiples of {alignment} bytes"
    if not all(0 <= stride < alignment << 31 for stride in strides):
        return f"strides of a cache must be from 0 to {alignment << 31} bytes"
    return None
