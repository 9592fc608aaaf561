"""Packs a request over a cache into the DecodeParams struct that all three decode kernels take.

The struct is declared once, in kernels_cu/decode_params.cuh after the Params of kernels_cu/forward_params.cuh, and read
from there.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import Any

from gpu_actors.devices.interface import Buffer
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.arguments import UNBOUNDED, ParamsLayout, parse_layout
from gpu_actors.kernels.assets import asset_text
from gpu_actors.kernels.decode_schedule import ITEM_UNITS, min_units
from gpu_actors.kernels.decode_variants import row_tiles
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["decode_layout", "pack_decode", "pack_pointers", "page_division"]

_HEADERS = ("forward_params.cuh", "decode_params.cuh")
_AXES = {"b": "batch", "r": "row", "h": "head"}
_CHUNK = 16  # bytes that a cp.async copies, and a multiple of which its addresses are


@functools.cache
def decode_layout() -> ParamsLayout:
    """struct DecodeParams of kernels_cu/decode_params.cuh."""
    return parse_layout("\n".join(map(asset_text, _HEADERS)), "DecodeParams")


def pack_decode(problem: AttentionProblem, key: DispatchKey, ranges: int, buffers: Mapping[str, Buffer]) -> bytes:
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
        plan int32 (ranges + 1, 4); sums int64, partial_out, partial_lse float32, where the launch has them.
    Raises InvalidRequest for an operand that is missing or not as described. Rows of caches must begin at multiples of
    16 bytes.
    """
    values = _scalars(problem) | {"ranges": ranges, "min_units": min_units(key)}
    for name, field, axes, shape, dtypes, optional in _operands(problem):
        buffer = buffers.get(name)
        if buffer is None and optional:
            continue
        buffer = _checked(name, buffer, shape, dtypes)
        values[field] = buffer.address
        for axis, letter in enumerate(axes):
            if letter in _AXES and buffer.shape[axis] > 1:
                values[f"{field}_strides.{_AXES[letter]}"] = buffer.strides[axis]
    values |= _cache_values(problem, buffers)
    if problem.sinks:
        values["attention.sinks_are_float"] = buffers["sinks"].dtype == "float32"
    for name, field in (("plan", "plan"), ("sums", "sums"), ("partial_out",) * 2, ("partial_lse",) * 2):
        if name in buffers:
            values[field] = buffers[name].address
    layout = decode_layout()
    return layout.pack([values.get(field.name, 0) for field in layout.fields])


def pack_pointers(problem: AttentionProblem, side: str, buffers: Mapping[str, Buffer]) -> bytes:
    """The addresses of a batch's cache arrays, uint64 (batch,). side: "k_cache" or "v_cache".

    Raises InvalidRequest for one that is not as the first, or does not begin at a multiple of 16 bytes.
    """
    first = buffers[f"{side}.0"]
    addresses = []
    for index in range(problem.batch):
        name = f"{side}.{index}"
        buffer = buffers[name]
        if (buffer.shape, buffer.strides, buffer.dtype) != (first.shape, first.strides, first.dtype):
            raise InvalidRequest(name, f"{buffer.shape}, {buffer.strides}", f"must be laid out as {side}.0")
        _check_chunks(name, buffer, (0, 1))
        addresses.append(buffer.address)
    return struct.pack(f"<{len(addresses)}Q", *addresses)


@functools.lru_cache(maxsize=1024)
def _scalars(problem: AttentionProblem) -> dict[str, int | float]:
    left, right = problem.window
    scalars: dict[str, int | float] = {
        "attention.softmax_scale": problem.softmax_scale,
        "attention.softcap": problem.softcap,
        "attention.heads_q": problem.heads_q,
        "attention.heads_kv": problem.heads_kv,
        "attention.seqlen_q": problem.seqlen_q,
        "attention.seqlen_k": problem.seqlen_k,
        "attention.window_left": UNBOUNDED if left < 0 else min(left, UNBOUNDED),
        "attention.window_right": UNBOUNDED if right < 0 else min(right, UNBOUNDED),
        "attention.sink_tokens": min(problem.sink_tokens, UNBOUNDED),
        "batch": problem.batch,
        **page_division(problem.page_size),
        "capacity": problem.seqlen_k,
        "row_tiles": row_tiles(problem),
        "splits": problem.num_splits,
        "item_units": ITEM_UNITS,
    }
    return scalars


