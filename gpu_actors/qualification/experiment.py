"""Experiment: one launch of a kernel on a small problem, and how far its results may be from the oracle's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Event, Kernels, Launch, OutputSpec, ScratchSpec, Step, Stream
from gpu_actors.errors import LaunchError
from gpu_actors.kernels.append import AppendProblem
from gpu_actors.kernels.merge import MergeProblem

__all__ = ["Experiment", "Problem", "ProofFailed", "ProofTimeout", "poisoned", "random_of"]

Problem: TypeAlias = AttentionProblem | AppendProblem | MergeProblem

_FIRST_LOOK, _LONGEST_LOOK = 50e-6, 2e-3  # seconds between two checks of a launch


class ProofFailed(Exception):
    """A kernel has computed an experiment wrongly. outputs: its outputs, by name."""

    def __init__(self, message: str, outputs: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.outputs = outputs


class ProofTimeout(LaunchError):
    """The launch of an experiment has not finished in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A launch on arrays of the host, and a check of the arrays that it writes.

    key: the launch's, None for kernels without a key. variants: those of its kernels, in order.
    inputs, written: arrays by name; in ``written``, the contents before the launch, such as poison.
    steps: returns the steps for the loaded kernels. answer: returns the oracle's contents of ``written``.
    check: raises AssertionError, which says how far written arrays are from the oracle's.
    repeatable: whether two launches write the same bits.
    """

    problem: Problem
    key: DispatchKey | None
    variants: tuple[Variant, ...]
    inputs: Mapping[str, Any]
    written: Mapping[str, Any]
    steps: Callable[[Kernels], tuple[Step, ...]]
    answer: Callable[[], Mapping[str, Any]]
    check: Callable[[Mapping[str, Any]], object]
    scratch: Mapping[str, ScratchSpec] = field(default_factory=dict)
    repeatable: bool = True

    @property
    def text(self) -> str:
        """The problem as a line of Python."""
        return self.problem.repro() if isinstance(self.problem, AttentionProblem) else repr(self.problem)

    def takes(self, arrays: Mapping[str, Any]) -> bool:
        """Whether ``arrays`` are bitwise equal to the launch's own arrays."""
        own = {**self.inputs, **self.written}
        return own.keys() == arrays.keys() and all(_bits(own[name]) == _bits(array) for name, array in arrays.items())

    def prove(self, stream: Stream, kernels: Kernels, limit: float) -> None:
        """Launch the experiment and compare it with the oracle. If it is repeatable, compare a second launch's bits.

        kernels: those of `variants`, or none if the device runs none. limit: seconds for each launch.
        Raises `ProofFailed`, `ProofTimeout`, and the errors of `Event.wait`.
        """
        first = self.launch(stream, kernels, limit)
        try:
            with np.errstate(all="ignore"):  # a wrong result may be any number
                self.check(first)
        except AssertionError as error:
            raise ProofFailed(str(error).strip(), first) from None
        if not self.repeatable:
            return
        second = self.launch(stream, kernels, limit)
        for name, array in first.items():
            if _bits(array) != _bits(second[name]):
                raise ProofFailed(f"{name} has other bits in a second launch of the same arrays", second)

    def launch(self, stream: Stream, kernels: Kernels, limit: float) -> dict[str, Any]:
        """Return the arrays that one launch writes."""
        written = {name: array.copy() for name, array in self.written.items()}
        if kernels:
            inputs, names = {**self.inputs, **written}, tuple(written)
            launch = Launch(self.key, inputs, {}, lambda _: {}, self.steps(kernels), self.scratch, returned=names)
            _await(stream.launch(launch), limit)
            return written
        outputs = {name: OutputSpec(array.shape, array.dtype.name) for name, array in written.items()}
        event = stream.launch(Launch(self.key, self.inputs, outputs, lambda _: self.answer()))
        _await(event, limit)
        return {name: np.asarray(event.outputs[name]) for name in written}


def _await(event: Event, limit: float) -> None:
    end, pause = time.monotonic() + limit, _FIRST_LOOK
    # A wait for the event itself has no time limit, and nothing could end it while a kernel hangs.
    while not event.done():
        if time.monotonic() > end:
            raise ProofTimeout(f"has not ended within {limit:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_LOOK)
    event.wait()


def _bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def poisoned(shape: Sequence[int], dtype: str) -> Any:
    """An array whose bits are all ones: NaN in every floating-point format."""
    kind = dtype_of(dtype)
    return np.full((*shape, kind.itemsize), 0xFF, np.uint8).view(kind).reshape(tuple(shape))


def random_of(rng: np.random.Generator, shape: Sequence[int], dtype: str, scale: float = 1.0) -> Any:
    """Gaussian numbers in a dtype, clipped to the range of every 8-bit format."""
    drawn = rng.standard_normal(tuple(shape)) * scale
    return np.clip(drawn, -240.0, 240.0).astype(dtype_of(dtype))
