"""Program: what a kernel family launches for a problem, independent of the request or graph that has the problem."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.devices.interface import Buffer, Kernel, Kernels, LaunchGeometry, ScratchSpec, Step, Steps, TensorMap
from gpu_actors.errors import Unsupported

__all__ = [
    "ANYWHERE",
    "NO_VALUES",
    "EncodeTensorMap",
    "Pack",
    "Part",
    "Program",
    "Split",
    "Target",
    "Values",
    "flat_grid",
]

_MAX_BLOCKS = (1 << 31) - 1  # of grid.x; y and z end at 65,535, so grids are flat

EncodeTensorMap: TypeAlias = Callable[[TensorMap], bytes]
"""`Device.encode_tensor_map`."""


class Target(NamedTuple):
    """What a program depends on besides the problem.

    multiprocessors: the device's, None if unknown. encode: makes its tensor maps. lengths_on_host: whether the lengths
    of a cache are NumPy arrays, so that the host can split the work.
    """

    multiprocessors: int | None = None
    encode: EncodeTensorMap | None = None
    lengths_on_host: bool = True


ANYWHERE = Target()
"""Stands for a device about which nothing is known."""


class Values(NamedTuple):
    """The values that a launch passes by value. score_scalars: those of the problem's score modification, in order."""

    dropout_seed: int = 0
    score_scalars: Sequence[float] = ()


Pack: TypeAlias = Callable[[Mapping[str, Buffer], Values], bytes]
"""Packs buffers by name into the bytes of a kernel's parameter struct. Raises InvalidRequest naming the operand."""


Split: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Makes the other inputs of a launch from the request's own, such as cache_seqlens and cu_seqlens_q."""


NO_VALUES = Values()


def flat_grid(blocks: int, threads: int, shared_bytes: int, field: str, value: int) -> LaunchGeometry:
    """The geometry of ``blocks`` blocks. field, value: the size that Unsupported names if these are too many."""
    if blocks > _MAX_BLOCKS:
        reason = f"makes {blocks} blocks, and a grid holds {_MAX_BLOCKS}"
        raise Unsupported(field, value, reason, max(1, value * _MAX_BLOCKS // blocks))
    return LaunchGeometry((blocks, 1, 1), (threads, 1, 1), shared_bytes)


class Part(NamedTuple):
    """One kernel of a program. key: what picks and compiles it."""

    key: DispatchKey
    geometry: LaunchGeometry
    pack: Pack


@dataclass(frozen=True, slots=True)
class Program:
    """The kernels of a launch in order, and the scratch memory between them. split: on the host, or None."""

    parts: tuple[Part, ...]
    scratch: Mapping[str, ScratchSpec] = field(default_factory=dict)
    split: Split | None = None
    _number: int = field(init=False, repr=False, compare=False, default_factory=itertools.count().__next__)

    @property
    def keys(self) -> tuple[DispatchKey, ...]:
        return tuple(part.key for part in self.parts)

    def steps(self, kernels: Sequence[Kernel], values: Values) -> Steps:
        """The steps of a launch; the same object for the same `Kernels` if there are no values. kernels: of `keys`."""
        memo = kernels if isinstance(kernels, Kernels) and values is NO_VALUES else None
        steps: Steps | None = None if memo is None else memo.memo.get(self._number)
        if steps is None:
            steps = Steps(
                Step(kernel, part.geometry, functools.partial(_pack, part.pack, values))
                for kernel, part in zip(kernels, self.parts, strict=True)
            )
            if memo is not None:
                memo.remember(self._number, steps)
        return steps


def _pack(pack: Pack, values: Values, buffers: Mapping[str, Buffer]) -> bytes:
    return pack(buffers, values)
