"""Requests over caches: their signatures, how their plans are made, and how a request is bound to its plan.

`PagedForward` and `BatchedDecode` become launches with the same operands: q, cache_seqlens, if given cu_seqlens_q,
alibi_slopes, sinks, tree_mask (uint64 bits), the descales, q_positions and k_positions, and by layout

    paged     k_cache, v_cache (num_blocks, page_size, heads_kv, dim), block_table and perhaps cache_leftpad
    cache     k_cache, v_cache (batch, capacity, heads_kv, dim), perhaps cache_batch_idx and cache_leftpad
    pointers  k_cache.0, v_cache.0, k_cache.1, ... (heads_kv, max_seq, dim), per sequence; q (batch, 1, heads, dim)

Outputs are out, shaped like q, and lse, (batch, heads, rows) or (heads, total_q).
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpu_actors.arrays.adopt import Adopted, CallerNotes
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.arrays.request_arrays import adopt_request
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.requests import AttentionOutput, BatchedDecode, PagedForward, scalars_of
from gpu_actors.devices.interface import Device, DeviceInfo, Kernel, Launch, Outputs
from gpu_actors.fields import describe, expect, integer
from gpu_actors.planning.block_masks import launch_masked, mask_signature, masked_problem, planned_mask
from gpu_actors.planning.forward import attention_output
from gpu_actors.planning.plan import Accumulate, Plan, PlanCache, attention_outputs, described, program_for
from gpu_actors.planning.tma_eligibility import (
    alignments,
    array_families,
    between_chunks,
    device_key,
    invariant_key,
    key_for,
)
from gpu_actors.validation.forward import check_cu_seqlens, longest
from gpu_actors.validation.lengths import check_batch_idx, check_block_table, check_leftpad, check_lengths
from gpu_actors.validation.overlap import check_output_memory
from gpu_actors.validation.paged import check_bias, check_cache_positions, decode_problem, own_positions, paged_problem

__all__ = [
    "CacheRequest",
    "Decoding",
    "adopt_cache_request",
    "bind_cached",
    "cached_oracle",
    "cached_problem",
    "check_cached",
    "check_operands",
    "decoding_output",
    "pose_cached",
    "tree_bits",
]

CacheRequest: TypeAlias = PagedForward | BatchedDecode

_OPTIONAL = ("alibi_slopes", "sinks", "q_descale", "k_descale", "v_descale", "q_positions", "k_positions", "bias")
_PAGED = ("k_cache", "v_cache", "block_table", "cache_seqlens", "cu_seqlens_q", "cache_batch_idx", "cache_leftpad")
_PAGED_ARRAYS = ("q", *_PAGED, "tree_mask", *_OPTIONAL, "out")
_DECODE = ("q", "seq_lens", *_OPTIONAL, "out")
_PAGED_READ, _READ = _PAGED_ARRAYS[:-1], _DECODE[:-1]
_PLANS = 4096
_MAX_LENGTH = (1 << 31) - 1
_Values: TypeAlias = Callable[[CacheRequest], tuple[Any, ...]]
_scalars: _Values = operator.attrgetter(*scalars_of(BatchedDecode))
_paged_scalars: _Values = operator.attrgetter(*(name for name in scalars_of(PagedForward) if name != "block_mask"))
_arrays: _Values = operator.attrgetter(*_DECODE)
_paged_arrays: _Values = operator.attrgetter(*_PAGED_ARRAYS)


def adopt_cache_request(
    message: CacheRequest, device: str, notes: CallerNotes | None = None
) -> tuple[CacheRequest, Adopted | None]:
    """`adopt_request` for a request that may give one length for all sequences, as FlashAttention allows."""
    field = "cache_seqlens" if isinstance(message, PagedForward) else "seq_lens"
    length = getattr(message, field)
    if not isinstance(length, numbers.Integral):
        return adopt_request(message, device, notes)
    nothing: Any = None
    message, template = adopt_request(dataclasses.replace(message, **{field: nothing}), device, notes)
    ends = getattr(message, "cu_seqlens_q", None)
    shape: tuple[int, ...] = getattr(message.q if ends is None else ends, "shape", ())
    if shape:
        batch = max(0, shape[0] - (ends is not None))
        lengths: Any = np.full(batch, integer(field, length, 0, _MAX_LENGTH), np.int32)
        message = dataclasses.replace(message, **{field: lengths})
    return message, template


def signature(request: CacheRequest) -> Hashable:
    """What decides the plan of an adopted request. Hashing it raises TypeError if an option cannot be hashed."""
    paged = isinstance(request, PagedForward)
    scalars = (_paged_scalars if paged else _scalars)(request)
    # Equal values may be of other types: 1 == True == 1.0. A refused value must not find the plan of an accepted one.
    # The window is not checked yet, so it may be of any length.
    kinds = (*map(type, scalars), type(request.window_size[0]), type(request.window_size[1]))
    arrays = tuple(map(described, (_paged_arrays if paged else _arrays)(request)))
    if not isinstance(request, PagedForward):
        caches = _caches_described(request.k_caches), _caches_described(request.v_caches)
        return scalars, kinds, arrays, caches, between_chunks(_caches(request)), lengths_on_host(request)
    mask = None if request.block_mask is None else mask_signature(request.block_mask)
    apart = alignments(request.q, request.k_cache, request.v_cache, request.out)
    arrays = (*arrays, apart, lengths_on_host(request), mask)
    if request.cu_seqlens_q is None or request.max_seqlen_q is not None:
        return scalars, kinds, arrays
    # The longest sequence shapes the grid, so it belongs to the plan even if it has to be looked up.
    return scalars, kinds, arrays, longest("cu_seqlens_q", request.cu_seqlens_q)


def _caches_described(caches: Any) -> Hashable:
    # Every array of a list counts: validation found only the arrays of the planned list to be alike.
    return tuple(map(described, caches)) if isinstance(caches, list) else described(caches)


def _caches(request: BatchedDecode) -> tuple[Any, ...]:
    return (*_arrays_of(request.k_caches), *_arrays_of(request.v_caches))


def _arrays_of(caches: Any) -> list[Any]:
    return caches if isinstance(caches, list) else [caches]


def check_cached(plan: Plan, request: CacheRequest) -> None:
    """Check the contents of an adopted request's arrays, such as its lengths."""
    problem = plan.problem
    if isinstance(request, PagedForward):
        lengths, blocks, padding = request.cache_seqlens, request.k_cache.shape[0], request.cache_leftpad
        check_lengths("cache_seqlens", lengths, problem.seqlen_k)
        check_leftpad(padding, lengths, problem.seqlen_k)
        check_batch_idx(request.cache_batch_idx, blocks)
        if request.block_table is not None:
            check_block_table(request.block_table, lengths, problem.page_size, blocks, padding)
    else:
        capacities = [cache.shape[1] for cache in request.k_caches] if problem.own_layouts else problem.seqlen_k
        check_lengths("seq_lens", request.seq_lens, capacities)
    check_operands(plan, request)


