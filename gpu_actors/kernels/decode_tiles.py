"""The tiles of decode_mma: the packed rows and keys of a block, and the number of tiles in a launch."""

from __future__ import annotations

import functools
from typing import NamedTuple

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.family import GREATEST_DIM
from gpu_actors.kernels.occupancy import shared_a_multiprocessor, shared_mem_limit
from gpu_actors.kernels.support import ELEMENTS, capability
from gpu_actors.kernels.tiles import Tile, mma_row

__all__ = [
    "ROW_TILES",
    "DecodeTile",
    "decode_tile",
    "items_of",
    "packed_rows",
    "row_tile_of",
    "row_tiles",
    "value_warps",
]

ROW_TILES = (16, 32, 64)
WIDE_ROW_TILES = (16, 32)  # more do not fit into shared memory beside keys of over 256 columns
# Bytes that should be in flight to a multiprocessor: bandwidth times latency, with some to spare.
_BYTES_IN_FLIGHT = 96 * 1024


class DecodeTile(NamedTuple):
    """tile: its packed rows and keys. blocks: per multiprocessor. shared_bytes: per block."""

    tile: Tile
    blocks: int
    shared_bytes: int


def packed_rows(problem: AttentionProblem) -> int:
    """The rows by which kernel and tile are chosen: query heads per KV head, times new rows.

    With pinned splits, a sequence must be computed alike, however many rows the rest of its batch has: the heads alone
    count. With invariant rows, a single row must be computed as a prompt is: the number is fixed.
    """
    if problem.invariant:
        return ROW_TILES[-1]
    return problem.gqa_ratio * (1 if problem.num_splits else problem.seqlen_q)


def row_tile_of(problem: AttentionProblem) -> int:
    rows = packed_rows(problem)
    sizes = ROW_TILES if max(problem.head_dim, problem.head_dim_v) <= GREATEST_DIM else WIDE_ROW_TILES
    return next((tile for tile in sizes if rows <= tile), sizes[-1])


@functools.lru_cache(maxsize=1024)
def decode_tile(key: DispatchKey) -> DecodeTile:
    """The tile of a key: for two blocks per multiprocessor if each can have two stages or more, else for one.

    Raises Unsupported if not even one fits.
    """
    limit, whole = shared_mem_limit(capability(key.arch)), shared_a_multiprocessor(key.arch)
    widest, narrow = max(key.head_dim, key.head_dim_v), ELEMENTS[key.kv_dtype].fp8
    # Work that is done once per tile and warp costs relatively more if a tile has half the bytes.
    sizes: tuple[int, ...] = (128, 64, 32) if narrow and key.row_tile == 16 and widest <= 128 else (64, 32)
    if widest > GREATEST_DIM:
        return _wide_tile(key, limit, whole)
    if key.row_tile >= 64 and widest > 192:
        sizes = (32,)  # a warp has all keys of a tile; beside O, its registers hold no more of them
    for block_n in sizes:
        warps = 2 if block_n == 32 and key.row_tile == 16 else max(4, key.row_tile // 16)
        for blocks in (2, 1):
            room = min(limit, whole // blocks - 1024)
            tile = _deepest(key, block_n, warps, blocks, room)
            if tile is not None:
                return tile
    raise Unsupported("head_dim", key.head_dim, f"its tiles do not fit into shared memory on {key.arch}", 128)


def _wide_tile(key: DispatchKey, limit: int, whole: int) -> DecodeTile:
    """The tile for rows of more columns than a warp's registers can sum: `value_warps` warps share them."""
    for block_n in (32, 16):
        key_warps = block_n // 16 if key.row_tile == 16 else 1
        tile = _deepest(key, block_n, value_warps(key) * key.row_tile // 16 * key_warps, 1, min(limit, whole - 1024))
        if tile is not None:
            return tile
    raise Unsupported("head_dim", key.head_dim, f"its tiles do not fit into shared memory on {key.arch}", GREATEST_DIM)


def value_warps(key: DispatchKey) -> int:
    """The number of warps that share a row's columns of V."""
    return 1 if max(key.head_dim, key.head_dim_v) <= GREATEST_DIM else 2


def _deepest(key: DispatchKey, block_n: int, warps: int, blocks: int, room: int) -> DecodeTile | None:
    """The tile with as many stages as the bytes in flight need and ``room`` holds; None if these are fewer than two."""
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


def row_tiles(problem: AttentionProblem, row_tile: int) -> int:
    """The tiles of packed rows of the longest sequence. row_tile: the key's."""
    return -(-problem.seqlen_q * problem.gqa_ratio // row_tile)


def items_of(problem: AttentionProblem, row_tile: int) -> int:
    """The items of a launch: its tiles of packed rows times KV heads."""
    return problem.batch * row_tiles(problem, row_tile) * problem.heads_kv
