"""What backward_sm90 launches: the kernels before, in and after the products, with memory between them."""

from __future__ import annotations

import functools

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.kernels.backward.launch import gradient_program
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.hopper_backward.params import pack_sm90_backward
from gpu_actors.kernels.hopper_backward.variant import (
    CONSUMERS,
    NAMES,
    sm90_backward_macros,
    sm90_backward_refuses,
    sm90_backward_threads,
    sm90_dq_floats,
)
from gpu_actors.kernels.program import Program, Target

__all__ = ["BACKWARD_SM90"]


def sm90_backward_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The three kernels of ``key``. Raises Unsupported where a grid cannot hold their blocks."""
    pack = functools.partial(pack_sm90_backward, problem, key, target.encode)
    turns = (CONSUMERS,)  # one for each one's share of a slot
    return gradient_program(problem, key, NAMES, sm90_backward_threads, pack, sm90_dq_floats(key), turns)


_PREPARE, _MAIN, _FINISH = NAMES
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
    positions=True,
    lacks=("alibi_signed", "summed"),
    tma=True,
)
