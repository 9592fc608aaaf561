"""What many new rows over a cache launch where forward_sm90 takes them: one kernel, whatever the lengths are."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_actors.devices.interface import Kernel, ScratchSpec, Step
from gpu_actors.kernels.sm90_arguments import COUNTER, EncodeTensorMap, pack_sm90
from gpu_actors.kernels.variants import launch_geometry
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["PrefillLaunch"]


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """The same interface as `DecodeLaunch`, whose kernels split the keys of few rows."""

    problem: AttentionProblem
    key: DispatchKey
    multiprocessors: int | None
    encode: EncodeTensorMap

    @property
    def keys(self) -> tuple[DispatchKey, ...]:
        return (self.key,)

    def plan(self, cache_seqlens: Any, cu_seqlens_q: Any = None) -> dict[str, Any]:
        """Inputs besides the request's own: none, because blocks draw their tiles as they get done."""
        return {}

    def scratch(self) -> Mapping[str, ScratchSpec]:
        return {COUNTER: ScratchSpec((1,), "int32", zero=True)}

    def steps(self, kernels: tuple[Kernel, ...]) -> tuple[Step, ...]:
        """The steps of a launch. kernels: of ``keys``, loaded."""
        geometry = launch_geometry(self.key, self.problem, self.multiprocessors)
        pack = functools.partial(pack_sm90, self.problem, self.key, self.encode)
        return tuple(Step(kernel, geometry, pack) for kernel in kernels)
