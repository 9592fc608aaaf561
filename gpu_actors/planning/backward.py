"""Backward requests: their signatures, how their plans are made, and how a request is bound to its plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import Adopted, restore
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.requests import AttentionGradients, FlashBackward
from gpu_actors.devices.interface import Device, DeviceInfo, Kernel, Launch, Outputs, OutputSpec
from gpu_actors.kernels.program import NO_VALUES, Values
from gpu_actors.planning.block_masks import launch_masked, masked_problem, planned_mask
from gpu_actors.planning.forward import SharedBackward, bound_inputs, forward_signature, rounded_inputs
from gpu_actors.planning.plan import Accumulate, Plan, described, program_for
from gpu_actors.planning.tma_eligibility import alignments, key_for
from gpu_actors.validation.forward import backward_problem

__all__ = [
    "attention_gradients",
    "backward_plan",
    "backward_signature",
    "bind_backward",
    "gradient_problem",
    "pose_backward",
]

_NAMES = ("dq", "dk", "dv", "dbias", "dsinks")


def backward_signature(request: FlashBackward, plain: bool) -> Hashable:
    dout, lse = request.dout, request.lse
    return (
        "backward",
        forward_signature(request, plain),
        described(dout),
        described(lse),
        alignments(dout),
        summed_of(request),
        request.deterministic,
        type(request.deterministic),
    )


def bind_backward(plan: Plan, request: FlashBackward, kernels: Sequence[Kernel]) -> Launch:
    inputs = bound_inputs(plan.problem, request)
    inputs |= {"out": request.out, "dout": request.dout, "lse": request.lse}
    seed = request.dropout_seed
    oracle = functools.partial(_oracle, plan.problem, plan.accumulate, seed)
    if request.block_mask is None:
        return plan.launch(inputs, oracle, kernels, Values(seed) if seed else NO_VALUES)
    return launch_masked(plan, request.block_mask, inputs, oracle, kernels, seed)


def summed_of(request: FlashBackward) -> str:
    """The names of the operands that a request's sequences share, as "kv"."""
    return request.summed if isinstance(request, SharedBackward) else ""


def gradient_problem(request: FlashBackward, info: DeviceInfo) -> AttentionProblem:
    problem = dataclasses.replace(backward_problem(request), summed=summed_of(request))
    if info.invariant:
        problem = dataclasses.replace(problem, invariant=True, deterministic=True)
    return masked_problem(request, problem)


def pose_backward(request: FlashBackward, device: Device) -> tuple[AttentionProblem, DispatchKey]:
    """Validate an adopted request and pick its kernels."""
    problem = gradient_problem(request, device.info)
    return problem, key_for(problem, device, request, ("q", "k", "v", "dout"))


def backward_plan(request: FlashBackward, device: Device, accumulate: Accumulate) -> Plan:
    problem, key = pose_backward(request, device)
    program = program_for(problem, key, device)
    outputs = {
        name: OutputSpec(
            (1, *array.shape[1:]) if name[1:] in problem.summed else tuple(array.shape),
            array.dtype.name,
        )
        for name in _NAMES
        if (array := getattr(request, name[1:])) is not None and (name != "dbias" or problem.dbias)
    }
    return Plan(problem, key, program, outputs, accumulate, planned_mask(request, problem))


def attention_gradients(template: Adopted | None, outputs: Outputs) -> Sequence[AttentionGradients]:
    """The answer to one request, in arrays of the kind of its q."""
    found = [outputs.get(name) for name in _NAMES]
    if template is not None:
        found = [None if array is None else restore(array, template) for array in found]
    return (AttentionGradients(*found),)


def _oracle(problem: AttentionProblem, accumulate: Accumulate, dropout_seed: int, inputs: Mapping[str, Any]) -> Outputs:
    from gpu_actors.reference.arguments import Arguments
    from gpu_actors.reference.backward import Incoming, evaluate_backward

    operands = dict(rounded_inputs(problem, inputs))
    incoming = Incoming(operands.pop("dout"), operands.pop("out"), operands.pop("lse"))
    arguments = Arguments(problem=problem, dropout_seed=dropout_seed, **operands)
    result = evaluate_backward(arguments, incoming, np.dtype(accumulate))
    gradients = {name: getattr(result, name) for name in _NAMES}
    for name in problem.summed:
        gradients[f"d{name}"] = gradients[f"d{name}"].sum(axis=0, keepdims=True)
    return gradients
