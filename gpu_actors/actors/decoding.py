"""DecodingPlan: everything about a request over a cache that does not depend on its data.

`PagedForward` and `BatchedDecode` become launches with the same operands: q, cache_seqlens, where they are given
cu_seqlens_q, alibi_slopes, sinks, tree_mask (uint64 bits) and the descales, and by layout

    paged     k_cache, v_cache (num_blocks, page_size, heads_kv, dim) and block_table
    cache     k_cache, v_cache (batch, capacity, heads_kv, dim)
    pointers  k_cache.0, v_cache.0, k_cache.1, ... (heads_kv, max_seq, dim), one a sequence; q (batch, 1, heads, dim)

Outputs are out, shaped like q, and lse, (batch, heads, rows) or (heads, total_q).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from gpu_actors.actors.attention import attention_output
from gpu_actors.actors.reach import alignments, reaching_families
from gpu_actors.devices.interface import Device, Kernel, Launch, Outputs, OutputSpec
from gpu_actors.interop.arrays import Adopted, CallerStreams, adopt, check_device
from gpu_actors.kernels.decode_launch import DecodeLaunch, decode_launch
from gpu_actors.kernels.decode_variants import DECODE
from gpu_actors.kernels.dispatch import FAMILIES, KernelFamily, answering_key
from gpu_actors.kernels.prefill_launch import PrefillLaunch
from gpu_actors.kernels.sm90_arguments import EncodeTensorMap
from gpu_actors.plans import PlanCache
from gpu_actors.problem import AttentionProblem, DispatchKey
from gpu_actors.requests import AttentionOutput, BatchedDecode, PagedForward
from gpu_actors.validation import (
    check_block_table,
    check_cu_seqlens,
    check_lengths,
    check_output_memory,
    decode_problem,
    paged_problem,
)
from gpu_actors.validation.fields import describe, expect

__all__ = [
    "CacheLaunch",
    "CacheRequest",
    "Decoding",
    "DecodingPlan",
    "adopt_cache_request",
    "cache_problem",
    "decoding_output",
    "decoding_plan",
    "tree_bits",
]

CacheRequest: TypeAlias = PagedForward | BatchedDecode
CacheLaunch: TypeAlias = DecodeLaunch | PrefillLaunch

_OPTIONAL = ("alibi_slopes", "sinks", "q_descale", "k_descale", "v_descale")
_PAGED = ("q", "k_cache", "v_cache", "block_table", "cache_seqlens", "cu_seqlens_q", "tree_mask", *_OPTIONAL, "out")
_DECODE = ("q", "seq_lens", *_OPTIONAL, "out")
_CACHES = ("k_caches", "v_caches")
_PLANS = 4096
_SCALARS = ("window_size", "softmax_scale", "softcap", "sink_tokens", "num_splits", "return_lse")
_PAGED_SCALARS = (*_SCALARS, "causal", "max_seqlen_q", "chunk_index", "num_chunks")


def adopt_cache_request(
    request: CacheRequest, device: str, streams: CallerStreams | None = None
) -> tuple[CacheRequest, Adopted | None]:
    """The request over arrays that this package can read, and what its q was if that was no NumPy array.

    device, streams and errors: as for `adopt_arrays`.
    """
    changes: dict[str, Any] = {}
    like: Adopted | None = None

    def one(array: Any, name: str) -> Any:
        nonlocal like
        if type(array) is np.ndarray:
            return array
        adopted = adopt(array, name, streams)
        check_device(adopted, name, device)
        if name == "q":
            like = adopted
        return adopted.array

    for name in _PAGED if isinstance(request, PagedForward) else _DECODE:
        array = getattr(request, name)
        if array is not None and type(array) is not np.ndarray:
            changes[name] = one(array, name)
    if isinstance(request, BatchedDecode):
        for name in _CACHES:
            caches = getattr(request, name)
            if isinstance(caches, list | tuple):
                changes[name] = [one(cache, f"{name}[{index}]") for index, cache in enumerate(caches)]
            else:
                changes[name] = one(caches, name)
    return (dataclasses.replace(request, **changes) if changes else request), like


def signature(request: CacheRequest) -> Hashable:
    """What decides the plan of an adopted request. Hashing it raises TypeError where an option cannot be hashed."""
    paged = isinstance(request, PagedForward)
    scalars = tuple(getattr(request, name) for name in (_PAGED_SCALARS if paged else _SCALARS))
    # Equal is not alike: 1 == True == 1.0, and what validation refuses must not find the plan of what it accepts.
    kinds = tuple(map(type, scalars)) + tuple(map(type, request.window_size))
    arrays = tuple(_described(getattr(request, name)) for name in (_PAGED if paged else _DECODE))
    if not isinstance(request, PagedForward):
        return scalars, kinds, arrays, _caches_described(request.k_caches), _caches_described(request.v_caches)
    arrays = (*arrays, alignments(request.q, request.k_cache, request.v_cache, request.out))
    if request.cu_seqlens_q is None or request.max_seqlen_q is not None:
        return scalars, kinds, arrays
    # The longest sequence shapes the grid, so it belongs to the plan even where it has to be looked up.
    return scalars, kinds, arrays, paged_problem(request).seqlen_q


def _described(array: Any) -> Hashable:
    return None if array is None else (array.shape, array.strides, array.dtype)


def _caches_described(caches: Any) -> Hashable:
    # Every array of a list: that they are alike is what validation found out, and only of these.
    return tuple(map(_described, caches)) if isinstance(caches, list) else _described(caches)


@dataclass(frozen=True, slots=True)
class DecodingPlan:
    """A problem over a cache with the kernel that answers it.

    outputs: what a launch produces when the caller gives no ``out``. multiprocessors: of the device, if known.
    encode: makes the device's tensor maps.
    """

    problem: AttentionProblem
    key: DispatchKey
    accumulate: Literal["float64", "float32"]
    outputs: Mapping[str, OutputSpec]
    multiprocessors: int | None
    encode: EncodeTensorMap

    def launching(self, request: CacheRequest) -> CacheLaunch | None:
        """The kernels that answer an adopted request, or None where none does. They split the work themselves where its
        lengths lie on the device."""
        if self.key.kernel == "forward_sm90":
            return PrefillLaunch(self.problem, self.key, self.multiprocessors, self.encode)
        if self.key.kernel != DECODE:
            return None
        lengths: tuple[Any, ...]
        if isinstance(request, PagedForward):
            lengths = (request.cache_seqlens, request.cu_seqlens_q)
        else:
            lengths = (request.seq_lens,)
        planned = all(array is None or isinstance(array, np.ndarray) for array in lengths)
        return decode_launch(self.problem, self.key, self.multiprocessors, planned)

    def check(self, request: CacheRequest) -> None:
        """Check what depends on the data of an adopted request. Raises `InvalidRequest`."""
        problem = self.problem
        if isinstance(request, PagedForward):
            check_lengths("cache_seqlens", request.cache_seqlens, problem.seqlen_k)
            if request.cu_seqlens_q is not None:
                check_cu_seqlens("cu_seqlens_q", request.cu_seqlens_q, problem.total_q, problem.seqlen_q)
            if request.block_table is not None:
                blocks = request.k_cache.shape[0]
                check_block_table(request.block_table, request.cache_seqlens, problem.page_size, blocks)
            if request.tree_mask is not None:
                tree_bits(request.tree_mask)
        else:
            check_lengths("seq_lens", request.seq_lens, problem.seqlen_k)
        if request.out is not None:
            check_output_memory(request.out, operands(request))

    def bind(self, request: CacheRequest, kernels: tuple[Kernel, ...] = ()) -> Launch:
        """A launch of this plan on the arrays of an adopted request that `check` let pass.

        kernels: those of `launching`, loaded; empty where the device runs none.
        """
        problem = self.problem
        inputs = operands(request)
        outputs = self.outputs
        if request.out is not None:
            into = request.out if isinstance(request, PagedForward) else request.out[:, None]
            outputs = {**outputs, "out": dataclasses.replace(outputs["out"], into=into)}
        launch = Launch(self.key, inputs, outputs, functools.partial(_oracle, problem, self.accumulate))
        launching = self.launching(request) if kernels else None
        if launching is not None:
            launch.steps, launch.scratch = launching.steps(kernels), launching.scratch()
            launch.inputs = inputs | launching.plan(inputs["cache_seqlens"], inputs.get("cu_seqlens_q"))
        return launch


def decoding_plan(request: CacheRequest, device: Device, accumulate: Literal["float64", "float32"]) -> DecodingPlan:
    """Validate an adopted request and pick its kernel. Raises `InvalidRequest` and `Unsupported`."""
    info = device.info
    problem = cache_problem(request)
    key = answering_key(problem, info.arch, info.runs_kernels, cache_families(request))
    rows = request.q.shape[:-1] if isinstance(request, PagedForward) else (problem.batch, 1, problem.heads_q)
    outputs = {"out": OutputSpec((*rows, problem.head_dim_v), problem.out_dtype)}
    if problem.return_lse:
        packed = (problem.heads_q, problem.total_q)
        shape = packed if problem.varlen_q else (problem.batch, problem.heads_q, problem.seqlen_q)
        outputs["lse"] = OutputSpec(shape, "float32")
    return DecodingPlan(problem, key, accumulate, outputs, info.multiprocessors, device.encode_tensor_map)


def cache_families(request: CacheRequest) -> tuple[KernelFamily, ...]:
    """The kernels to choose from for an adopted request."""
    if isinstance(request, BatchedDecode):
        return FAMILIES
    return reaching_families({name: getattr(request, name) for name in ("q", "k_cache", "v_cache", "out")})


def cache_problem(request: CacheRequest) -> AttentionProblem:
    """Validate an adopted request. Raises `InvalidRequest` and `Unsupported`."""
    return paged_problem(request) if isinstance(request, PagedForward) else decode_problem(request)


class Decoding:
    """The plans of an actor's requests over caches; outlives its incarnations."""

    def __init__(self, device: Device, place: str, accumulate: Literal["float64", "float32"]) -> None:
        self.place = place
        self.plans: PlanCache[DecodingPlan] = PlanCache(_PLANS)
        self._make = functools.partial(decoding_plan, device=device, accumulate=accumulate)

    def plan(self, request: CacheRequest) -> DecodingPlan:
        """The plan of an adopted request. Raises `InvalidRequest` and `Unsupported`."""
        try:
            key = signature(request)
            plan = self.plans.find(key)
        except Exception:
            # An option that cannot be hashed or an operand that is no array: validation names it.
            return self._make(request)
        if plan is None:
            plan = self._make(request)
            self.plans.add(key, plan)
        return plan

    def merged_plan(self, request: CacheRequest, key: DispatchKey) -> DecodingPlan:
        """The plan of a request that was put together from others, for the kernels of ``key`` that they all have."""
        plan = self.plan(request)
        return plan if plan.key == key else dataclasses.replace(plan, key=key)


