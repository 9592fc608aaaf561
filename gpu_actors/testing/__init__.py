"""Public helpers for tests of programs that use gpu_actors: faults, a clock, the oracle, problems and tolerances."""

from gpu_actors import reference
from gpu_actors.testing.clock import MockClock
from gpu_actors.testing.faults import Fault, FaultPlan
from gpu_actors.testing.problems import ForwardCase, random_forward
from gpu_actors.testing.tolerance import Bounds, assert_output_close, check_output, forward_bounds

__all__ = [
    "Bounds",
    "Fault",
    "FaultPlan",
    "ForwardCase",
    "MockClock",
    "assert_output_close",
    "check_output",
    "forward_bounds",
    "random_forward",
    "reference",
]
