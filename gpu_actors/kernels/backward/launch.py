"""What backward_mma launches: the kernels before, in and after the products, with memory between them."""

from __future__ import annotations

import functools

from gpu_actors.kernels.backward.params import pack_backward
from gpu_actors.kernels.backward.variant import (
    FINISH,
    MAIN,
    NAMES,
    PREPARE,
    backward_macros,
    backward_threads,
    dq_floats,
    gradient_geometry,
    gradient_scratch,
    keys_of,
    summed_in_place,
)
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.program import Part, Program, Target
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["BACKWARD_MMA"]


def backward_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The three kernels of ``key``. Raises Unsupported where a grid cannot hold their blocks."""
    parts = tuple(
        Part(
            part,
            gradient_geometry(part, key, problem, backward_threads(part)),
            functools.partial(pack_backward, problem, part == key),
        )
        for part in keys_of(key, NAMES)
    )
    return Program(parts, gradient_scratch(key, problem, dq_floats(key)), summed_in_place(problem))


BACKWARD_MMA = KernelFamily(
    MAIN,
    "computes the gradients of every option of dense and varlen batches on tensor cores, with mma.sync",
    backward_program,
    backward_macros,
    backward_threads,
    "backward",
    ("dense", "varlen"),
    ("float16", "float32", "bfloat16"),
    companions=(PREPARE, FINISH),
    score_mods=True,
)
