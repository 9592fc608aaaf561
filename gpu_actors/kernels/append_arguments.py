"""An append as a step of a launch: packs its operands into the bytes of the kernel's Arguments struct.

The struct is declared once, in kernels_cu/append_params.cuh, and read from there.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpu_actors.devices.interface import Buffer, Kernel, Step
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.append import AppendKey, AppendProblem, Rope, append_geometry, cut_rows
from gpu_actors.kernels.arguments import ParamsLayout, parse_layout
from gpu_actors.kernels.assets import asset_text
from gpu_actors.kernels.support import ELEMENTS

__all__ = ["append_layout", "append_step", "pack_append"]


def append_step(key: AppendKey, problem: AppendProblem, kernel: Kernel) -> Step:
    """The append as a step of a launch, whose operands have the names that `pack_append` lists.

    The caches are among the launch's updates. Raises Unsupported as `append_geometry`.
    """
    return Step(kernel, append_geometry(key, problem), functools.partial(pack_append, key, problem))


@functools.cache
def append_layout() -> ParamsLayout:
    """struct Params of kernels_cu/append_params.cuh."""
    return parse_layout(asset_text("append_params.cuh"), "Params")


class _Operand(NamedTuple):
    """An operand, and the fields of struct Params that its address and the strides of its axes go to.

    strides: a field for each axis, "" for one that has none; the last axis of what has columns is contiguous.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    field: str
    strides: tuple[str, ...]
    optional: bool = False


def pack_append(key: AppendKey, problem: AppendProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The parameters of a launch.

    buffers, by name; outer strides may be any, the last axis is contiguous:
        k (total, heads_kv, head_dim), v (total, heads_kv, head_dim_v) of dtype: the new rows, sequence after sequence.
        cu_seqlens_q int32 (batch + 1,) of the new rows, where ``rows`` is 0; rows past its end are no sequence's.
        cache_seqlens int32 (batch,): keys of each sequence, the new ones included.
        k_cache, v_cache of cache_dtype, as the layout says; with "pointers" k_pointers, v_pointers uint64 (batch,).
        block_table int32 (batch, max_blocks), where paged.
        positions int32 (total,); rope_cos, rope_sin float32 (table_rows, rope.dim / 2), where asked for.
        q, q_rotated (total, heads_q, head_dim) of dtype, where heads_q > 0: the latter is an output.
        k_descale, v_descale float32 (batch, heads_kv), positive; one of them may be missing.
    Raises InvalidRequest for an operand that is missing or not as described.
    """
    values: dict[str, int | float] = dict.fromkeys(append_layout().positions, 0)
    values |= _scalars(key, problem)
    for operand in _operands(problem):
        buffer = buffers.get(operand.name)
        if buffer is None and operand.optional:
            continue
        values[operand.field] = _checked_address(operand, buffer)
        assert buffer is not None
        for axis, field in enumerate(operand.strides):
            if field:
                values[field] = buffer.strides[axis]
    if problem.layout == "pointers":
        for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v)):
            values[f"{name}_cache_row"], values[f"{name}_cache_head"] = dim, problem.max_seq * dim
    packed = append_layout().pack(list(values.values()))
    if problem.rope is not None and not problem.rope.table_rows:
        packed += struct.pack(f"<{problem.rope.dim // 2}Q", *_steps(problem.rope))
    return packed


@functools.lru_cache(maxsize=64)
def _steps(rope: Rope) -> tuple[int, ...]:
    """Turns a position of each pair, in units of 2^-64, whole turns dropped."""
    return tuple(round(math.fmod(radians / math.tau, 1.0) * 2.0**64) % (1 << 64) for radians in rope.frequencies)


def _scalars(key: AppendKey, problem: AppendProblem) -> dict[str, int]:
    return {
        "batch": problem.batch,
        "total": problem.total,
        "rows": problem.rows,
        "heads_kv": problem.heads_kv,
        "heads_q": problem.heads_q,
        "capacity": problem.capacity,
        "page_size": problem.page_size,
        "num_blocks": problem.num_blocks,
        "table_rows": 0 if problem.rope is None else problem.rope.table_rows,
        **cut_rows(key, problem)._asdict(),
    }


def _operands(problem: AppendProblem) -> Iterator[_Operand]:
    p = problem
    for name, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
        yield _Operand(name, (p.total, p.heads_kv, dim), p.dtype, name, (f"{name}_row", f"{name}_head"))
        cache = f"{name}_cache"
        strides = (f"{cache}_block", f"{cache}_row", f"{cache}_head")
        if p.layout == "paged":
            yield _Operand(cache, (p.num_blocks, p.page_size, p.heads_kv, dim), p.cache_dtype, cache, strides)
        elif p.layout == "dense":
            yield _Operand(cache, (p.batch, p.max_seq, p.heads_kv, dim), p.cache_dtype, cache, strides)
        else:
            yield _Operand(f"{name}_pointers", (p.batch,), "uint64", cache, ())
        if p.descales:
            field = f"{name}_descale"
            factors = (f"{field}_row", f"{field}_head")
            yield _Operand(field, (p.batch, p.heads_kv), "float32", field, factors, optional=True)
    yield _Operand("cache_seqlens", (p.batch,), "int32", "cache_seqlens", ())
    if not p.rows:
        yield _Operand("cu_seqlens_q", (p.batch + 1,), "int32", "cu_seqlens", ())
    if p.layout == "paged":
        yield _Operand("block_table", (p.batch, p.max_blocks), "int32", "block_table", ("block_table_row",))
    if p.positions:
        yield _Operand("positions", (p.total,), "int32", "positions", ())
    if p.rope is not None and p.rope.table_rows:
        for name in ("rope_cos", "rope_sin"):
            yield _Operand(name, (p.rope.table_rows, p.rope.dim // 2), "float32", name, (f"{name}_row",))
    if p.heads_q:
        for name in ("q", "q_rotated"):
            yield _Operand(name, (p.total, p.heads_q, p.head_dim), p.dtype, name, (f"{name}_row", f"{name}_head"))


def _checked_address(operand: _Operand, buffer: Buffer | None) -> int:
    """The operand's address, after a look at its shape, dtype, columns and alignment."""
    name, shape, dtype = operand.name, operand.shape, operand.dtype
    if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
        given = None if buffer is None else f"{buffer.dtype}{list(buffer.shape)}"
        raise InvalidRequest(name, given, f"must be {dtype} of shape {shape} for this append")
    # Descales have a stride for their last axis, too.
    if len(operand.strides) < len(shape) and shape[-1] > 1 and buffer.strides[-1] != 1:
        raise InvalidRequest(name, f"strides {buffer.strides}", "the last axis must be contiguous")
    itemsize = ELEMENTS[dtype].itemsize if dtype in ELEMENTS else 8 if dtype == "uint64" else 4
    if buffer.address % itemsize:
        raise InvalidRequest(name, hex(buffer.address), f"must start at a multiple of {itemsize} bytes")
    return buffer.address
