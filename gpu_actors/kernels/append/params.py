"""Packs the operands of an append into the bytes of the kernel's parameter struct.

The struct is declared once, in kernels_cu/append/params.cuh, and read from there.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Mapping

from gpu_actors.devices.interface import Buffer
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.append.variant import AppendKey, AppendProblem, Rope, cut_rows
from gpu_actors.kernels.params import ITEMSIZES, Binder, Operand, ParamsLayout, struct_layout

__all__ = ["append_layout", "pack_append"]


append_layout = functools.partial(struct_layout, "Params", "append/params.cuh")


def pack_append(key: AppendKey, problem: AppendProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The parameters of a launch.

    buffers, by name; outer strides may be any, the last axis is contiguous:
        k (total, heads_kv, head_dim), v (total, heads_kv, head_dim_v) of dtype: the new rows, sequence after sequence.
        cu_seqlens_q int32 (batch + 1,) of the new rows, where ``rows`` is 0; rows past its end are no sequence's.
        cache_seqlens int32 (batch,): keys of each sequence, the new ones included.
        k_cache, v_cache of cache_dtype, as the layout says; with "pointers" k_pointers, v_pointers uint64 (batch,).
            Of a latent cache k_cache alone, and k_descale, which is that of v too.
        block_table int32 (batch, max_blocks), where paged.
        positions int32 (total,); rope_cos, rope_sin float32 (table_rows, rope.dim / 2), where asked for.
        q, q_rotated (total, heads_q, head_dim) of dtype, where heads_q > 0: the latter is an output.
        k_descale, v_descale float32 (batch, heads_kv), positive; one of them may be missing.
    Raises InvalidRequest for an operand that is missing or not as described.
    """
    packed = _binder(key, problem).pack(_columns(problem, buffers) if problem.latent else buffers)
    if problem.rope is not None and not problem.rope.table_rows:
        packed += struct.pack(f"<{problem.rope.dim // 2}Q", *_steps(problem.rope))
    return packed


def _columns(problem: AppendProblem, buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """The one cache as two: of its first columns, which are v's, and of those behind them."""
    cache, found = buffers["k_cache"], dict(buffers)
    if cache.shape[-1] != problem.sides["k"]:
        reason = f"must have {problem.sides['k']} columns: {problem.head_dim_v} of v, and k's behind them"
        raise InvalidRequest("k_cache", f"{cache.dtype}{list(cache.shape)}", reason)
    for name, first, dim in (("v_cache", 0, problem.head_dim_v), ("k_cache", problem.head_dim_v, problem.head_dim)):
        address = cache.address + first * ITEMSIZES[cache.dtype]
        found[name] = cache._replace(address=address, shape=(*cache.shape[:-1], dim))
    if "k_descale" in buffers:
        found["v_descale"] = buffers["k_descale"]
    return found


@functools.lru_cache(maxsize=64)
def _steps(rope: Rope) -> tuple[int, ...]:
    """Turns a position of each pair, in units of 2^-64, whole turns dropped."""
    return tuple(round(math.fmod(radians / math.tau, 1.0) * 2.0**64) % (1 << 64) for radians in rope.frequencies)


@functools.lru_cache(maxsize=256)
def _binder(key: AppendKey, problem: AppendProblem) -> Binder:
    layout = append_layout()
    scalars = layout.named(problem) | layout.named(problem.rope) | layout.named(cut_rows(key, problem))
    if problem.layout == "pointers":
        for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v)):
            scalars |= {f"{name}_cache_row": dim, f"{name}_cache_head": problem.max_seq * dim}
    return Binder.of(layout, _operands(problem, layout), scalars)


def _operands(p: AppendProblem, layout: ParamsLayout) -> Iterator[Operand]:
    operand = layout.operand

    def rows(name: str, heads: int, dim: int) -> Operand:
        return operand(name, (f"{name}_row", f"{name}_head", "."), (p.total, heads, dim), p.dtype)

    for side, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
        yield rows(side, p.heads_kv, dim)
        cache, factors = f"{side}_cache", f"{side}_descale"
        if p.layout == "pointers":
            yield operand(f"{side}_pointers", ".", (p.batch,), "uint64", field=cache)
        else:
            outer = (p.num_blocks, p.page_size) if p.layout == "paged" else (p.batch, p.max_seq)
            axes = (f"{cache}_block", f"{cache}_row", f"{cache}_head", ".")
            yield operand(cache, axes, (*outer, p.heads_kv, dim), p.cache_dtype)
        if p.descales:
            yield operand(
                factors, (f"{factors}_row", f"{factors}_head"), (p.batch, p.heads_kv), "float32", optional=True
            )
    yield operand("cache_seqlens", ".", (p.batch,), "int32")
    if not p.rows:
        yield operand("cu_seqlens_q", ".", (p.batch + 1,), "int32", field="cu_seqlens")
    if p.layout == "paged":
        yield operand("block_table", ("block_table_row", "."), (p.batch, p.max_blocks), "int32")
    if p.positions:
        yield operand("positions", ".", (p.total,), "int32")
    if p.rope is not None and p.rope.table_rows:
        for name in ("rope_cos", "rope_sin"):
            yield operand(name, (f"{name}_row", "."), (p.rope.table_rows, p.rope.dim // 2), "float32")
    if p.heads_q:
        yield rows("q", p.heads_q, p.head_dim)
        yield rows("q_rotated", p.heads_q, p.head_dim)
