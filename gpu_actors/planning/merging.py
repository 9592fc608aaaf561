"""Merges several requests over caches: which may share a launch, the merged request, and the results of each.

Merging joins small arrays: rows of q, tables and lengths. The launch itself joins those that lie on the device. Pools
are never copied, and results are views of the merged outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from gpu_actors.arrays.device_array import DeviceArray, Joined
from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.requests import PagedForward
from gpu_actors.devices.interface import Outputs
from gpu_actors.planning.cached import CacheRequest, tree_bits
from gpu_actors.planning.plan import Plan

__all__ = [
    "ends_of",
    "join",
    "joining_kind",
    "memory_of",
    "merge",
    "merge_key",
    "merge_tables",
    "split_outputs",
]

# Fields with an entry for each row or each sequence. The other fields hold one value for the whole launch.
_ROWS = ("q", "tree_mask")
_SEQUENCES = (
    "cache_seqlens",
    "cache_leftpad",
    "seq_lens",
    "q_descale",
    "k_descale",
    "v_descale",
    "q_positions",
    "k_positions",
)


def merge_key(plan: Plan, request: CacheRequest) -> Hashable | None:
    """Requests with equal keys may share a launch. None: the request needs its own launch.

    None is returned for results that go into the caller's array, for operands on a device with gaps or cu_seqlens_q on
    a device, for a dense cache, which would have to be copied next to others, and for arrays of several layouts.
    """
    problem = plan.problem
    if request.out is not None or problem.layout == "cache" or problem.own_layouts or plan.vacuous:
        return None
    if request.bias is not None or getattr(request, "block_mask", None) is not None:
        return None  # these would have to be joined along keys, too
    slopes = request.alibi_slopes
    if isinstance(getattr(request, "cu_seqlens_q", None), DeviceArray):
        return None
    together = [getattr(request, name, None) for name in ("block_table", *_ROWS, *_SEQUENCES)]
    kinds = [joining_kind(array) for array in (*together, slopes if problem.alibi == "batch" else None)]
    if "apart" in kinds:
        return None
    caches: Hashable
    if isinstance(request, PagedForward):
        caches = (memory_of(request.k_cache), memory_of(request.v_cache))
    else:
        k, v = request.k_caches[0], request.v_caches[0]
        caches = (k.strides, v.strides, type(k) is DeviceArray)
    shared = (memory_of(request.sinks), memory_of(slopes) if problem.alibi == "heads" else None)
    dtypes = tuple(None if (array := getattr(request, name, None)) is None else array.dtype for name in _SEQUENCES)
    return plan.key, _without_sizes(problem), caches, shared, dtypes, *kinds


@functools.lru_cache(maxsize=4096)
def _without_sizes(problem: AttentionProblem) -> AttentionProblem:
    rows = 0 if problem.varlen_q else problem.seqlen_q
    keys = 0 if problem.layout == "paged" else problem.seqlen_k
    return dataclasses.replace(problem, batch=0, seqlen_q=rows, seqlen_k=keys, total_q=0, total_k=0)


def memory_of(array: Any) -> Hashable:
    """A key that is equal for arrays in the same memory that are read in the same way."""
    if array is None:
        return None
    address = array.address if isinstance(array, DeviceArray) else array.__array_interface__["data"][0]
    return address, array.shape, array.strides, array.dtype


def joining_kind(array: Any) -> Hashable:
    """Arrays of one kind can be joined: those on the host, and contiguous ones on a device in one stream's order.

    "apart" for an array that cannot.
    """
    if not isinstance(array, DeviceArray):
        return array is not None
    # The joined array lies in memory that the stream's library reuses in the order of that stream.
    return (array.shape[1:], array.stream) if array.contiguous else "apart"


def join(arrays: Sequence[Any]) -> Any:
    """Arrays of one kind, joined along the first axis. The launch copies those that lie on a device."""
    if isinstance(arrays[0], DeviceArray):
        return Joined(tuple(arrays))
    return np.concatenate(arrays)


def merge(requests: Sequence[CacheRequest]) -> CacheRequest:
    """Return one request that asks for all that several ask for, in their order. Their `merge_key`s must be equal."""
    first = requests[0]
    changes: dict[str, Any] = {"q": join([request.q for request in requests])}
    for name in _SEQUENCES:
        if getattr(first, name, None) is not None:
            changes[name] = join([getattr(request, name) for request in requests])
    if first.alibi_slopes is not None and first.alibi_slopes.ndim == 2:
        changes["alibi_slopes"] = join([request.alibi_slopes for request in requests])
    if isinstance(first, PagedForward):
        paged = [request for request in requests if isinstance(request, PagedForward)]
        if first.tree_mask is not None:
            changes["tree_mask"] = join([tree_bits(request.tree_mask) for request in paged])
        if first.block_table is not None:
            changes["block_table"] = merge_tables([request.block_table for request in paged])
        if first.cu_seqlens_q is not None:
            bounds: list[Any] = [request.cu_seqlens_q for request in paged]
            changes["cu_seqlens_q"] = ends_of(np.concatenate([np.diff(ends) for ends in bounds]))
            # Limited as in each request's plan. Otherwise the greatest maximum may need the tiles of another kernel.
            longest = [
                None if request.max_seqlen_q is None else min(request.max_seqlen_q, max(1, len(request.q)))
                for request in paged
            ]
            changes["max_seqlen_q"] = None if None in longest else max(longest, key=int)  # type: ignore[arg-type]
    else:
        for name in ("k_caches", "v_caches"):
            changes[name] = [cache for request in requests for cache in getattr(request, name)]
    return dataclasses.replace(first, **changes)


def merge_tables(tables: Sequence[Any]) -> Any:
    """Block tables one below the other. The columns that a narrower table lacks are never read."""
    if isinstance(tables[0], DeviceArray):
        return join(tables)
    width = max(table.shape[1] for table in tables)
    merged = np.full((sum(len(table) for table in tables), width), -1, np.int32)
    start = 0
    for table in tables:
        merged[start : start + len(table), : table.shape[1]] = table
        start += len(table)
    return merged


def ends_of(counts: Any) -> Any:
    """The cu_seqlens, int32 (batch + 1,), of sequences with ``counts`` rows, (batch,)."""
    ends = np.zeros(len(counts) + 1, np.int32)
    np.add.accumulate(counts, dtype=np.int32, out=ends[1:])
    return ends


def split_outputs(requests: Sequence[CacheRequest], outputs: Outputs) -> list[Outputs]:
    out, lse = outputs["out"], outputs.get("lse")
    packed = isinstance(requests[0], PagedForward) and requests[0].cu_seqlens_q is not None
    shares: list[Outputs] = []
    start = 0
    for request in requests:
        # The first axis of q and out is that of sequences, or of packed rows; lse has heads before packed rows.
        part = slice(start, start + len(request.q))
        start = part.stop
        shares.append({"out": out[part], "lse": None if lse is None else lse[:, part] if packed else lse[part]})
    return shares
