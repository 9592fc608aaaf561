"""Public helpers for tests of programs that use gpu_actors: faults, a clock, the oracle, problems and tolerances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu_actors.devices.fault_plan import Fault, FaultPlan
from gpu_actors.testing.clock import MockClock

if TYPE_CHECKING:
    from gpu_actors import reference
    from gpu_actors.reference.gradient_tolerance import GradientBounds, check_gradients, gradient_bounds
    from gpu_actors.reference.tolerance import Bounds, assert_output_close, check_output, forward_bounds
    from gpu_actors.testing.problems import BackwardCase, ForwardCase, random_backward, random_forward
    from gpu_actors.testing.replays import Replay, replay

__all__ = [
    "BackwardCase",
    "Bounds",
    "Fault",
    "FaultPlan",
    "ForwardCase",
    "GradientBounds",
    "MockClock",
    "Replay",
    "assert_output_close",
    "check_gradients",
    "check_output",
    "forward_bounds",
    "gradient_bounds",
    "random_backward",
    "random_forward",
    "reference",
    "replay",
]

# Names whose modules are slow to import. Only tests of numerical results need them.
_LAZY = {
    "BackwardCase": "gpu_actors.testing.problems",
    "GradientBounds": "gpu_actors.reference.gradient_tolerance",
    "check_gradients": "gpu_actors.reference.gradient_tolerance",
    "gradient_bounds": "gpu_actors.reference.gradient_tolerance",
    "random_backward": "gpu_actors.testing.problems",
    "Bounds": "gpu_actors.reference.tolerance",
    "ForwardCase": "gpu_actors.testing.problems",
    "assert_output_close": "gpu_actors.reference.tolerance",
    "check_output": "gpu_actors.reference.tolerance",
    "forward_bounds": "gpu_actors.reference.tolerance",
    "random_forward": "gpu_actors.testing.problems",
    "Replay": "gpu_actors.testing.replays",
    "replay": "gpu_actors.testing.replays",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "reference":
        return importlib.import_module("gpu_actors.reference")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
