"""Which kernel answers a request, and why, without a launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from gpu_actors.arrays.request_arrays import adopt_request
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.requests import BatchedDecode, FlashBackward, FlashForward, PagedForward
from gpu_actors.devices.interface import Device, DeviceInfo
from gpu_actors.errors import Unqualified, Unsupported
from gpu_actors.kernels.dispatch import FAMILIES, Barred, Verdict
from gpu_actors.kernels.few_rows import Packing, as_cache
from gpu_actors.kernels.option_table import Explanation, explain_problem
from gpu_actors.planning.backward import gradient_problem, pose_backward
from gpu_actors.planning.cached import adopt_cache_request, cached_problem, pose_cached
from gpu_actors.planning.forward import batch_problem, broadcast_batch, is_padded, pose_forward, weigh_forward
from gpu_actors.planning.seqused import to_varlen
from gpu_actors.validation.forward import check_seed

__all__ = ["explain_request", "key_of"]

Request: TypeAlias = FlashForward | FlashBackward | PagedForward | BatchedDecode


def key_of(request: Request, device: Device) -> DispatchKey:
    """The dispatch key of a caller's request."""
    return _key_of(_adopted(request, device.info), device)


def _key_of(adopted: Request, device: Device) -> DispatchKey:
    if isinstance(adopted, PagedForward | BatchedDecode):
        return pose_cached(adopted, device)[1]
    if isinstance(adopted, FlashBackward):
        return pose_backward(adopted, device)[1]
    return pose_forward(adopted, device)[1]


def explain_request(request: Request, device: Device) -> Explanation:
    """Why a caller's request has the kernel that it has, or none."""
    info, barred = device.info, device.barred
    adopted = _adopted(request, info)
    if isinstance(adopted, PagedForward | BatchedDecode):
        problem = cached_problem(adopted, info)
    elif isinstance(adopted, FlashBackward):
        problem = gradient_problem(adopted, info)
    else:
        problem = batch_problem(adopted, info)
    try:
        if not isinstance(adopted, FlashBackward | PagedForward | BatchedDecode):
            _, key, packing = weigh_forward(adopted, device)
            return _explain_forward(problem, key, packing, barred)
        return explain_problem(problem, info.arch, _key_of(adopted, device), barred)
    except (Unsupported, Unqualified) as error:
        found, refused = explain_problem(problem, info.arch, None, barred), str(error)
        # No kernel takes the request, or the only kernel of an invariant context cannot read an operand where it lies.
        return _changed(found, lambda verdict: refused if verdict.taken else None)


def _explain_forward(
    problem: AttentionProblem, key: DispatchKey, packing: Packing | None, barred: Barred | None
) -> Explanation:
    """Like `explain_problem`. Kernels that the rule for packing excludes have its numbers as their reason."""
    as_a_cache = key.decoding if packing is None else packing.taken
    if packing is None and not as_a_cache:
        return explain_problem(problem, key.arch, key, barred)
    posed = as_cache(problem) if as_a_cache else problem
    chosen = key if packing is None or not packing.taken else packing.key
    if packing is None:
        reason = f"invariant=True: rows of a batch have the bits that {key.kernel} gives them over a cache"
    else:
        reason = packing.reason
    others = {
        family.name
        for family in FAMILIES
        if family.direction == "forward" and ("dense" in (family.layouts or ())) == as_a_cache
    }
    found = explain_problem(posed, key.arch, chosen, barred)
    return _changed(found, lambda verdict: reason if verdict.family in others else None)


def _changed(found: Explanation, reason: Callable[[Verdict], str | None]) -> Explanation:
    """Change verdicts to a refusal, if ``reason`` returns a sentence that says why."""
    verdicts = ((verdict, reason(verdict)) for verdict in found.verdicts)
    changed = (v if why is None else Verdict(v.family, False, why) for v, why in verdicts)
    return dataclasses.replace(found, verdicts=tuple(changed))


def _adopted(request: Request, info: DeviceInfo) -> Request:
    if isinstance(request, PagedForward | BatchedDecode):
        return adopt_cache_request(request, info.device_name)[0]
    check_seed(request.dropout_seed)
    adopted = broadcast_batch(adopt_request(request, info.device_name)[0])
    return to_varlen(adopted) if is_padded(adopted) else adopted
