"""Which kernel answers a request, and why, without a launch."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from gpu_actors.arrays.adoption import adopt_request
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.requests import BatchedDecode, FlashBackward, FlashForward, PagedForward
from gpu_actors.devices.interface import Device, DeviceInfo
from gpu_actors.errors import Unqualified, Unsupported
from gpu_actors.kernels.dispatch import FAMILIES, Barred, Verdict
from gpu_actors.kernels.few_rows import Packing, as_cache
from gpu_actors.kernels.option_table import Explanation, explain_problem
from gpu_actors.planning.backward import gradient_problem, pose_backward
from gpu_actors.planning.block_masks import masked_problem
from gpu_actors.planning.cached import adopt_cache_request, cached_problem, pose_cached
from gpu_actors.planning.forward import broadcast_batch, is_padded, pose_forward, weigh_forward
from gpu_actors.planning.seqused import to_varlen
from gpu_actors.validation.forward import check_seed, forward_problem

__all__ = ["explain_request", "key_of"]

Request: TypeAlias = FlashForward | FlashBackward | PagedForward | BatchedDecode


def key_of(request: Request, device: Device) -> DispatchKey:
    """The dispatch key of a caller's request. Raises `InvalidRequest`, and as `dispatch_key`."""
    return _key_of(_adopted(request, device.info), device)


def _key_of(adopted: Request, device: Device) -> DispatchKey:
    if isinstance(adopted, PagedForward | BatchedDecode):
        return pose_cached(adopted, device.info, device.barred)[1]
    if isinstance(adopted, FlashBackward):
        return pose_backward(adopted, device.info, device.barred)[1]
    return pose_forward(adopted, device.info, device.barred)[1]


def explain_request(request: Request, device: Device) -> Explanation:
    """Why a caller's request has the kernel that it has, or none. Raises `InvalidRequest`."""
    info, barred = device.info, device.barred
    adopted = _adopted(request, info)
    if isinstance(adopted, PagedForward | BatchedDecode):
        problem = cached_problem(adopted)
    elif isinstance(adopted, FlashBackward):
        problem = gradient_problem(adopted)
    else:
        problem = masked_problem(adopted, forward_problem(adopted))
    try:
        if not isinstance(adopted, FlashBackward | PagedForward | BatchedDecode):
            _, key, packing = weigh_forward(adopted, info, barred)
            return _explain_forward(problem, key, packing, barred)
        return explain_problem(problem, info.arch, _key_of(adopted, device), barred)
    except (Unsupported, Unqualified):
        return explain_problem(problem, info.arch, None, barred)


def _explain_forward(
    problem: AttentionProblem, key: DispatchKey, packing: Packing | None, barred: Barred | None
) -> Explanation:
    """As `explain_problem`. Kernels that the rule for packing leaves out name its numbers."""
    if packing is None:
        return explain_problem(problem, key.arch, key, barred)
    posed, chosen = (as_cache(problem), packing.key) if packing.taken else (problem, key)
    found = explain_problem(posed, key.arch, chosen, barred)
    others = {
        family.name
        for family in FAMILIES
        if family.direction == "forward" and ("dense" in (family.layouts or ())) == packing.taken
    }
    verdicts = (Verdict(v.family, False, packing.reason) if v.family in others else v for v in found.verdicts)
    return dataclasses.replace(found, verdicts=tuple(verdicts))


def _adopted(request: Request, info: DeviceInfo) -> Request:
    if isinstance(request, PagedForward | BatchedDecode):
        return adopt_cache_request(request, info.device_name)[0]
    check_seed(request.dropout_seed)
    adopted = broadcast_batch(adopt_request(request, info.device_name)[0])
    return to_varlen(adopted) if is_padded(adopted) else adopted
