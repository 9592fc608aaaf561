"""Runs backward kernels on tensors whose parts lie more than 2^32 elements apart, with nothing accessible between."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from emulated.backward import KERNEL, backward_problem_of, filled
from emulated.far_tensors import AXES, far_buffer, far_halves
from emulated.forward import describe, gaussian, key_of, module_of, program_on
from inside.emulation import EmulatedBuffer
from inside.kernels import NO_VALUES, program_of, query_slots, tile_of
from support.gate import kernel_source

from gpu_actors import AttentionGradients
from gpu_actors.reference import attention_forward
from gpu_actors.testing import check_gradients

__all__ = ["check_far_gradients", "check_far_scratch"]

SHAPE = (2, 2, 2, 64)
FAR = 3 << 28
"""Rows before the packed sequence, whose lse and delta together are more than 2^31 floats."""


def split(name: str, axis: int) -> int:
    return AXES["lse"][axis] if name == "lse" else axis


def check_far_gradients(axis: int) -> None:
    """Compare backward_mma's gradients with the oracle's. axis: 0, 1 or 2 for two far sequences, rows or heads."""
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
    gradients = {
        name: np.concatenate([half[name].view(np.float16, shape) for half in halves], axis) for name in outputs
    }
    saved = {"out": arrays["out"], "lse": arrays["lse"]}
    check_gradients(AttentionGradients(**gradients), arrays["dout"], *inputs, causal=True, **saved)


def check_far_scratch(kernel: str, arch: str) -> None:
    """The arrays and scratch of q's rows lie behind those of `FAR` rows that have no memory."""
    rows, keys, heads, dim = 70, 90, 2, 64
    arrays: dict[str, Any] = {
        name: gaussian(n, (rows if name in ("dout", "q") else keys, heads, dim), "float16")
        for n, name in enumerate(("dout", "q", "k", "v"))
    }
    near = {name: np.array([0, end], np.int32) for name, end in (("cu_seqlens_q", rows), ("cu_seqlens_k", keys))}
    inputs = [arrays[name] for name in "qkv"]
    result = attention_forward(*inputs, **near)
    arrays |= {"out": result.out.astype(np.float16), "lse": result.lse.astype(np.float32)}
    arrays |= {f"d{name}": np.full_like(arrays[name], np.nan) for name in "qkv"}
    arrays |= near | {"cu_seqlens_q": near["cu_seqlens_q"] + np.int32(FAR)}
    problem = dataclasses.replace(backward_problem_of(*inputs, **near), total_q=FAR + rows)
    key = key_of(problem, arch, kernel)
    program = program_on(problem, key)
    there = {}
    for name, spec in program.scratch.items():
        slots = spec.shape[0]
        if name in ("statistics", "dq_sums"):  # only the last slots, as many as the rows alone would have
            slots = query_slots(dataclasses.replace(problem, total_q=rows), tile_of(key).block_m)
        there[name] = filled((slots, *spec.shape[1:]), spec.dtype, spec.zero)
    memory = {name: EmulatedBuffer.of(array, name) for name, array in {**arrays, **there}.items()}
    buffers = {}
    for name, array in {**arrays, **there}.items():
        shape, axis = list(array.shape), 1 if name == "lse" else 0
        absent = program.scratch[name].shape[0] - len(array) if name in there else 0
        if name in ("dout", "q", "out", "lse", "dq"):
            absent = FAR
        shape[axis] += absent
        place = describe(array, array, memory[name].address)
        address = place.address - absent * place.strides[axis] * array.itemsize
        buffers[name] = place._replace(address=address, shape=tuple(shape))
    for part in program.parts:
        params = part.pack(buffers, NO_VALUES)
        module_of(kernel_source(part.key)).launch(part.key.kernel, *part.geometry, params, list(memory.values()))
    gradients = {name: memory[name].view(np.float16, arrays[name].shape) for name in ("dq", "dk", "dv")}
    saved = {"out": arrays["out"], "lse": arrays["lse"], **near}
    check_gradients(AttentionGradients(**gradients), arrays["dout"], *inputs, **saved)
