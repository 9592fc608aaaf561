"""Packs a launch of forward_sm90: tensor maps, the parameters of every forward kernel, and the schedule.

    struct Sm90Params of kernels_cu/sm90_params.cuh:    q, k, v, out | Params | Schedule

TMA asks more of an operand than a kernel that reads through pointers: `tma_refusal` says what.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from gpu_actors.devices.interface import Buffer, TensorMap
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.arguments import ParamsLayout, pack_forward, parse_layout
from gpu_actors.kernels.assets import asset_text
from gpu_actors.kernels.sm90_variants import ROWS, Sections, sections_of
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import Tile, padded_head_dim
from gpu_actors.kernels.transposition import TRANSPOSE, TRANSPOSED, positions_of
from gpu_actors.kernels.variants import tile_of
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = [
    "COUNTER",
    "TMA_ALIGNMENT",
    "EncodeTensorMap",
    "pack_sm90",
    "pack_transposition",
    "schedule_layout",
    "tma_refusal",
]

COUNTER = "tile_counter"
"""The name of the scratch memory, one int32 of 0, that blocks draw tiles from."""

TMA_ALIGNMENT = 16
"""Bytes that addresses and strides are multiples of."""

EncodeTensorMap = Callable[[TensorMap], bytes]

_HEADER = "sm90_params.cuh"
_ALIGNMENT = 64  # of the struct, because its tensor maps have it
_MAX_STRIDE = 1 << 40
_MAX_EXTENT = 1 << 32
_NO_MAP = bytes(128)  # of an operand without elements, which no block looks at


@functools.cache
def schedule_layout() -> ParamsLayout:
    """struct Schedule of kernels_cu/sm90_params.cuh."""
    return parse_layout(asset_text(_HEADER), "Schedule")


def tma_refusal(
    name: str, shape: Sequence[int], strides: Sequence[int], address: int = 0, itemsize: int = 2
) -> Unsupported | None:
    """Why TMA cannot move an operand, or None.

    shape, strides: (..., dim), strides in elements; those of axes of extent 1 may be anything.
    address: where it starts. itemsize: bytes of an element.
    """
    if address % TMA_ALIGNMENT:
        return Unsupported(name, hex(address), "TMA moves operands that start at a multiple of 16 bytes")
    if 0 in shape:
        return None
    for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        nbytes = stride * itemsize
        last = axis == len(shape) - 1
        if extent > 1 and last and stride != 1:
            return Unsupported(name, f"strides {tuple(strides)}", "TMA moves operands whose last axis is contiguous")
        if extent > 1 and not last and (nbytes % TMA_ALIGNMENT or not 0 < nbytes < _MAX_STRIDE):
            reason = "TMA strides over positive multiples of 16 bytes below 2^40"
            return Unsupported(name, f"strides {tuple(strides)}", reason)
    return None


def pack_sm90(
    problem: AttentionProblem, key: DispatchKey, encode: EncodeTensorMap, buffers: Mapping[str, Buffer]
) -> bytes:
    """The parameters of a launch.

    buffers: as `gpu_actors.kernels.arguments.pack_forward` wants them, and the scratch memory `COUNTER`. Of 8-bit
        floats, those of `gpu_actors.kernels.transposition`, too. Over a cache,
        k_cache and v_cache (blocks, page_size, heads_kv, dim) or (batch, capacity, heads_kv, dim), cache_seqlens int32
        (batch,) and, for pages, block_table int32 (batch, pages) whose rows are contiguous.
    encode: the device's own tensor maps. Raises InvalidRequest as pack_forward does, and for what TMA cannot move.
    """
    if problem.decoding:
        buffers = {**buffers, "k": buffers["k_cache"], "v": buffers["v_cache"]}
    params = pack_forward(problem, buffers)
    tile = tile_of(key)
    keys = min(tile.block_n, problem.page_size or tile.block_n)
    dim, dim_v = (padded_head_dim(dim, problem.dtype) for dim in (problem.head_dim, problem.head_dim_v))
    if ELEMENTS[problem.dtype].fp8:
        values = _map_of("v", _as_rows(buffers[TRANSPOSED]), tile.block_n, dim_v, encode)
    else:
        values = _map_of("v", buffers["v"], dim_v, keys, encode)
    maps = (
        _map_of("q", buffers["q"], dim, ROWS, encode),
        _map_of("k", buffers["k"], dim, keys, encode),
        values,
        _map_of("out", buffers["out"], dim_v, ROWS, encode),
    )
    packed = b"".join((*maps, params, _schedule(problem, tile, buffers)))
    return packed.ljust(-(-len(packed) // _ALIGNMENT) * _ALIGNMENT, b"\0")


def pack_transposition(problem: AttentionProblem, key: DispatchKey, buffers: Mapping[str, Buffer]) -> bytes:
    """The parameters of transpose_values: struct ValuesParams of its file.

    buffers: v as for `pack_sm90`, cu_seqlens_k where varlen, and the scratch memory `TRANSPOSED`. Raises InvalidRequest
    where rows of v do not start at multiples of 16 bytes.
    """
    layout, v = transposition_layout(), buffers["v"]
    _check_tma("v", v)
    varlen = problem.layout == "varlen"
    row, head, _ = v.strides[-3:]
    named = {
        "v": v.address,
        "transposed": buffers[TRANSPOSED].address,
        "cu_seqlens_k": buffers["cu_seqlens_k"].address if varlen else 0,
        "batch_stride": 0 if varlen else v.strides[0],
        "row_stride": row,
        "head_stride": head,
        "tiles": positions_of(problem, tile_of(key).block_n) // tile_of(key).block_n,
        "heads_kv": problem.heads_kv,
        "seqlen_k": problem.seqlen_k,
        "batch": problem.batch,
    }
    return layout.pack([named[field.name] for field in layout.fields])


@functools.cache
def transposition_layout() -> ParamsLayout:
    """struct ValuesParams of kernels_cu/transpose_values.cu."""
    return parse_layout(asset_text(f"{TRANSPOSE}.cu"), "ValuesParams")


def _as_rows(transposed: Buffer) -> Buffer:
    """(batch, heads, dim, positions) as (batch, dim, heads, positions): the rows are columns of V."""
    shape, strides = (tuple(values[axis] for axis in (0, 2, 1, 3)) for values in (transposed.shape, transposed.strides))
    return Buffer(transposed.address, shape, strides, transposed.dtype)


def _check_tma(name: str, buffer: Buffer) -> None:
    refusal = tma_refusal(name, buffer.shape, buffer.strides, buffer.address, ELEMENTS[buffer.dtype].itemsize)
    if refusal is not None:
        raise InvalidRequest(name, refusal.value, refusal.reason)


def _map_of(name: str, buffer: Buffer, columns: int, rows: int, encode: EncodeTensorMap) -> bytes:
    """An operand (.., rows, heads, dim) as (dim, rows, heads, batch), in boxes of a swizzle's width and ``rows`` rows.

    columns: of a tile, of which boxes take 128 bytes each where that is a multiple of them, else 64.
    """
    _check_tma(name, buffer)
    if 0 in buffer.shape:
        return _NO_MAP
    itemsize = ELEMENTS[buffer.dtype].itemsize
    shape, strides = buffer.shape, buffer.strides
    if len(shape) == 3:  # packed
        shape, strides = (1, *shape), (0, *strides)
    batch, length, heads, dim = shape
    extents = (dim, length, heads, batch)
    steps = []
    for extent, stride in zip(extents[1:], (strides[1], strides[2], strides[0]), strict=True):
        # What an axis of one element strides over is no matter, but the driver looks at it.
        steps.append(stride * itemsize if extent > 1 else TMA_ALIGNMENT * 2)
    wide = columns * itemsize % 128 == 0
    return encode(
        TensorMap(
            address=buffer.address,
            dtype=buffer.dtype,
            shape=extents,
            strides=tuple(steps),
            box=((128 if wide else 64) // itemsize, rows, 1, 1),
            swizzle="128B" if wide else "64B",
        )
    )


def _schedule(problem: AttentionProblem, tile: Tile, buffers: Mapping[str, Buffer]) -> bytes:
    layout = schedule_layout()
    values = list(_schedule_values(problem, sections_of(problem, tile)))
    values[layout.positions["counter"]] = buffers[COUNTER].address
    if problem.decoding:
        values[layout.positions["cache_seqlens"]] = _int32("cache_seqlens", buffers, (problem.batch,)).address
    if problem.layout == "paged":
        table = _int32("block_table", buffers, (problem.batch, buffers["block_table"].shape[-1]))
        values[layout.positions["block_table"]] = table.address
        values[layout.positions["block_table_stride"]] = table.strides[0]
    return layout.pack(values)


def _int32(name: str, buffers: Mapping[str, Buffer], shape: tuple[int, ...]) -> Buffer:
    """A table of the cache, after a look at it. Raises InvalidRequest."""
    buffer = buffers[name]
    if (buffer.shape, buffer.dtype) != (shape, "int32"):
        given = f"{buffer.dtype}{list(buffer.shape)}"
        raise InvalidRequest(name, given, f"must be int32 of shape {shape} for this problem")
    if shape[-1] > 1 and buffer.strides[-1] != 1:
        raise InvalidRequest(name, f"strides {buffer.strides}", "the last axis must be contiguous")
    return buffer


@functools.lru_cache(maxsize=1024)
def _schedule_values(problem: AttentionProblem, sections: Sections) -> tuple[int, ...]:
    last = sections.all_heads % sections.heads if sections.heads else 0
    dividers = {
        "heads": problem.heads_q,
        "head_group": problem.gqa_ratio,
        "section": sections.heads,
        "section_tiles": sections.heads * sections.row_tiles,
        "last_section": last or sections.heads,
    }
    named = {
        "counter": 0,
        "cache_seqlens": 0,
        "block_table": 0,
        "block_table_stride": 0,
        "tiles": sections.tiles,
        "row_tiles": sections.row_tiles,
        "all_heads": sections.all_heads,
        "section_heads": sections.heads,
    }
    for name, divisor in dividers.items():
        multiplier, shift = magic(max(1, divisor))
        named |= {f"{name}.divisor": divisor, f"{name}.multiplier": multiplier, f"{name}.shift": shift}
    return tuple(named[field.name] for field in schedule_layout().fields)


def magic(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) with n // divisor == n * multiplier >> 32 + shift for 0 <= n < 2^31; multiplier 0 for 1.

    Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994, theorem 4.2.
    """
    if divisor == 1:
        return 0, 0
    bits = (divisor - 1).bit_length()
    return ((1 << (31 + bits)) + divisor - 1) // divisor, bits - 1
