"""forward_sm90: the problems that it takes, its macros, the order in which its blocks work, its parameters, its launch.

struct Sm90Params of kernels_cu/forward_sm90/params.cuh:    q, k, v, out | Params | RowStats | ScoreParams | Schedule

Tile sizes are in `tiles`. The schedule is drawn in kernels_cu/forward_sm90/schedule.cuh. TMA has requirements on an
operand that reads through pointers do not have: see `tma_refusal`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer, LaunchGeometry, ScratchSpec, TensorMap
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.forward import scored_packer
from gpu_actors.kernels.macros import Macros, forward_macros
from gpu_actors.kernels.params import Binder, divider, struct_layout
from gpu_actors.kernels.program import EncodeTensorMap, Pack, Part, Program, Target, Values
from gpu_actors.kernels.support import ELEMENTS, capability
from gpu_actors.kernels.tiles import (
    Tile,
    output_is_direct,
    padded_head_dim,
    shared_bytes_of,
    threads_of,
    tile_of,
    value_pieces,
)
from gpu_actors.kernels.trials import batch_trials, cache_trials

__all__ = [
    "COUNTER",
    "FORWARD_SM90",
    "MULTIPROCESSORS",
    "ROWS",
    "SWIZZLE_ROWS",
    "TMA_ALIGNMENT",
    "Sections",
    "folded_factor_refusal",
    "mapped_packer",
    "schedule_layout",
    "section_heads",
    "sections_of",
    "sm90_packer",
    "tma_refusal",
]

ROWS = 64
"""The rows of a consumer, and of its boxes of queries and outputs."""

SWIZZLE_ROWS = 8
"""The rows after which TMA's swizzle repeats. Boxes of a page begin at multiples of it."""

MULTIPROCESSORS = 132
"""The multiprocessors of an H100 or H200 (SXM), assumed if a device does not say how many it has."""

_MAX_TILES = (1 << 31) - 1 - MULTIPROCESSORS * 8  # blocks draw numbers beyond it
_L2_BYTES = 32 << 20  # of 50 MiB: outputs and the next section need room, too
_CACHE_KEYS, _WIDE_CACHE_KEYS = 128, 64  # keys of a tile up to head dim 128, and above: see `tiles`
_FACTORS = {"softmax_scale": (2.0**-30, 2.0**30), "softcap": (2.0**-10, 2.0**10)}


def sm90_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    if capability(arch) != 90:
        return Unsupported("arch", arch, "forward_sm90 is written for Hopper's wgmma", "sm_90a")
    if problem.bias is not None and problem.layout != "dense":
        return Unsupported("bias", problem.bias[0], "forward_sm90 finds a bias by rows and keys of dense batches")
    if problem.out_dtype == "float32":
        reason = "forward_sm90 stores outputs of 16 bits; other kernels round none"
        return Unsupported("out_dtype", problem.out_dtype, reason, ELEMENTS[problem.dtype].out)
    refusal = _cache_refusal(problem) or _shape_refusal(problem) or _register_refusal(problem)
    return refusal or folded_factor_refusal(problem, "forward_sm90")


def _register_refusal(problem: AttentionProblem) -> Unsupported | None:
    """Why options that would spill registers together are left to other kernels, or None."""
    biased, dropped = problem.bias is not None, problem.dropout_p > 0.0
    dim = max(problem.head_dim, problem.head_dim_v)
    wide, summed_apart = dim > 192, ELEMENTS[problem.dtype].fp8 and 64 < dim <= 128
    windowed = problem.sliding_window or problem.attention_chunk > 0
    field, value = ("dropout_p", problem.dropout_p) if problem.bias is None else ("bias", problem.bias[0])
    for together, reason in (
        (problem.score_mod and (biased or dropped), "a score modification beside a bias or dropout"),
        (problem.positions and biased, "positions of rows or keys beside a bias"),
        (problem.positions and dropped and wide, "positions beside dropout above head dim 192"),
        (biased and dropped and wide, "a bias beside dropout above head dim 192"),
        (summed_apart and windowed and value == "float32", "a bias in float32 beside a window in 8 bits"),
    ):
        if together:
            return Unsupported(field, value, f"forward_sm90 has no registers for {reason}; other kernels do")
    return None


