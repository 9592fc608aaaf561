"""Requests that are refused, with what each refusal must say."""

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
    """A valid request, batch 2, seqlens 4 and 6, heads 4 and 2, head_dim 8, with changes."""
    sound: dict[str, Any] = {"q": array(2, 4, 4, 8), "k": array(2, 6, 2, 8), "v": array(2, 6, 2, 8)}
    return ga.FlashForward(**{**sound, **changes})


def fp8(**changes: Any) -> ga.FlashForward:
    sound = {name: array(2, 4, 2, 8, dtype=F8) for name in "qkv"}
    return ga.FlashForward(**{**sound, **changes})


def varlen(**changes: Any) -> ga.FlashForward:
    """A valid varlen request: sequences of 1 row and 2 keys, and of 3 rows and 4 keys, with changes."""
    sound: dict[str, Any] = {"q": array(4, 4, 8), "k": array(6, 2, 8), "v": array(6, 2, 8)}
    sound |= {"cu_seqlens_q": ints(0, 1, 4), "cu_seqlens_k": ints(0, 2, 6)}
    return ga.FlashForward(**{**sound, **changes})


def backward(**changes: Any) -> ga.FlashBackward:
    sound: dict[str, Any] = {"q": array(2, 4, 4, 8), "k": array(2, 6, 2, 8), "v": array(2, 6, 2, 8)}
    sound |= {"out": array(2, 4, 4, 8), "dout": array(2, 4, 4, 8), "lse": array(2, 4, 4)}
    return ga.FlashBackward(**{**sound, **changes})


OF_THE_FIELD: Any = object()


@dataclasses.dataclass
class Case:
    """A request with what its refusal must say. value: by default the field's, of an array its dtype and shape.

    nearest: if there is one, the error is `Unsupported`.
    """

    request: Any
    field: str
    reason: str
    value: Any = OF_THE_FIELD
    nearest: Any = None

    def __post_init__(self) -> None:
        self.error = ga.InvalidRequest if self.nearest is None else ga.Unsupported
        if self.value is OF_THE_FIELD:
            name, _, index = self.field.partition("[")
            value = getattr(self.request, name)
            value = value[int(index[:-1])] if index else value
            self.value = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else value


DENSE = {
    "not an array": Case(dense(q=[[1.0]]), "q", "must be an array", value="list"),
    "three axes": Case(dense(q=array(4, 4, 8)), "q", "must have 4 axes (batch, seqlen, heads, head_dim)"),
    "no heads": Case(dense(q=array(2, 4, 0, 8)), "q", "at least one head"),
    "no head_dim": Case(dense(q=array(2, 4, 4, 0), k=array(2, 6, 2, 0)), "head_dim", "must be >= 1", value=0),
    "k's batch": Case(dense(k=array(3, 6, 2, 8)), "k", "must have q's batch, 2"),
    "v's rows": Case(dense(v=array(2, 5, 2, 8)), "v", "must have k's seqlen, 6"),
    "v's heads": Case(dense(v=array(2, 6, 1, 8)), "v", "must have k's heads, 2"),
    "k's head_dim": Case(dense(k=array(2, 6, 2, 9)), "k", "must have q's head_dim, 8"),
    "heads that do not divide": Case(
        dense(k=array(2, 6, 3, 8), v=array(2, 6, 3, 8)), "k", "of which q's 4 must be a whole multiple"
    ),
    "mixed dtypes": Case(
        dense(k=array(2, 6, 2, 8, dtype=np.float16)), "k", "must have q's dtype, float32", value="float16"
    ),
    "max_seqlen without cu_seqlens": Case(dense(max_seqlen_q=4), "max_seqlen_q", "goes with cu_seqlens only"),
    "causal that is no bool": Case(dense(causal="yes"), "causal", "must be True or False"),
    "alignment": Case(dense(alignment="middle"), "alignment", 'must be "bottom_right" or "top_left"'),
    "window of one": Case(dense(window_size=(1,)), "window_size", "must be (left, right), two ints"),
    "window below -1": Case(dense(window_size=(-2, 0)), "window_size", "each >= 0 keys or -1"),
    "infinite scale": Case(dense(softmax_scale=np.inf), "softmax_scale", "must be a finite number"),
    "negative softcap": Case(dense(softcap=-1.0), "softcap", "must be >= 0; 0 leaves the scores as they are"),
    "negative sink_tokens": Case(dense(sink_tokens=-1), "sink_tokens", "must be an int >= 0"),
    "dropout of 1": Case(dense(dropout_p=1.0), "dropout_p", "must be in [0, 1)"),
    "dropout of almost 1": Case(dense(dropout_p=1 - 2**-40), "dropout_p", "no probability would ever be kept"),
    "negative seed": Case(dense(dropout_seed=-1), "dropout_seed", "must be an int in [0, 18446744073709551615]"),
    "alibi's shape": Case(dense(alibi_slopes=array(3)), "alibi_slopes", "must be an array of float32, shape (4,) or"),
    "sinks' shape": Case(dense(sinks=array(2)), "sinks", "shape (4,)"),
    "bias' shape": Case(dense(bias=array(2, 4, 4, 5)), "bias", "shape (2, 4, 4, 6) or (2, 4, 1, 6) or"),
    "compute of bf16": Case(
        dense(**{name: getattr(dense(), name).astype(BF16) for name in "qkv"}, compute="tf32"),
        "compute",
        "bfloat16 inputs can be computed in bf16",
    ),
    "unknown compute": Case(dense(compute="f64"), "compute", "f32 or tf32 or f16 or bf16"),
    "return_lse": Case(dense(return_lse=1), "return_lse", "must be True or False"),
    "out's shape": Case(dense(out=array(2, 4, 4, 9)), "out", "shape (2, 4, 4, 8)"),
    "integers": Case(
        dense(**{name: getattr(dense(), name).astype(np.int32) for name in "qkv"}),
        "q",
        "must have one of the dtypes",
        value="int32",
        nearest="float32",
    ),
    "long doubles": Case(
        dense(**{name: getattr(dense(), name).astype(np.longdouble) for name in "qkv"}),
        "q",
        "must have one of the dtypes",
        value="float128",
        nearest="float64",
    ),
    "head_dim beyond 512": Case(
        dense(q=array(2, 4, 4, 520), k=array(2, 6, 2, 520)),
        "head_dim",
        "head dims from 1 to 512",
        value=520,
        nearest=512,
    ),
    "head_dim_v beyond 512": Case(
        dense(v=array(2, 6, 2, 600)), "head_dim_v", "head dims from 1 to 512", value=600, nearest=512
    ),
    "fp8 with dropout": Case(fp8(dropout_p=0.1), "dropout_p", "inference and has no dropout", nearest=0.0),
    "fp8 descales of the wrong heads": Case(
        fp8(k_descale=array(2, 3)), "k_descale", "must be an array of float32, shape (2, 2)"
    ),
    "fp8 descales by row": Case(
        fp8(k_descale=array(2, 2, 4)),
        "k_descale",
        "none of a row or a block of rows: (batch, heads_kv)",
        nearest="float32[2, 2]",
    ),
}

