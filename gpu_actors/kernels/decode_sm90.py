"""decode_sm90: the problems that it takes, its tile, its macros, its parameters and its launch.

    struct Sm90DecodeParams of kernels_cu/decode_sm90/params.cuh:    k, v | DecodeParams

decode_mma's kernels split and merge the work. Their keys differ in ``kernel`` alone.
"""

from __future__ import annotations

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import LaunchGeometry
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.decode_mma import (
    UNKNOWN_MULTIPROCESSORS,
    decode_packer,
    decode_refuses,
    query_macros,
    split_macros,
    split_program,
)
from gpu_actors.kernels.decode_tiles import DecodeTile, decode_tile, packed_rows
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.forward_sm90 import SWIZZLE_ROWS, mapped_packer
from gpu_actors.kernels.macros import Macros, flags, score_macros, tile_macros
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.program import Part, Program, Target
from gpu_actors.kernels.support import ELEMENTS, MAX_HEAD_DIM, capability
from gpu_actors.kernels.tiles import Tile, padded_head_dim
from gpu_actors.kernels.trials import cache_trials

__all__ = ["DECODE_SM90", "NAME", "part_of", "sm90_decode_tile"]

NAME = "decode_sm90"
SM90_ROW_TILES = (64, 128)
"""The packed rows of a block of one warpgroup, or of two."""

_FEWEST_ROWS = 16
_WIDEST = 128  # head dim
_BARRIERS, _FOUND = 16, 16  # bytes of a stage's barriers, and of the word after them
_WIDENED = 2  # stages that hold widened keys and values
_WIDE = 2  # bytes of a widened element
_WARP = 32


def sm90_decode_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    if capability(arch) != 90:
        return Unsupported("arch", arch, f"{NAME} is written for Hopper's wgmma", "sm_90a")
    if packed_rows(problem) < _FEWEST_ROWS:
        which = "num_splits" if problem.num_splits else "seqlen_q"
        rows = "heads a KV head" if problem.num_splits else "rows times heads a KV head"
        reason = f"{NAME} is for {_FEWEST_ROWS} {rows} and more; with fewer, decode_mma reads keys as often"
        return Unsupported(which, getattr(problem, which), reason)
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest % 8 == 0 and _WIDEST < widest <= MAX_HEAD_DIM:
        reason = f"{NAME} holds 64 rows of Q and of the output in registers, up to {_WIDEST} columns"
        return Unsupported("head_dim", widest, reason, _WIDEST)
    if problem.page_size % SWIZZLE_ROWS:
        reason = f"{NAME} brings pages of a multiple of {SWIZZLE_ROWS} keys; decode_mma brings others row by row"
        return Unsupported("page_size", problem.page_size, reason, SWIZZLE_ROWS)
    if problem.total_k == 0:
        return Unsupported("seqlen_k", 0, f"{NAME} moves keys by TMA, which there must be", 1)
    return decode_refuses(problem, arch)


def sm90_row_tile(problem: AttentionProblem) -> int:
    return SM90_ROW_TILES[packed_rows(problem) > SM90_ROW_TILES[0]]


def sm90_decode_tile(key: DispatchKey) -> DecodeTile:
    """The tile for one block per multiprocessor: as many stages as fit, and keys as in the split and the merge."""
    block_n, narrow = decode_tile(key).tile.block_n, ELEMENTS[key.kv_dtype].fp8
    columns = sum(padded_head_dim(dim, key.kv_dtype) for dim in (key.head_dim, key.head_dim_v))
    stage = block_n * columns * ELEMENTS[key.kv_dtype].itemsize + _BARRIERS
    widened = _WIDENED * (block_n * columns * _WIDE + _BARRIERS) if narrow else 0
    stages = (shared_mem_limit(90) - _FOUND - widened) // stage
    warps = key.row_tile // 16 + (8 if narrow else 4)
    return DecodeTile(Tile(key.row_tile, block_n, stages, warps), 1, stages * stage + widened + _FOUND)


def sm90_decode_macros(key: DispatchKey) -> Macros:
    tile, _, shared_bytes = sm90_decode_tile(key)
    options = flags(PAGED=key.paged, TREE=key.tree_mask) | score_macros(key)
    macros = tile_macros(key, tile, shared_bytes) | query_macros(key)
    return macros | split_macros(key) | options | {"STAGES": tile.stages}


def sm90_decode_threads(key: DispatchKey) -> int:
    """The threads of a block: warpgroups that multiply, one that widens an 8-bit cache, and one that loads."""
    return sm90_decode_tile(key).tile.warps * _WARP


def part_of(page_size: int, keys: int) -> int:
    """The keys that one copy brings: the largest power of two that divides the page size, but at most ``keys``."""
    return min(keys, page_size & -page_size) if page_size else keys


def sm90_decode_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    tile = sm90_decode_tile(key)
    ranges = max(1, target.multiprocessors or UNKNOWN_MULTIPROCESSORS) * tile.blocks
    geometry = LaunchGeometry((ranges, 1, 1), (sm90_decode_threads(key), 1, 1), tile.shared_bytes)
    params = decode_packer(problem, key, ranges)
    part = part_of(problem.page_size, tile.tile.block_n)
    dims = {"k_cache": problem.head_dim, "v_cache": problem.head_dim_v}
    boxes = [(name, padded_head_dim(dim, problem.kv_dtype), part) for name, dim in dims.items()]
    pack = mapped_packer(params, boxes, target.encode)
    return split_program(problem, Part(key, geometry, pack), params, ranges, target.lengths_on_host)


DECODE_SM90 = KernelFamily(
    NAME,
    "computes 16 packed rows and more over caches on Hopper with TMA and wgmma, splitting the keys",
    sm90_decode_program,
    sm90_decode_macros,
    sm90_decode_threads,
    "forward",
    ("cache", "paged"),
    ("float8_e5m2", "float8_e4m3fn", "float16", "bfloat16"),
    refuses=sm90_decode_refuses,
    row_tile=sm90_row_tile,
    row_tiles=SM90_ROW_TILES,
    tma=True,
    lacks=("latent", "cache_batch_idx", "cache_leftpad", "bias"),
    trials=lambda key: cache_trials(key, sm90_decode_tile(key).tile, sm90_row_tile),
)
