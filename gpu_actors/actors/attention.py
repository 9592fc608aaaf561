"""AttentionPlan: everything about a forward request that does not depend on its data.

A request whose signature has been seen before finds its plan by one dictionary look-up; then only its arrays are
bound. Shared by the actors that answer attention requests. `gradients` has the same for backward requests.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from gpu_actors.actors.reach import alignments, reaching_families
from gpu_actors.devices.interface import (
    Device,
    Kernel,
    Launch,
    LaunchGeometry,
    Outputs,
    OutputSpec,
    Step,
)
from gpu_actors.interop.arrays import Adopted, CallerStreams, adopt, check_device, restore
from gpu_actors.kernels.arguments import pack_forward
from gpu_actors.kernels.dispatch import KernelFamily, dispatch_key
from gpu_actors.kernels.sm90_arguments import EncodeTensorMap
from gpu_actors.kernels.sm90_launch import sm90_scratch, sm90_steps
from gpu_actors.kernels.transposition import parts_of
from gpu_actors.kernels.variants import launch_geometry
from gpu_actors.problem import AttentionProblem, DispatchKey
from gpu_actors.requests import AttentionOutput, FlashBackward, FlashForward
from gpu_actors.validation import check_cu_seqlens, check_output_memory, check_seed, forward_problem, longest

__all__ = [
    "AttentionPlan",
    "adopt_arrays",
    "attention_output",
    "bound_inputs",
    "forward_families",
    "forward_options",
    "forward_plan",
    "forward_signature",
    "is_plain",
    "rounded_inputs",
]

_OPTIONAL = (
    "alibi_slopes",
    "sinks",
    "bias",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "q_descale",
    "k_descale",
    "v_descale",
)
_ARRAYS = ("q", "k", "v", *_OPTIONAL, "out")
_BACKWARD_ARRAYS = (*_ARRAYS, "dout", "lse")

Request = TypeVar("Request", FlashForward, FlashBackward)

# What fp32 operands are rounded to before they are multiplied. "f16" keeps fp32's range: large ones stay finite.
_ROUNDED = {"tf32": "tf32", "f16": "wide_float16", "bf16": "bfloat16"}


def adopt_arrays(
    request: Request, plain: bool, device: str, streams: CallerStreams | None = None
) -> tuple[Request, Adopted | None]:
    """The request over arrays that this package can read, and what its q was if that was no NumPy array.

    plain: see `is_plain`. device: "cpu" or "cuda:N", where arrays may lie besides the host. streams: the submitting
    thread's own.
    Raises `InvalidRequest` for what is no array, or lies elsewhere.
    """
    if plain:
        return request, None
    changes: dict[str, Any] = {}
    like: Adopted | None = None
    for name in _BACKWARD_ARRAYS if isinstance(request, FlashBackward) else _ARRAYS:
        array = getattr(request, name)
        if array is None or type(array) is np.ndarray:
            continue
        adopted = adopt(array, name, streams)
        check_device(adopted, name, device)
        changes[name] = adopted.array
        if name == "q":
            like = adopted
    return (dataclasses.replace(request, **changes) if changes else request), like


def forward_signature(request: FlashForward, plain: bool) -> Hashable:
    """What decides the plan of an adopted request. plain: see `is_plain`.

    Hashing it raises TypeError where an option cannot be hashed.
    """
    q, k, v = request.q, request.k, request.v
    return (
        q.shape,
        q.strides,
        q.dtype,
        k.shape,
        k.strides,
        k.dtype,
        v.shape,
        v.strides,
        v.dtype,
        request.causal,
        request.alignment,
        request.window_size,
        request.softmax_scale,
        request.softcap,
        request.sink_tokens,
        request.dropout_p,
        request.compute,
        request.return_lse,
        # Equal is not alike: 1 == True == 1.0, and what validation refuses must not find the plan of what it accepts.
        type(request.causal),
        type(request.return_lse),
        type(request.sink_tokens),
        type(request.softmax_scale),
        type(request.softcap),
        type(request.dropout_p),
        type(request.window_size[0]),
        type(request.window_size[1]),
        None if plain else _other_signature(request),
    )


def is_plain(request: FlashForward) -> bool:
    """True where nothing but q, k and v is given, as NumPy arrays."""
    return (
        type(request.q) is type(request.k) is type(request.v) is np.ndarray
        and request.out is None
        and _has_no_options(request)
    )


def _has_no_options(request: FlashForward) -> bool:
    """True where no operand but q, k, v and out is given. Written out because every request passes here."""
    return (
        request.cu_seqlens_q is None
        and request.cu_seqlens_k is None
        and request.max_seqlen_q is None
        and request.max_seqlen_k is None
        and request.bias is None
        and request.alibi_slopes is None
        and request.sinks is None
        and request.q_descale is None
        and request.k_descale is None
        and request.v_descale is None
    )


def _other_signature(request: FlashForward) -> Hashable:
    out = request.out
    return (
        None if _has_no_options(request) else _optional_signature(request),
        None if out is None else (out.shape, out.strides, out.dtype),
        alignments(request.q, request.k, request.v, out),
    )


def _optional_signature(request: FlashForward) -> Hashable:
    longest_q, longest_k = request.max_seqlen_q, request.max_seqlen_k
    kinds = (type(longest_q), type(longest_k))
    # The longest sequence shapes the grid, so it belongs to the plan even where it has to be looked up.
    if request.cu_seqlens_q is not None and longest_q is None:
        longest_q = longest("cu_seqlens_q", request.cu_seqlens_q)
    if request.cu_seqlens_k is not None and longest_k is None:
        longest_k = longest("cu_seqlens_k", request.cu_seqlens_k)
    arrays = (getattr(request, name) for name in _OPTIONAL)
    described = tuple(None if array is None else (array.shape, array.strides, array.dtype) for array in arrays)
    return longest_q, longest_k, kinds, described


@dataclass(slots=True)
class AttentionPlan:
    """A problem with the kernel that answers it.

    geometry is None where the device runs no kernels. outputs: what a launch produces when the caller gives no ``out``.
    encode: makes the tensor maps of a kernel that takes them. kernels: what `bind` takes, once it is loaded.
    """

    problem: AttentionProblem
    key: DispatchKey
    geometry: LaunchGeometry | None
    accumulate: Literal["float64", "float32"]
    outputs: Mapping[str, OutputSpec]
    encode: EncodeTensorMap
    kernels: tuple[Kernel, ...] | None = None

    @property
    def keys(self) -> tuple[DispatchKey, ...]:
        """Of the kernels that `bind` takes, in that order."""
        return parts_of(self.key)

    def bind(self, request: FlashForward, plain: bool, kernels: Sequence[Kernel]) -> Launch:
        """A launch of this plan on the arrays of an adopted request. Checks what depends on their data.

        kernels: of `keys`; empty where the device runs none.
        """
        problem = self.problem
        inputs = {"q": request.q, "k": request.k, "v": request.v} if plain else bound_inputs(problem, request)
        outputs = self.outputs
        if request.out is not None:
            check_output_memory(request.out, inputs)
            outputs = {**outputs, "out": dataclasses.replace(outputs["out"], into=request.out)}
        seed = request.dropout_seed
        if type(seed) is not int or seed:
            check_seed(seed)
        oracle = functools.partial(_oracle, problem, self.accumulate, seed)
        if self.geometry is None or not kernels:
            return Launch(self.key, inputs, outputs, oracle)
        if self.key.kernel == "forward_sm90":
            steps = sm90_steps(problem, self.key, self.geometry, self.encode, kernels)
            return Launch(self.key, inputs, outputs, oracle, steps, sm90_scratch(problem, self.key))
        step = Step(kernels[0], self.geometry, functools.partial(pack_forward, problem, dropout_seed=seed))
        return Launch(self.key, inputs, outputs, oracle, (step,))


def bound_inputs(problem: AttentionProblem, request: FlashForward) -> dict[str, Any]:
    """The operands of an adopted request by name. Checks sequence bounds that lie on the host."""
    inputs = {"q": request.q, "k": request.k, "v": request.v}
    if not _has_no_options(request):
        for name in _OPTIONAL:
            array = getattr(request, name)
            if array is not None:
                inputs[name] = array
    if problem.layout == "varlen":
        check_cu_seqlens("cu_seqlens_q", request.cu_seqlens_q, problem.total_q, problem.seqlen_q)
        check_cu_seqlens("cu_seqlens_k", request.cu_seqlens_k, problem.total_k, problem.seqlen_k)
    return inputs


def forward_families(request: FlashForward) -> tuple[KernelFamily, ...]:
    """The kernels to choose from for an adopted request."""
    return reaching_families({name: getattr(request, name) for name in ("q", "k", "v", "out")})


def forward_plan(request: FlashForward, device: Device, accumulate: Literal["float64", "float32"]) -> AttentionPlan:
    """Validate an adopted request and pick its kernel. Raises `InvalidRequest` and `Unsupported`."""
    info = device.info
    problem = forward_problem(request)
    key = dispatch_key(problem, info.arch, forward_families(request))
    outputs = {"out": OutputSpec((*request.q.shape[:-1], problem.head_dim_v), problem.out_dtype)}
    if problem.return_lse:
        varlen = problem.layout == "varlen"
        rows = (problem.heads_q, problem.total_q if varlen else problem.seqlen_q)
        outputs["lse"] = OutputSpec(rows if varlen else (problem.batch, *rows), "float32")
    return AttentionPlan(
        problem=problem,
        key=key,
        geometry=launch_geometry(key, problem, info.multiprocessors) if info.runs_kernels else None,
        accumulate=accumulate,
        outputs=outputs,
        encode=device.encode_tensor_map,
    )


def attention_output(like: Adopted | None, result: Any, outputs: Outputs) -> Sequence[AttentionOutput]:
    """The answer to one request. result: the caller's own ``out``, where it gave one."""
    out, lse = outputs["out"], outputs.get("lse")
    if like is not None:
        out = restore(out, like)
        lse = None if lse is None else restore(lse, like)
    return (AttentionOutput(out if result is None else result, lse),)


