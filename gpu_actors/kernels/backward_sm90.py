"""backward_sm90: the problems that it takes, its macros, its parameters, and the three kernels that it launches.

struct Sm90BackwardParams of kernels_cu/backward_sm90/params.cuh:    q, k, v, dout | BackwardParams | ScoreParams

backward_prepare_sm90 and backward_finish_sm90 have its tile. Their keys differ from its key in ``kernel`` alone.
"""

from __future__ import annotations

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.backward_mma import backward_packer, gradient_macros, gradient_program, keys_of
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.forward_sm90 import folded_factor_refusal, mapped_packer
from gpu_actors.kernels.macros import Macros
from gpu_actors.kernels.program import EncodeTensorMap, Pack, Program, Target
from gpu_actors.kernels.support import bias_turns_refusal, capability
from gpu_actors.kernels.tiles import padded_backward_dims, shares_keys, tile_of
from gpu_actors.kernels.trials import batch_trials

__all__ = [
    "BACKWARD_SM90",
    "CONSUMERS",
    "NAMES",
    "sm90_backward_macros",
    "sm90_backward_packer",
    "sm90_backward_refuses",
    "sm90_backward_threads",
    "sm90_dq_floats",
]

NAMES = _PREPARE, _MAIN, _FINISH = "backward_prepare_sm90", "backward_sm90", "backward_finish_sm90"

CONSUMERS = 2
"""The warpgroups of a block that multiply."""

_NARROW = 128
_PREPARE_THREADS, _WARPGROUP = 128, 128


def sm90_backward_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
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
    return gradient_macros(key, NAMES, {"DQ_FLOATS": sm90_dq_floats(key)})


def sm90_backward_threads(key: DispatchKey) -> int:
    if key.kernel == _PREPARE:
        return _PREPARE_THREADS
    return _WARPGROUP * (CONSUMERS if key.kernel == _FINISH else CONSUMERS + 1)


def sm90_dq_floats(key: DispatchKey) -> int:
    """The floats of dQ in a slot: a tile's rows, padded to the columns that are multiplied."""
    tile = tile_of(keys_of(key, NAMES)[1])
    return tile.block_m * padded_backward_dims(tile, key.head_dim, key.head_dim_v)[0]


def sm90_backward_packer(problem: AttentionProblem, key: DispatchKey, encode: EncodeTensorMap | None) -> Pack:
    tile = tile_of(key)
    dim, dim_v = padded_backward_dims(tile, key.head_dim, key.head_dim_v)
    share = 2 if shares_keys(tile) else 1  # consumers that divide the columns of Q and dO
    boxes = (
        ("q", dim // share, tile.block_m),
        ("k", dim, tile.block_n),
        ("v", dim_v, tile.block_n),
        ("dout", dim_v // share, tile.block_m),
    )
    return mapped_packer(backward_packer(problem, True), boxes, encode)


def sm90_backward_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    pack = sm90_backward_packer(problem, key, target.encode)
    turns = (CONSUMERS,)  # one per consumer, for its share of a slot
    return gradient_program(problem, key, NAMES, sm90_backward_threads, pack, sm90_dq_floats(key), turns)


BACKWARD_SM90 = KernelFamily(
    _MAIN,
    "computes gradients of 16-bit batches on Hopper with TMA and wgmma",
    sm90_backward_program,
    sm90_backward_macros,
    sm90_backward_threads,
    "backward",
    ("dense", "varlen"),
    ("float16", "bfloat16"),
    refuses=sm90_backward_refuses,
    companions=(_PREPARE, _FINISH),
    score_mods=True,
    invariant=True,
    positions=True,
    lacks=("alibi_signed", "summed"),
    tma=True,
    trials=lambda key: batch_trials(key, tile_of(key)),
)