def _cache_refusal(problem: AttentionProblem) -> Unsupported | None:
    """Why new rows over a cache are left to the kernels that decode, or None."""
    if not problem.decoding:
        return None
    if ELEMENTS[problem.dtype].fp8:
        return Unsupported(
            "dtype",
            problem.dtype,
            "forward_sm90 takes 8-bit operands of dense and packed requests, and no cache of them",
            "bfloat16",
        )
    if problem.kv_dtype != problem.dtype:
        return Unsupported("kv_dtype", problem.kv_dtype, "forward_sm90 multiplies operands of one type", problem.dtype)
    if problem.seqlen_q < ROWS:
        reason = f"forward_sm90 multiplies {ROWS} rows at a time, and fewer rows leave a cache's keys on few blocks"
        return Unsupported("seqlen_q", problem.seqlen_q, reason, ROWS)
    if problem.tree_mask:
        return Unsupported("tree_mask", "an array", "forward_sm90 knows no tree masks")
    if problem.num_splits > 1:
        return Unsupported("num_splits", problem.num_splits, "forward_sm90 does not split keys", 1)
    if problem.num_splits and problem.varlen_q:
        # Alone, a sequence of fewer rows goes to decode_mma. With pinned splits it must have the same bits in a batch.
        reason = (
            "forward_sm90 takes a sequence or leaves it by the rows of others, and pinned splits promise the same bits"
        )
        return Unsupported("num_splits", problem.num_splits, reason, 0)
    if problem.page_size % SWIZZLE_ROWS:
        reason = f"forward_sm90 brings pages of a multiple of {SWIZZLE_ROWS} keys; decode_mma brings others row by row"
        return Unsupported("page_size", problem.page_size, reason, SWIZZLE_ROWS)
    keys = _CACHE_KEYS if max(problem.head_dim, problem.head_dim_v) <= 128 else _WIDE_CACHE_KEYS
    if problem.page_size and keys % problem.page_size and problem.page_size % keys:
        reason = f"forward_sm90 brings {keys} keys at a time, which pages divide or are multiples of"
        return Unsupported("page_size", problem.page_size, reason, keys)
    return None


