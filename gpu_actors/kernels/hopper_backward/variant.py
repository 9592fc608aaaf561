"""What backward_sm90 takes, its macros and grids, and the scratch memory between its three kernels.

backward_prepare_sm90 and backward_finish_sm90 share its tile, and their keys are its key under their names.
"""

from __future__ import annotations

import dataclasses

from gpu_actors.devices.interface import LaunchGeometry, ScratchSpec
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.backward.variant import outer_macros
from gpu_actors.kernels.hopper.variant import folded_factor_refusal
from gpu_actors.kernels.macros import Macros, forward_macros
from gpu_actors.kernels.support import MAX_HEAD_DIM, capability
from gpu_actors.kernels.tiles import Tile, num_kv_tiles, num_q_tiles, padded_backward_dim, shared_bytes_of, tile_of
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = [
    "CONSUMERS",
    "FINISH",
    "MAIN",
    "PREPARE",
    "sm90_backward_geometry",
    "sm90_backward_keys",
    "sm90_backward_macros",
    "sm90_backward_refuses",
    "sm90_backward_scratch",
    "sm90_backward_threads",
]

PREPARE, MAIN, FINISH = "backward_prepare_sm90", "backward_sm90", "backward_finish_sm90"

CONSUMERS = 2
"""Warpgroups of a block that multiply."""

_WIDEST = 128  # head dim
_PREPARE_THREADS, _WARPGROUP = 128, 128
_MAX_BLOCKS = (1 << 31) - 1


def sm90_backward_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """Why backward_sm90 does not take a problem, or None. What TMA asks of strides is in `hopper.params`."""
    if capability(arch) != 90:
        return Unsupported("arch", arch, f"{MAIN} is written for Hopper's wgmma", "sm_90a")
    if not problem.scale_only:
        reason = f"{MAIN} has the scale alone between product and weight; other options are in backward_mma alone"
        return Unsupported("scores", "with options", reason)
    if problem.total_q == 0 or problem.total_k == 0:
        return Unsupported("seqlen_k", 0, f"{MAIN} moves rows and keys by TMA, which there must be", 1)
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest % 8 == 0 and _WIDEST < widest <= MAX_HEAD_DIM:
        reason = f"{MAIN} holds dK and dV of 64 keys in registers, up to {_WIDEST} columns"
        return Unsupported("head_dim", widest, reason, _WIDEST)
    return folded_factor_refusal(problem, MAIN)


def sm90_backward_keys(key: DispatchKey) -> tuple[DispatchKey, DispatchKey, DispatchKey]:
    """The keys of the kernels that are launched for the key of any of them, in order."""
    return (
        dataclasses.replace(key, kernel=PREPARE),
        dataclasses.replace(key, kernel=MAIN),
        dataclasses.replace(key, kernel=FINISH),
    )


def sm90_backward_macros(key: DispatchKey) -> Macros:
    """The macros of kernels_cu/hopper_backward/layout.cuh, or of one of the outer kernels."""
    main = sm90_backward_keys(key)[1]
    tile = tile_of(main)
    own: Macros = {"DQ_FLOATS": _dq_floats(key, tile)}
    macros = {name: value for name, value in forward_macros(main).items() if name != "LSE"}
    if key.kernel == PREPARE:
        return outer_macros(key, macros, prepare=True)
    if key.kernel == FINISH:
        return outer_macros(key, macros, prepare=False) | own
    if key.deterministic:
        own["DETERMINISTIC"] = 1
    return macros | own | {"STAGES": tile.stages}


def sm90_backward_threads(key: DispatchKey) -> int:
    """The threads of a block of one of the three kernels."""
    if key.kernel == PREPARE:
        return _PREPARE_THREADS
    return _WARPGROUP * (CONSUMERS if key.kernel == FINISH else CONSUMERS + 1)


def sm90_backward_geometry(key: DispatchKey, problem: AttentionProblem) -> LaunchGeometry:
    """The launch of one of the three kernels. Raises Unsupported where a grid cannot hold its blocks."""
    main = sm90_backward_keys(key)[1]
    tile = tile_of(main)
    if key.kernel == MAIN:
        blocks, shared_bytes = num_kv_tiles(problem.seqlen_k, tile.block_n) * problem.heads_kv, shared_bytes_of(main)
    else:
        blocks, shared_bytes = num_q_tiles(problem.seqlen_q, tile.block_m) * problem.heads_q, 0
    if blocks * problem.batch > _MAX_BLOCKS:
        reason = f"a sequence makes {blocks} blocks of {key.kernel}, and a grid holds {_MAX_BLOCKS}"
        raise Unsupported("batch", problem.batch, reason, max(1, _MAX_BLOCKS // blocks))
    return LaunchGeometry((blocks * problem.batch, 1, 1), (sm90_backward_threads(key), 1, 1), shared_bytes)


def sm90_backward_scratch(key: DispatchKey, problem: AttentionProblem) -> dict[str, ScratchSpec]:
    """What the kernels hand to each other; see kernels_cu/backward/params.cuh for the layout of slots."""
    tile = tile_of(key)
    row_tiles = num_q_tiles(problem.seqlen_q, tile.block_m)
    tiles = problem.batch * row_tiles
    if problem.layout == "varlen":
        tiles = problem.total_q // tile.block_m + problem.batch
    slots = tiles * problem.heads_q
    scratch = {
        "statistics": ScratchSpec((slots, 2, tile.block_m), "float32"),
        "dq_sums": ScratchSpec((slots, _dq_floats(key, tile)), "float32", zero=True),
    }
    if problem.sinks:
        scratch["dsinks_parts"] = ScratchSpec((problem.heads_q, problem.batch, row_tiles), "float32")
    if key.deterministic:
        # A turn for each consumer's share of a slot.
        scratch["dq_turns"] = ScratchSpec((slots, CONSUMERS), "int32", zero=True)
        scratch["tickets"] = ScratchSpec((1,), "int32", zero=True)
    return scratch


def _dq_floats(key: DispatchKey, tile: Tile) -> int:
    """Floats of dQ that a slot holds: a tile's rows, padded to the columns that are multiplied."""
    return tile.block_m * padded_backward_dim(key.head_dim, key.head_dim_v)
