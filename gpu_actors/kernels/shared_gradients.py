"""The gradients of a q, k or v that the sequences of a batch share: a last kernel adds those of the sequences up.

The other kernels store them unrounded, (batch, rows, heads, dim), in scratch memory: "dk_parts" for ``dk``.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import ScratchSpec
from gpu_actors.kernels.macros import Macros
from gpu_actors.kernels.params import Binder, struct_layout
from gpu_actors.kernels.program import Pack, Part, flat_grid
from gpu_actors.kernels.support import ELEMENTS

__all__ = ["SUM", "SUM_THREADS", "part_dtype", "sum_macros", "sum_parts", "sum_scratch"]

SUM = "backward_sum"
"""The name of the kernel."""

SUM_THREADS = 256
"""The threads of a block. Each takes one element."""


def part_dtype(problem: AttentionProblem) -> str:
    """The dtype in which the gradients of sequences are stored before they are added up."""
    return "float64" if problem.dtype == "float64" else "float32"


def part_shapes(problem: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """(batch, rows, heads, dim) of each shared operand, by "q", "k" and "v"."""
    p = problem
    shapes = {
        "q": (p.batch, p.seqlen_q, p.heads_q, p.head_dim),
        "k": (p.batch, p.seqlen_k, p.heads_kv, p.head_dim),
        "v": (p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v),
    }
    return {name: shapes[name] for name in p.summed}


def sum_macros(key: DispatchKey) -> Macros:
    return {"ELEMENT": ELEMENTS[key.dtype].c_type}


def sum_scratch(problem: AttentionProblem) -> dict[str, ScratchSpec]:
    return {f"d{name}_parts": ScratchSpec(shape, part_dtype(problem)) for name, shape in part_shapes(problem).items()}


def sum_parts(problem: AttentionProblem, key: DispatchKey) -> tuple[Part, ...]:
    """A launch for each shared operand, after the other kernels."""
    # The kernel reads no scores, and families without block masks launch it, too.
    own, parts = dataclasses.replace(key, kernel=SUM, score_mod=None), []
    for name, (_, *shape) in part_shapes(problem).items():
        blocks = -(-math.prod(shape) // SUM_THREADS)
        geometry = flat_grid(blocks, SUM_THREADS, 0, f"d{name}", shape[0])
        parts.append(Part(own, geometry, _packer(problem, name)))
    return tuple(parts)


def _packer(problem: AttentionProblem, name: str) -> Pack:
    binder = functools.cache(lambda: _binder(problem, name))
    return lambda buffers, values: binder().pack(buffers)


def _binder(problem: AttentionProblem, name: str) -> Binder:
    layout = struct_layout("SumParams", "backward/backward_sum.cu")
    batch, *shape = part_shapes(problem)[name]
    operands = (
        layout.operand(f"d{name}_parts", "....", (batch, *shape), part_dtype(problem), field="parts"),
        layout.operand(f"d{name}", "....", (1, *shape), problem.dtype, field="sum"),
    )
    return Binder.of(layout, operands, {"size": math.prod(shape), "batch": batch})
