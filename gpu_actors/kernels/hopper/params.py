"""Packs a launch of forward_sm90: tensor maps, the parameters of every forward kernel, where the stats of rows go, what
a score modification reads, and the schedule.

    struct Sm90Params of kernels_cu/hopper/params.cuh:    q, k, v, out | Params | RowStats | ScoreParams | Schedule

TMA asks more of an operand than a kernel that reads through pointers: `tma_refusal` says what.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer, TensorMap
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.hopper.variant import ROWS, Sections, sections_of
from gpu_actors.kernels.params import Binder, divider, pack_forward, struct_layout
from gpu_actors.kernels.program import NO_VALUES, EncodeTensorMap, Values
from gpu_actors.kernels.row_stats import pack_row_stats
from gpu_actors.kernels.score_params import pack_score
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import padded_head_dim, tile_of

__all__ = [
    "COUNTER",
    "TMA_ALIGNMENT",
    "pack_sm90",
    "pad_to_maps",
    "rows_map",
    "schedule_layout",
    "tma_refusal",
]

COUNTER = "tile_counter"
"""The name of the scratch memory, one int32 of 0, that blocks draw tiles from."""

TMA_ALIGNMENT = 16
"""Bytes that addresses and strides are multiples of."""

_ALIGNMENT = 64  # of the struct, because its tensor maps have it
_MAX_STRIDE = 1 << 40
_NO_MAP = bytes(128)  # of an operand without elements, which no block looks at


schedule_layout = functools.partial(struct_layout, "Schedule", "hopper/params.cuh")


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
    problem: AttentionProblem,
    key: DispatchKey,
    encode: EncodeTensorMap | None,
    buffers: Mapping[str, Buffer],
    values: Values = NO_VALUES,
) -> bytes:
    """The parameters of a launch.

    buffers: as `gpu_actors.kernels.params.pack_forward` wants them, and the scratch memory `COUNTER`. Over a cache,
        k_cache and v_cache (blocks, page_size, heads_kv, dim) or (batch, capacity, heads_kv, dim), cache_seqlens int32
        (batch,) and, for pages, block_table int32 (batch, pages) whose rows are contiguous.
    encode: the device's own tensor maps. Raises InvalidRequest as pack_forward does, and for what TMA cannot move.
    """
    assert encode is not None, "a launch by TMA is packed for a device"
    params = pack_forward(problem, buffers, dropout_seed=values.dropout_seed)
    params += pack_row_stats(problem, buffers) + pack_score(problem, buffers, values.score_scalars)
    k, v = ("k_cache", "v_cache") if problem.decoding else ("k", "v")
    tile = tile_of(key)
    keys = min(tile.block_n, problem.page_size or tile.block_n)
    dim, dim_v = (padded_head_dim(dim, problem.dtype) for dim in (problem.head_dim, problem.head_dim_v))
    maps = (
        rows_map("q", buffers["q"], dim, ROWS, encode),
        rows_map(k, buffers[k], dim, keys, encode),
        rows_map(v, buffers[v], dim_v, keys, encode),
        rows_map("out", buffers["out"], dim_v, ROWS, encode),
    )
    schedule = _schedule_binder(problem, sections_of(problem, tile)).pack(buffers)
    return pad_to_maps(b"".join((*maps, params, schedule)))


def pad_to_maps(packed: bytes) -> bytes:
    """The bytes of a struct whose tensor maps decide its alignment."""
    return packed.ljust(-(-len(packed) // _ALIGNMENT) * _ALIGNMENT, b"\0")


def _check_tma(name: str, buffer: Buffer) -> None:
    refusal = tma_refusal(name, buffer.shape, buffer.strides, buffer.address, ELEMENTS[buffer.dtype].itemsize)
    if refusal is not None:
        raise InvalidRequest(name, refusal.value, refusal.reason)


def rows_map(name: str, buffer: Buffer, columns: int, rows: int, encode: EncodeTensorMap) -> bytes:
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
    # The stride of an axis of one element has no meaning, but the driver checks it. A row has whole 16 bytes.
    steps = tuple(
        (stride if extent > 1 else dim) * itemsize
        for extent, stride in zip(extents[1:], (strides[1], strides[2], strides[0]), strict=True)
    )
    wide = columns * itemsize % 128 == 0
    return encode(
        TensorMap(
            address=buffer.address,
            dtype=buffer.dtype,
            shape=extents,
            strides=steps,
            box=((128 if wide else 64) // itemsize, rows, 1, 1),
            swizzle="128B" if wide else "64B",
        )
    )


@functools.lru_cache(maxsize=1024)
def _schedule_binder(problem: AttentionProblem, sections: Sections) -> Binder:
    layout = schedule_layout()
    operands = [layout.operand(COUNTER, ".", (1,), "int32", field="counter")]
    if problem.decoding:
        operands.append(layout.operand("cache_seqlens", ".", (problem.batch,), "int32"))
    if problem.layout == "paged":
        table = (problem.batch, problem.seqlen_k // problem.page_size)
        operands.append(layout.operand("block_table", ("block_table_stride", "."), table, "int32"))
    last = sections.all_heads % sections.heads if sections.heads else 0
    dividers = {
        "heads": problem.heads_q,
        "head_group": problem.gqa_ratio,
        "section": sections.heads,
        "section_tiles": sections.heads * sections.row_tiles,
        "last_section": last or sections.heads,
    }
    scalars = layout.named(sections) | {"section_heads": sections.heads}
    for name, divisor in dividers.items():
        multiplier, shift = divider(max(1, divisor))
        scalars |= {f"{name}.divisor": divisor, f"{name}.multiplier": multiplier, f"{name}.shift": shift}
    return Binder.of(layout, operands, scalars)