def operands(request: CacheRequest) -> dict[str, Any]:
    """The launch's inputs by name, as the module says. Raises `InvalidRequest` for what lies where it cannot."""
    inputs: dict[str, Any] = {}
    if isinstance(request, PagedForward):
        for name in ("q", "k_cache", "v_cache", "block_table", "cache_seqlens", "cu_seqlens_q"):
            if getattr(request, name) is not None:
                inputs[name] = getattr(request, name)
        if request.tree_mask is not None:
            inputs["tree_mask"] = tree_bits(request.tree_mask)
    else:
        inputs["q"] = request.q[:, None]
        for index, (k, v) in enumerate(zip(request.k_caches, request.v_caches, strict=True)):
            inputs[f"k_cache.{index}"], inputs[f"v_cache.{index}"] = k, v
        inputs["cache_seqlens"] = request.seq_lens.view(np.dtype(np.int32))
    for name in _OPTIONAL:
        if getattr(request, name) is not None:
            inputs[name] = getattr(request, name)
    return inputs


def decoding_output(decode: bool, like: Adopted | None, result: Any, outputs: Outputs) -> Sequence[AttentionOutput]:
    """The answer to one request. decode: a `BatchedDecode`, whose output has no axis of rows."""
    if decode:
        lse = outputs.get("lse")
        outputs = {"out": outputs["out"][:, 0], "lse": None if lse is None else lse[..., 0]}
    return attention_output(like, result, outputs)


