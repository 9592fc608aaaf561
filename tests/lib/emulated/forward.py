"""Runs forward kernels on the CPU over arrays and compares them with the float64 oracle. For tests."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from emulated import contraction
from inside.devices import Buffer
from inside.emulation import EmulatedBuffer, EmulatedModule, Toolchain, build_module, encode_tensor_map
from inside.kernels import COUNTER, ELEMENTS, FAMILIES, Program, Target, Values, dispatch_key, program_of
from support.gate import kernel_source

from gpu_actors import AttentionProblem, DispatchKey, KernelSource
from gpu_actors.testing import ForwardCase, check_output

OPERANDS = (
    "bias",
    "alibi_slopes",
    "sinks",
    "q_descale",
    "k_descale",
    "v_descale",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "q_positions",
    "k_positions",
)


def problem_of(q: Any, k: Any, v: Any, *, compute: str | None = None, **options: Any) -> AttentionProblem:
    """The problem of these arrays and options, LSE included."""
    element = ELEMENTS[q.dtype.name]
    ends = [options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    varlen = ends[0] is not None
    batch = len(ends[0]) - 1 if varlen else len(q)
    lengths = [max(1, int(np.diff(e).max())) for e in ends] if varlen else [q.shape[1], k.shape[1]]
    bias, slopes = options.get("bias"), options.get("alibi_slopes")
    words: dict[str, Any] = {name: options[name].ndim for name in ("q_positions", "k_positions") if name in options}
    return AttentionProblem(
        layout="varlen" if varlen else "dense",
        batch=batch,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        total_q=len(q) if varlen else batch * lengths[0],
        total_k=len(k) if varlen else batch * lengths[1],
        heads_q=q.shape[-2],
        heads_kv=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=q.dtype.name,
        kv_dtype=k.dtype.name,
        out_dtype=element.out,
        compute=compute or element.computes[0],
        softmax_scale=options.get("softmax_scale", q.shape[-1] ** -0.5),
        causal=options.get("causal", False),
        alignment=options.get("alignment", "bottom_right"),
        window_size=options.get("window_size", (-1, -1)),
        softcap=options.get("softcap", 0.0),
        alibi=None if slopes is None else "heads" if slopes.ndim == 1 else "batch",
        sinks="sinks" in options,
        sink_tokens=options.get("sink_tokens", 0),
        attention_chunk=options.get("attention_chunk", 0),
        bias=None if bias is None else (bias.dtype.name, len(bias) < batch, bias.shape[1] < q.shape[-2]),
        dropout_p=options.get("dropout_p", 0.0),
        descales=any(f"{name}_descale" in options for name in "qkv"),
        alibi_signed=options.get("alibi_signed", False),
        return_lse=True,
        dropout_first_head=options.get("dropout_first_head", 0),
        dropout_heads=options.get("dropout_heads", 0),
        **words,
    )


def key_of(problem: AttentionProblem, arch: str = "sm_90a", kernel: str = "forward_simple") -> DispatchKey:
    """The key of that kernel, whichever kernel the problem would be dispatched to."""
    return dispatch_key(problem, arch, tuple(family for family in FAMILIES if family.name == kernel))


def module_of(source: KernelSource) -> EmulatedModule:
    compiler = contraction.toolchain()
    brief = contraction.arithmetic() == "nearest" and not compiler.contraction  # never in a sweep
    if brief and "forward_simple" in source.entry_points:
        compiler = _Quick(**vars(compiler))
    return _module(source, compiler)


class _Quick(Toolchain):
    """Builds `forward_simple` in two thirds of the time. A launch takes three times as long, but is short in tests."""

    @property
    def flags(self) -> tuple[str, ...]:
        return (*super().flags, "-Og")


@functools.cache
def _module(source: KernelSource, toolchain: Toolchain) -> EmulatedModule:
    macros, headers = dict(source.macros), dict(source.headers)
    return build_module(source.source, macros, headers, toolchain, entries=source.entry_points)


class Strided(NamedTuple):
    """An array to pass, with the memory that it is a view of."""

    array: Any
    base: Any


def describe(array: Any, base: Any, address: int) -> Buffer:
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Buffer(address + offset, array.shape, strides, array.dtype.name)


def run(
    problem: AttentionProblem,
    operands: dict[str, Any],
    *,
    arch: str = "sm_90a",
    kernel: str = "forward_simple",
    dropout_seed: int = 0,
    score_scalars: tuple[float, ...] = (),
    multiprocessors: int | None = None,
    **launch: Any,
) -> tuple[Any, Any]:
    """(out, lse) of a kernel. Outputs start as NaN.

    operands: arrays or Strided views by name; ``out``, score_max and score_sum_exp may be among them, and are filled.
    score_scalars: of the problem's score modification. launch: arguments of EmulatedModule.launch.
    """
    key = key_of(problem, arch, kernel)
    rows = (problem.total_q,) if problem.layout == "varlen" else (problem.batch, problem.seqlen_q)
    outputs = {
        "out": np.full((*rows, problem.heads_q, problem.head_dim_v), np.nan, ml_dtype(problem.out_dtype)),
        "lse": np.full((*rows[:-1], problem.heads_q, rows[-1]), np.nan, np.float32),
    }
    strided = {
        name: operand if isinstance(operand, Strided) else Strided(operand, operand)
        for name, operand in {**outputs, **operands}.items()
    }
    memory = {name: EmulatedBuffer.of(view.base, name) for name, view in strided.items()}
    buffers = {name: describe(*view, memory[name].address) for name, view in strided.items()}
    program = program_on(problem, key, multiprocessors)
    for name, spec in program.scratch.items():
        kind = ml_dtype(spec.dtype)
        content = np.full((*spec.shape, kind.itemsize), 0 if spec.zero else 0xFF, np.uint8)
        array = content.view(kind).reshape(spec.shape)
        memory[name] = EmulatedBuffer.of(array, name)
        buffers[name] = describe(array, array, memory[name].address)
    for part in program.parts:
        module_of(kernel_source(part.key)).launch(
            part.key.kernel,
            part.geometry.grid,
            part.geometry.block,
            part.geometry.shared_bytes,
            part.pack(buffers, Values(dropout_seed, score_scalars)),
            list(memory.values()),
            **{"arithmetic": contraction.arithmetic(), **launch},
        )
    if COUNTER in memory:
        assert not memory[COUNTER].array.any(), "the counter is ready for the next launch"
    for name in {*outputs, "score_max", "score_sum_exp"} & strided.keys():
        view = strided[name]
        view.base.reshape(-1).view(np.uint8)[:] = memory[name].array
    return strided["out"].array, strided["lse"].array


def program_on(problem: AttentionProblem, key: DispatchKey, multiprocessors: int | None = None) -> Program:
    """What the emulated device launches for a problem."""
    return program_of(problem, key, Target(multiprocessors, lambda tensor_map: encode_tensor_map(*tensor_map)))


def run_case(case: ForwardCase, *, compute: str | None = None, **launch: Any) -> tuple[Any, Any]:
    problem = problem_of(*case.inputs, compute=compute, **case.options)
    arrays = {name: case.options[name] for name in OPERANDS if name in case.options}
    operands = dict(zip("qkv", case.inputs, strict=True)) | arrays
    return run(problem, operands, dropout_seed=case.options.get("dropout_seed", 0), **launch)


def check_case(case: ForwardCase, *, compute: str | None = None, **launch: Any) -> float:
    out, lse = run_case(case, compute=compute, **launch)
    return check_output(out, lse, *case.inputs, repro=case.repro, compute=compute, **case.options)


def ml_dtype(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))


def gaussian(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtype(dtype))


def qkv(
    rows: int, keys: int, *, batch: int = 1, heads: int = 2, heads_kv: int = 1, dim: int = 16, dtype: str = "float32"
):
    shapes = ((batch, rows, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim))
    return [gaussian(n, shape, dtype) for n, shape in enumerate(shapes)]


def answer(q: Any, k: Any, v: Any, *, compute: str | None = None, dropout_seed: int = 0, **options: Any):
    arrays = {name: options[name] for name in OPERANDS if name in options}
    problem = problem_of(q, k, v, compute=compute, **options)
    return run(problem, {"q": q, "k": k, "v": v, **arrays}, dropout_seed=dropout_seed)


def check(q: Any, k: Any, v: Any, **options: Any) -> None:
    out, lse = answer(q, k, v, **options)
    check_output(out, lse, q, k, v, **options)