def check_operands(plan: Plan, request: CacheRequest) -> None:
    """`check_cached` without lengths and block tables, which a KvCache makes itself."""
    problem = plan.problem
    if problem.bias_keys:
        check_bias(problem, request)
    if request.q_positions is not None or request.k_positions is not None:
        check_cache_positions(problem, request)
    if isinstance(request, PagedForward):
        if request.cu_seqlens_q is not None:
            check_cu_seqlens("cu_seqlens_q", request.cu_seqlens_q, problem.total_q, problem.seqlen_q)
        if request.tree_mask is not None:
            tree_bits(request.tree_mask)
    if request.out is not None:
        check_output_memory(request.out, _arrays_read(request))


def _arrays_read(request: CacheRequest) -> dict[str, Any]:
    """The arrays of a request that a launch reads, by name."""
    names = _PAGED_READ if isinstance(request, PagedForward) else _READ
    arrays = {name: array for name in names if (array := getattr(request, name)) is not None}
    if not isinstance(request, PagedForward):
        for side, caches in (("k", request.k_caches), ("v", request.v_caches)):
            arrays |= {f"{side}_cache.{index}": cache for index, cache in enumerate(caches)}
    return arrays


def bind_cached(plan: Plan, request: CacheRequest, kernels: tuple[Kernel, ...] = ()) -> Launch:
    """Return a launch of a plan on the arrays of an adopted request. `check_cached` must have accepted the request."""
    out = request.out
    into = out if out is None or isinstance(request, PagedForward) else _with_row(out)
    oracle = functools.partial(cached_oracle, plan.problem, plan.accumulate)
    if isinstance(request, PagedForward) and request.block_mask is not None:
        return launch_masked(plan, request.block_mask, operands(request), oracle, kernels, into=into)
    return plan.launch(operands(request), oracle, kernels, into=into)


