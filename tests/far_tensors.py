"""Runs a forward kernel on tensors whose halves lie more than 2^32 elements apart, with nothing accessible between."""

from __future__ import annotations

from typing import Any

import emulated_forward
import numpy as np
from emulated_forward import gaussian, key_of, problem_of

from gpu_actors.devices.emulation import EmulatedBuffer
from gpu_actors.devices.emulation.memory import Mapping
from gpu_actors.devices.interface import Buffer
from gpu_actors.kernels.arguments import pack_forward
from gpu_actors.kernels.variants import kernel_source, launch_geometry
from gpu_actors.testing.tolerance import check_output

__all__ = ["check_far"]

DIM = 32
# Where batch, rows and heads are in each operand.
AXES = {"bias": (0, 2, 1), "lse": (0, 2, 1)}
SHAPES = {"bias": (2, 2, 2, 2), "lse": (2, 2, 2)}
APART = 12 << 30  # bytes


def check_far(kernel: str, axis: int, **launch: Any) -> None:
    """Compare with the oracle. axis: 0, 1 or 2 for two far sequences, rows or heads. launch: as `run` takes it."""
    arrays = {name: gaussian(n, (2, 2, 2, DIM), "float16") for n, name in enumerate("qkv")}
    arrays["bias"] = gaussian(4, SHAPES["bias"])
    outputs = {"out": np.empty((2, 2, 2, DIM), np.float16), "lse": np.empty(SHAPES["lse"], np.float32)}
    spacers, halves = [], []
    for half in range(2):
        memory = {
            name: EmulatedBuffer.of(np.full_like(part, np.nan) if name in outputs else part, name)
            for name, array in {**arrays, **outputs}.items()
            for part in [np.take(array, [half], split(name, axis))]
        }
        halves.append(memory)
        spacers.append(Mapping(0, guard=APART))
    buffers = {
        name: far_buffer(array, split(name, axis), [memory[name].address for memory in halves])
        for name, array in {**arrays, **outputs}.items()
    }
    problem = problem_of(*(arrays[name] for name in "qkv"), bias=arrays["bias"])
    key = key_of(problem, "sm_86", kernel)
    geometry = launch_geometry(key, problem)
    emulated_forward.module_of(kernel_source(key)).launch(
        kernel,
        geometry.grid,
        geometry.block,
        geometry.shared_bytes,
        pack_forward(problem, buffers),
        [buffer for memory in halves for buffer in memory.values()],
        **launch,
    )
    for name, array in outputs.items():
        at = split(name, axis)
        shape = tuple(1 if n == at else extent for n, extent in enumerate(array.shape))
        outputs[name] = np.concatenate([memory[name].view(array.dtype, shape) for memory in halves], at)
    q, k, v, bias = arrays.values()
    check_output(outputs["out"], outputs["lse"], q, k, v, bias=bias)


def split(name: str, axis: int) -> int:
    return AXES[name][axis] if name in AXES else axis


def far_buffer(array: Any, at: int, addresses: list[int]) -> Buffer:
    """The tensor whose halves along axis ``at``, each in C order, lie at two addresses."""
    half = [1 if n == at else extent for n, extent in enumerate(array.shape)]
    strides = [int(np.prod(half[n + 1 :])) for n in range(len(half))]
    strides[at] = (addresses[1] - addresses[0]) // array.itemsize
    assert abs(strides[at]) > 1 << 31
    return Buffer(addresses[0], array.shape, tuple(strides), array.dtype.name)
