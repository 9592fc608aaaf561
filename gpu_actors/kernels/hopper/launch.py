"""What forward_sm90 launches: that kernel, and before it transpose_v where the operands are 8-bit floats."""

from __future__ import annotations

import functools

from gpu_actors.devices.interface import ScratchSpec
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.hopper.params import COUNTER, pack_sm90, pack_transpose_v
from gpu_actors.kernels.hopper.transpose_v import TRANSPOSE, parts_of, transpose_v_scratch
from gpu_actors.kernels.hopper.variant import sm90_geometry, sm90_macros, sm90_refuses, sm90_threads
from gpu_actors.kernels.program import Part, Program, Target
from gpu_actors.kernels.tiles import tile_of
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["FORWARD_SM90"]


def sm90_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The kernels of ``key``, which names forward_sm90. A cache takes one kernel, whatever its lengths are."""
    scratch = {COUNTER: ScratchSpec((1,), "int32", zero=True)}
    parts = parts_of(key)
    if len(parts) > 1:
        scratch |= transpose_v_scratch(problem, tile_of(key))
    packs = {
        TRANSPOSE: functools.partial(pack_transpose_v, problem, key),
        key.kernel: functools.partial(pack_sm90, problem, key, target.encode),
    }
    multiprocessors = target.multiprocessors
    steps = (Part(part, sm90_geometry(part, problem, multiprocessors), packs[part.kernel]) for part in parts)
    return Program(tuple(steps), scratch)


FORWARD_SM90 = KernelFamily(
    "forward_sm90",
    "computes 16-bit and 8-bit batches, and many new rows over caches, on Hopper with TMA and wgmma",
    sm90_program,
    sm90_macros,
    sm90_threads,
    "forward",
    ("dense", "varlen", "cache", "paged"),
    ("float16", "float8_e5m2", "float8_e4m3fn", "bfloat16"),
    refuses=sm90_refuses,
    companions=(TRANSPOSE,),
    persistent=True,
    score_mods=True,
    block_masks=True,
    positions=True,
    row_stats=True,
    tma=True,
    lacks=("cache_batch_idx", "cache_leftpad"),
)
