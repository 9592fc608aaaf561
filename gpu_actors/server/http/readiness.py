"""Verdict: whether something takes requests, and why not; of one context, and of several workers together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu_actors.handles.health import Health

__all__ = ["Verdict", "verdict_of", "verdict_of_workers"]


class Verdict(NamedTuple):
    """state: as `Health.state`. reason: a sentence where the state is not "ready"."""

    ready: bool
    state: str
    reason: str


def verdict_of(health: Health, missing: str = "") -> Verdict:
    """The verdict on one context. missing: why progress of its device is not proven, or an empty string."""
    if health.ready and missing:
        return Verdict(False, "stalled", missing)
    return Verdict(health.ready, str(health.state), health.reason)


def verdict_of_workers(workers: Mapping[str, Verdict]) -> Verdict:
    """The verdict on a pool: ready while one worker is, and "degraded" with the reasons unless all of them are well.

    If no worker takes requests, the state is theirs where all agree, else "stalled" if one of them is, else "degraded".
    """
    unwell = {name: one for name, one in workers.items() if not (one.ready and one.state == "ready")}
    if not unwell:
        return Verdict(True, "ready", "")
    reason = "; ".join(f"{name}: {one.reason or one.state}" for name, one in unwell.items())
    if any(one.ready for one in workers.values()):
        return Verdict(True, "degraded", reason)
    states = {one.state for one in workers.values()}
    state = states.pop() if len(states) == 1 else "stalled" if "stalled" in states else "degraded"
    return Verdict(False, state, reason)