def _oracle(
    problem: AttentionProblem,
    accumulate: Literal["float64", "float32"],
    dropout_seed: int,
    inputs: Mapping[str, Any],
) -> Outputs:
    # Only a mock device computes here, so only its programs pay for the import.
    from gpu_actors.reference import attention_forward

    reference = attention_forward(
        **rounded_inputs(problem, inputs, ("q", "k", "v")),
        **forward_options(problem),
        dropout_seed=dropout_seed,
        accumulate=accumulate,
    )
    return {"out": reference.out, "lse": reference.lse}


def forward_options(problem: AttentionProblem) -> dict[str, Any]:
    """The options of the problem as the oracle names them."""
    return {
        "causal": problem.causal,
        "alignment": problem.alignment,
        "window_size": problem.window,
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "sink_tokens": problem.sink_tokens,
        "dropout_p": problem.dropout_p,
    }


def rounded_inputs(
    problem: AttentionProblem, inputs: Mapping[str, Any], multiplied: tuple[str, ...]
) -> Mapping[str, Any]:
    """The operands with those that are multiplied rounded to what the problem computes in."""
    from gpu_actors.reference.low_precision import rounder

    if problem.compute not in _ROUNDED:
        return inputs
    step = rounder(_ROUNDED[problem.compute])
    return {**inputs, **{name: step(inputs[name]) for name in multiplied}}
