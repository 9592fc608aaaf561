"""Which problems the kernels can compute, and why they refuse others.

`refusals` is the single list of reasons; the first one counts. `gpu_actors.validation` refuses earlier what no device
could answer (shapes that contradict each other, a negative softcap).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.compiling.source import FIRST_CAPABILITY, check_arch
from gpu_actors.errors import Unsupported

__all__ = [
    "ELEMENTS",
    "FIRST_FP8_CAPABILITY",
    "LATENT_DIM",
    "MAX_HEAD_DIM",
    "MAX_SEQLEN",
    "Element",
    "bias_turns_refusal",
    "capability",
    "check_capability",
    "check_support",
    "example_problem",
    "find_unsupported",
    "order_refusal",
    "refusals",
    "scale_refusal",
]

MAX_HEAD_DIM = 512
LATENT_DIM = 576  # of keys that hold a latent of 512 columns and a rotated part of 64
MAX_SEQLEN = (1 << 30) - 1  # kernels add two row indices and a window bound in 32 bits
SMALLEST_SCALE = 2.0**-100  # of kernels that take maxima before they scale
FIRST_FP8_CAPABILITY = 90


class Element(NamedTuple):
    """A dtype as kernels know it.

    c_type: its type in kernels_cu/common/types.cuh. itemsize: in bytes. computes: the possible precisions of its
    products, the default first. out: the dtype of the output.
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


def check_support(problem: AttentionProblem, arch: str) -> None:
    """Raise the first of `refusals`, if there is one."""
    found = find_unsupported(problem, arch)
    if found is not None:
        raise found[1]


def find_unsupported(problem: AttentionProblem, arch: str) -> tuple[str, Unsupported] | None:
    return next(refusals(problem, arch), None)


@functools.lru_cache(maxsize=64)
def capability(arch: str) -> int:
    """The compute capability times ten: sm_80 -> 80, sm_90a -> 90, sm_120a -> 120."""
    digits = re.search(r"\d+", check_arch(arch))
    assert digits is not None
    return int(digits[0])


def check_capability(arch: str) -> None:
    if capability(arch) < FIRST_CAPABILITY:
        reason = "the kernels are written for compute capability 8.0 (Ampere) and newer"
        raise Unsupported("arch", arch, reason, "sm_80")


def scale_refusal(problem: AttentionProblem) -> Unsupported | None:
    """Why a kernel that takes maxima before it scales does not take a problem, or None."""
    if problem.softmax_scale >= SMALLEST_SCALE:
        return None
    reason = "maxima are taken before the scale, which needs a positive scale"
    return Unsupported("softmax_scale", problem.softmax_scale, reason, SMALLEST_SCALE)


def bias_turns_refusal(problem: AttentionProblem) -> Unsupported | None:
    """Why a kernel whose blocks take turns at the gradient of a bias does not take a problem, or None."""
    p = problem
    own_tiles = p.layout == "varlen" or p.q_positions or p.k_positions
    if not (p.deterministic and p.dbias and p.bias and p.bias[1] and own_tiles):
        return None
    reason = "sequences take turns at each tile of a bias that they share, and those of other lengths lack some tiles"
    return Unsupported("deterministic", True, reason, False)


def order_refusal(problem: AttentionProblem, reason: str, field: str, value: object, nearest: object) -> Unsupported:
    """The error of a problem if no kernel orders the sums of its gradients.

    field, value, nearest: what the error names in an invariant context, where callers do not set ``deterministic``.
    """
    if not problem.invariant:
        return Unsupported("deterministic", True, reason, False)
    reason = f"gradients are deterministic with ContextOptions(invariant=True), but {reason}"
    return Unsupported(field, value, reason, nearest)


def example_problem(dtype: str, head_dim: int, **fields: Any) -> AttentionProblem:
    """A problem of one sequence of 1024 rows and keys and one head, with the default options except ``fields``."""
    element = ELEMENTS[dtype]
    usual: dict[str, Any] = {
        **dict.fromkeys(("batch", "heads_q", "heads_kv"), 1),
        **dict.fromkeys(("seqlen_q", "seqlen_k", "total_q", "total_k"), 1024),
        **dict.fromkeys(("head_dim", "head_dim_v"), head_dim),
        **dict.fromkeys(("dtype", "kv_dtype"), dtype),
    }
    own = {"out_dtype": element.out, "compute": element.computes[0], "softmax_scale": head_dim**-0.5}
    return AttentionProblem(**usual | own | fields)