def _shape_refusal(problem: AttentionProblem) -> Unsupported | None:
    if problem.total_k == 0:
        return Unsupported("seqlen_k", 0, "forward_sm90 moves keys by TMA, which there must be", 1)
    if problem.batch * problem.heads_q * -(-problem.seqlen_q // ROWS) > _MAX_TILES:
        reason = "forward_sm90 numbers its tiles of rows in 31 bits"
        return Unsupported("batch", problem.batch, reason, 1)
    return None


def folded_factor_refusal(problem: AttentionProblem, kernel: str) -> Unsupported | None:
    """Why a kernel cannot fold the problem's scale or softcap into other factors, or None."""
    for field, (least, greatest) in _FACTORS.items():
        value = getattr(problem, field)
        if field == "softcap" and value == 0.0:
            continue
        if not least <= value <= greatest:
            reason = f"{kernel} folds it into other factors in fp32, from {least} to {greatest}"
            return Unsupported(field, value, reason, min(max(value, least), greatest))
    return None


def sm90_macros(key: DispatchKey) -> Macros:
    tile = tile_of(key)
    macros = forward_macros(key) | {"STAGES": tile.stages}
    if key.decoding:
        macros |= {"CACHE_LENGTHS": 1} | ({"VARLEN": 1} if key.varlen_q else {})
        macros |= {"PAGE_SIZE": key.page_size} if key.paged else {}
    if output_is_direct(tile, key.dtype, key.head_dim, key.head_dim_v):
        macros["O_DIRECT"] = 1
    if (pieces := value_pieces(tile, key.dtype, key.head_dim_v)) > 1:
        macros["PIECES"] = pieces
    return macros


class Sections(NamedTuple):
    """tiles: all row tiles. row_tiles: per sequence. all_heads: query heads of all sequences. heads: per section."""

    tiles: int
    row_tiles: int
    all_heads: int
    heads: int


def sections_of(problem: AttentionProblem, tile: Tile) -> Sections:
    """The schedule of a problem: a section has whole KV heads, at most as many as L2 holds keys and values of."""
    row_tiles = -(-problem.seqlen_q // tile.block_m)
    all_heads = problem.batch * problem.heads_q
    itemsize = ELEMENTS[problem.dtype].itemsize
    bytes_a_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * itemsize
    heads = section_heads(all_heads, problem.gqa_ratio, bytes_a_head)
    return Sections(row_tiles * all_heads, row_tiles, all_heads, heads)


def section_heads(all_heads: int, group: int, bytes_a_head: int) -> int:
    """The query heads of a section: the number above half of what L2 holds that fills the last section best.

    A last section of few heads would end with long tiles. group: query heads per KV head. bytes_a_head: the bytes of a
    KV head's keys and values.
    """
    most = max(1, _L2_BYTES // max(1, bytes_a_head)) * group
    if most >= all_heads:
        return all_heads
    return max(range(most, most // 2, -group), key=lambda heads: (all_heads % heads or heads) / heads)


COUNTER = "tile_counter"
"""The name of the scratch memory from which blocks draw tiles: one int32 of 0."""

TMA_ALIGNMENT = 16
"""Addresses and strides are multiples of this many bytes."""

_ALIGNMENT = 64  # of the struct, because its tensor maps have it
_MAX_STRIDE = 1 << 40
_NO_MAP = bytes(128)  # for an operand without elements, which no block reads


schedule_layout = functools.partial(struct_layout, "Schedule", "forward_sm90/params.cuh")


def tma_refusal(
    name: str, shape: Sequence[int], strides: Sequence[int], address: int = 0, itemsize: int = 2
) -> Unsupported | None:
    """Why TMA cannot move an operand, or None.

    shape, strides: (..., dim), strides in elements; axes of extent 1 may have any stride.
    address: the operand's. itemsize: bytes of an element.
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


def sm90_packer(problem: AttentionProblem, key: DispatchKey, encode: EncodeTensorMap | None) -> Pack:
    """Return what packs the parameters of launches of a problem. encode: makes the device's tensor maps.

    The buffers are those of `forward_operands` and of `_schedule_binder`.
    """
    k, v = ("k_cache", "v_cache") if problem.decoding else ("k", "v")
    tile = tile_of(key)
    keys = min(tile.block_n, problem.page_size or tile.block_n)
    dim, dim_v = (padded_head_dim(dim, problem.dtype) for dim in (problem.head_dim, problem.head_dim_v))
    boxes = (("q", dim, ROWS), (k, dim, keys), (v, dim_v, keys), ("out", dim_v, ROWS))
    params = scored_packer(problem)
    schedule = functools.cache(lambda: _schedule_binder(problem, sections_of(problem, tile)))
    return mapped_packer(lambda buffers, values: params(buffers, values) + schedule().pack(buffers), boxes, encode)


def mapped_packer(params: Pack, boxes: Sequence[tuple[str, int, int]], encode: EncodeTensorMap | None) -> Pack:
    """Return what packs tensor maps, and after them ``params``. boxes: operand, columns and rows for `_rows_map`."""

    def pack(buffers: Mapping[str, Buffer], values: Values) -> bytes:
        assert encode is not None, "a launch by TMA is packed for a device"
        packed = params(buffers, values)  # first, because it checks the operands
        maps = [_rows_map(name, buffers[name], columns, rows, encode) for name, columns, rows in boxes]
        whole = b"".join((*maps, packed))
        return whole + bytes(-len(whole) % _ALIGNMENT)

    return pack


def _rows_map(name: str, buffer: Buffer, columns: int, rows: int, encode: EncodeTensorMap) -> bytes:
    """The map of an operand (.., rows, heads, dim) as (dim, rows, heads, batch). Boxes have ``rows`` rows.

    columns: those of a tile. A box, like the swizzle, is 128 bytes wide if that divides a tile's row, else 64.
    """
    itemsize = ELEMENTS[buffer.dtype].itemsize
    refusal = tma_refusal(name, buffer.shape, buffer.strides, buffer.address, itemsize)
    if refusal is not None:
        raise InvalidRequest(name, refusal.value, refusal.reason)
    if 0 in buffer.shape:
        return _NO_MAP
    shape, strides = buffer.shape, buffer.strides
    if len(shape) == 3:  # packed
        shape, strides = (1, *shape), (0, *strides)
    batch, length, heads, dim = shape
    extents = (dim, length, heads, batch)
    # The stride of an axis of extent 1 has no meaning, but the driver checks it. A row is a multiple of 16 bytes.
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


def sm90_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The program of the kernel alone. A cache needs no other kernel either, wherever its lengths lie."""
    pack = sm90_packer(problem, key, target.encode)
    # One block per multiprocessor, but no more than there are tiles.
    blocks = min(sections_of(problem, tile_of(key)).tiles, target.multiprocessors or MULTIPROCESSORS)
    geometry = LaunchGeometry((blocks, 1, 1), (threads_of(key), 1, 1), shared_bytes_of(key))
    return Program((Part(key, geometry, pack),), {COUNTER: ScratchSpec((1,), "int32", zero=True, rearmed=True)})


FORWARD_SM90 = KernelFamily(
    "forward_sm90",
    "computes 16-bit and 8-bit batches, and many new rows over caches, on Hopper with TMA and wgmma",
    sm90_program,
    sm90_macros,
    threads_of,
    "forward",
    ("dense", "varlen", "cache", "paged"),
    ("float16", "float8_e5m2", "float8_e4m3fn", "bfloat16"),
    refuses=sm90_refuses,
    persistent=True,
    score_mods=True,
    block_masks=True,
    positions=True,
    row_stats=True,
    tma=True,
    lacks=("cache_batch_idx", "cache_leftpad"),
    trials=lambda key: (cache_trials if key.decoding else batch_trials)(key, tile_of(key)),
)
