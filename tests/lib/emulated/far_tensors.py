"""Runs a forward kernel on tensors whose halves lie more than 2^32 elements apart, with nothing accessible between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from emulated import forward as emulated_forward
from emulated.forward import gaussian, key_of, problem_of
from inside.devices import Buffer
from inside.emulation import EmulatedBuffer, Mapping
from inside.kernels import COUNTER, NO_VALUES
from support.gate import kernel_source

from gpu_actors.testing import check_output

__all__ = ["APART", "AXES", "check_far", "far_buffer", "far_halves"]

DIM = 32
# The axes of batch, rows and heads in these operands.
AXES = {"bias": (0, 2, 1), "lse": (0, 2, 1)}
SHAPES = {"bias": (2, 2, 2, 2), "lse": (2, 2, 2)}
APART = 12 << 30  # bytes


def check_far(kernel: str, axis: int, **launch: Any) -> None:
    """Compare with the oracle. axis: 0, 1 or 2 for two far sequences, rows or heads. launch: as the module takes it."""
    arrays = {name: gaussian(n, (2, 2, 2, DIM), "float16") for n, name in enumerate("qkv")}
    biased = kernel != "forward_sm90"
    if biased:
        arrays["bias"] = gaussian(4, SHAPES["bias"])
    outputs: dict[str, Any] = {"out": np.empty((2, 2, 2, DIM), np.float16), "lse": np.empty(SHAPES["lse"], np.float32)}

    def half(_: int) -> dict[str, EmulatedBuffer]:
        return {name: EmulatedBuffer(array.nbytes // 2, name) for name, array in {**arrays, **outputs}.items()}

    halves = far_halves(half)
    if not biased:  # TMA takes no negative strides
        ordered = {name: sorted((half[name] for half in halves), key=lambda place: place.address) for name in halves[0]}
        halves = [{name: places[n] for name, places in ordered.items()} for n in range(2)]
    for n, memory in enumerate(halves):
        for name, array in arrays.items():
            memory[name].array[:] = np.take(array, [n], split(name, axis)).reshape(-1).view(np.uint8)
    buffers = {
        name: far_buffer(array, split(name, axis), [memory[name].address for memory in halves])
        for name, array in {**arrays, **outputs}.items()
    }
    options = {"bias": arrays["bias"]} if biased else {}
    problem = problem_of(*(arrays[name] for name in "qkv"), **options)
    key = key_of(problem, "sm_86" if biased else "sm_90a", kernel)
    (part,) = emulated_forward.program_on(problem, key).parts
    counter = EmulatedBuffer.of(np.zeros(1, np.int32), COUNTER)
    buffers[COUNTER] = Buffer(counter.address, (1,), (1,), "int32")
    emulated_forward.module_of(kernel_source(key)).launch(
        kernel,
        part.geometry.grid,
        part.geometry.block,
        part.geometry.shared_bytes,
        part.pack(buffers, NO_VALUES),
        [counter, *(buffer for memory in halves for buffer in memory.values())],
        **launch,
    )
    for name, array in outputs.items():
        at = split(name, axis)
        shape = tuple(1 if n == at else extent for n, extent in enumerate(array.shape))
        outputs[name] = np.concatenate([memory[name].view(array.dtype, shape) for memory in halves], at)
    check_output(outputs["out"], outputs["lse"], *(arrays[name] for name in "qkv"), **options)


def far_halves(make: Callable[[int], dict[str, EmulatedBuffer]], apart: int = APART) -> list[dict[str, EmulatedBuffer]]:
    """The buffers of half 0 and of half 1. Each of one half begins more than ``apart`` bytes from each of the other,
    wherever the system puts memory."""
    first, rejected = make(0), []
    for _ in range(50):
        # The mapping takes the place that the next second half would get, as do rejected halves.
        second = make(1)
        rejected.append((second, Mapping(0, guard=apart)))
        if all(abs(a.address - b.address) > apart for a in first.values() for b in second.values()):
            return [first, second]
    raise AssertionError("the system puts all memory in one place")


def split(name: str, axis: int) -> int:
    return AXES[name][axis] if name in AXES else axis


def far_buffer(array: Any, at: int, addresses: list[int]) -> Buffer:
    """The tensor whose halves along axis ``at``, each in C order, lie at two addresses."""
    half = [1 if n == at else extent for n, extent in enumerate(array.shape)]
    strides = [int(np.prod(half[n + 1 :])) for n in range(len(half))]
    strides[at] = (addresses[1] - addresses[0]) // array.itemsize
    assert abs(strides[at]) > 1 << 31
    return Buffer(addresses[0], array.shape, tuple(strides), array.dtype.name)
