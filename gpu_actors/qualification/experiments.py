"""The experiments of any variant of the package's own kernels."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Device
from gpu_actors.kernels.append import AppendProblem
from gpu_actors.kernels.merge import MergeProblem
from gpu_actors.qualification.attention import attention_experiments, proves_alone
from gpu_actors.qualification.experiment import Experiment
from gpu_actors.qualification.rows import append_experiments, copy_experiments, merge_experiments

__all__ = ["experiments_of", "is_proved"]


def is_proved(variant: Variant) -> bool:
    """Whether a variant has experiments. This check is cheap; making the experiments is not."""
    example = variant.example
    if variant.own is not None:
        return False
    if isinstance(example, DispatchKey):
        return proves_alone(example)
    return isinstance(example, AppendProblem | MergeProblem) or variant.kernel == "copy_pages"


def experiments_of(variant: Variant, device: Device) -> Iterator[Experiment]:
    """Yield the experiments that prove a variant on a device; none if it is not `is_proved`."""
    if not is_proved(variant):
        return
    if isinstance(variant.example, DispatchKey):
        yield from attention_experiments(variant, device)
    elif isinstance(variant.example, AppendProblem):
        yield from append_experiments(variant)
    elif isinstance(variant.example, MergeProblem):
        yield from merge_experiments(variant)
    else:
        yield from copy_experiments(variant)
