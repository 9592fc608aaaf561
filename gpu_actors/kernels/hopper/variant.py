"""What forward_sm90 takes, how it is compiled, and the order in which its persistent blocks work.

Tile sizes are in `tiles`. The schedule is drawn in kernels_cu/hopper/schedule.cuh.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import LaunchGeometry
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.macros import Macros, forward_macros
from gpu_actors.kernels.support import ELEMENTS, capability
from gpu_actors.kernels.tiles import Tile, output_is_direct, shared_bytes_of, tile_of, value_pieces

__all__ = [
    "MULTIPROCESSORS",
    "ROWS",
    "SWIZZLE_ROWS",
    "Sections",
    "folded_factor_refusal",
    "section_heads",
    "sections_of",
    "sm90_geometry",
    "sm90_macros",
    "sm90_refuses",
    "sm90_threads",
]

ROWS = 64
"""The rows of a consumer, and of its boxes of queries and outputs."""

SWIZZLE_ROWS = 8
"""The rows after which TMA's swizzle repeats: boxes of a page begin at multiples of them."""

MULTIPROCESSORS = 132
"""The multiprocessors of an H100 or H200 (SXM), assumed where a device does not say how many it has."""

_MAX_TILES = (1 << 31) - 1 - MULTIPROCESSORS * 8  # numbers that blocks draw lie beyond it
_L2_BYTES = 32 << 20  # of 50 MiB: outputs and the next section want room, too
_CACHE_KEYS, _WIDE_CACHE_KEYS = 128, 64  # a tile of keys up to head dim 128, and beyond: see `tiles`
_FACTORS = {"softmax_scale": (2.0**-30, 2.0**30), "softcap": (2.0**-10, 2.0**10)}


def sm90_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """Why forward_sm90 does not take a problem, or None. What its operands' strides must be is in `sm90_arguments`."""
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
    """Why options are left to other kernels that would spill registers together."""
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
    """Why new rows over a cache are left to the kernels that decode."""
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
        # decode_mma takes a sequence of fewer rows alone; with pinned splits it must have the same bits in a batch.
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
    """Why the kernel of that name does not take the problem's scale or softcap, or None."""
    for field, (least, greatest) in _FACTORS.items():
        value = getattr(problem, field)
        if field == "softcap" and value == 0.0:
            continue
        if not least <= value <= greatest:
            reason = f"{kernel} folds it into other factors in fp32, from {least} to {greatest}"
            return Unsupported(field, value, reason, min(max(value, least), greatest))
    return None


def sm90_macros(key: DispatchKey) -> Macros:
    """The macros of kernels_cu/hopper/layout.cuh."""
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


def sm90_threads(key: DispatchKey) -> int:
    """The threads of a block of forward_sm90."""
    return tile_of(key).warps * 32


def sm90_geometry(key: DispatchKey, problem: AttentionProblem, multiprocessors: int | None) -> LaunchGeometry:
    """One block a multiprocessor, and no more than there are tiles."""
    blocks = min(sections_of(problem, tile_of(key)).tiles, multiprocessors or MULTIPROCESSORS)
    return LaunchGeometry((blocks, 1, 1), (sm90_threads(key), 1, 1), shared_bytes_of(key))


class Sections(NamedTuple):
    """tiles: of rows, in all. row_tiles: of a sequence. all_heads: query heads of all sequences. heads: a section."""

    tiles: int
    row_tiles: int
    all_heads: int
    heads: int


@functools.lru_cache(maxsize=1024)
def sections_of(problem: AttentionProblem, tile: Tile) -> Sections:
    """The schedule of a problem: as many whole KV heads a section as L2 holds the keys and values of."""
    row_tiles = -(-problem.seqlen_q // tile.block_m)
    all_heads = problem.batch * problem.heads_q
    itemsize = ELEMENTS[problem.dtype].itemsize
    bytes_a_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * itemsize
    heads = section_heads(all_heads, problem.gqa_ratio, bytes_a_head)
    return Sections(row_tiles * all_heads, row_tiles, all_heads, heads)


def section_heads(all_heads: int, group: int, bytes_a_head: int) -> int:
    """Query heads of a section: of the larger half of what L2 holds, the number that fills the last section best.

    A last section of few heads would end with long tiles. group: query heads a KV head. bytes_a_head: of its keys and
    values.
    """
    most = max(1, _L2_BYTES // max(1, bytes_a_head)) * group
    if most >= all_heads:
        return all_heads
    return max(range(most, most // 2, -group), key=lambda heads: (all_heads % heads or heads) / heads)
