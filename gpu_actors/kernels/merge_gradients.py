"""The kernel of the merge's gradient: its macros, grids and parameters. Its problem is that of the merge."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Buffer, LaunchGeometry
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.macros import flags
from gpu_actors.kernels.merge import WARPS, MergeProblem, check_merge, merge_macros, result_operands
from gpu_actors.kernels.params import Binder, struct_layout
from gpu_actors.kernels.program import flat_grid
from gpu_actors.kernels.support import ELEMENTS

__all__ = [
    "GRADIENT_TERM_FIELDS",
    "merge_gradient_geometries",
    "merge_gradient_variants",
    "pack_gradient_terms",
    "pack_merge_gradients",
    "sums_dtype",
]

_WARP = 32
_SOURCES = ("merge/terms.cuh", "merge/merge_gradients.cu")

GRADIENT_TERM_FIELDS = 10
"""64-bit fields of an entry of the table of terms."""


def merge_gradient_variants(problem: MergeProblem, arch: str) -> tuple[Variant, ...]:
    """The kernels of a problem on an architecture, in the order of its launches. out_dtype: of dout.

    With sinks there is a second launch, which sums the rows of each sink. Raises InvalidRequest and Unsupported.
    """
    check_merge(problem, arch)
    if problem.out_dtype == "float64" and ELEMENTS[problem.dtype].itemsize == 2:
        reason = "gradients in float64 would be rounded twice on their way to 16 bits"
        raise Unsupported("dout", problem.out_dtype, reason, "float32")
    macros, passes = merge_macros(problem), (False, True) if problem.sinks is not None else (False,)
    return tuple(Variant("merge_gradients", arch, macros | flags(SUM_SINKS=last)) for last in passes)


def sums_dtype(problem: MergeProblem) -> str:
    """float64 where an operand is, else float32."""
    return "float64" if "float64" in (problem.dtype, problem.lse_dtype, problem.out_dtype) else "float32"


def _lanes(problem: MergeProblem) -> int:
    """Threads that share a row: a power of 2, so that a warp has whole rows."""
    return min(_WARP, 1 << (problem.groups - 1).bit_length())


def merge_gradient_geometries(problem: MergeProblem) -> list[LaunchGeometry]:
    """The grid and block of each launch; no dynamic shared memory.

    Raises Unsupported where the rows are too many for 32 bits.
    """
    threads, most = WARPS * _WARP, (1 << 31) - 1
    if problem.results > most:
        raise Unsupported("partials", problem.results, f"a launch takes at most {most} rows of all heads", most)
    counts = [-(-problem.results * _lanes(problem) // threads)]
    if problem.sinks is not None:
        counts.append(problem.heads)
    return [flat_grid(blocks, threads, 0, "partials", problem.results) for blocks in counts]


def pack_gradient_terms(problem: MergeProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The table of terms, uint64 (count, GRADIENT_TERM_FIELDS): where each partial and its gradients lie.

    buffers: out.N and lse.N of dtype and lse_dtype; dout.N and dlse.N like them, without gaps. Raises InvalidRequest
    for one that is not as described.
    """
    p, layout = problem, struct_layout("GradientTerm", *_SOURCES)
    table = []
    for index in range(p.count):
        operands = [*result_operands(p, layout, p.dtype, p.lse_dtype, f".{index}", "seen.")]
        for operand in result_operands(p, layout, p.dtype, p.lse_dtype, f".{index}", "seen."):
            address = layout.positions["d" + operand.name.split(".")[0]]
            operands.append(operand._replace(name="d" + operand.name, address=address, strides=(), packed=0))
        table.append(Binder.of(layout, operands).pack(buffers))
    return b"".join(table)


def pack_merge_gradients(problem: MergeProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The parameters of either launch.

    buffers: terms uint64 (count, GRADIENT_TERM_FIELDS), of `pack_gradient_terms`; dout and dlse of the merged dtypes,
    dlse possibly missing; with sinks these, (heads,), float32 or of dtype, dsinks like them in float32, and sink_parts
    (heads, batch * rows), of the sums' dtype. Raises InvalidRequest for what is not as described.
    """
    return _binder(problem).pack(buffers)


@functools.lru_cache(maxsize=256)
def _binder(p: MergeProblem) -> Binder:
    layout = struct_layout("GradientParams", *_SOURCES)
    operands = [layout.operand("terms", "..", (p.count, GRADIENT_TERM_FIELDS), "uint64")]
    merged = result_operands(p, layout, p.out_dtype, p.out_lse_dtype, prefix="d")
    operands += [operand._replace(name="d" + operand.name, optional=operand.name == "lse") for operand in merged]
    if p.sinks is not None:
        operands.append(layout.operand("sinks", ("sinks_stride",), (p.heads,), p.sinks))
        operands.append(layout.operand("sink_parts", "..", (p.heads, p.results // p.heads), sums_dtype(p)))
        operands.append(layout.operand("dsinks", ".", (p.heads,), "float32"))
    scalars = {"lanes": _lanes(p), "sinks_are_float": int(p.sinks == "float32")}
    return Binder.of(layout, operands, layout.named(p) | scalars)
