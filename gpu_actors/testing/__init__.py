"""Public helpers for tests of programs that use gpu_actors: faults, a clock, tolerances and the oracle."""

from gpu_actors import reference
from gpu_actors.testing.clock import MockClock
from gpu_actors.testing.faults import Fault, FaultPlan

__all__ = ["Fault", "FaultPlan", "MockClock", "reference"]
