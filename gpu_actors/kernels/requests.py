"""What the actor that compiles is asked for by the other actors: a kernel, ready for the context's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from gpu_actors.compiling.source import KernelSource
from gpu_actors.kernels.variants import KernelKey

__all__ = ["Prepare", "SourceVariant"]


class SourceVariant(NamedTuple):
    """A source of the caller's, where the package's own kernels have a key."""

    source: KernelSource
    arch: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have the kernel of ``key`` ready for this context's device: the reply is a `Cubin`, or a built `Kernel`.

    Everybody who waits for the kernel has a time limit of their own, so this has none.
    """

    no_deadline: ClassVar[bool] = True

    key: KernelKey | SourceVariant