def pose_cached(request: CacheRequest, device: Device) -> tuple[AttentionProblem, DispatchKey]:
    """Validate an adopted request and pick its kernels."""
    problem = cached_problem(request, device.info)
    if not isinstance(request, PagedForward):
        if problem.invariant:
            lists = {"k_caches": request.k_caches, "v_caches": request.v_caches}
            eligible = {name: array_families(_arrays_of(caches)) for name, caches in lists.items()}
            return problem, invariant_key(problem, device, eligible)
        return problem, device_key(problem, device, array_families(_caches(request)))
    tiles = ("q", "k_cache", "out") if problem.latent else ("q", "k_cache", "v_cache", "out")
    return problem, key_for(problem, device, request, tiles)


def cached_problem(request: CacheRequest, info: DeviceInfo) -> AttentionProblem:
    """The validated problem of an adopted request."""
    if isinstance(request, PagedForward):
        problem = masked_problem(request, paged_problem(request))
    else:
        problem = decode_problem(request)
    if info.invariant:
        # One split, because the bounds of several splits would move while the keys of a sequence grow.
        return dataclasses.replace(problem, invariant=True, num_splits=problem.num_splits or 1)
    return problem


def _cached_plan(request: CacheRequest, device: Device, accumulate: Accumulate, key: DispatchKey | None = None) -> Plan:
    """Make the plan of an adopted request, with the kernels of ``key`` if it is given."""
    if key is None:
        problem, key = pose_cached(request, device)
    else:
        problem = cached_problem(request, device.info)
    rows = request.q.shape[:-1] if isinstance(request, PagedForward) else (problem.batch, 1, problem.heads_q)
    program = program_for(problem, key, device, lengths_on_host(request))
    mask = planned_mask(request, problem) if isinstance(request, PagedForward) else None
    return Plan(problem, key, program, attention_outputs(problem, rows), accumulate, mask)


def lengths_on_host(request: CacheRequest) -> bool:
    """Whether the host can split the work of an adopted request. If lengths lie on the device, the kernels split it."""
    lengths = (
        (request.cache_seqlens, request.cu_seqlens_q) if isinstance(request, PagedForward) else (request.seq_lens,)
    )
    return all(array is None or isinstance(array, np.ndarray) for array in lengths)


class Decoding:
    """The plans of an actor's requests over caches. They outlive the actor's incarnations."""

    def __init__(self, device: Device, accumulate: Accumulate) -> None:
        self.plans: PlanCache[Plan] = PlanCache(_PLANS)
        self._make = functools.partial(_cached_plan, device=device, accumulate=accumulate)

    def plan(self, request: CacheRequest, key: DispatchKey | None = None) -> Plan:
        return self.plans.of(lambda: (signature(request), key), lambda: self._make(request, key=key))


