"""What backward_sm90 takes, its macros and the threads of its three kernels.

backward_prepare_sm90 and backward_finish_sm90 share its tile, and their keys are its key under their names.
"""

from __future__ import annotations

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.backward.variant import gradient_macros, keys_of
from gpu_actors.kernels.hopper.variant import folded_factor_refusal
from gpu_actors.kernels.macros import Macros
from gpu_actors.kernels.support import bias_turns_refusal, capability
from gpu_actors.kernels.tiles import padded_backward_dims, tile_of

__all__ = [
    "CONSUMERS",
    "NAMES",
    "sm90_backward_macros",
    "sm90_backward_refuses",
    "sm90_backward_threads",
    "sm90_dq_floats",
]

NAMES = _PREPARE, _MAIN, _FINISH = "backward_prepare_sm90", "backward_sm90", "backward_finish_sm90"

CONSUMERS = 2
"""Warpgroups of a block that multiply."""

_NARROW = 128
_PREPARE_THREADS, _WARPGROUP = 128, 128


def sm90_backward_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """Why backward_sm90 does not take a problem, or None. What TMA asks of strides is in `hopper.params`."""
    if capability(arch) != 90:
        return Unsupported("arch", arch, f"{_MAIN} is written for Hopper's wgmma", "sm_90a")
    widest = max(problem.head_dim, problem.head_dim_v)
    derived = problem.score_mod is not None or problem.capped
    if problem.dbias and derived and widest > _NARROW:
        reason = f"{_MAIN} keeps products where dQ has no place above {_NARROW} columns, for a bias beside a derivative"
        return Unsupported("head_dim", widest, reason, _NARROW)
    if problem.total_q == 0 or problem.total_k == 0:
        return Unsupported("seqlen_k", 0, f"{_MAIN} moves rows and keys by TMA, which there must be", 1)
    return bias_turns_refusal(problem) or folded_factor_refusal(problem, _MAIN)


def sm90_backward_macros(key: DispatchKey) -> Macros:
    """The macros of kernels_cu/hopper_backward/layout.cuh, or of one of the outer kernels."""
    return gradient_macros(key, NAMES, {"DQ_FLOATS": sm90_dq_floats(key)})


def sm90_backward_threads(key: DispatchKey) -> int:
    """The threads of a block of one of the three kernels."""
    if key.kernel == _PREPARE:
        return _PREPARE_THREADS
    return _WARPGROUP * (CONSUMERS if key.kernel == _FINISH else CONSUMERS + 1)


def sm90_dq_floats(key: DispatchKey) -> int:
    """Floats of dQ that a slot holds: a tile's rows, padded to the columns that are multiplied."""
    tile = tile_of(keys_of(key, NAMES)[1])
    return tile.block_m * padded_backward_dims(tile, key.head_dim, key.head_dim_v)[0]
