"""What forward_sm90 launches: that kernel alone."""

from __future__ import annotations

import functools

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import ScratchSpec
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.hopper.params import COUNTER, pack_sm90
from gpu_actors.kernels.hopper.variant import sm90_geometry, sm90_macros, sm90_refuses, sm90_threads
from gpu_actors.kernels.program import Part, Program, Target

__all__ = ["FORWARD_SM90"]


def sm90_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The kernel of ``key``, which names forward_sm90. A cache takes it alone, too, whatever its lengths are."""
    pack = functools.partial(pack_sm90, problem, key, target.encode)
    part = Part(key, sm90_geometry(key, problem, target.multiprocessors), pack)
    return Program((part,), {COUNTER: ScratchSpec((1,), "int32", zero=True, rearmed=True)})


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
    persistent=True,
    score_mods=True,
    block_masks=True,
    positions=True,
    row_stats=True,
    tma=True,
    lacks=("cache_batch_idx", "cache_leftpad"),
)
