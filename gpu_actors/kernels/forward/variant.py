"""What forward_mma and forward_simple take, how they are compiled, and their grid."""

from __future__ import annotations

from gpu_actors.devices.interface import LaunchGeometry
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.macros import Macros, forward_macros
from gpu_actors.kernels.support import head_dim_refusal
from gpu_actors.kernels.tiles import num_q_tiles, shared_bytes_of, tile_of
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["MMA_HEAD_DIMS", "SMALLEST_SCALE", "forward_geometry", "mma_macros", "mma_refuses", "simple_refuses"]

_MAX_BLOCKS = (1 << 31) - 1  # of grid.x; y and z end at 65,535, so grids are flat
_WARP = 32
MMA_HEAD_DIMS = range(32, 257, 8)
SMALLEST_SCALE = 2.0**-100


def simple_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """Why forward_simple does not take a problem, or None."""
    if problem.direction != "forward":
        return Unsupported("direction", problem.direction, "forward_simple computes no gradients", "forward")
    if problem.layout not in ("dense", "varlen"):
        return Unsupported("layout", problem.layout, "forward_simple reads no caches", "varlen")
    return None


def mma_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """Why forward_mma does not take a problem, or None."""
    if problem.direction != "forward":
        return Unsupported("direction", problem.direction, "forward_mma computes no gradients", "forward")
    if problem.layout not in ("dense", "varlen"):
        return Unsupported("layout", problem.layout, "forward_mma reads no caches", "varlen")
    if problem.dtype not in ("float16", "bfloat16", "float32"):
        return Unsupported("dtype", problem.dtype, "forward_mma multiplies f16, bf16 and tf32", "bfloat16")
    if problem.compute == "f32":
        return Unsupported("compute", problem.compute, "tensor cores have no float32 products", "tf32")
    refusal = head_dim_refusal(problem, MMA_HEAD_DIMS, "forward_mma copies rows in whole chunks")
    if refusal is not None:
        return refusal
    if problem.softmax_scale < SMALLEST_SCALE:
        reason = "forward_mma takes maxima before it scales, which needs a positive scale"
        return Unsupported("softmax_scale", problem.softmax_scale, reason, SMALLEST_SCALE)
    return None


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
