"""The kernel that runs before forward_sm90 on 8-bit floats, whose products take V transposed: its macros and grid.

kernels_cu/hopper/transposed_v.cuh draws what it writes.
"""

from __future__ import annotations

import dataclasses

from gpu_actors.devices.interface import LaunchGeometry, ScratchSpec
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import Tile
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = [
    "TRANSPOSE",
    "TRANSPOSED",
    "main_key",
    "parts_of",
    "positions_of",
    "transpose_v_geometry",
    "transpose_v_macros",
    "transpose_v_refusal",
    "transpose_v_scratch",
]

TRANSPOSE = "transpose_v"
"""The kernel."""

TRANSPOSED = "transposed_v"
"""The name of the scratch memory that it fills: (batch, heads_kv, head_dim_v, positions), a batch of 1 where varlen."""

_COLUMNS = 64  # of a block
_WIDEST_TILE = 256  # keys
_LIMIT = (1 << 31) - 1  # of blocks in a grid, and of TMA's coordinates


def parts_of(key: DispatchKey) -> tuple[DispatchKey, ...]:
    """The keys of the kernels that answer a forward request over no cache, in the order of their launches."""
    if key.kernel == "forward_sm90" and ELEMENTS[key.dtype].fp8:
        return dataclasses.replace(key, kernel=TRANSPOSE), key
    return (key,)


def main_key(key: DispatchKey) -> DispatchKey:
    """The key of forward_sm90 that a key of its own or of transpose_v belongs to: both share a tile."""
    return dataclasses.replace(key, kernel="forward_sm90") if key.kernel == TRANSPOSE else key


def transpose_v_refusal(problem: AttentionProblem) -> Unsupported | None:
    """Why the values of a problem cannot be transposed for forward_sm90, or None."""
    positions = positions_of(problem, _WIDEST_TILE)
    blocks = positions // (_WIDEST_TILE // 4) * _columns_of(problem) * problem.heads_kv * _batch(problem)
    if positions > _LIMIT or blocks > _LIMIT:
        reason = "forward_sm90 transposes 8-bit values in fewer than 2^31 blocks and positions"
        return Unsupported("batch", problem.batch, reason, 1)
    return None


def positions_of(problem: AttentionProblem, block_n: int) -> int:
    """The positions of a head's transposed values: whole tiles of keys, where every sequence starts a tile."""
    if problem.layout == "varlen":
        tiles = (problem.total_k + problem.batch * (block_n - 1)) // block_n
    else:
        tiles = -(-problem.seqlen_k // block_n)
    return max(1, tiles) * block_n


def transpose_v_macros(key: DispatchKey, tile: Tile) -> dict[str, str | int]:
    """What transpose_v is compiled for. key: of the kernel that it runs before, under its own name."""
    return {
        "HEAD_DIM_V": key.head_dim_v,
        "BLOCK_N": tile.block_n,
        "VARLEN": int(key.varlen),
        "SHARED_BYTES": _COLUMNS * tile.block_n,
    }


def transpose_v_geometry(problem: AttentionProblem, tile: Tile) -> LaunchGeometry:
    """A block for each tile of keys and 64 columns of a head, with a thread for each key."""
    blocks = positions_of(problem, tile.block_n) // tile.block_n * _columns_of(problem)
    blocks *= problem.heads_kv * _batch(problem)
    return LaunchGeometry((blocks, 1, 1), (tile.block_n, 1, 1), _COLUMNS * tile.block_n)


def transpose_v_scratch(problem: AttentionProblem, tile: Tile) -> dict[str, ScratchSpec]:
    """The memory of `TRANSPOSED`."""
    shape = (_batch(problem), problem.heads_kv, problem.head_dim_v, positions_of(problem, tile.block_n))
    return {TRANSPOSED: ScratchSpec(shape, problem.dtype)}


def _columns_of(problem: AttentionProblem) -> int:
    """Blocks that the columns of a head make."""
    return -(-problem.head_dim_v // _COLUMNS)


def _batch(problem: AttentionProblem) -> int:
    return 1 if problem.layout == "varlen" else problem.batch