VARLEN = {
    "v's rows": Case(varlen(v=array(5, 2, 8)), "v", "must have k's rows, 6"),
    "cu_seqlens_q alone": Case(varlen(cu_seqlens_k=None), "cu_seqlens_k", "must be an int32 array (batch + 1,)"),
    "cu_seqlens of int64": Case(varlen(cu_seqlens_q=ints(0, 1, 4, dtype=np.int64)), "cu_seqlens_q", "an int32 array"),
    "different batches": Case(
        varlen(cu_seqlens_k=ints(0, 6)), "cu_seqlens_k", "must bound as many sequences as cu_seqlens_q, 2", value=1
    ),
    "four axes": Case(varlen(q=array(1, 4, 4, 8)), "q", "must have 3 axes (total,"),
    "does not begin with 0": Case(varlen(cu_seqlens_q=ints(1, 2, 4)), "cu_seqlens_q", "must begin with 0", value=1),
    "falls": Case(varlen(cu_seqlens_q=ints(0, 5, 4)), "cu_seqlens_q", "must not fall", value=-1),
    "does not end with the rows": Case(
        varlen(cu_seqlens_q=ints(0, 1, 3)), "cu_seqlens_q", "number of rows, 4", value=3
    ),
    "max_seqlen too small": Case(varlen(max_seqlen_q=2), "max_seqlen_q", "at least the longest sequence, 3"),
    "max_seqlen of 0": Case(varlen(max_seqlen_k=0), "max_seqlen_k", "hold 0, and k has 6"),
    "negative max_seqlen": Case(varlen(max_seqlen_k=-1), "max_seqlen_k", "must be an int >= 0"),
    "more rows than fit": Case(varlen(max_seqlen_k=2), "max_seqlen_k", "2 of so many rows hold 4, and k has 6"),
    "bias of fewer rows": Case(varlen(bias=array(1, 1, 2, 4)), "bias", "shape (2, 4, 3, 4)"),
}

BACKWARD = {
    "fp8": Case(
        backward(**{name: array(2, 4, 4, 8, dtype=F8) for name in ("q", "k", "v")}),
        "q",
        "fp8 gradients would be lost in rounding",
        value="float8_e4m3fn",
        nearest="bfloat16",
    ),
    "no dout": Case(backward(dout=None), "dout", "is needed by backward"),
    "no lse": Case(backward(lse=None), "lse", "ask forward for return_lse=True"),
    "lse too small": Case(backward(lse=array(2, 4, 3)), "lse", "holds 96 bytes where 128 are needed"),
    "dout's shape": Case(backward(dout=array(2, 5, 4, 8)), "dout", "(2, 4, 4, 8)"),
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
        "shape (4, 4)",
    ),
    "return_lse": Case(backward(return_lse=True), "return_lse", "backward gives gradients alone"),
}

KINDS = {"dense": DENSE, "varlen": VARLEN, "backward": BACKWARD}
CASES = {f"{kind}: {name}": case for kind, cases in KINDS.items() for name, case in cases.items()}
