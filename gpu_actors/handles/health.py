"""Health: whether a context answers requests, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from gpu_actors.devices.interface import DeviceInfo
from gpu_actors.errors import Unqualified
from gpu_actors.runtime.children import Children

__all__ = ["Health", "examine"]

State: TypeAlias = Literal["ready", "degraded", "stalled", "draining", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a context answers, and why not. The context fails if a vital actor fails. All built-in actors are vital
    except the one for kernels of your own.

    state: "ready"; "degraded" (an actor is being restarted, has failed ``degraded_after`` times without a success, or
        is not vital and has stopped or is stuck; or a kernel is quarantined, and others answer in its place); "stalled"
        (the oldest launch, or the batch that a vital actor works on, has taken half the hang timeout); "draining";
        "failed" (the device context is lost, or a vital actor has stopped); "stopped".
    ready: whether to send requests here. True in the state "ready", and in "degraded" unless a vital actor keeps
        failing.
    reason: a sentence that says why the state is not "ready", else "".
    device: the context's device; ``device.kind`` is "cuda", "emulated" or "mock", ``device.name`` says more.
    actors: each actor's state. failures: each actor's launches or incarnations that failed since its last success.
    oldest_launch: seconds that the oldest unfinished launch has taken. None without one.
    quarantined: a sentence for each kernel that has failed its proof. It names kernel, problem and error.
    """

    state: State
    ready: bool
    reason: str
    generation: int
    actors: Mapping[str, str]
    oldest_launch: float | None
    device: DeviceInfo
    failures: Mapping[str, int]
    quarantined: tuple[str, ...] = ()


class _Verdict(NamedTuple):
    state: State
    ready: bool
    reason: str


def examine(children: Children, stopped: bool) -> Health:
    """The health of a context now. stopped: whether it has been closed. Never blocks."""
    oldest = children.oldest_launch()
    age = None if oldest is None else children.clock.now() - oldest
    actors = {name: cell.state for name, cell in children.cells.items()}
    # The actors change meanwhile, so everything below reads this one copy of their states.
    quarantined = () if children.kernels is None else tuple(map(_sentence, children.kernels.quarantine.failures()))
    verdict = _ended(children, stopped, actors) or _stalled(children, age) or _degraded(children, actors, quarantined)
    return Health(
        *(verdict or _Verdict("ready", True, "")),
        generation=children.generation,
        actors=actors,
        oldest_launch=age,
        device=children.device.info,
        failures={name: cell.progress.failures for name, cell in children.cells.items()},
        quarantined=quarantined,
    )


def _sentence(failure: Unqualified) -> str:
    return f"{failure}; shown by {failure.problem}" if failure.problem else str(failure)


def _ended(children: Children, stopped: bool, actors: Mapping[str, str]) -> _Verdict | None:
    if children.lost is not None:
        return _Verdict("failed", False, f"the device context is lost: {children.lost}")
    if children.failure is not None:
        return _Verdict("failed", False, str(children.failure))
    if stopped:
        return _Verdict("stopped", False, "the context is closed")
    if children.draining:
        return _Verdict("draining", False, "the context is draining")
    vital = children.vital()
    gone = [f"{name} has stopped" for name in vital if actors[name] in ("stopped", "failed")]
    return _Verdict("failed", False, ", ".join(gone)) if gone else None


def _stalled(children: Children, age: float | None) -> _Verdict | None:
    if age is not None and age > children.hang_timeout / 2:
        return _Verdict("stalled", False, f"a launch has not finished for {age:.1f} s")
    stuck = children.stuck()
    if any(name in stuck for name in children.vital()):
        return _Verdict("stalled", False, f"{', '.join(stuck)} cannot get on with its requests")
    return None


def _degraded(children: Children, actors: Mapping[str, str], quarantined: tuple[str, ...]) -> _Verdict | None:
    reasons = [f"{name} is {state}" for name, state in actors.items() if state != "running"]
    reasons += [f"{name} cannot get on with its requests" for name in children.stuck()]
    failing = {name: cell.progress.reason for name, cell in children.cells.items() if cell.progress.failing}
    reasons += [f"{name} {reason}" for name, reason in failing.items()]
    reasons += quarantined
    ready = not any(name in failing for name in children.vital())
    return _Verdict("degraded", ready, ", ".join(reasons)) if reasons else None
