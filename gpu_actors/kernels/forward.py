"""How forward_mma, forward_wide and forward_simple are compiled and launched: each is one kernel."""

from __future__ import annotations

import dataclasses

from gpu_actors.attention.problem import AttentionProblem, DispatchKey, Layout
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.macros import Macros, forward_macros
from gpu_actors.kernels.params import forward_packer, row_stats_packer, score_packer
from gpu_actors.kernels.program import Pack, Part, Program, Target, flat_grid
from gpu_actors.kernels.support import MAX_HEAD_DIM, scale_refusal
from gpu_actors.kernels.tiles import shared_bytes_of, threads_of, tile_of
from gpu_actors.kernels.trials import batch_trials

__all__ = ["FORWARD_MMA", "FORWARD_SIMPLE", "FORWARD_WIDE", "scored_packer"]


def mma_macros(key: DispatchKey) -> Macros:
    return forward_macros(key) | {"STAGES": tile_of(key).stages}


def forward_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The kernel of ``key``, with a block for each tile of query rows of a head."""
    blocks = -(-problem.seqlen_q // tile_of(key).block_m) * problem.heads_q * problem.batch
    geometry = flat_grid(blocks, threads_of(key), shared_bytes_of(key), "batch", problem.batch)
    return Program((Part(key, geometry, scored_packer(problem)),))


def scored_packer(problem: AttentionProblem) -> Pack:
    """Return what packs Params, followed by RowStats and ScoreParams, for launches of a problem."""
    more = [pack for pack in (row_stats_packer(problem), score_packer(problem)) if pack is not None]
    first = forward_packer(problem)
    if not more:
        return first
    return lambda buffers, values: b"".join(pack(buffers, values) for pack in (first, *more))


_LAYOUTS: tuple[Layout, ...] = ("dense", "varlen")

FORWARD_MMA = KernelFamily(
    "forward_mma",
    "computes every forward option of dense and varlen batches on tensor cores, with mma.sync",
    forward_program,
    mma_macros,
    threads_of,
    "forward",
    _LAYOUTS,
    ("float16", "float32", "bfloat16"),
    refuses=lambda problem, arch: scale_refusal(problem),
    score_mods=True,
    block_masks=True,
    invariant=True,
    positions=True,
    row_stats=True,
    trials=lambda key: batch_trials(key, tile_of(key)),
)
FORWARD_WIDE = dataclasses.replace(
    FORWARD_MMA,
    name="forward_wide",
    reason="computes every forward option of dense and varlen batches of wide heads on tensor cores, with mma.sync",
    dtypes=("float16", "bfloat16"),
    greatest_dim=MAX_HEAD_DIM,
)
FORWARD_SIMPLE = KernelFamily(
    "forward_simple",
    "computes every forward option of dense and varlen batches on CUDA cores",
    forward_program,
    forward_macros,
    threads_of,
    "forward",
    _LAYOUTS,
    tensor_cores=False,
    score_mods=True,
    block_masks=True,
    invariant=True,
    positions=True,
    row_stats=True,
    trials=lambda key: batch_trials(key, tile_of(key)),
)