def refusals(problem: AttentionProblem, arch: str) -> Iterator[tuple[str, Unsupported]]:
    """Yield every reason to refuse a problem, (code, error). The first one counts.

    A later check may assume that no earlier reason holds.
    """
    p = problem
    yield from _unknown(p, arch)
    q, kv = ELEMENTS[p.dtype], ELEMENTS[p.kv_dtype]
    if q.fp8 or kv.fp8:
        yield from _fp8_refusals(p, arch)
    if p.kv_dtype != p.dtype and not (p.decoding and kv.fp8 and q.itemsize == 2):
        reason = f"keys and values must have q's dtype, {p.dtype}: no kernel here reads mixed dtypes"
        if q.fp8:
            reason = f"fp8 queries ({p.dtype}) need keys and values of the same fp8 type"
        elif p.decoding:
            reason = f"a cache holds q's dtype ({p.dtype}), or fp8 under a 16-bit q"
        yield "kv_dtype.mixed", Unsupported("kv_dtype", p.kv_dtype, reason, p.dtype)
    if p.out_dtype != q.out and (p.out_dtype != "float32" or p.dtype == "float64" or p.direction == "backward"):
        reason = f"the output of {p.dtype} inputs is {q.out}"
        yield "out_dtype.fixed", Unsupported("out_dtype", p.out_dtype, reason, q.out)
    if p.compute not in q.computes:
        reason = f"{p.dtype} inputs are multiplied in their own precision; only float32 inputs can choose"
        if len(q.computes) > 1:
            reason = f"{p.dtype} inputs are multiplied in one of {', '.join(q.computes)}"
        yield "compute.mode", Unsupported("compute", p.compute, reason, q.computes[0])
    if p.wide_lse and p.dtype != "float64":
        reason = f"scores of {p.dtype} inputs are float32, and a wider LSE would hold no more of them"
        yield "lse_dtype.wide", Unsupported("lse_dtype", p.lse_dtype, reason, "float32")
    for field, dim in (("head_dim", p.head_dim), ("head_dim_v", p.head_dim_v)):
        greatest = LATENT_DIM if p.latent and field == "head_dim" else MAX_HEAD_DIM
        if not 1 <= dim <= greatest:
            reason = f"the kernels keep whole rows on chip, and take head dims from 1 to {greatest}"
            yield "head_dim.range", Unsupported(field, dim, reason, min(max(dim, 1), greatest))
    for field, length in (("seqlen_q", p.seqlen_q), ("seqlen_k", p.seqlen_k)):
        if length > MAX_SEQLEN:
            reason = "one sequence holds fewer than 2^30 rows"
            yield "seqlen.range", Unsupported(field, length, reason, MAX_SEQLEN)
    if p.dropout_p and (q.fp8 or kv.fp8):
        reason = "fp8 attention is for inference and has no dropout"
        yield "dropout.fp8", Unsupported("dropout_p", p.dropout_p, reason, 0.0)
    if p.bias is not None and p.bias[0] not in (p.dtype, "float32", "bool"):
        reason = f"a bias has q's dtype, {p.dtype}, or float32, and a mask is bool"
        yield "bias.dtype", Unsupported("bias", p.bias[0], reason, "float32")
    if p.bias_row and p.dbias and p.deterministic:
        reason = "rows that share a bias add to its gradient in any order"
        whole = (*p.bias_shape[:2], p.seqlen_q, p.bias_shape[3])
        yield "bias.row", order_refusal(p, reason, "bias", p.bias_shape, whole)
    if p.descales and not (q.fp8 or kv.fp8):
        reason = f"descales are for fp8 inputs, and q is {p.dtype}"
        yield "descales.dtype", Unsupported("q_descale", "an array", reason)
    if p.invariant:
        yield from _invariant_refusals(p)
    for field in ("softmax_scale", "softcap") if p.dtype != "float64" else ():
        value = getattr(p, field)
        nearest = math.copysign(min(max(abs(value), LEAST_FACTOR), GREATEST_FACTOR), value)
        if value and nearest != value:
            reason = f"scores are fp32, which take 0 or a magnitude from {LEAST_FACTOR} to {GREATEST_FACTOR} here"
            yield "float.range", Unsupported(field, value, reason, nearest)


def _invariant_refusals(p: AttentionProblem) -> Iterator[tuple[str, Unsupported]]:
    """The options by which a row's bits depend on its surroundings in every kernel."""
    if p.dropout_p:
        reason = "dropout draws by a sequence's place in its batch, and bits of this context do not depend on it"
        yield "invariant.dropout", Unsupported("dropout_p", p.dropout_p, reason, 0.0)
    if p.num_splits > 1:
        reason = "splits lie where the length of a sequence puts them, and bits of this context do not depend on it"
        yield "invariant.splits", Unsupported("num_splits", p.num_splits, reason, 1)
    if p.score_mod is not None and p.score_mod.block_size is not None and p.direction == "forward":
        reason = "a row has its keys in the order of its block's list, and its bits do not depend on other rows here"
        yield "invariant.blocks", Unsupported("block_mask", p.score_mod.block_size, reason)


def _unknown(p: AttentionProblem, arch: str) -> Iterator[tuple[str, Unsupported]]:
    try:
        check_capability(arch)
    except Unsupported as error:
        yield "arch.known", error
    for field, dtype in (("dtype", p.dtype), ("kv_dtype", p.kv_dtype)):
        if dtype not in ELEMENTS:
            reason = f"attention is computed on {', '.join(ELEMENTS)}"
            yield "dtype.known", Unsupported(field, dtype, reason, "float32")


def _fp8_refusals(p: AttentionProblem, arch: str) -> Iterator[tuple[str, Unsupported]]:
    field, nearest = ("dtype", "bfloat16") if ELEMENTS[p.dtype].fp8 else ("kv_dtype", p.dtype)
    if p.direction != "forward":
        reason = "fp8 gradients would be lost in rounding; backward takes 16-bit and wider inputs"
        yield "fp8.backward", Unsupported(field, getattr(p, field), reason, nearest)
    # Over a cache all 8-bit values are widened before they are multiplied.
    if capability(arch) < FIRST_FP8_CAPABILITY and not p.decoding:
        reason = f"fp8 attention needs sm_90a or newer, and {arch} is older"
        yield "fp8.arch", Unsupported(field, getattr(p, field), reason, nearest)
