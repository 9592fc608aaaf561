"""Forward requests: their signatures, how their plans are made, and how a request is bound to its plan.

A request whose signature is known finds its plan by one dictionary look-up. Then only its arrays are bound.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import Adopted, restore
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.requests import AttentionOutput, FlashBackward, FlashForward, scalars_of
from gpu_actors.devices.interface import Device, DeviceInfo, Kernel, Launch, Outputs
from gpu_actors.errors import Unsupported
from gpu_actors.fields import describe
from gpu_actors.kernels.decode_mma import DECODE
from gpu_actors.kernels.few_rows import Packing, as_cache, has_cache_form, option_without_cache, packing_of
from gpu_actors.kernels.program import NO_VALUES, Values
from gpu_actors.kernels.support import ELEMENTS, FIRST_FP8_CAPABILITY, capability
from gpu_actors.planning.block_masks import launch_masked, mask_signature, masked_problem, planned_mask
from gpu_actors.planning.plan import Accumulate, Plan, attention_outputs, described, program_for
from gpu_actors.planning.tma_eligibility import alignments, device_key, eligible_families, key_for
from gpu_actors.validation.forward import check_cu_seqlens, check_positions, forward_problem, longest
from gpu_actors.validation.overlap import check_output_memory

__all__ = [
    "SharedBackward",
    "attention_output",
    "batch_problem",
    "bind_forward",
    "bound_inputs",
    "broadcast_batch",
    "forward_plan",
    "forward_signature",
    "is_padded",
    "is_plain",
    "pose_forward",
    "rounded_inputs",
    "weigh_forward",
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
    "q_positions",
    "k_positions",
    "seqused_q",
    "seqused_k",
)
# Scalars that `forward_signature` does not simply include: dropout_seed decides no plan, the longest sequences may have
# to be found first, and only a part of a block mask decides a plan.
_UNSAID = ("dropout_seed", "max_seqlen_q", "max_seqlen_k", "block_mask")
_scalars: Callable[[FlashForward], tuple[Any, ...]] = operator.attrgetter(
    *(name for name in scalars_of(FlashForward) if name not in _UNSAID)
)
_SCALARS = frozenset((bool, int, float, str, type(None)))
_MULTIPLIED = ("q", "k", "v", "dout")
_TILES = ("q", "k", "v", "out")  # operands that move in tiles
# The dtype that fp32 operands are rounded to before a product. "f16" keeps fp32's range: large values stay finite.
_ROUNDED = {"tf32": "tf32", "f16": "wide_float16", "bf16": "bfloat16"}


def forward_signature(request: FlashForward, plain: bool) -> Hashable:
    """What decides the plan of an adopted request. Hashing it raises TypeError if an option cannot be hashed."""
    q, k, v = request.q, request.k, request.v
    scalars = _scalars(request)
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
        scalars,
        # 1 == True == 1.0, and a value that validation refuses must not find the plan of one that it accepts.
        *map(type, scalars),
        type(request.window_size[0]),
        type(request.window_size[1]),
        None if plain else _other_signature(request),
    )


def call_signature(request: FlashForward, options: Mapping[str, Any]) -> Hashable | None:
    """What decides the plan of a plain request, as its caller wrote it; None if only a closer look can tell.

    options: what the caller gave besides q, k and v. These are few, so this is faster than `forward_signature`.
    """
    q, k, v = request.q, request.k, request.v
    if not type(q) is type(k) is type(v) is np.ndarray or "dropout_seed" in options:
        return None
    kinds = (*map(type, options.values()),)
    if not _SCALARS.issuperset(kinds):
        return None
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
        *options.items(),
        # 1 == True == 1.0: see `forward_signature`.
        kinds,
    )


def is_plain(request: FlashForward) -> bool:
    """Whether nothing but q, k and v is given, as NumPy arrays."""
    return (
        type(request.q) is type(request.k) is type(request.v) is np.ndarray
        and request.out is None
        and _has_no_options(request)
    )


def is_padded(request: FlashForward) -> bool:
    """Whether a request's sequences may end before its rows or keys do."""
    return request.seqused_q is not None or request.seqused_k is not None


