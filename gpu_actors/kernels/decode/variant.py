"""Tiles, macros and grids of the decode kernels: decode_plan, decode_mma and decode_combine.

The keys of one launch differ in ``kernel`` alone. kernels_cu/decode/decode_mma.cu tells how rows are packed and split.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import LaunchGeometry
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.family import GREATEST_DIM
from gpu_actors.kernels.macros import Macros, bias_macros, flags, mask_macros, score_macros, tile_macros
from gpu_actors.kernels.occupancy import shared_a_multiprocessor, shared_mem_limit
from gpu_actors.kernels.support import ELEMENTS, FIRST_FP8_CAPABILITY, capability, example_problem, scale_refusal
from gpu_actors.kernels.tiles import Tile, mma_row

__all__ = [
    "COMBINE",
    "DECODE",
    "PLAN",
    "ROW_TILES",
    "DecodeTile",
    "decode_keys",
    "decode_macros",
    "decode_refuses",
    "decode_threads",
    "decode_tile",
    "items_of",
    "packed_rows",
    "query_macros",
    "ranges_of",
    "row_tile_of",
    "row_tiles",
    "split_macros",
    "step_geometry",
    "usual_decode_problems",
]

PLAN, DECODE, COMBINE = "decode_plan", "decode_mma", "decode_combine"
ROW_TILES = (16, 32, 64)
WIDE_ROW_TILES = (16, 32)  # more do not fit into shared memory beside keys of over 256 columns

_MAX_ITEMS = (1 << 31) - 1
_WARP = 32
_PLAN_WARPS = 8
_COMBINE_WARPS = 4
_COMBINE_ROWS = 4
# Bytes that should be on their way to a multiprocessor: bandwidth times latency, with some to spare.
_BYTES_IN_FLIGHT = 96 * 1024


class DecodeTile(NamedTuple):
    """tile: of packed rows and keys. blocks: a multiprocessor. shared_bytes: a block."""

    tile: Tile
    blocks: int
    shared_bytes: int


def packed_rows(problem: AttentionProblem) -> int:
    """The rows by which kernel and tile are chosen: query heads a KV head, times new rows.

    Where the splits are pinned, a sequence must be computed alike whatever rows others in the batch have: then the
    heads alone decide.
    """
    return problem.gqa_ratio * (1 if problem.num_splits else problem.seqlen_q)


def row_tile_of(problem: AttentionProblem) -> int:
    """The packed rows that a block takes."""
    rows = packed_rows(problem)
    sizes = ROW_TILES if max(problem.head_dim, problem.head_dim_v) <= GREATEST_DIM else WIDE_ROW_TILES
    return next((tile for tile in sizes if rows <= tile), sizes[-1])


@functools.lru_cache(maxsize=1024)
def decode_tile(key: DispatchKey) -> DecodeTile:
    """The tile of a key: two blocks a multiprocessor where two stages and more fit in for both, else one.

    Raises Unsupported where not even one fits.
    """
    limit, whole = shared_mem_limit(capability(key.arch)), shared_a_multiprocessor(key.arch)
    widest, narrow = max(key.head_dim, key.head_dim_v), ELEMENTS[key.kv_dtype].fp8
    # Work that is done once a tile and warp costs relatively more where a tile has half the bytes.
    sizes: tuple[int, ...] = (128, 64, 32) if narrow and key.row_tile == 16 and widest <= 128 else (64, 32)
    if widest > GREATEST_DIM:
        return _wide_tile(key, limit, whole)
    if key.row_tile >= 64 and widest > 192:
        sizes = (32,)  # a warp has all keys of a tile, and registers for no more of them beside O
    for block_n in sizes:
        warps = 2 if block_n == 32 and key.row_tile == 16 else max(4, key.row_tile // 16)
        for blocks in (2, 1):
            room = min(limit, whole // blocks - 1024)
            tile = _deepest(key, block_n, warps, blocks, room)
            if tile is not None:
                return tile
    raise Unsupported("head_dim", key.head_dim, f"its tiles do not fit into shared memory on {key.arch}", 128)


def _wide_tile(key: DispatchKey, limit: int, whole: int) -> DecodeTile:
    """The tile of rows of more columns than a warp's registers sum: `VALUE_WARPS` share them."""
    for block_n in (32, 16):
        key_warps = block_n // 16 if key.row_tile == 16 else 1
        tile = _deepest(key, block_n, value_warps(key) * key.row_tile // 16 * key_warps, 1, min(limit, whole - 1024))
        if tile is not None:
            return tile
    raise Unsupported("head_dim", key.head_dim, f"its tiles do not fit into shared memory on {key.arch}", GREATEST_DIM)


def value_warps(key: DispatchKey) -> int:
    """Warps that share a row's columns of V."""
    return 1 if max(key.head_dim, key.head_dim_v) <= GREATEST_DIM else 2


def _deepest(key: DispatchKey, block_n: int, warps: int, blocks: int, room: int) -> DecodeTile | None:
    """The tile with as many stages as the bytes in flight call for and ``room`` holds; None below two."""
    k_row, chunk = mma_row(key.head_dim, key.kv_dtype), 16 // ELEMENTS[key.kv_dtype].itemsize
    sharing = value_warps(key)
    columns = key.head_dim_v if sharing == 1 else -(-key.head_dim_v // (16 * chunk)) * 16 * chunk
    v_row = mma_row(columns, key.kv_dtype)
    stage = block_n * (k_row + (0 if key.latent else v_row))
    queries = key.row_tile * k_row * 2 // ELEMENTS[key.kv_dtype].itemsize
    merge = warps // sharing * 16 * ((columns + 8) * 4 + 8)
    wanted = 1 + -(-_BYTES_IN_FLIGHT // (blocks * stage))
    stages = min(max(2, wanted), (room - queries) // stage)
    shared = max(queries + stages * stage, merge + (queries if sharing == 1 else 0))
    if stages < 2 or shared > room:
        return None
    return DecodeTile(Tile(key.row_tile, block_n, stages, warps), blocks, shared)


def decode_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """Why decode_mma does not take a problem over a cache, or None."""
    if ELEMENTS[problem.dtype].itemsize > 2:
        reason = "tensor cores multiply 16-bit queries here, or 8-bit ones over a cache of their dtype"
        return Unsupported("dtype", problem.dtype, reason, "bfloat16")
    shared = 2 * 8 * 16 // ELEMENTS[problem.kv_dtype].itemsize  # columns of whole chunks of two warps
    if problem.latent and problem.head_dim > GREATEST_DIM and problem.head_dim_v % shared:
        reason = f"two warps share the values of a latent cache of {problem.kv_dtype} by multiples of {shared} columns"
        return Unsupported("head_dim_v", problem.head_dim_v, reason, -(-problem.head_dim_v // shared) * shared)
    if items_of(problem, row_tile_of(problem)) * max(1, problem.num_splits) > _MAX_ITEMS:
        return Unsupported("batch", problem.batch, f"decode_mma counts {_MAX_ITEMS} pieces of work at most")
    return scale_refusal(problem)


def row_tiles(problem: AttentionProblem, row_tile: int) -> int:
    """Tiles of packed rows of the longest sequence. row_tile: of the key."""
    return -(-problem.seqlen_q * problem.gqa_ratio // row_tile)


def items_of(problem: AttentionProblem, row_tile: int) -> int:
    """Tiles of packed rows times KV heads, in all."""
    return problem.batch * row_tiles(problem, row_tile) * problem.heads_kv


def decode_keys(problem: AttentionProblem, key: DispatchKey, planned: bool) -> tuple[DispatchKey, ...]:
    """The kernels of a launch in order. key: of the one that attends. planned: whether the host splits the work."""
    names = [key.kernel] if planned else [PLAN, key.kernel]
    if problem.num_splits != 1:
        names.append(COMBINE)
    return tuple(key if name == key.kernel else dataclasses.replace(key, kernel=name) for name in names)


def ranges_of(key: DispatchKey, multiprocessors: int) -> int:
    """Ranges that the work is split into: as many as blocks run at once."""
    return max(1, multiprocessors) * decode_tile(key).blocks


def step_geometry(key: DispatchKey, problem: AttentionProblem, ranges: int) -> LaunchGeometry:
    """The grid of one of a launch's kernels. It depends on no length, so that a graph can hold it."""
    if key.kernel == PLAN:
        return LaunchGeometry((1, 1, 1), (decode_threads(key), 1, 1), 0)
    if key.kernel == DECODE:
        return LaunchGeometry((ranges, 1, 1), (decode_threads(key), 1, 1), decode_tile(key).shared_bytes)
    merged = items_of(problem, key.row_tile) if problem.num_splits else ranges - 1
    return LaunchGeometry((merged, key.row_tile // _COMBINE_ROWS, 1), (decode_threads(key), 1, 1), 0)


def usual_decode_problems(arch: str) -> list[AttentionProblem]:
    """What is worth compiling ahead: pages and pointers, one new row of 1, 4 or 8 heads, and 8 rows of them."""
    kv_dtypes = ["bfloat16"]
    if capability(arch) >= FIRST_FP8_CAPABILITY:
        kv_dtypes.append("float8_e4m3fn")
    problems = [_usual(kv_dtype, 128, 8, rows) for kv_dtype in kv_dtypes for rows in (1, 8)]
    problems += [_usual("bfloat16", dim, 8, 1) for dim in (64, 80, 256)]
    decode = dataclasses.replace(problems[0], layout="pointers", causal=False, page_size=0)
    return [*problems, decode]


def _usual(kv_dtype: str, head_dim: int, ratio: int, rows: int) -> AttentionProblem:
    sizes = {"seqlen_q": rows, "total_q": rows, "heads_q": ratio, "page_size": 64}
    cache: dict[str, Any] = {"layout": "paged", "kv_dtype": kv_dtype, "descales": ELEMENTS[kv_dtype].fp8}
    return example_problem("bfloat16", head_dim, causal=True, **cache, **sizes)


def decode_macros(key: DispatchKey) -> Macros:
    """What one of the three kernels is compiled for, which the key names.

    Options that a kernel does not read keep one value, so that they make no further variants.
    """
    tile, _, shared_bytes = decode_tile(key)
    work = split_macros(key)
    if key.kernel == DECODE:
        options = flags(PAGED=key.paged, SINGLE=key.page_size == 1, TREE=key.tree_mask, LATENT=key.latent)
        options |= score_macros(key) | bias_macros(key) | _sharing(key)
        return tile_macros(key, tile, shared_bytes) | query_macros(key) | work | options | {"STAGES": tile.stages}
    unseen: dict[str, Any] = dict.fromkeys(("dtype", "kv_dtype", "out_dtype"), "float16")
    unseen |= dict.fromkeys(("head_dim", "head_dim_v"), 64)
    if key.kernel == COMBINE:
        unseen |= {"head_dim_v": key.head_dim_v, "out_dtype": key.out_dtype}
    macros = tile_macros(dataclasses.replace(key, **unseen), tile, 0) | work
    if key.kernel == PLAN:
        return macros | {"WARPS": _PLAN_WARPS}
    return macros | flags(SINKS=key.sinks, LSE=key.lse) | {"WARPS": _COMBINE_WARPS}


def query_macros(key: DispatchKey) -> Macros:
    """Of 8-bit queries, that they are widened to halves, as keys and values are: exactly, and in the fewest steps."""
    element = ELEMENTS[key.dtype]
    return {"Q_ELEMENT": element.c_type, "ELEMENT": ELEMENTS["float16"].c_type} if element.fp8 else {}


def _sharing(key: DispatchKey) -> Macros:
    return {} if value_warps(key) == 1 else {"VALUE_WARPS": value_warps(key)}


def split_macros(key: DispatchKey) -> Macros:
    """What every kernel is compiled for that counts tiles of keys."""
    work = flags(VARLEN=key.varlen_q, POINTERS=key.layout == "pointers", POSITIONS=key.positions)
    work |= flags(OWN_LAYOUTS=key.own_layouts, BATCH_IDX=key.cache_batch_idx, LEFTPAD=key.cache_leftpad)
    return work | mask_macros(key)


def decode_threads(key: DispatchKey) -> int:
    """The threads of a block of one of the three kernels."""
    return {PLAN: _PLAN_WARPS, COMBINE: _COMBINE_WARPS}.get(key.kernel, decode_tile(key).tile.warps) * _WARP
