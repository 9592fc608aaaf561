"""What forward_mma and forward_simple launch: one kernel."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from gpu_actors.devices.interface import Buffer
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.forward.variant import (
    forward_geometry,
    forward_threads,
    mma_macros,
)
from gpu_actors.kernels.macros import forward_macros
from gpu_actors.kernels.params import pack_forward
from gpu_actors.kernels.program import Part, Program, Target, Values
from gpu_actors.kernels.score_params import pack_score
from gpu_actors.kernels.support import scale_refusal
from gpu_actors.problem import AttentionProblem, DispatchKey, Layout

__all__ = ["FORWARD_MMA", "FORWARD_SIMPLE"]


def forward_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The kernel of ``key``. Raises Unsupported where a grid cannot hold its blocks."""
    return Program((Part(key, forward_geometry(key, problem), functools.partial(_pack, problem)),))


def _pack(problem: AttentionProblem, buffers: Mapping[str, Buffer], values: Values) -> bytes:
    packed = pack_forward(problem, buffers, dropout_seed=values.dropout_seed)
    return packed + pack_score(problem, buffers, values.score_scalars)


_LAYOUTS: tuple[Layout, ...] = ("dense", "varlen")

FORWARD_MMA = KernelFamily(
    "forward_mma",
    "computes every forward option of dense and varlen batches on tensor cores, with mma.sync",
    forward_program,
    mma_macros,
    forward_threads,
    "forward",
    _LAYOUTS,
    ("float16", "float32", "bfloat16"),
    refuses=lambda problem, arch: scale_refusal(problem),
    score_mods=True,
)
FORWARD_SIMPLE = KernelFamily(
    "forward_simple",
    "computes every forward option of dense and varlen batches on CUDA cores",
    forward_program,
    forward_macros,
    forward_threads,
    "forward",
    _LAYOUTS,
    tensor_cores=False,
    score_mods=True,
)
