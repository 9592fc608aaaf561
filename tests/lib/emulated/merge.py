"""Runs the kernels of the merge and of its gradient on the CPU over arrays. For tests."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from emulated.append import buffer_of, dtype_of
from inside.emulation import EmulatedBuffer, EmulatedModule, build_module
from inside.kernels import (
    GRADIENT_TERM_FIELDS,
    TERM_FIELDS,
    MergeProblem,
    merge_geometry,
    merge_gradient_geometries,
    merge_gradient_variants,
    merge_variant,
    pack_gradient_terms,
    pack_merge,
    pack_merge_gradients,
    pack_terms,
    sums_dtype,
)

from gpu_actors import KernelSource
from gpu_actors.partial import MergeGradients, Partial

__all__ = ["merge_problem", "run_merge", "run_merge_gradients"]


@functools.cache
def module_of(source: KernelSource) -> EmulatedModule:
    return build_module(source.source, dict(source.macros), dict(source.headers), entries=source.entry_points)


def merge_problem(partials: Sequence[Partial], sinks: Any = None, out_dtype: str | None = None) -> MergeProblem:
    out, lse = partials[0]
    dtype = out_dtype or out.dtype.name
    *batch, rows, heads, columns = out.shape
    return MergeProblem(
        count=len(partials),
        batch=batch[0] if batch else 0,
        rows=rows,
        heads=heads,
        columns=columns,
        dtype=out.dtype.name,
        lse_dtype=lse.dtype.name,
        out_dtype=dtype,
        out_lse_dtype="float64" if "float64" in (dtype, lse.dtype.name) else "float32",
        sinks=None if sinks is None else sinks.dtype.name,
    )


def placed(arrays: dict[str, Any]) -> tuple[dict[str, EmulatedBuffer], dict[str, Any]]:
    """Put all arrays but the table of terms into the emulated device's memory."""
    memory: dict[str, EmulatedBuffer] = {}
    buffers: dict[str, Any] = {}
    for name, array in arrays.items():
        if name != "terms":
            root = array if array.flags.c_contiguous else array.T if array.base is None else array.base
            memory[name] = EmulatedBuffer.of(root, name)
            buffers[name] = buffer_of(array, memory[name].address + array.ctypes.data - root.ctypes.data)
    return memory, buffers


def run_merge(partials: Sequence[Partial], sinks: Any = None, out_dtype: str | None = None, **launch: Any) -> Partial:
    """The merged out and lse, which begin as NaN. launch: options of the kernel's launch."""
    problem = merge_problem(partials, sinks, out_dtype)
    out, lse = partials[0]
    arrays: dict[str, Any] = {
        "out": np.full(out.shape, np.nan, dtype_of(problem.out_dtype)),
        "lse": np.full(lse.shape, np.nan, dtype_of(problem.out_lse_dtype)),
        "terms": np.zeros((problem.count, TERM_FIELDS), np.uint64),
    }
    for index, partial in enumerate(partials):
        arrays |= {f"out.{index}": partial.out, f"lse.{index}": partial.lse}
    if sinks is not None:
        arrays["sinks"] = sinks
    memory, buffers = placed(arrays)
    table = np.frombuffer(pack_terms(problem, buffers), np.uint64).reshape(problem.count, TERM_FIELDS)
    memory["terms"] = EmulatedBuffer.of(table, "terms")
    buffers["terms"] = buffer_of(table, memory["terms"].address)
    geometry = merge_geometry(problem)
    module = module_of(merge_variant(problem, "sm_90a").source)
    packed = pack_merge(problem, buffers)
    module.launch("merge", geometry.grid, geometry.block, 0, packed, list(memory.values()), **launch)
    return Partial(*(memory[name].view(arrays[name].dtype, arrays[name].shape) for name in ("out", "lse")))


def run_merge_gradients(
    partials: Sequence[Partial], dout: Any, dlse: Any = None, sinks: Any = None, build: Any = module_of, **launch: Any
) -> MergeGradients:
    """The gradients of a merge, which begin as NaN. dout, dlse: the incoming gradients.

    build: makes a source's module.
    """
    problem = merge_problem(partials, sinks, dout.dtype.name)
    arrays: dict[str, Any] = {"dout": dout} if dlse is None else {"dout": dout, "dlse": dlse}
    for index, (out, lse) in enumerate(partials):
        arrays |= {f"out.{index}": out, f"lse.{index}": lse}
        arrays |= {f"dout.{index}": np.full(out.shape, np.nan, out.dtype)}
        arrays |= {f"dlse.{index}": np.full(lse.shape, np.nan, lse.dtype)}
    if sinks is not None:
        parts = (problem.heads, problem.results // problem.heads)
        arrays |= {"sinks": sinks, "dsinks": np.full(sinks.shape, np.nan, np.float32)}
        arrays |= {"sink_parts": np.full(parts, np.nan, sums_dtype(problem))}
    memory, buffers = placed(arrays)
    table = np.frombuffer(pack_gradient_terms(problem, buffers), np.uint64).reshape(-1, GRADIENT_TERM_FIELDS)
    memory["terms"] = EmulatedBuffer.of(table, "terms")
    buffers["terms"] = buffer_of(table, memory["terms"].address)
    packed = pack_merge_gradients(problem, buffers)
    variants = merge_gradient_variants(problem, "sm_90a")
    for variant, geometry in zip(variants, merge_gradient_geometries(problem), strict=True):
        module = build(variant.source)
        module.launch(variant.kernel, geometry.grid, geometry.block, 0, packed, list(memory.values()), **launch)

    def result(name: str) -> Any:
        return memory[name].view(arrays[name].dtype, arrays[name].shape)

    gradients = [Partial(result(f"dout.{n}"), result(f"dlse.{n}")) for n in range(problem.count)]
    return MergeGradients(tuple(gradients), None if sinks is None else result("dsinks"))