def tree_bits(mask: Any) -> Any:
    """A tree mask as uint64, one number a row."""
    if mask.dtype != np.bool_:
        return mask.view(np.dtype(np.uint64))
    expect(isinstance(mask, np.ndarray), "tree_mask", describe(mask), "of bool must lie on the host; give uint64 bits")
    weights = np.uint64(1) << np.arange(mask.shape[-1], dtype=np.uint64)
    return np.where(mask, weights, np.uint64(0)).sum(axis=-1, dtype=np.uint64)


def _oracle(problem: AttentionProblem, accumulate: Literal["float64", "float32"], inputs: Mapping[str, Any]) -> Outputs:
    # Only a mock device computes here, so only its programs pay for the import.
    from gpu_actors.reference import gather_cache, gather_caches, gather_pages, paged_attention_forward

    lengths = inputs["cache_seqlens"]
    if problem.layout == "paged":
        cache = gather_pages(inputs["k_cache"], inputs["v_cache"], inputs["block_table"], lengths)
    elif problem.layout == "cache":
        cache = gather_cache(inputs["k_cache"], inputs["v_cache"], lengths)
    else:
        k, v = ([inputs[f"{side}_cache.{index}"] for index in range(problem.batch)] for side in "kv")
        cache = gather_caches(k, v, lengths)
    names = ("cu_seqlens_q", "tree_mask", *_OPTIONAL)
    reference = paged_attention_forward(
        inputs["q"],
        cache,
        **{name: inputs[name] for name in names if name in inputs},
        causal=problem.causal,
        window_size=problem.window,
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        sink_tokens=problem.sink_tokens,
        accumulate=accumulate,
    )
    return {"out": reference.out, "lse": reference.lse}
