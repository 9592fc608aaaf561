"""Readiness: whether one context, or several workers together, take requests, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu_actors.fields import expect
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.handles.health import Health

__all__ = ["Readiness", "contexts_by_name", "readiness_of", "readiness_of_workers"]


class Readiness(NamedTuple):
    """state: a value of `Health.state`. reason: a sentence if the state is not "ready"."""

    ready: bool
    state: str
    reason: str


def contexts_by_name(context: GpuContext | Mapping[str, GpuContext]) -> Mapping[str, GpuContext]:
    """Workers by name, or one context as "". Raises `InvalidRequest` for no workers, or for a worker without a name."""
    if not isinstance(context, Mapping):
        return {"": context}
    expect(bool(context) and "" not in context, "context", context, "must be a context, or at least one worker by name")
    return context


def readiness_of(health: Health, overdue: str = "") -> Readiness:
    """The readiness of one context. overdue: why its device counts as stalled, or an empty string."""
    if health.ready and overdue:
        return Readiness(False, "stalled", overdue)
    return Readiness(health.ready, str(health.state), health.reason)


def readiness_of_workers(workers: Mapping[str, Readiness]) -> Readiness:
    """The readiness of a pool: ready while one worker is, and "degraded", with reasons, unless every state is "ready".

    If no worker is ready, the state is the workers' state if all agree, else "stalled" if one is stalled, else
    "degraded".
    """
    unwell = {name: one for name, one in workers.items() if not (one.ready and one.state == "ready")}
    if not unwell:
        return Readiness(True, "ready", "")
    reason = "; ".join(f"{name}: {one.reason or one.state}" for name, one in unwell.items())
    if any(one.ready for one in workers.values()):
        return Readiness(True, "degraded", reason)
    states = {one.state for one in workers.values()}
    state = states.pop() if len(states) == 1 else "stalled" if "stalled" in states else "degraded"
    return Readiness(False, state, reason)
