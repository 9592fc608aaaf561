"""Requests that cannot be answered as asked: each names its field, the value, what would be accepted, and the nearest.

A request is refused by its reply, never by the call, and never at the cost of the actor that looked at it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

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


def paged(**changes: Any) -> ga.PagedForward:
    """A sound request over pages: 2 sequences, 1 row each, pages of 16 keys."""
    sound: dict[str, Any] = {"q": array(2, 1, 4, 8), "k_cache": array(6, 16, 2, 8), "v_cache": array(6, 16, 2, 8)}
    sound |= {"block_table": ints(0, 1, 2, 3).reshape(2, 2), "cache_seqlens": ints(20, 30)}
    return ga.PagedForward(**{**sound, **changes})


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
        dense(q=array(4, 4, 8)), "q", "ndarray float32[4, 4, 8]", "must have 4 axes (batch, seqlen, heads, head_dim)"
    ),
    "empty batch": Case(
        dense(q=array(0, 4, 4, 8), k=array(0, 6, 2, 8), v=array(0, 6, 2, 8)),
        "q",
        "ndarray float32[0, 4, 4, 8]",
        "at least one sequence: the batch is empty",
    ),
    "no rows": Case(dense(q=array(2, 0, 4, 8)), "q", "ndarray float32[2, 0, 4, 8]", "must have seqlen >= 1"),
    "no keys": Case(
        dense(k=array(2, 0, 2, 8), v=array(2, 0, 2, 8)), "k", "ndarray float32[2, 0, 2, 8]", "must have seqlen >= 1"
    ),
    "no heads": Case(dense(q=array(2, 4, 0, 8)), "q", "ndarray float32[2, 4, 0, 8]", "at least one head"),
    "no head_dim": Case(dense(q=array(2, 4, 4, 0), k=array(2, 6, 2, 0)), "head_dim", 0, "must be >= 1"),
    "k's batch": Case(dense(k=array(3, 6, 2, 8)), "k", "ndarray float32[3, 6, 2, 8]", "must have q's batch, 2"),
    "v's batch": Case(dense(v=array(3, 6, 2, 8)), "v", "ndarray float32[3, 6, 2, 8]", "must have q's batch, 2"),
    "v's rows": Case(dense(v=array(2, 5, 2, 8)), "v", "ndarray float32[2, 5, 2, 8]", "must have k's seqlen, 6"),
    "v's heads": Case(dense(v=array(2, 6, 1, 8)), "v", "ndarray float32[2, 6, 1, 8]", "must have k's heads, 2"),
    "k's head_dim": Case(dense(k=array(2, 6, 2, 9)), "k", "ndarray float32[2, 6, 2, 9]", "must have q's head_dim, 8"),
    "heads that do not divide": Case(
        dense(k=array(2, 6, 3, 8), v=array(2, 6, 3, 8)), "heads_kv", 3, "q's 4 heads must be a whole multiple"
    ),
    "more KV heads than heads": Case(
        dense(k=array(2, 6, 8, 8), v=array(2, 6, 8, 8)), "heads_kv", 8, "at least 1, of the KV heads"
    ),
    "no KV heads": Case(
        dense(k=array(2, 6, 0, 8), v=array(2, 6, 0, 8)), "heads_kv", 0, "q's 4 heads must be a whole multiple"
    ),
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
        dense(alibi_slopes=array(3)), "alibi_slopes", "ndarray float32[3]", "must be an array of float32, shape (4,) or"
    ),
    "alibi's dtype": Case(
        dense(alibi_slopes=array(4, dtype=np.float64)), "alibi_slopes", "ndarray float64[4]", "an array of float32"
    ),
    "sinks' shape": Case(dense(sinks=array(2)), "sinks", "ndarray float32[2]", "shape (4,)"),
    "bias' shape": Case(
        dense(bias=array(2, 4, 4, 5)), "bias", "ndarray float32[2, 4, 4, 5]", "shape (2, 4, 4, 6) or (2, 1, 4, 6) or"
    ),
    "bias' dtype": Case(
        dense(bias=array(1, 1, 4, 6, dtype=np.float16)), "bias", "ndarray float16[1, 1, 4, 6]", "an array of float32"
    ),
    "descales of fp32": Case(
        dense(q_descale=array(2, 2)),
        "q_descale",
        "ndarray float32[2, 2]",
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
    "out's shape": Case(dense(out=array(2, 4, 4, 9)), "out", "ndarray float32[2, 4, 4, 9]", "shape (2, 4, 4, 8)"),
    "out's dtype": Case(
        dense(out=array(2, 4, 4, 8, dtype=BF16)), "out", "ndarray bfloat16[2, 4, 4, 8]", "an array of float32"
    ),
    "integers": unsupported(
        dense(**{name: getattr(dense(), name).astype(np.int32) for name in "qkv"}),
        "dtype",
        "int32",
        "q must have one of",
        "float32",
    ),
    "long doubles": unsupported(
        dense(**{name: getattr(dense(), name).astype(np.longdouble) for name in "qkv"}),
        "dtype",
        "float128",
        "q must have one of",
        "float64",
    ),
    "head_dim beyond 256": unsupported(
        dense(q=array(2, 4, 4, 264), k=array(2, 6, 2, 264)), "head_dim", 264, "head dims from 1 to 256", 256
    ),
    "head_dim_v beyond 256": unsupported(
        dense(v=array(2, 6, 2, 300)), "head_dim_v", 300, "head dims from 1 to 256", 256
    ),
    "fp8 with dropout": unsupported(fp8(dropout_p=0.1), "dropout_p", 0.1, "inference and has no dropout", 0.0),
    "fp8 descales of the wrong heads": Case(
        fp8(k_descale=array(2, 3)), "k_descale", "ndarray float32[2, 3]", "must be an array of float32, shape (2, 2)"
    ),
    "mixed fp8": Case(fp8(k=array(2, 4, 2, 8, dtype=F8_WIDE)), "k", "float8_e5m2", "must have q's dtype"),
    "fp8 output in fp8": Case(
        fp8(out=array(2, 4, 2, 8, dtype=F8)), "out", "ndarray float8_e4m3fn[2, 4, 2, 8]", "an array of bfloat16"
    ),
}

VARLEN = {
    "cu_seqlens_q alone": Case(varlen(cu_seqlens_k=None), "cu_seqlens_k", None, "must be an int32 array (batch + 1,)"),
    "cu_seqlens_k alone": Case(varlen(cu_seqlens_q=None), "cu_seqlens_q", None, "must be an int32 array (batch + 1,)"),
    "cu_seqlens of int64": Case(
        varlen(cu_seqlens_q=ints(0, 1, 4, dtype=np.int64)), "cu_seqlens_q", "ndarray int64[3]", "an int32 array"
    ),
    "no sequences": Case(varlen(cu_seqlens_q=ints(0)), "cu_seqlens_q", "ndarray int32[1]", "with batch >= 1"),
    "different batches": Case(
        varlen(cu_seqlens_k=ints(0, 6)), "cu_seqlens_k", 1, "must bound as many sequences as cu_seqlens_q, 2"
    ),
    "four axes": Case(varlen(q=array(1, 4, 4, 8)), "q", "ndarray float32[1, 4, 4, 8]", "must have 3 axes (total,"),
    "does not begin with 0": Case(varlen(cu_seqlens_q=ints(1, 2, 4)), "cu_seqlens_q", 1, "must begin with 0"),
    "falls": Case(varlen(cu_seqlens_q=ints(0, 5, 4)), "cu_seqlens_q", -1, "must not fall"),
    "does not end with the rows": Case(varlen(cu_seqlens_q=ints(0, 1, 3)), "cu_seqlens_q", 3, "number of rows, 4"),
    "max_seqlen too small": Case(varlen(max_seqlen_q=2), "max_seqlen_q", 2, "at least the longest sequence, 3"),
    "max_seqlen of 0": Case(varlen(max_seqlen_k=0), "max_seqlen_k", 0, "must be an int >= 1"),
    "all sequences empty": Case(
        varlen(q=array(0, 4, 8), cu_seqlens_q=ints(0, 0, 0)), "cu_seqlens_q", 0, "at least one sequence with a row"
    ),
    "more rows than fit": Case(varlen(max_seqlen_k=2), "k", 6, "more rows than batch * max_seqlen_k = 4 can hold"),
    "v's rows": Case(varlen(v=array(5, 2, 8)), "v", "ndarray float32[5, 2, 8]", "must have k's rows, 6"),
    "bias": Case(varlen(bias=array(1, 1, 3, 4)), "bias", "ndarray float32[1, 1, 3, 4]", "dense layout only"),
    "alibi of another batch": Case(
        varlen(alibi_slopes=array(3, 4)), "alibi_slopes", "ndarray float32[3, 4]", "shape (4,) or (2, 4)"
    ),
}

BACKWARD = {
    "fp8": unsupported(
        backward(**{name: array(2, 4, 4, 8, dtype=F8) for name in ("q", "k", "v")}),
        "dtype",
        "float8_e4m3fn",
        "fp8 gradients would be lost in rounding",
        "bfloat16",
    ),
    "no dout": Case(backward(dout=None), "dout", None, "is needed by backward"),
    "no out": Case(backward(out=None), "out", None, "is needed by backward"),
    "no lse": Case(backward(lse=None), "lse", None, "ask forward for return_lse=True"),
    "lse too small": Case(
        backward(lse=array(2, 4, 3)), "lse", "ndarray float32[2, 4, 3]", "holds 96 bytes where 128 are needed"
    ),
    "lse's dtype": Case(
        backward(lse=array(2, 4, 4, dtype=np.float64)), "lse", "ndarray float64[2, 4, 4]", "array of float32"
    ),
    "dout's shape": Case(backward(dout=array(2, 5, 4, 8)), "dout", "ndarray float32[2, 5, 4, 8]", "(2, 4, 4, 8)"),
    "deterministic": Case(backward(deterministic="yes"), "deterministic", "yes", "must be True or False"),
    "forward's own": Case(backward(softcap=-2.0), "softcap", -2.0, "must be >= 0"),
}

PAGED = {
    "empty pool": Case(
        paged(k_cache=array(0, 16, 2, 8), v_cache=array(0, 16, 2, 8)),
        "k_cache",
        "ndarray float32[0, 16, 2, 8]",
        "must have at least one page: the pool is empty",
    ),
    "pages of 12": unsupported(
        paged(k_cache=array(6, 12, 2, 8), v_cache=array(6, 12, 2, 8)), "page_size", 12, "a multiple of 8 rows", 16
    ),
    "pages of 4": unsupported(
        paged(k_cache=array(6, 4, 2, 8), v_cache=array(6, 4, 2, 8)), "page_size", 4, "a multiple of 8 rows", 8
    ),
    "pages of 1": unsupported(
        paged(k_cache=array(6, 1, 2, 8), v_cache=array(6, 1, 2, 8)), "page_size", 1, "a multiple of 8 rows", 8
    ),
    "the pool's head_dim": Case(
        paged(k_cache=array(6, 16, 2, 16)), "k_cache", "ndarray float32[6, 16, 2, 16]", "must have q's head_dim, 8"
    ),
    "v_cache's pages": Case(
        paged(v_cache=array(5, 16, 2, 8)), "v_cache", "ndarray float32[5, 16, 2, 8]", "k_cache's blocks, page_size"
    ),
    "heads": Case(
        paged(k_cache=array(6, 16, 3, 8), v_cache=array(6, 16, 3, 8)), "heads_kv", 3, "q's 4 heads must be a whole"
    ),
    "chunk index": Case(paged(chunk_index=2, num_chunks=2), "chunk_index", 2, "must be an int in [0, 1]"),
    "negative chunk": Case(paged(chunk_index=-1), "chunk_index", -1, "must be an int in [0, 0]"),
    "no chunks": Case(paged(num_chunks=0), "num_chunks", 0, "must be an int >= 1"),
    "table's rows": Case(paged(block_table=ints(0, 1).reshape(1, 2)), "block_table", (1, 2), "must have 2 rows"),
    "table's dtype": Case(
        paged(block_table=np.zeros((2, 2), np.int64)), "block_table", "ndarray int64[2, 2]", "an array of int32"
    ),
    "table's columns": Case(paged(block_table=np.zeros((2, 0), np.int32)), "block_table", (2, 0), ">= 1 column"),
    "no lengths": Case(paged(cache_seqlens=None), "cache_seqlens", None, "must be an int32 array (batch,)"),
    "lengths of another batch": Case(
        paged(cache_seqlens=ints(1, 2, 3)), "cache_seqlens", "ndarray int32[3]", "shape (2,)"
    ),
    "empty batch": Case(
        paged(q=array(0, 1, 4, 8), block_table=np.zeros((0, 2), np.int32), cache_seqlens=ints()),
        "q",
        "ndarray float32[0, 1, 4, 8]",
        "the batch is empty",
    ),
    "too many rows": Case(
        paged(q=array(9, 4, 8), cu_seqlens_q=ints(0, 4, 9), max_seqlen_q=4),
        "q",
        9,
        "more rows than batch * max_seqlen_q = 8",
    ),
    "softcap": Case(paged(softcap=-1.0), "softcap", -1.0, "must be >= 0"),
    "pages of fp32 for a bf16 query": unsupported(
        paged(q=array(2, 1, 4, 8, dtype=BF16)),
        "kv_dtype",
        "float32",
        "pages hold q's dtype (bfloat16) or fp8",
        "bfloat16",
    ),
}

CASES = {
    f"{kind}: {name}": case
    for kind, cases in {"dense": DENSE, "varlen": VARLEN, "backward": BACKWARD, "paged": PAGED}.items()
    for name, case in cases.items()
}


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0, "a request cost the actor its life"
        assert ctx.stats()["flash_attn"].in_flight == 0


@pytest.mark.parametrize("name", CASES)
def test_a_request_that_cannot_be_answered_is_refused_by_name(ctx: ga.GpuContext, name: str) -> None:
    case = CASES[name]
    launched = ctx.stats()["flash_attn"].launched
    with pytest.raises(ga.RequestError) as caught:
        ctx.flash_attn.submit(case.request).result(5.0)
    error = caught.value
    assert type(error) is case.error
    assert (error.field, error.value) == (case.field, case.value)
    assert case.reason in error.reason
    assert str(error).startswith(f"{case.field}={case.value!r}: ")
    if isinstance(error, ga.Unsupported):
        assert error.nearest == case.nearest
        assert f"(nearest supported: {case.nearest!r})" in str(error)
    assert ctx.stats()["flash_attn"].launched == launched, "refused before any launch"


@pytest.mark.parametrize("name", CASES)
def test_inspect_key_refuses_what_can_be_seen_without_the_data(ctx: ga.GpuContext, name: str) -> None:
    case = CASES[name]
    of_the_data = ("must begin with 0", "must not fall", "number of rows", "longest sequence", "in [0, 184467")
    if any(reason in case.reason for reason in of_the_data):
        return
    with pytest.raises(case.error) as caught:
        ctx.flash_attn.inspect_key(case.request)
    assert caught.value.field == case.field


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
@pytest.mark.parametrize("dtype", [F8, F8_WIDE])
def test_fp8_is_refused_below_hopper(arch: str, dtype: Any) -> None:
    request = fp8(**{name: array(2, 4, 2, 8, dtype=dtype) for name in "qkv"})
    reason = f"fp8 attention needs sm_90a or newer, and {arch} is older"
    options = ga.ContextOptions(arch=arch)
    with ga.open_context("mock", options) as ctx, pytest.raises(ga.Unsupported, match=reason) as caught:
        ctx.flash_attn.submit(request).result(5.0)
    assert (caught.value.field, caught.value.nearest) == ("dtype", "bfloat16")


@pytest.mark.parametrize(
    "request_",
    [
        backward(),
        backward(causal=True, window_size=(2, 0)),
        paged(),
        paged(q=array(5, 4, 8), cu_seqlens_q=ints(0, 2, 5)),
        paged(chunk_index=1, num_chunks=2),
        paged(
            **{name: array(6, 16, 2, 8, dtype=F8) for name in ("k_cache", "v_cache")}, q=array(2, 1, 4, 8, dtype=BF16)
        ),
    ],
    ids=["backward", "backward with options", "paged", "paged varlen", "chunk", "fp8 pages"],
)
@pytest.mark.parametrize("device", ["mock", "emulated"])
def test_sound_requests_that_no_kernel_answers_yet_are_unsupported_on_every_device(device: str, request_: Any) -> None:
    with ga.open_context(device) as ctx:
        with pytest.raises(ga.Unsupported) as caught:
            ctx.flash_attn.submit(request_).result(10.0)
        assert ctx.flash_attn.restarts == 0
    error = caught.value
    assert error.field
    assert len(error.reason.split()) >= 4, "a sentence"
    assert error.nearest is not None


def test_sinks_need_no_mask_and_a_window_of_zero_is_the_rows_own_key(ctx: ga.GpuContext) -> None:
    ctx.flash_attn.submit(dense(sinks=array(4))).result(5.0)
    ctx.flash_attn.submit(dense(window_size=(0, 0))).result(5.0)
    ctx.flash_attn.submit(dense(sink_tokens=2)).result(5.0)


# Operands as programs really pass them


ODD = {
    "big-endian": array(2, 4, 4, 8, dtype=">f4"),
    "objects": array(2, 4, 4, 8, dtype=object),
    "strings": array(2, 4, 4, 8, dtype="U4"),
    "records": array(2, 4, 4, 8, dtype=[("x", "f4")]),
    "complex": array(2, 4, 4, 8, dtype=np.complex64),
    "dates": array(2, 4, 4, 8, dtype="M8[s]"),
    "masked": np.ma.zeros((2, 4, 4, 8), np.float32),
    "lists": [[[[0.0] * 8] * 4] * 4] * 2,
    "numbers": 3.0,
    "bytes": b"0123",
    "zero axes": np.float32(3.0),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("field", ["q", "k", "v"])
def test_odd_operands_are_refused_by_name(ctx: ga.GpuContext, field: str, name: str) -> None:
    sound = dense(k=array(2, 4, 4, 8), v=array(2, 4, 4, 8))
    with pytest.raises(ga.RequestError) as caught:
        ctx.flash_attn.submit(dataclasses.replace(sound, **{field: ODD[name]})).result(5.0)
    error = caught.value
    assert error.field == field or (error.field == "dtype" and error.reason.startswith(f"{field} must have one of"))


def test_out_must_be_writeable_and_apart_from_the_operands_in_every_request(ctx: ga.GpuContext) -> None:
    """The second request finds the plan of the first, which must not spare it the check."""
    sound = dense(v=array(2, 6, 2, 8))
    for _ in range(2):
        sealed = array(2, 4, 4, 8)
        sealed.flags.writeable = False
        with pytest.raises(ga.InvalidRequest, match="must be writeable"):
            ctx.flash_attn.submit(dataclasses.replace(sound, out=sealed)).result(5.0)
        with pytest.raises(ga.InvalidRequest, match="must not share memory with q"):
            ctx.flash_attn.submit(dataclasses.replace(sound, out=sound.q)).result(5.0)
        base = array(2, 16, 4, 8)
        overlapping = dataclasses.replace(sound, q=base[:, :4], out=base[:, 3:7])
        with pytest.raises(ga.InvalidRequest, match="must not share memory with q"):
            ctx.flash_attn.submit(overlapping).result(5.0)
        out = array(2, 4, 4, 8)
        assert ctx.flash_attn.submit(dataclasses.replace(sound, out=out)).result(5.0).out is out


def test_what_depends_on_the_data_is_checked_in_every_request(ctx: ga.GpuContext) -> None:
    ctx.flash_attn.submit(varlen()).result(5.0)
    ctx.flash_attn.submit(dense(dropout_p=0.5, dropout_seed=3)).result(5.0)
    for _ in range(2):
        with pytest.raises(ga.InvalidRequest, match="must begin with 0"):
            ctx.flash_attn.submit(varlen(cu_seqlens_q=ints(1, 1, 4))).result(5.0)
        for seed in (-1, 1 << 64, "x", 0.0, False, array(2)):
            with pytest.raises(ga.InvalidRequest, match="must be an int in"):
                ctx.flash_attn.submit(dense(dropout_p=0.5, dropout_seed=seed)).result(5.0)


def test_bounds_that_wrap_around_in_32_bits_are_no_lengths(ctx: ga.GpuContext) -> None:
    """Five steps of 2^32 / 5 come around to where they began: every 32-bit difference looks like a sound length."""
    steps = np.cumsum([0] + [((1 << 32) + 4) // 5] * 4 + [0]).astype(np.int64)
    steps[-1] = (1 << 32) + 4
    bounds = steps.astype(np.uint32).view(np.int32)
    assert (np.diff(bounds) >= 0).all()
    assert int(bounds[-1]) == 4
    request = varlen(cu_seqlens_q=bounds, cu_seqlens_k=ints(0, 1, 2, 3, 4, 6), max_seqlen_q=(1 << 30) - 1)
    with pytest.raises(ga.RequestError) as caught:
        ctx.flash_attn.submit(request).result(5.0)
    assert (caught.value.field, caught.value.reason[:13]) == ("cu_seqlens_q", "must not fall")


# Whatever else programs pass


class Hostile:
    """Raises whatever is asked of it."""

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class HostileArray:
    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no shape")


class Impostor:
    shape = (2, 4, 4, 8)
    dtype = "float32"


GARBAGE: list[Any] = [
    *(None, True, 0, -1, 1 << 31, 1 << 64, 10**400, -(10**400), 0.0, 0.5, 1e308, float("nan"), float("inf"), 1j),
    *("", "causal", b"x", [], (), (1, 2), (True, False), (10**30, 0), ("a", "b"), {}, {1: 2}, set(), object(), ...),
    *(
        np.float32(1),
        np.int64(1),
        np.bool_(True),
        np.array(1),
        np.array([]),
        np.array([1]),
        np.zeros((1, 2), np.float32),
    ),
    *(np.zeros((2, 4, 4, 8), dtype) for dtype in ("f4", ">f4", object, "U3", "M8[s]", [("a", "f4")], F8, BF16)),
    *(np.zeros(shape, np.float32) for shape in ((0, 4, 4, 8), (2, 0, 4, 8), (2, 4, 0, 8), (2, 4, 4, 0))),
    *(ints(0, 4), ints(4, 0), ints(0, -1, 4), ints(0, (1 << 31) - 1), ints(0, 4, dtype=np.int64), range(4)),
    *(Hostile(), HostileArray(), Impostor(), type, NotImplemented, slice(1), np.dtype("f4"), memoryview(b"abcd")),
]
BASES = {
    "dense": dense(),
    "varlen": varlen(),
    "options": dense(dropout_p=0.5, causal=True, window_size=(2, 2), sink_tokens=1, return_lse=True),
    "fp8": fp8(q_descale=array(2, 2)),
}


def refusal(reply: ga.Reply[Any]) -> ga.RequestError | None:
    """Why a request was refused, or None where it was answered. Anything else is raised."""
    try:
        reply.result(5.0)
    except ga.RequestError as error:
        return error
    return None


@pytest.mark.parametrize("base", BASES)
def test_no_value_of_any_field_harms_the_actor(ctx: ga.GpuContext, base: str) -> None:
    """Every field of a sound request takes every kind of garbage: an answer, or a refusal that names a field."""
    fields = [field.name for field in dataclasses.fields(ga.FlashForward)]
    refused = 0
    logging.disable()
    for field in fields:
        for value in GARBAGE:
            reply = ctx.flash_attn.submit(dataclasses.replace(BASES[base], **{field: value}))
            error = refusal(reply)
            if error is not None:
                refused += 1
                assert error.field in {*fields, "dtype", "heads_kv", "head_dim", "head_dim_v", "seqlen_q", "seqlen_k"}
                assert str(error)
    logging.disable(logging.NOTSET)
    assert refused > len(fields) * len(GARBAGE) // 2
    assert ctx.flash_attn.restarts == 0


@pytest.mark.parametrize("kind", ["backward", "paged"])
def test_no_value_of_any_field_harms_the_actor_in_other_messages(ctx: ga.GpuContext, kind: str) -> None:
    sound = backward() if kind == "backward" else paged()
    logging.disable()
    for field in dataclasses.fields(sound):
        for value in GARBAGE:
            with pytest.raises(ga.RequestError) as caught:
                ctx.flash_attn.submit(dataclasses.replace(sound, **{field.name: value})).result(5.0)
            assert caught.value.field
    logging.disable(logging.NOTSET)
    assert ctx.flash_attn.restarts == 0


def test_an_operand_whose_own_code_raises_is_refused_and_logged(
    ctx: ga.GpuContext, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(str):
        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError("in __eq__")

        __hash__ = str.__hash__

    reason = "could not be read, it raised ZeroDivisionError"
    with caplog.at_level(logging.WARNING, "gpu_actors"), pytest.raises(ga.InvalidRequest, match=reason) as caught:
        ctx.flash_attn.submit(dense(alignment=Raising("bottom_right"))).result(5.0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.field, caught.value.value) == ("message", "FlashForward")
    assert "in __eq__" in caplog.text, "with its traceback"


def test_a_window_wider_than_any_sequence_is_unbounded(ctx: ga.GpuContext) -> None:
    generator = np.random.default_rng(0)
    q, k, v = (
        generator.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    )
    wide = ctx.flash_attn.forward(q, k, v, window_size=(10**30, 1 << 40)).result(5.0).out
    assert np.array_equal(wide, ctx.flash_attn.forward(q, k, v).result(5.0).out)
