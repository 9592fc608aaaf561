"""Merges of partials and their gradients: from an adopted message to its problem, its kernels and its launch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpu_actors.arrays.adopt import Adopted, name_of, restore
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Device, Kernel, Launch, Outputs, OutputSpec, ScratchSpec, Step, zero_launch
from gpu_actors.kernels.merge import (
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
from gpu_actors.partial import (
    MergeBackward,
    MergeGradients,
    MergePartials,
    Partial,
    merged_dtypes,
    merged_lse_dtype,
    oracle_merge,
    oracle_merge_gradients,
)

__all__ = [
    "MergePlan",
    "bind_merge",
    "bind_merge_gradients",
    "merge_gradients_answer",
    "merge_gradients_of",
    "merge_plan",
]


class MergePlan(NamedTuple):
    """How a merge is launched. variants: those of its kernels; none if there is nothing to merge."""

    problem: MergeProblem
    variants: tuple[Variant, ...]


def merge_plan(message: MergePartials | MergeBackward, device: Device) -> MergePlan:
    first = message.partials[0]
    *batch, rows, heads, columns = map(int, first.out.shape)
    if isinstance(message, MergeBackward):
        out_dtype = name_of(message.dout.dtype)
        out_lse_dtype = merged_lse_dtype(first, out_dtype)
    else:
        out_dtype, out_lse_dtype = merged_dtypes(message)
    problem = MergeProblem(
        count=len(message.partials),
        batch=batch[0] if batch else 0,
        rows=rows if batch != [0] else 0,  # a batch without sequences has no rows
        heads=heads,
        columns=columns,
        dtype=name_of(first.out.dtype),
        lse_dtype=name_of(first.lse.dtype),
        out_dtype=out_dtype,
        out_lse_dtype=out_lse_dtype,
        sinks=None if message.sinks is None else name_of(message.sinks.dtype),
    )
    if isinstance(message, MergeBackward):
        variants = merge_gradient_variants(problem, device.info.arch)
        merge_gradient_geometries(problem)
    else:
        variants = (merge_variant(problem, device.info.arch),)
        merge_geometry(problem)
    return MergePlan(problem, variants if problem.results else ())


def bind_merge(plan: MergePlan, message: MergePartials, kernels: Sequence[Kernel]) -> Launch:
    """Return a launch of a plan on the arrays of an adopted message. kernels: the plan's, or none."""
    problem = plan.problem
    first = message.partials[0]
    outputs = {
        "out": OutputSpec(tuple(first.out.shape), problem.out_dtype),
        "lse": OutputSpec(tuple(first.lse.shape), problem.out_lse_dtype),
    }
    if not problem.results:
        return zero_launch(None, first.out, outputs)
    terms = ScratchSpec((problem.count, TERM_FIELDS), "uint64", contents=functools.partial(pack_terms, problem))
    pack = functools.partial(pack_merge, problem)
    steps = tuple(Step(kernel, merge_geometry(problem), pack) for kernel in kernels)
    oracle = functools.partial(_oracle, problem.count)
    return Launch(None, _inputs(message), outputs, oracle, steps, {"terms": terms})


def bind_merge_gradients(plan: MergePlan, message: MergeBackward, kernels: Sequence[Kernel]) -> Launch:
    """Like `bind_merge`, but the outputs are dout.N and dlse.N of partial N, and dsinks."""
    problem = plan.problem
    inputs = _inputs(message) | {"dout": message.dout}
    if message.dlse is not None:
        inputs["dlse"] = message.dlse
    outputs = {}
    for index, partial in enumerate(message.partials):
        outputs[f"dout.{index}"] = OutputSpec(tuple(partial.out.shape), problem.dtype)
        outputs[f"dlse.{index}"] = OutputSpec(tuple(partial.lse.shape), problem.lse_dtype)
    if message.sinks is not None:
        outputs["dsinks"] = OutputSpec((problem.heads,), "float32")
    if not problem.results:
        return zero_launch(None, message.dout, outputs)
    oracle = functools.partial(_gradients_oracle, problem.count)
    fill = functools.partial(pack_gradient_terms, problem)
    scratch = {"terms": ScratchSpec((problem.count, GRADIENT_TERM_FIELDS), "uint64", contents=fill)}
    if message.sinks is not None:
        parts = (problem.heads, problem.results // problem.heads)
        scratch["sink_parts"] = ScratchSpec(parts, sums_dtype(problem))
    pack = functools.partial(pack_merge_gradients, problem)
    grids = merge_gradient_geometries(problem)
    steps = tuple(Step(kernel, grid, pack) for kernel, grid in zip(kernels, grids, strict=bool(kernels)))
    return Launch(None, inputs, outputs, oracle, steps, scratch)


def merge_gradients_answer(count: int, template: Adopted, outputs: Outputs) -> Sequence[MergeGradients]:
    """The answer, in arrays of the kind of the first out."""
    return (merge_gradients_of(count, {name: restore(array, template) for name, array in outputs.items()}),)


def merge_gradients_of(count: int, outputs: Mapping[str, Any]) -> MergeGradients:
    """The gradients of ``count`` partials, from the outputs of a launch of `bind_merge_gradients`."""
    partials = (Partial(outputs[f"dout.{n}"], outputs[f"dlse.{n}"]) for n in range(count))
    return MergeGradients(tuple(partials), outputs.get("dsinks"))


def _inputs(message: MergePartials | MergeBackward) -> dict[str, Any]:
    inputs: dict[str, Any] = {} if message.sinks is None else {"sinks": message.sinks}
    for index, partial in enumerate(message.partials):
        inputs[f"out.{index}"], inputs[f"lse.{index}"] = partial.out, partial.lse
    return inputs


def _partials(count: int, inputs: Mapping[str, Any]) -> list[Partial]:
    return [Partial(inputs[f"out.{n}"], inputs[f"lse.{n}"]) for n in range(count)]


def _oracle(count: int, inputs: Mapping[str, Any]) -> Outputs:
    merged = oracle_merge(_partials(count, inputs), inputs.get("sinks"))
    return {"out": merged.out, "lse": merged.lse}


def _gradients_oracle(count: int, inputs: Mapping[str, Any]) -> Outputs:
    dout, dlse, sinks = inputs["dout"], inputs.get("dlse"), inputs.get("sinks")
    found = oracle_merge_gradients(_partials(count, inputs), dout, dlse, sinks)
    outputs = {} if sinks is None else {"dsinks": found.dsinks}
    for index, partial in enumerate(found.partials):
        outputs[f"dout.{index}"], outputs[f"dlse.{index}"] = partial.out, partial.lse
    return outputs
