"""What the kernels here can compute, and the reasons for what they cannot.

`CHECKS` is the one list, in the order in which they are made: a code, and a function that answers with the
`Unsupported` to raise or with None. What no device could answer (shapes that contradict each other, a
negative softcap) is refused earlier, by `gpu_actors.validation`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from gpu_actors.compiling.source import check_arch
from gpu_actors.errors import Unsupported
from gpu_actors.problem import AttentionProblem

__all__ = [
    "CHECKS",
    "ELEMENTS",
    "FIRST_FP8_CAPABILITY",
    "MAX_HEAD_DIM",
    "MAX_SEQLEN",
    "Check",
    "Element",
    "capability",
    "check_support",
    "example_problem",
    "find_unsupported",
    "head_dim_refusal",
]

MAX_HEAD_DIM = 256
MAX_SEQLEN = (1 << 30) - 1  # kernels add two row indices and a window bound in 32 bits
FIRST_CAPABILITY = 80
FIRST_FP8_CAPABILITY = 90


class Element(NamedTuple):
    """A dtype as kernels know it.

    c_type: its type in kernels_cu/common/types.cuh. itemsize: bytes. computes: the precisions its products can be
    taken in, the default first. out: the dtype of the output.
    """

    c_type: str
    itemsize: int
    computes: tuple[str, ...]
    out: str
    fp8: bool = False


ELEMENTS = {
    "float16": Element("half_t", 2, ("f16",), "float16"),
    "bfloat16": Element("bfloat16_t", 2, ("bf16",), "bfloat16"),
    "float32": Element("float", 4, ("f32", "tf32", "f16", "bf16"), "float32"),
    "float64": Element("double", 8, ("f64",), "float64"),
    "float8_e4m3fn": Element("e4m3_t", 1, ("fp8",), "bfloat16", fp8=True),
    "float8_e5m2": Element("e5m2_t", 1, ("fp8",), "bfloat16", fp8=True),
}

# Limits of softmax_scale and softcap: within fp32's range, with room for the factors that kernels fold in.
LEAST_FACTOR, GREATEST_FACTOR = 1e-36, 1e36

Finding: TypeAlias = Unsupported | None


class Check(NamedTuple):
    """One reason to refuse a problem on an architecture. code: stable, for logs and tests."""

    code: str
    find: Callable[[AttentionProblem, str], Finding]


def check_support(problem: AttentionProblem, arch: str) -> None:
    """Raise `Unsupported` for the first of `CHECKS` that refuses the problem on kernels of ``arch``.

    Raises InvalidRequest where ``arch`` names no architecture at all.
    """
    found = find_unsupported(problem, arch)
    if found is not None:
        raise found[1]


def find_unsupported(problem: AttentionProblem, arch: str) -> tuple[str, Unsupported] | None:
    """(code, error) of the first check that refuses, or None where the problem is supported."""
    for code, find in CHECKS:
        error = find(problem, arch)
        if error is not None:
            return code, error
    return None


@functools.lru_cache(maxsize=64)
def capability(arch: str) -> int:
    """The compute capability of an exact architecture, times ten: sm_80 -> 80, sm_90a -> 90, sm_120a -> 120.

    Raises InvalidRequest or Unsupported as `gpu_actors.compiling.source.check_arch`.
    """
    digits = re.search(r"\d+", check_arch(arch))
    assert digits is not None
    return int(digits[0])


def head_dim_refusal(problem: AttentionProblem, dims: range, reason: str) -> Unsupported | None:
    """Why a kernel that takes these head dims does not take the problem's, or None. reason: a sentence without its end.

    The nearest head dim is the next one up, for rows can be padded and cannot be shortened.
    """
    for field, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim not in dims:
            nearest = min((known for known in dims if known >= dim), default=dims[-1])
            return Unsupported(field, dim, f"{reason}: multiples of {dims.step} from {dims[0]} to {dims[-1]}", nearest)
    return None


def example_problem(dtype: str, head_dim: int, **fields: Any) -> AttentionProblem:
    """A problem of one sequence of 1024 rows and keys and one head, as requests of the dtype are by default.

    fields: of `AttentionProblem`, in place of these.
    """
    element = ELEMENTS[dtype]
    usual: dict[str, Any] = {
        **dict.fromkeys(("batch", "heads_q", "heads_kv"), 1),
        **dict.fromkeys(("seqlen_q", "seqlen_k", "total_q", "total_k"), 1024),
        **dict.fromkeys(("head_dim", "head_dim_v"), head_dim),
        **dict.fromkeys(("dtype", "kv_dtype"), dtype),
    }
    own = {"out_dtype": element.out, "compute": element.computes[0], "softmax_scale": head_dim**-0.5}
    return AttentionProblem(**usual | own | fields)


def _arch_known(problem: AttentionProblem, arch: str) -> Finding:
    try:
        old = capability(arch) < FIRST_CAPABILITY
    except Unsupported as error:
        return error
    reason = "the kernels are written for compute capability 8.0 (Ampere) and newer"
    return Unsupported("arch", arch, reason, "sm_80") if old else None


def _dtype_known(problem: AttentionProblem, arch: str) -> Finding:
    for field, dtype in (("dtype", problem.dtype), ("kv_dtype", problem.kv_dtype)):
        if dtype not in ELEMENTS:
            return Unsupported(field, dtype, f"attention is computed on {', '.join(ELEMENTS)}", "float32")
    return None


def _fp8_backward(problem: AttentionProblem, arch: str) -> Finding:
    if problem.direction == "forward" or not _any_fp8(problem):
        return None
    reason = "fp8 gradients would be lost in rounding; backward takes 16-bit and wider inputs"
    return _without_fp8(problem, reason)


def _fp8_arch(problem: AttentionProblem, arch: str) -> Finding:
    if not _any_fp8(problem) or capability(arch) >= FIRST_FP8_CAPABILITY:
        return None
    if problem.decoding and not ELEMENTS[problem.dtype].fp8:
        return None  # a cache's values are widened before they are multiplied
    reason = f"fp8 attention needs sm_90a or newer, and {arch} is older"
    return _without_fp8(problem, reason)


def _kv_dtype_mixed(problem: AttentionProblem, arch: str) -> Finding:
    if problem.kv_dtype == problem.dtype:
        return None
    if ELEMENTS[problem.dtype].fp8:
        reason = f"fp8 queries ({problem.dtype}) need keys and values of the same fp8 type"
    elif problem.decoding and ELEMENTS[problem.kv_dtype].fp8 and ELEMENTS[problem.dtype].itemsize == 2:
        return None
    elif problem.decoding:
        reason = f"a cache holds q's dtype ({problem.dtype}), or fp8 under a 16-bit q"
    else:
        reason = f"keys and values must have q's dtype, {problem.dtype}: no kernel here reads mixed dtypes"
    return Unsupported("kv_dtype", problem.kv_dtype, reason, problem.dtype)


def _out_dtype_fixed(problem: AttentionProblem, arch: str) -> Finding:
    out = ELEMENTS[problem.dtype].out
    if problem.out_dtype == out:
        return None
    return Unsupported("out_dtype", problem.out_dtype, f"the output of {problem.dtype} inputs is {out}", out)


def _compute_mode(problem: AttentionProblem, arch: str) -> Finding:
    computes = ELEMENTS[problem.dtype].computes
    if problem.compute in computes:
        return None
    if len(computes) == 1:
        reason = f"{problem.dtype} inputs are multiplied in their own precision; only float32 inputs can choose"
    else:
        reason = f"{problem.dtype} inputs are multiplied in one of {', '.join(computes)}"
    return Unsupported("compute", problem.compute, reason, computes[0])


def _head_dim_range(problem: AttentionProblem, arch: str) -> Finding:
    for field, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            reason = f"the kernels keep whole rows on chip, and take head dims from 1 to {MAX_HEAD_DIM}"
            return Unsupported(field, dim, reason, min(max(dim, 1), MAX_HEAD_DIM))
    return None


def _seqlen_range(problem: AttentionProblem, arch: str) -> Finding:
    for field, length in (("seqlen_q", problem.seqlen_q), ("seqlen_k", problem.seqlen_k)):
        if length > MAX_SEQLEN:
            return Unsupported(field, length, "one sequence holds fewer than 2^30 rows", MAX_SEQLEN)
    return None


def _dropout_fp8(problem: AttentionProblem, arch: str) -> Finding:
    if not problem.dropout_p or not _any_fp8(problem):
        return None
    reason = "fp8 attention is for inference and has no dropout"
    return Unsupported("dropout_p", problem.dropout_p, reason, 0.0)


def _bias_layout(problem: AttentionProblem, arch: str) -> Finding:
    if problem.bias is None or problem.layout == "dense":
        return None
    reason = f"a bias is a dense (seqlen_q, seqlen_k) matrix, and the layout is {problem.layout}"
    return Unsupported("bias", problem.bias[0], reason)


def _bias_dtype(problem: AttentionProblem, arch: str) -> Finding:
    if problem.bias is None or problem.bias[0] in (problem.dtype, "float32"):
        return None
    reason = f"a bias has q's dtype, {problem.dtype}, or float32"
    return Unsupported("bias", problem.bias[0], reason, "float32")


def _descales_dtype(problem: AttentionProblem, arch: str) -> Finding:
    if not problem.descales or _any_fp8(problem):
        return None
    return Unsupported("q_descale", "an array", f"descales are for fp8 inputs, and q is {problem.dtype}")


def _float_range(problem: AttentionProblem, arch: str) -> Finding:
    if problem.dtype == "float64":
        return None
    for field in ("softmax_scale", "softcap"):
        value = getattr(problem, field)
        nearest = math.copysign(min(max(abs(value), LEAST_FACTOR), GREATEST_FACTOR), value)
        if value and nearest != value:
            reason = f"scores are fp32, which take 0 or a magnitude from {LEAST_FACTOR} to {GREATEST_FACTOR} here"
            return Unsupported(field, value, reason, nearest)
    return None


def _any_fp8(problem: AttentionProblem) -> bool:
    return ELEMENTS[problem.dtype].fp8 or ELEMENTS[problem.kv_dtype].fp8


def _without_fp8(problem: AttentionProblem, reason: str) -> Unsupported:
    if ELEMENTS[problem.dtype].fp8:
        return Unsupported("dtype", problem.dtype, reason, "bfloat16")
    return Unsupported("kv_dtype", problem.kv_dtype, reason, problem.dtype)


CHECKS = (
    Check("arch.known", _arch_known),
    Check("dtype.known", _dtype_known),
    Check("fp8.backward", _fp8_backward),
    Check("fp8.arch", _fp8_arch),
    Check("kv_dtype.mixed", _kv_dtype_mixed),
    Check("out_dtype.fixed", _out_dtype_fixed),
    Check("compute.mode", _compute_mode),
    Check("head_dim.range", _head_dim_range),
    Check("seqlen.range", _seqlen_range),
    Check("dropout.fp8", _dropout_fp8),
    Check("bias.layout", _bias_layout),
    Check("bias.dtype", _bias_dtype),
    Check("descales.dtype", _descales_dtype),
    Check("float.range", _float_range),
)
