"""Merges of partials: from an adopted `MergePartials` to its problem, its kernel and its launch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpu_actors.arrays.adopt import name_of
from gpu_actors.devices.interface import Device, Kernel, Launch, Outputs, OutputSpec, ScratchSpec, Step, zero_launch
from gpu_actors.kernels.merge.merge import (
    TERM_FIELDS,
    MergeKey,
    MergeProblem,
    merge_geometry,
    merge_key,
    pack_merge,
    pack_terms,
)
from gpu_actors.partial import MergePartials, Partial, merged_dtypes, oracle_merge

__all__ = ["MergePlan", "bind_merge", "merge_plan"]


class MergePlan(NamedTuple):
    """keys: of the kernels that `bind_merge` takes; none where there is nothing to merge."""

    problem: MergeProblem
    key: MergeKey

    @property
    def keys(self) -> tuple[MergeKey, ...]:
        return (self.key,) if self.problem.results else ()


def merge_plan(message: MergePartials, device: Device) -> MergePlan:
    """The plan of an adopted message. Raises `InvalidRequest` and `Unsupported`."""
    first = message.partials[0]
    *batch, rows, heads, columns = map(int, first.out.shape)
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
    merge_geometry(problem)
    return MergePlan(problem, merge_key(problem, device.info.arch))


def bind_merge(plan: MergePlan, message: MergePartials, kernels: Sequence[Kernel]) -> Launch:
    """A launch of a plan on the arrays of an adopted message. kernels: of the plan's key, or none."""
    problem = plan.problem
    first = message.partials[0]
    inputs: dict[str, Any] = {}
    for index, partial in enumerate(message.partials):
        inputs[f"out.{index}"], inputs[f"lse.{index}"] = partial.out, partial.lse
    if message.sinks is not None:
        inputs["sinks"] = message.sinks
    outputs = {
        "out": OutputSpec(tuple(first.out.shape), problem.out_dtype),
        "lse": OutputSpec(tuple(first.lse.shape), problem.out_lse_dtype),
    }
    if not problem.results:
        return zero_launch(None, first.out, outputs)
    terms = ScratchSpec((problem.count, TERM_FIELDS), "uint64", contents=functools.partial(pack_terms, problem))
    steps = [Step(kernel, merge_geometry(problem), functools.partial(pack_merge, problem)) for kernel in kernels]
    oracle = functools.partial(_oracle, problem.count)
    return Launch(None, inputs, outputs, oracle, tuple(steps), {"terms": terms} if steps else {})


def _oracle(count: int, inputs: Mapping[str, Any]) -> Outputs:
    merged = oracle_merge([Partial(inputs[f"out.{n}"], inputs[f"lse.{n}"]) for n in range(count)], inputs.get("sinks"))
    return {"out": merged.out, "lse": merged.lse}
