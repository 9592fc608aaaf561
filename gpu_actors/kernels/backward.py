"""What backward kernels launch for a problem: several of them, with memory between them.

To add a family, add a row to FAMILIES in `dispatch` and what makes its `BackwardLaunch` to `LAUNCHES` here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from gpu_actors.devices.interface import Buffer, LaunchGeometry, ScratchSpec
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.backward_arguments import pack_backward, pack_backward_part
from gpu_actors.kernels.backward_variants import backward_keys, backward_scratch
from gpu_actors.kernels.variants import launch_geometry, tile_of
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["LAUNCHES", "BackwardLaunch", "BackwardStep", "PackBackward", "backward_launch"]


class PackBackward(Protocol):
    """Turns a problem and its operands into the bytes of a kernel's parameter struct.

    buffers: by name, the inputs q, k, v, out, dout, lse and the forward's optional ones, the outputs dq, dk, dv, and
    dbias and dsinks where there are bias and sinks, and the launch's scratch.
    """

    def __call__(self, problem: AttentionProblem, buffers: Mapping[str, Buffer], *, dropout_seed: int = 0) -> bytes: ...


class BackwardStep(NamedTuple):
    """One kernel of the launch. key: what picks and compiles it."""

    key: DispatchKey
    geometry: LaunchGeometry
    pack: PackBackward


class BackwardLaunch(NamedTuple):
    """How a family answers a problem: its kernels in order, what lies between them, and the outputs they add to."""

    steps: tuple[BackwardStep, ...]
    scratch: Mapping[str, ScratchSpec]
    zeroed: frozenset[str] = frozenset()


def _mma_launch(key: DispatchKey, problem: AttentionProblem) -> BackwardLaunch:
    steps = tuple(
        BackwardStep(part, launch_geometry(part, problem), pack_backward if part == key else pack_backward_part)
        for part in backward_keys(key)
    )
    sums_in_place = problem.bias is not None and problem.bias[0] == "float32"
    return BackwardLaunch(
        steps, backward_scratch(key, tile_of(key), problem), frozenset({"dbias"} if sums_in_place else ())
    )


LAUNCHES: dict[str, Callable[[DispatchKey, AttentionProblem], BackwardLaunch]] = {"backward_mma": _mma_launch}


def backward_launch(key: DispatchKey, problem: AttentionProblem) -> BackwardLaunch:
    """What to launch for a problem whose key is ``key``.

    Raises InvalidRequest for a key whose kernels compute no gradients, and Unsupported where the grid is too large.
    """
    make = LAUNCHES.get(key.kernel)
    if make is None:
        raise InvalidRequest(
            "kernel", key.kernel, f"kernels that compute gradients are {', '.join(LAUNCHES) or 'none'}"
        )
    return make(key, problem)
