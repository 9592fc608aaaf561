"""Runs the backward kernels on the CPU over arrays and compares gradients with the float64 oracle. For tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from cases.poison import poison_unseen_backward
from emulated import contraction
from emulated.forward import OPERANDS, Strided, describe, key_of, ml_dtype, module_of, problem_of, program_on
from inside.emulation import EmulatedBuffer
from inside.kernels import Values
from support.gate import kernel_source

from gpu_actors import AttentionGradients, AttentionProblem
from gpu_actors.testing import BackwardCase, check_gradients

KERNEL = "backward_mma"
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
POISON = 0xFF


def backward_problem_of(q: Any, k: Any, v: Any, *, deterministic: bool = False, **options: Any) -> AttentionProblem:
    problem = problem_of(q, k, v, **options)
    return dataclasses.replace(problem, direction="backward", deterministic=deterministic)


def run(
    problem: AttentionProblem,
    operands: dict[str, Any],
    *,
    arch: str = "sm_90a",
    kernel: str = KERNEL,
    dropout_seed: int = 0,
    **launch: Any,
) -> AttentionGradients:
    """The kernels' gradients. Outputs and scratch start as NaN, but scratch that a program needs zeroed as 0.

    operands: arrays or Strided views by name, with dout, out and lse, and possibly gradients. launch: arguments of
    EmulatedModule.launch.
    """
    key = key_of(problem, arch, kernel)
    program = program_on(problem, key)
    belongs = {f"d{name}": operands.get(name) for name in ("q", "k", "v", "bias", "sinks")}
    inputs = {name: getattr(of, "array", of) for name, of in belongs.items() if of is not None}
    outputs = {name: filled(array.shape, array.dtype, False) for name, array in inputs.items()}
    scratch = {name: filled(spec.shape, spec.dtype, spec.zero) for name, spec in program.scratch.items()}
    strided = {
        name: operand if isinstance(operand, Strided) else Strided(operand, operand)
        for name, operand in {**outputs, **scratch, **operands}.items()
    }
    memory = {name: EmulatedBuffer.of(view.base, name) for name, view in strided.items()}
    buffers = {name: describe(*view, memory[name].address) for name, view in strided.items()}
    for part in program.parts:
        module_of(kernel_source(part.key)).launch(
            part.key.kernel,
            part.geometry.grid,
            part.geometry.block,
            part.geometry.shared_bytes,
            part.pack(buffers, Values(dropout_seed)),
            list(memory.values()),
            **{"arithmetic": contraction.arithmetic(), **launch},
        )
    for name, spec in program.scratch.items():
        assert not spec.rearmed or not memory[name].array.any(), f"the kernels left {name} other than 0"
    for name in outputs:
        strided[name].base.reshape(-1).view(np.uint8)[:] = memory[name].array
    return AttentionGradients(**{name: strided[name].array for name in outputs})


def filled(shape: tuple[int, ...], dtype: Any, zero: bool) -> Any:
    array = np.empty(shape, ml_dtype(dtype) if isinstance(dtype, str) else dtype)
    array.reshape(-1).view(np.uint8)[...] = 0 if zero else POISON
    return array


def run_case(
    case: BackwardCase, *, compute: str | None = None, deterministic: bool = False, **launch: Any
) -> AttentionGradients:
    problem = backward_problem_of(*case.forward.inputs, compute=compute, deterministic=deterministic, **case.options)
    arrays = {name: case.options[name] for name in OPERANDS if name in case.options}
    operands = dict(zip(("dout", "q", "k", "v", "out", "lse"), case.inputs, strict=True)) | arrays
    return run(problem, operands, dropout_seed=case.options.get("dropout_seed", 0), **launch)


def check_case(case: BackwardCase, *, compute: str | None = None, **launch: Any) -> float:
    """The largest error as a share of its bound. The kernels and the oracle read the same results of the forward.

    Keys that no row sees, and rows that see nothing, hold NaN for the kernels.
    """
    gradients = run_case(poison_unseen_backward(case), compute=compute, **launch)
    saved = {"out": case.out, "lse": case.lse}
    return check_gradients(gradients, *case.arguments, repro=case.repro, compute=compute, **saved, **case.options)
