"""The backward kernels on tensors whose halves lie more than 2^32 elements apart, with nothing accessible between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated.backward import KERNEL, backward_problem_of, filled
from emulated.far_tensors import AXES, far_buffer, far_halves
from emulated.forward import describe, gaussian, key_of, module_of

from gpu_actors import AttentionGradients
from gpu_actors.devices.emulation import EmulatedBuffer
from gpu_actors.kernels.dispatch import program_of
from gpu_actors.kernels.program import NO_VALUES
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.reference import attention_forward
from gpu_actors.testing import check_gradients

SHAPE = (2, 2, 2, 64)


def split(name: str, axis: int) -> int:
    return AXES["lse"][axis] if name == "lse" else axis


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["sequences", "rows", "heads"])
def test_offsets_past_32_bits_are_followed(axis: int) -> None:
    arrays: dict[str, Any] = {name: gaussian(n, SHAPE, "float16") for n, name in enumerate(("dout", "q", "k", "v"))}
    inputs = [arrays[name] for name in "qkv"]
    result = attention_forward(*inputs, causal=True)
    arrays |= {"out": result.out.astype(np.float16), "lse": result.lse.astype(np.float32)}
    outputs = {name: np.full(SHAPE, np.nan, np.float16) for name in ("dq", "dk", "dv")}
    halves = far_halves(
        lambda n: {
            name: EmulatedBuffer.of(np.take(array, [n], split(name, axis)), name)
            for name, array in {**arrays, **outputs}.items()
        }
    )
    buffers = {
        name: far_buffer(array, split(name, axis), [memory[name].address for memory in halves])
        for name, array in {**arrays, **outputs}.items()
    }
    # The first sweep's kernels.
    problem = backward_problem_of(*inputs, causal=True)
    program = program_of(problem, key_of(problem, "sm_80", KERNEL))
    scratch = {name: filled(spec.shape, spec.dtype, spec.zero) for name, spec in program.scratch.items()}
    places = {name: EmulatedBuffer.of(array, name) for name, array in scratch.items()}
    buffers |= {name: describe(array, array, places[name].address) for name, array in scratch.items()}
    memory = [*places.values(), *(buffer for half in halves for buffer in half.values())]
    for part in program.parts:
        grid, block, shared_bytes = part.geometry
        params = part.pack(buffers, NO_VALUES)
        module_of(kernel_source(part.key)).launch(part.key.kernel, grid, block, shared_bytes, params, memory)
    shape = tuple(1 if n == axis else extent for n, extent in enumerate(SHAPE))
    found = {name: np.concatenate([half[name].view(np.float16, shape) for half in halves], axis) for name in outputs}
    given = {"out": arrays["out"], "lse": arrays["lse"]}
    check_gradients(AttentionGradients(**found), arrays["dout"], *inputs, causal=True, **given)