def broadcast_batch(request: FlashForward) -> FlashForward:
    """Return an adopted request in which a q, k or v of one sequence serves every sequence, by strides of 0, uncopied.

    This is for dense batches. Validation refuses others, and batch sizes that differ in other ways. A `FlashBackward`
    becomes a `SharedBackward`.
    """
    q, k, v = (getattr(array, "shape", ()) for array in (request.q, request.k, request.v))
    if q[:1] == k[:1] == v[:1]:
        return request
    shapes: dict[str, Any] = {"q": q, "k": k, "v": v}
    batches = {shape[0] for shape in shapes.values() if len(shape) == 4}
    if len(batches) != 2 or 1 not in batches:
        return request
    batch = max(batches)
    narrow = {name: getattr(request, name) for name, shape in shapes.items() if shape[:1] == (1,)}
    whole = {name: _repeated(array, batch) for name, array in narrow.items()}
    if not isinstance(request, FlashBackward):
        return dataclasses.replace(request, **whole)
    if is_padded(request):
        reason = "gradients of an operand that padded sequences share are not added up: repeat it for each"
        raise Unsupported(next(iter(narrow)), "a batch of 1", reason, f"a batch of {batch}")
    given = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return SharedBackward(**given | whole, summed="".join(narrow))


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class SharedBackward(FlashBackward):
    """A backward request in which operands of one sequence serve all sequences. summed: their names, as "kv"."""

    summed: str = ""


def _repeated(array: Any, batch: int) -> Any:
    shape = (batch, *array.shape[1:])
    if isinstance(array, np.ndarray):
        return np.broadcast_to(array, shape)
    return dataclasses.replace(array, shape=shape, strides=(0, *array.strides[1:]), source=None)


def _has_no_options(request: FlashForward) -> bool:
    """Whether no operand but q, k, v and out is given. Written out for speed, because every request comes here."""
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
        and request.q_positions is None
        and request.k_positions is None
        and request.seqused_q is None
        and request.seqused_k is None
        and request.block_mask is None
    )


def _other_signature(request: FlashForward) -> Hashable:
    out = request.out
    return (
        None if _has_no_options(request) else _optional_signature(request),
        described(out),
        alignments(request.q, request.k, request.v, out),
    )


def _optional_signature(request: FlashForward) -> Hashable:
    longest_q, longest_k = request.max_seqlen_q, request.max_seqlen_k
    kinds = (type(longest_q), type(longest_k))
    # The longest sequence shapes the grid, so it belongs to the plan even if it has to be looked up.
    if request.cu_seqlens_q is not None and longest_q is None:
        longest_q = longest("cu_seqlens_q", request.cu_seqlens_q)
    if request.cu_seqlens_k is not None and longest_k is None:
        longest_k = longest("cu_seqlens_k", request.cu_seqlens_k)
    arrays = tuple([described(getattr(request, name)) for name in _OPTIONAL])
    return longest_q, longest_k, kinds, arrays, mask_signature(request.block_mask)


def bind_forward(plan: Plan, request: FlashForward, plain: bool, kernels: Sequence[Kernel]) -> Launch:
    """Return a launch of a plan on the arrays of an adopted request, after the checks that depend on the arrays."""
    problem = plan.problem
    inputs = {"q": request.q, "k": request.k, "v": request.v} if plain else bound_inputs(problem, request)
    if request.out is not None:
        check_output_memory(request.out, inputs)
    seed = request.dropout_seed
    oracle = functools.partial(_oracle, problem, plan.accumulate, seed)
    if request.block_mask is not None:
        return launch_masked(plan, request.block_mask, inputs, oracle, kernels, seed, request.out)
    return plan.launch(inputs, oracle, kernels, Values(seed) if seed else NO_VALUES, request.out)


def bound_inputs(problem: AttentionProblem, request: FlashForward) -> dict[str, Any]:
    """Return the operands of an adopted request by name, after a check of sequence bounds that lie on the host."""
    inputs = {"q": request.q, "k": request.k, "v": request.v}
    if not _has_no_options(request):
        for name in _OPTIONAL:
            array = getattr(request, name)
            if array is not None:
                inputs[name] = array
    if problem.layout == "varlen":
        check_cu_seqlens("cu_seqlens_q", request.cu_seqlens_q, problem.total_q, problem.seqlen_q)
        check_cu_seqlens("cu_seqlens_k", request.cu_seqlens_k, problem.total_k, problem.seqlen_k)
    if problem.q_positions or problem.k_positions:
        check_positions(problem, request)
    return inputs


