"""What a forward request launches where forward_sm90 takes it: that kernel, and of 8-bit floats one before it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from gpu_actors.devices.interface import Buffer, Kernel, LaunchGeometry, ScratchSpec, Step
from gpu_actors.kernels.sm90_arguments import COUNTER, EncodeTensorMap, pack_sm90, pack_transposition
from gpu_actors.kernels.transposition import TRANSPOSE, parts_of, transposition_scratch
from gpu_actors.kernels.variants import launch_geometry, tile_of
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["pack_part", "sm90_scratch", "sm90_steps"]


def sm90_scratch(problem: AttentionProblem, key: DispatchKey) -> dict[str, ScratchSpec]:
    """The memory that the kernels share. key: of forward_sm90."""
    scratch = {COUNTER: ScratchSpec((1,), "int32", zero=True)}
    if len(parts_of(key)) > 1:
        scratch |= transposition_scratch(problem, tile_of(key))
    return scratch


def sm90_steps(
    problem: AttentionProblem,
    key: DispatchKey,
    geometry: LaunchGeometry,
    encode: EncodeTensorMap,
    kernels: Sequence[Kernel],
) -> tuple[Step, ...]:
    """The steps of a launch. geometry: of forward_sm90, whose key is ``key``. kernels: of `parts_of` it, loaded."""
    return tuple(
        Step(
            kernel,
            geometry if part is key else launch_geometry(part, problem),
            functools.partial(pack_part, problem, part, encode),
        )
        for part, kernel in zip(parts_of(key), kernels, strict=True)
    )


def pack_part(
    problem: AttentionProblem, key: DispatchKey, encode: EncodeTensorMap, buffers: Mapping[str, Buffer]
) -> bytes:
    """The parameters of one of the kernels, which the key names."""
    if key.kernel == TRANSPOSE:
        return pack_transposition(problem, key, buffers)
    return pack_sm90(problem, key, encode, buffers)