def page_division(page_size: int) -> dict[str, int]:
    """What finds the page of a key without a division, exactly for every key below 2^30.

    With factor = ceil(2^p / size), the product exceeds key 2^p / size by less than key size / size; that stays
    below one page's worth, 2^p / size, as long as key size < 2^p (Granlund and Montgomery, "Division by invariant
    integers using multiplication", PLDI 1994, theorem 4.2).
    """
    if not page_size:
        return {}
    power = 30 + (page_size - 1).bit_length()
    return {"page_size": page_size, "page_factor": -(-(1 << power) // page_size), "page_shift": power - 32}


@functools.lru_cache(maxsize=1024)
def _operands(problem: AttentionProblem) -> tuple[tuple[Any, ...], ...]:
    """(name, field, axes, shape, dtypes, optional) of operands apart from the cache. Axes as in `_AXES`."""
    p = problem
    rows: tuple[int, ...] = (p.total_q,) if p.varlen_q else (p.batch, p.seqlen_q)
    axes = "rh." if p.varlen_q else "brh."
    shape: tuple[int, ...]
    found: list[tuple[Any, ...]] = [
        ("q", "attention.q", axes, (*rows, p.heads_q, p.head_dim), (p.dtype,), False),
        ("out", "attention.out", axes, (*rows, p.heads_q, p.head_dim_v), (p.out_dtype,), False),
        ("cache_seqlens", "seq_lens", ".", (p.batch,), ("int32",), False),
    ]
    if p.varlen_q:
        found.append(("cu_seqlens_q", "attention.cu_seqlens_q", ".", (p.batch + 1,), ("int32",), False))
    if p.return_lse:
        shape = (p.heads_q, p.total_q) if p.varlen_q else (p.batch, p.heads_q, p.seqlen_q)
        found.append(("lse", "attention.lse", "hr" if p.varlen_q else "bhr", shape, ("float32",), False))
    if p.alibi is not None:
        axes = "h" if p.alibi == "heads" else "bh"
        shape = (p.heads_q,) if p.alibi == "heads" else (p.batch, p.heads_q)
        found.append(("alibi_slopes", "attention.alibi_slopes", axes, shape, ("float32",), False))
    if p.sinks:
        found.append(("sinks", "attention.sinks", "h", (p.heads_q,), ("float32", p.out_dtype), False))
    if p.tree_mask:
        shape = (p.total_q,) if p.varlen_q else (p.batch, p.seqlen_q)
        found.append(("tree_mask", "tree_mask", "r" if p.varlen_q else "br", shape, ("uint64",), False))
    if p.descales:
        found += [
            (name, f"attention.{name}", "bh", (p.batch, p.heads_kv), ("float32",), True)
            for name in ("k_descale", "v_descale")
        ]
    return tuple(found)


def _cache_values(problem: AttentionProblem, buffers: Mapping[str, Buffer]) -> dict[str, int]:
    """Where keys and values lie."""
    p, values = problem, {}
    sides = {"k": p.head_dim, "v": p.head_dim_v}
    if p.layout == "pointers":
        for side, dim in sides.items():
            name = f"{side}_cache.0"
            first = _checked(name, buffers.get(name), (p.heads_kv, p.seqlen_k, dim), (p.kv_dtype,))
            values[f"{side}_ptrs"] = _checked(
                f"{side}_ptrs", buffers.get(f"{side}_ptrs"), (p.batch,), ("uint64",)
            ).address
            values[f"attention.{side}_strides.head"], values[f"attention.{side}_strides.row"] = first.strides[:2]
        return values
    rows = p.page_size if p.layout == "paged" else p.seqlen_k
    blocks = p.total_k // rows
    for side, dim in sides.items():
        name = f"{side}_cache"
        cache = _checked(name, buffers.get(name), (blocks, rows, p.heads_kv, dim), (p.kv_dtype,))
        _check_chunks(name, cache, (0, 1, 2))
        values[f"attention.{side}"] = cache.address
        for axis, letter in enumerate("brh"):
            values[f"attention.{side}_strides.{_AXES[letter]}"] = cache.strides[axis]
    if p.layout == "paged":
        columns = p.seqlen_k // p.page_size
        table = _checked("block_table", buffers.get("block_table"), (p.batch, columns), ("int32",))
        if columns > 1 and table.strides[1] != 1:
            raise InvalidRequest("block_table", f"strides {table.strides}", "the last axis must be contiguous")
        values["block_table"], values["table_stride"] = table.address, table.strides[0]
    return values


def _checked(name: str, buffer: Buffer | None, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Buffer:
    """The buffer, after a look at its shape, dtype, last axis and alignment."""
    if buffer is None or buffer.shape != shape or buffer.dtype not in dtypes:
        given = None if buffer is None else f"{buffer.dtype}{list(buffer.shape)}"
        wanted = f"must be {' or '.join(dict.fromkeys(dtypes))} of shape {shape} for this problem"
        raise InvalidRequest(name, given, wanted)
    # Operands that the kernels stride over in all axes are those of at most one value a head.
    strided = name in ("lse", "alibi_slopes", "sinks", "tree_mask", "k_descale", "v_descale", "block_table")
    if not strided and shape[-1] > 1 and buffer.strides[-1] != 1:
        raise InvalidRequest(name, f"strides {buffer.strides}", "the last axis must be contiguous")
    itemsize = _ITEMSIZES[buffer.dtype]
    if buffer.address % itemsize:
        raise InvalidRequest(name, hex(buffer.address), f"must start at a multiple of {itemsize} bytes")
    return buffer


_ITEMSIZES = {"int32": 4, "uint64": 8} | {name: element.itemsize for name, element in ELEMENTS.items()}


def _check_chunks(name: str, cache: Buffer, axes: tuple[int, ...]) -> None:
    """Raise InvalidRequest unless every row of a cache begins at a multiple of 16 bytes, within 2^31 of them."""
    strides = [cache.strides[axis] * _ITEMSIZES[cache.dtype] for axis in axes if cache.shape[axis] > 1]
    given = f"address {cache.address:#x}, strides {cache.strides}"
    if cache.address % _CHUNK or any(stride % _CHUNK for stride in strides):
        raise InvalidRequest(name, given, f"rows of a cache must begin at multiples of {_CHUNK} bytes")
    if not all(0 <= stride < _CHUNK << 31 for stride in strides):
        raise InvalidRequest(name, given, f"strides of a cache must be from 0 to {_CHUNK << 31} bytes")
