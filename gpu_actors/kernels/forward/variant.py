"""How forward_mma and forward_simple are compiled, and their grid."""

from __future__ import annotations

from gpu_actors.devices.interface import LaunchGeometry
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.macros import Macros, forward_macros
from gpu_actors.kernels.tiles import num_q_tiles, shared_bytes_of, tile_of
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["forward_geometry", "mma_macros"]

_MAX_BLOCKS = (1 << 31) - 1  # of grid.x; y and z end at 65,535, so grids are flat
_WARP = 32


def mma_macros(key: DispatchKey) -> Macros:
    """The forward macros, and the stages of the ring."""
    return forward_macros(key) | {"STAGES": tile_of(key).stages}


def forward_threads(key: DispatchKey) -> int:
    """The threads of a block."""
    return tile_of(key).warps * _WARP


def forward_geometry(key: DispatchKey, problem: AttentionProblem) -> LaunchGeometry:
    """A block for each tile of query rows of a head. Raises Unsupported where a grid cannot hold them."""
    tile = tile_of(key)
    blocks = num_q_tiles(problem.seqlen_q, tile.block_m) * problem.heads_q * problem.batch
    if blocks > _MAX_BLOCKS:
        reason = f"the request makes {blocks} blocks of {tile.block_m} rows, and a grid holds {_MAX_BLOCKS}"
        raise Unsupported("batch", problem.batch, reason, max(1, problem.batch * _MAX_BLOCKS // blocks))
    return LaunchGeometry((blocks, 1, 1), (forward_threads(key), 1, 1), shared_bytes_of(key))
