"""Requests that cannot be answered as asked, with what their refusals must say."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

import gpu_actors as ga

F8, F8_WIDE, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def ints(*values: int, dtype: Any = np.int32) -> np.ndarray:
    return np.array(values, dtype)


def dense(**changes: Any) -> ga.FlashForward:
    """A sound request, batch 2, seqlens 4 and 6, heads 4 and 2, head_dim 8, with changes."""
    sound: dict[str, Any] = {"q": array(2, 4, 4, 8), "k": array(2, 6, 2, 8), "v": array(2, 6, 2, 8)}
    return ga.FlashForward(**{**sound, **changes})


def fp8(**changes: Any) -> ga.FlashForward:
    sound = {name: array(2, 4, 2, 8, dtype=F8) for name in "qkv"}
    return ga.FlashForward(**{**sound, **changes})


def varlen(**changes: Any) -> ga.FlashForward:
    """A sound varlen request: sequences of (1, 2) and (3, 4) rows."""
    sound: dict[str, Any] = {"q": array(4, 4, 8), "k": array(6, 2, 8), "v": array(6, 2, 8)}
    sound |= {"cu_seqlens_q": ints(0, 1, 4), "cu_seqlens_k": ints(0, 2, 6)}
    return ga.FlashForward(**{**sound, **changes})


def backward(**changes: Any) -> ga.FlashBackward:
    sound: dict[str, Any] = {"q": array(2, 4, 4, 8), "k": array(2, 6, 2, 8), "v": array(2, 6, 2, 8)}
    sound |= {"out": array(2, 4, 4, 8), "dout": array(2, 4, 4, 8), "lse": array(2, 4, 4)}
    return ga.FlashBackward(**{**sound, **changes})


@dataclasses.dataclass
class Case:
    """A request with what its refusal must say."""

    request: Any
    field: str
    value: Any
    reason: str
    nearest: Any = None
    error: type[ga.RequestError] = ga.InvalidRequest


def unsupported(request: Any, field: str, value: Any, reason: str, nearest: Any) -> Case:
    return Case(request, field, value, reason, nearest, ga.Unsupported)


DENSE = {
    "not an array": Case(dense(q=[[1.0]]), "q", "list", "must be an array"),
    "no q": Case(dense(q=None), "q", "NoneType", "must be an array"),
    "three axes": Case(
        dense(q=array(4, 4, 8)), "q", "float32[4, 4, 8]", "must have 4 axes (batch, seqlen, heads, head_dim)"
    ),
    "no heads": Case(dense(q=array(2, 4, 0, 8)), "q", "float32[2, 4, 0, 8]", "at least one head"),
    "no head_dim": Case(dense(q=array(2, 4, 4, 0), k=array(2, 6, 2, 0)), "head_dim", 0, "must be >= 1"),
    "k's batch": Case(dense(k=array(3, 6, 2, 8)), "k", "float32[3, 6, 2, 8]", "must have q's batch, 2"),
    "v's batch": Case(dense(v=array(3, 6, 2, 8)), "v", "float32[3, 6, 2, 8]", "must have q's batch, 2"),
    "v's rows": Case(dense(v=array(2, 5, 2, 8)), "v", "float32[2, 5, 2, 8]", "must have k's seqlen, 6"),
    "v's heads": Case(dense(v=array(2, 6, 1, 8)), "v", "float32[2, 6, 1, 8]", "must have k's heads, 2"),
    "k's head_dim": Case(dense(k=array(2, 6, 2, 9)), "k", "float32[2, 6, 2, 9]", "must have q's head_dim, 8"),
    "heads that do not divide": Case(
        dense(k=array(2, 6, 3, 8), v=array(2, 6, 3, 8)),
        "k",
        "float32[2, 6, 3, 8]",
        "of which q's 4 must be a whole multiple",
    ),
    "more KV heads than heads": Case(
        dense(k=array(2, 6, 8, 8), v=array(2, 6, 8, 8)),
        "k",
        "float32[2, 6, 8, 8]",
        "has 8 heads, of which q's 4 must be a whole multiple, at least 1",
    ),
    "no KV heads": Case(dense(k=array(2, 6, 0, 8), v=array(2, 6, 0, 8)), "k", "float32[2, 6, 0, 8]", "has 0 heads"),
    "mixed dtypes": Case(dense(k=array(2, 6, 2, 8, dtype=np.float16)), "k", "float16", "must have q's dtype, float32"),
    "fp8 keys of a bf16 query": Case(
        dense(q=array(2, 4, 4, 8, dtype=BF16), k=array(2, 6, 2, 8, dtype=F8), v=array(2, 6, 2, 8, dtype=F8)),
        "k",
        "float8_e4m3fn",
        "must have q's dtype, bfloat16",
    ),
    "max_seqlen without cu_seqlens": Case(dense(max_seqlen_q=4), "max_seqlen_q", 4, "goes with cu_seqlens only"),
    "causal that is no bool": Case(dense(causal="yes"), "causal", "yes", "must be True or False"),
    "alignment": Case(dense(alignment="middle"), "alignment", "middle", 'must be "bottom_right" or "top_left"'),
    "window of one": Case(dense(window_size=(1,)), "window_size", (1,), "must be (left, right), two ints"),
    "window below -1": Case(dense(window_size=(-2, 0)), "window_size", (-2, 0), "each >= 0 keys or -1"),
    "window of floats": Case(dense(window_size=(1.0, 2.0)), "window_size", (1.0, 2.0), "two ints"),
    "infinite scale": Case(dense(softmax_scale=np.inf), "softmax_scale", np.inf, "must be a finite number"),
    "scale of text": Case(dense(softmax_scale="1"), "softmax_scale", "1", "must be a finite number"),
    "negative softcap": Case(dense(softcap=-1.0), "softcap", -1.0, "must be >= 0; 0 leaves the scores as they are"),
    "negative sink_tokens": Case(dense(sink_tokens=-1), "sink_tokens", -1, "must be an int >= 0"),
    "dropout of 1": Case(dense(dropout_p=1.0), "dropout_p", 1.0, "must be in [0, 1)"),
    "negative dropout": Case(dense(dropout_p=-0.1), "dropout_p", -0.1, "must be in [0, 1)"),
    "negative seed": Case(dense(dropout_seed=-1), "dropout_seed", -1, "must be an int in [0, 18446744073709551615]"),
    "seed of 65 bits": Case(dense(dropout_seed=1 << 64), "dropout_seed", 1 << 64, "must be an int in [0,"),
    "alibi's shape": Case(
        dense(alibi_slopes=array(3)), "alibi_slopes", "float32[3]", "must be an array of float32, shape (4,) or"
    ),
    "alibi's dtype": Case(
        dense(alibi_slopes=array(4, dtype=np.float64)), "alibi_slopes", "float64[4]", "an array of float32"
    ),
    "sinks' shape": Case(dense(sinks=array(2)), "sinks", "float32[2]", "shape (4,)"),
    "bias' shape": Case(
        dense(bias=array(2, 4, 4, 5)), "bias", "float32[2, 4, 4, 5]", "shape (2, 4, 4, 6) or (2, 4, 1, 6) or"
    ),
    "bias' dtype": Case(
        dense(bias=array(1, 1, 4, 6, dtype=np.float16)), "bias", "float16[1, 1, 4, 6]", "an array of float32"
    ),
    "descales of fp32": Case(
        dense(q_descale=array(2, 2)),
        "q_descale",
        "float32[2, 2]",
        "goes with fp8 inputs only, and q is float32",
    ),
    "compute of bf16": Case(
        dense(**{name: getattr(dense(), name).astype(BF16) for name in "qkv"}, compute="tf32"),
        "compute",
        "tf32",
        "bfloat16 inputs can be computed in bf16",
    ),
    "unknown compute": Case(dense(compute="f64"), "compute", "f64", "f32 or tf32 or f16 or bf16"),
    "return_lse": Case(dense(return_lse=1), "return_lse", 1, "must be True or False"),
    "out's shape": Case(dense(out=array(2, 4, 4, 9)), "out", "float32[2, 4, 4, 9]", "shape (2, 4, 4, 8)"),
    "out's dtype": Case(dense(out=array(2, 4, 4, 8, dtype=BF16)), "out", "bfloat16[2, 4, 4, 8]", "an array of float32"),
    "integers": unsupported(
        dense(**{name: getattr(dense(), name).astype(np.int32) for name in "qkv"}),
        "q",
        "int32",
        "must have one of the dtypes",
        "float32",
    ),
    "long doubles": unsupported(
        dense(**{name: getattr(dense(), name).astype(np.longdouble) for name in "qkv"}),
        "q",
        "float128",
        "must have one of the dtypes",
        "float64",
    ),
    "head_dim beyond 512": unsupported(
        dense(q=array(2, 4, 4, 520), k=array(2, 6, 2, 520)), "head_dim", 520, "head dims from 1 to 512", 512
    ),
    "head_dim_v beyond 512": unsupported(
        dense(v=array(2, 6, 2, 600)), "head_dim_v", 600, "head dims from 1 to 512", 512
    ),
    "fp8 with dropout": unsupported(fp8(dropout_p=0.1), "dropout_p", 0.1, "inference and has no dropout", 0.0),
    "fp8 descales of the wrong heads": Case(
        fp8(k_descale=array(2, 3)), "k_descale", "float32[2, 3]", "must be an array of float32, shape (2, 2)"
    ),
    "fp8 descales by row": unsupported(
        fp8(k_descale=array(2, 2, 4)),
        "k_descale",
        "float32[2, 2, 4]",
        "none of a row or a block of rows: (batch, heads_kv)",
        "float32[2, 2]",
    ),
    "mixed fp8": Case(fp8(k=array(2, 4, 2, 8, dtype=F8_WIDE)), "k", "float8_e5m2", "must have q's dtype"),
    "fp8 output in fp8": Case(
        fp8(out=array(2, 4, 2, 8, dtype=F8)), "out", "float8_e4m3fn[2, 4, 2, 8]", "an array of bfloat16"
    ),
}

VARLEN = {
    "cu_seqlens_q alone": Case(varlen(cu_seqlens_k=None), "cu_seqlens_k", None, "must be an int32 array (batch + 1,)"),
    "cu_seqlens_k alone": Case(varlen(cu_seqlens_q=None), "cu_seqlens_q", None, "must be an int32 array (batch + 1,)"),
    "cu_seqlens of int64": Case(
        varlen(cu_seqlens_q=ints(0, 1, 4, dtype=np.int64)), "cu_seqlens_q", "int64[3]", "an int32 array"
    ),
    "no bounds": Case(varlen(cu_seqlens_q=ints()), "cu_seqlens_q", "int32[0]", "must be an int32 array (batch + 1,)"),
    "different batches": Case(
        varlen(cu_seqlens_k=ints(0, 6)), "cu_seqlens_k", 1, "must bound as many sequences as cu_seqlens_q, 2"
    ),
    "four axes": Case(varlen(q=array(1, 4, 4, 8)), "q", "float32[1, 4, 4, 8]", "must have 3 axes (total,"),
    "does not begin with 0": Case(varlen(cu_seqlens_q=ints(1, 2, 4)), "cu_seqlens_q", 1, "must begin with 0"),
    "falls": Case(varlen(cu_seqlens_q=ints(0, 5, 4)), "cu_seqlens_q", -1, "must not fall"),
    "does not end with the rows": Case(varlen(cu_seqlens_q=ints(0, 1, 3)), "cu_seqlens_q", 3, "number of rows, 4"),
    "max_seqlen too small": Case(varlen(max_seqlen_q=2), "max_seqlen_q", 2, "at least the longest sequence, 3"),
    "max_seqlen of 0": Case(varlen(max_seqlen_k=0), "max_seqlen_k", 0, "hold 0, and k has 6"),
    "negative max_seqlen": Case(varlen(max_seqlen_k=-1), "max_seqlen_k", -1, "must be an int >= 0"),
    "more rows than fit": Case(varlen(max_seqlen_k=2), "max_seqlen_k", 2, "2 of so many rows hold 4, and k has 6"),
    "v's rows": Case(varlen(v=array(5, 2, 8)), "v", "float32[5, 2, 8]", "must have k's rows, 6"),
    "bias of fewer rows": Case(varlen(bias=array(1, 1, 2, 4)), "bias", "float32[1, 1, 2, 4]", "shape (2, 4, 3, 4)"),
    "bias of fewer keys": Case(varlen(bias=array(1, 1, 3, 3)), "bias", "float32[1, 1, 3, 3]", "(1, 1, 1, 4)"),
    "bias of another batch": Case(varlen(bias=array(3, 1, 3, 4)), "bias", "float32[3, 1, 3, 4]", "(1, 4, 1, 4)"),
    "bias of three axes": Case(varlen(bias=array(4, 3, 4)), "bias", "float32[4, 3, 4]", "shape (2, 4, 3, 4)"),
    "alibi of another batch": Case(
        varlen(alibi_slopes=array(3, 4)), "alibi_slopes", "float32[3, 4]", "shape (4,) or (2, 4)"
    ),
}

BACKWARD = {
    "fp8": unsupported(
        backward(**{name: array(2, 4, 4, 8, dtype=F8) for name in ("q", "k", "v")}),
        "q",
        "float8_e4m3fn",
        "fp8 gradients would be lost in rounding",
        "bfloat16",
    ),
    "no dout": Case(backward(dout=None), "dout", None, "is needed by backward"),
    "no out": Case(backward(out=None), "out", None, "is needed by backward"),
    "no lse": Case(backward(lse=None), "lse", None, "ask forward for return_lse=True"),
    "lse too small": Case(
        backward(lse=array(2, 4, 3)), "lse", "float32[2, 4, 3]", "holds 96 bytes where 128 are needed"
    ),
    "lse's dtype": Case(backward(lse=array(2, 4, 4, dtype=np.float64)), "lse", "float64[2, 4, 4]", "array of float32"),
    "dout's shape": Case(backward(dout=array(2, 5, 4, 8)), "dout", "float32[2, 5, 4, 8]", "(2, 4, 4, 8)"),
    "dout's dtype": Case(
        backward(dout=array(2, 4, 4, 8, dtype=BF16)), "dout", "bfloat16[2, 4, 4, 8]", "an array of float32"
    ),
    "dout's layout": Case(
        backward(dout=array(2, 4, 4, 8).transpose(0, 2, 1, 3)[:, :3]),
        "dout",
        "float32[2, 3, 4, 8]",
        "(2, 4, 4, 8)",
    ),
    "out's shape": Case(backward(out=array(2, 4, 4, 9)), "out", "float32[2, 4, 4, 9]", "shape (2, 4, 4, 8)"),
    "out's dtype": Case(
        backward(out=array(2, 4, 4, 8, dtype=np.float16)), "out", "float16[2, 4, 4, 8]", "an array of float32"
    ),
    "lse's layout": Case(backward(lse=array(2, 4, 4, 1)), "lse", "float32[2, 4, 4, 1]", "must be an array of float32"),
    "a list for dout": Case(backward(dout=[1.0]), "dout", "list", "must be an array"),
    "lse of a packed batch": Case(
        ga.FlashBackward(
            q=array(4, 4, 8),
            k=array(6, 2, 8),
            v=array(6, 2, 8),
            cu_seqlens_q=ints(0, 1, 4),
            cu_seqlens_k=ints(0, 2, 6),
            out=array(4, 4, 8),
            dout=array(4, 4, 8),
            lse=array(4, 4, 1),
        ),
        "lse",
        "float32[4, 4, 1]",
        "shape (4, 4)",
    ),
    "return_lse": Case(backward(return_lse=True), "return_lse", True, "backward gives gradients alone"),
    "descales": Case(backward(q_descale=array(2, 2)), "q_descale", "float32[2, 2]", "goes with fp8 inputs only"),
    "deterministic": Case(backward(deterministic="yes"), "deterministic", "yes", "must be True or False"),
    "forward's own": Case(backward(softcap=-2.0), "softcap", -2.0, "must be >= 0"),
}

KINDS = {"dense": DENSE, "varlen": VARLEN, "backward": BACKWARD}
CASES = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}