def pose_forward(request: FlashForward, device: Device) -> tuple[AttentionProblem, DispatchKey]:
    """Validate an adopted request and pick its kernel."""
    problem, key, packing = weigh_forward(request, device)
    return problem, packing.key if packing is not None and packing.taken else key


def weigh_forward(request: FlashForward, device: Device) -> tuple[AttentionProblem, DispatchKey, Packing | None]:
    """Return the problem, the key of its kernel if its rows are not packed, and how its rows would be packed."""
    info = device.info
    problem = batch_problem(request, info)
    if problem.invariant:
        if has_cache_form(problem):
            return problem, key_for(as_cache(problem), device, request, _TILES), None
        _check_eight_bits(request, problem, info.arch)
        return problem, key_for(problem, device, request, _TILES), None
    families = eligible_families({name: getattr(request, name) for name in _TILES})
    key = device_key(problem, device, families)
    # Sequences that share the memory of one (`broadcast_batch`) are not packed.
    if any(array.shape[0] > 1 and array.strides[0] == 0 for array in (request.q, request.k, request.v)):
        return problem, key, None
    return problem, key, packing_of(problem, key, families, info.multiprocessors, request.pack_gqa, device.barred)


def _check_eight_bits(request: FlashForward, problem: AttentionProblem, arch: str) -> None:
    """Raise Unsupported for an option that keeps an invariant batch from the kernels that take fp8 on older GPUs."""
    field = option_without_cache(problem)
    if field is None or capability(arch) >= FIRST_FP8_CAPABILITY or not ELEMENTS[problem.dtype].fp8:
        return
    value = getattr(request, field)
    reason = (
        f"with ContextOptions(invariant=True) {DECODE} computes fp8 batches on {arch}, and it does not have this "
        "option; q of 16 bits can have it"
    )
    nearest = next(each.default for each in dataclasses.fields(request) if each.name == field)
    raise Unsupported(field, describe(value) if hasattr(value, "shape") else value, reason, nearest)


def batch_problem(request: FlashForward, info: DeviceInfo) -> AttentionProblem:
    """The validated problem of an adopted request without gradients."""
    problem = masked_problem(request, forward_problem(request))
    if not info.invariant:
        return problem
    if request.pack_gqa is False:
        reason = "with ContextOptions(invariant=True) one kernel takes few rows and many, and it packs them"
        raise Unsupported("pack_gqa", False, reason, True)
    return dataclasses.replace(problem, invariant=True)


def forward_plan(request: FlashForward, device: Device, accumulate: Accumulate) -> Plan:
    problem, key = pose_forward(request, device)
    outputs = attention_outputs(problem, request.q.shape[:-1])
    mask = planned_mask(request, problem)
    return Plan(problem, key, program_for(problem, key, device), outputs, accumulate, mask)


def attention_output(template: Adopted | None, result: Any, outputs: Outputs) -> Sequence[AttentionOutput]:
    """The answer to one request. result: the caller's own ``out``, if it gave one."""
    out, lse = outputs["out"], outputs.get("lse")
    if template is not None:
        lse = None if lse is None else restore(lse, template)
    if result is None:
        result = out if template is None else restore(out, template)
    return (AttentionOutput(result, lse),)


def rounded_inputs(problem: AttentionProblem, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The operands as NumPy multiplies them: rounded to the precision in which the problem computes."""
    if problem.compute not in _ROUNDED:
        return inputs
    from gpu_actors.reference.low_precision import rounder

    step = rounder(_ROUNDED[problem.compute])
    return {**inputs, **{name: step(inputs[name]) for name in _MULTIPLIED if name in inputs}}


def _oracle(problem: AttentionProblem, accumulate: Accumulate, dropout_seed: int, inputs: Mapping[str, Any]) -> Outputs:
    # Imported here because only programs on a mock device compute in NumPy.
    from gpu_actors.reference.arguments import Arguments
    from gpu_actors.reference.forward import evaluate

    arguments = Arguments(problem=problem, dropout_seed=dropout_seed, **rounded_inputs(problem, inputs))
    result = evaluate(arguments, np.dtype(accumulate))
    return {"out": result.out, "lse": result.lse}