def operands(request: CacheRequest) -> dict[str, Any]:
    """The launch's inputs by the names in this module's docstring."""
    inputs: dict[str, Any] = {}
    if isinstance(request, PagedForward):
        for name in ("q", *_PAGED):
            if getattr(request, name) is not None:
                inputs[name] = getattr(request, name)
        if request.tree_mask is not None:
            inputs["tree_mask"] = tree_bits(request.tree_mask)
    else:
        inputs["q"] = _with_row(request.q)
        for index, (k, v) in enumerate(zip(request.k_caches, request.v_caches, strict=True)):
            inputs[f"k_cache.{index}"], inputs[f"v_cache.{index}"] = k, v
        inputs["cache_seqlens"] = request.seq_lens.view(np.dtype(np.int32))
    for name in _OPTIONAL:
        if getattr(request, name) is not None:
            inputs[name] = getattr(request, name)
    if request.bias is not None and not isinstance(request, PagedForward):
        inputs["bias"] = request.bias[:, :, None]
    if isinstance(request, PagedForward) and request.latent_dim and request.k_descale is not None:
        inputs["v_descale"] = request.k_descale
    return inputs


def decoding_output(decode: bool, template: Adopted | None, result: Any, outputs: Outputs) -> Sequence[AttentionOutput]:
    """The answer to one request. decode: whether it is a `BatchedDecode`, whose output has no axis of rows."""
    if decode:
        out, lse = outputs["out"], outputs.get("lse")
        # The caller's own array has no axis of rows.
        outputs = {"out": out[:, 0] if result is None else out, "lse": None if lse is None else lse[..., 0]}
    return attention_output(template, result, outputs)


def _with_row(array: Any) -> Any:
    """View (batch, heads, dim) as (batch, 1, heads, dim)."""
    return array.inserted(1) if isinstance(array, DeviceArray) else array[:, None]


def tree_bits(mask: Any) -> Any:
    """A tree mask as uint64, one number per row."""
    if mask.dtype != np.bool_:
        return mask.view(np.dtype(np.uint64))
    expect(isinstance(mask, np.ndarray), "tree_mask", describe(mask), "of bool must lie on the host; give uint64 bits")
    weights = np.uint64(1) << np.arange(mask.shape[-1], dtype=np.uint64)
    return np.where(mask, weights, np.uint64(0)).sum(axis=-1, dtype=np.uint64)


def cached_oracle(problem: AttentionProblem, accumulate: Accumulate, inputs: Mapping[str, Any]) -> Outputs:
    """Compute a problem over a cache with NumPy: the reference for its kernels."""
    # Only a mock device computes here, so only its programs pay for the import.
    from gpu_actors.reference import gather_cache, gather_caches, gather_pages
    from gpu_actors.reference.paged import evaluate_cached

    lengths, padding = inputs["cache_seqlens"], inputs.get("cache_leftpad")
    if problem.latent:
        inputs = {**inputs, "v_cache": inputs["k_cache"][..., : problem.head_dim_v]}
    if problem.layout == "paged":
        cache = gather_pages(inputs["k_cache"], inputs["v_cache"], inputs["block_table"], lengths, padding)
    elif problem.layout == "cache":
        places = inputs.get("cache_batch_idx")
        cache = gather_cache(inputs["k_cache"], inputs["v_cache"], lengths, padding, places)
    else:
        k, v = ([inputs[f"{side}_cache.{index}"] for index in range(problem.batch)] for side in "kv")
        cache = gather_caches(k, v, lengths)
    ends = inputs.get("cu_seqlens_q")
    given = {name: inputs[name] for name in ("tree_mask", *_OPTIONAL) if name in inputs}
    if "k_positions" in given and "q_positions" not in given:
        rows = problem.seqlen_q if ends is None else np.diff(ends)
        own = own_positions(given["k_positions"], np.diff(cache.cu_seqlens_k).astype(np.int64), rows)
        given["q_positions"] = np.stack(own, axis=1)
    result = evaluate_cached(problem, inputs["q"], cache, ends, np.dtype(accumulate), **given)
    return {"out": result.out, "lse": result.lse}
