"""BackwardPlan: everything about a backward request that does not depend on its data.

It stands beside `AttentionPlan`: the same cache holds both, and the same actor binds them to arrays and launches them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpu_actors.actors.attention import (
    bound_inputs,
    forward_options,
    forward_signature,
    rounded_inputs,
)
from gpu_actors.devices.interface import Kernel, Launch, Outputs, OutputSpec, Step
from gpu_actors.interop.arrays import Adopted, restore
from gpu_actors.kernels.backward import BackwardLaunch, backward_launch
from gpu_actors.kernels.dispatch import answering_key
from gpu_actors.problem import AttentionProblem, DispatchKey
from gpu_actors.requests import AttentionGradients, FlashBackward, FlashForward
from gpu_actors.validation import backward_problem, check_seed

__all__ = ["BackwardPlan", "attention_gradients", "backward_plan", "backward_signature"]

_NAMES = ("dq", "dk", "dv", "dbias", "dsinks")


def backward_signature(request: FlashBackward, plain: bool) -> Hashable:
    """What decides the plan of an adopted request: all that decides the forward's, and what only backward takes."""
    dout, lse = request.dout, request.lse
    return (
        "backward",
        forward_signature(request, plain),
        (dout.shape, dout.strides, dout.dtype),
        (lse.shape, lse.strides, lse.dtype),
        request.deterministic,
        type(request.deterministic),
    )


@dataclass(slots=True)
class BackwardPlan:
    """A problem with the kernels that answer it. launch: None where the oracle does. kernels: as in `AttentionPlan`."""

    problem: AttentionProblem
    key: DispatchKey
    launch: BackwardLaunch | None
    accumulate: Literal["float64", "float32"]
    outputs: Mapping[str, OutputSpec]
    kernels: tuple[Kernel, ...] | None = None

    @property
    def keys(self) -> tuple[DispatchKey, ...]:
        """Of the kernels that `bind` takes, in that order."""
        return () if self.launch is None else tuple(step.key for step in self.launch.steps)

    def bind(self, request: FlashForward, plain: bool, kernels: Sequence[Kernel]) -> Launch:
        """A launch of this plan on the arrays of an adopted request. Checks what depends on their data.

        kernels: of `keys`; empty where the device runs none.
        """
        assert isinstance(request, FlashBackward)
        inputs = bound_inputs(self.problem, request)
        inputs |= {"out": request.out, "dout": request.dout, "lse": request.lse}
        seed = request.dropout_seed
        check_seed(seed)
        oracle = functools.partial(_oracle, self.problem, self.accumulate, seed)
        if self.launch is None or not kernels:
            return Launch(self.key, inputs, self.outputs, oracle)
        steps = tuple(
            Step(kernel, step.geometry, functools.partial(step.pack, self.problem, dropout_seed=seed))
            for kernel, step in zip(kernels, self.launch.steps, strict=True)
        )
        return Launch(self.key, inputs, self.outputs, oracle, steps, self.launch.scratch)


def backward_plan(
    request: FlashBackward, arch: str, runs_kernels: bool, accumulate: Literal["float64", "float32"]
) -> BackwardPlan:
    """Validate an adopted request and pick its kernels. Raises `InvalidRequest` and `Unsupported`."""
    problem = backward_problem(request)
    key = answering_key(problem, arch, runs_kernels)
    launch = None if key.kernel == "reference" else backward_launch(key, problem)
    zeroed = frozenset() if launch is None else launch.zeroed
    return BackwardPlan(
        problem=problem,
        key=key,
        launch=launch,
        accumulate=accumulate,
        outputs={
            name: OutputSpec(tuple(array.shape), array.dtype.name, zero=name in zeroed)
            for name in _NAMES
            if (array := getattr(request, name[1:])) is not None
        },
    )


def attention_gradients(like: Adopted | None, outputs: Outputs) -> Sequence[AttentionGradients]:
    """The answer to one request, in the kind of its q."""
    found = (outputs.get(name) for name in _NAMES)
    return (AttentionGradients(*(array if array is None or like is None else restore(array, like) for array in found)),)


def _oracle(
    problem: AttentionProblem,
    accumulate: Literal["float64", "float32"],
    dropout_seed: int,
    inputs: Mapping[str, Any],
) -> Outputs:
    # Only a mock device computes here, so only its programs pay for the import.
    from gpu_actors.reference import attention_backward

    gradients = attention_backward(
        **rounded_inputs(problem, inputs, ("q", "k", "v", "dout")),
        **forward_options(problem),
        dropout_seed=dropout_seed,
        accumulate=accumulate,
    )
    return {name: getattr(gradients, name) for name in _NAMES}
