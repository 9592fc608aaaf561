"""What a request over a cache launches: its kernels, the memory they share, and the split of the work.

    split on the host         decode_mma -> decode_combine       lengths are NumPy arrays
    split on the device       decode_plan -> decode_mma -> decode_combine

Grids and scratch memory depend on shapes alone and on no length, so that a recorded launch serves every step of a
sequence. With one split pinned there is nothing to combine.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.devices.interface import Kernel, ScratchSpec, Step
from gpu_actors.kernels.decode_arguments import pack_decode, pack_pointers
from gpu_actors.kernels.decode_schedule import plan_decode
from gpu_actors.kernels.decode_variants import COMBINE, PLAN, decode_keys, items_of, ranges_of, row_tiles, step_geometry
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["DecodeLaunch", "decode_launch"]

_UNKNOWN_MULTIPROCESSORS = 4  # of an emulated device: a few ranges show every way of splitting


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """The kernels of a launch and how they share its work. keys: of the kernels, in order."""

    problem: AttentionProblem
    key: DispatchKey
    keys: tuple[DispatchKey, ...]
    ranges: int

    @property
    def planned(self) -> bool:
        """Whether the host splits the work."""
        return all(key.kernel != PLAN for key in self.keys)

    def plan(self, cache_seqlens: Any, cu_seqlens_q: Any = None) -> dict[str, Any]:
        """Inputs that the launch takes besides the request's own: the ranges, int32 (ranges + 1, 4), where the host
        splits the work. The lengths are NumPy arrays then."""
        if not self.planned:
            return {}
        rows = None if cu_seqlens_q is None else np.diff(cu_seqlens_q)
        return {"plan": plan_decode(self.problem, self.key, self.ranges, cache_seqlens, rows).positions}

    def scratch(self) -> Mapping[str, ScratchSpec]:
        """Memory that the kernels share."""
        problem, specs = self.problem, {}
        if problem.layout == "pointers":
            for side in "kv":
                contents = functools.partial(pack_pointers, problem, f"{side}_cache")
                specs[f"{side}_ptrs"] = ScratchSpec((problem.batch,), "uint64", contents=contents)
        if not self.planned:
            specs["plan"] = ScratchSpec((self.ranges + 1, 4), "int32")
            specs["sums"] = ScratchSpec((problem.batch * row_tiles(problem),), "int64")
        if any(key.kernel == COMBINE for key in self.keys):
            pieces = items_of(problem) * problem.num_splits or 2 * self.ranges
            rows = (pieces, self.key.row_tile)
            specs["partial_out"] = ScratchSpec((*rows, problem.head_dim_v), "float32")
            specs["partial_lse"] = ScratchSpec(rows, "float32")
        return specs

    def steps(self, kernels: tuple[Kernel, ...]) -> tuple[Step, ...]:
        """The steps of a launch. kernels: of ``keys``, loaded."""
        pack = functools.partial(pack_decode, self.problem, self.key, self.ranges)
        return tuple(
            Step(kernel, step_geometry(key, self.problem, self.ranges), pack)
            for key, kernel in zip(self.keys, kernels, strict=True)
        )


@functools.lru_cache(maxsize=4096)
def decode_launch(
    problem: AttentionProblem, key: DispatchKey, multiprocessors: int | None, planned: bool
) -> DecodeLaunch:
    """What answers a problem over a cache. key: the problem's, of decode_mma. multiprocessors: of the device, if known.

    planned: whether the host knows the lengths and splits the work. Raises Unsupported as `decode_tile` does.
    """
    ranges = ranges_of(key, multiprocessors or _UNKNOWN_MULTIPROCESSORS)
    return DecodeLaunch(problem, key, decode_keys(problem, key, planned), ranges)
