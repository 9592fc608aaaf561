"""Refusals for users of other libraries name arrays as their callers know them, and what would be accepted."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.tensor import HostTensor
from inside.kernels import FAMILIES, dispatch_key, explain

import gpu_actors as ga
from gpu_actors.validation.forward import backward_problem, forward_problem
from gpu_actors.validation.paged import decode_problem

BF16 = ml_dtypes.bfloat16


def zeros(*shape: int, dtype: Any = BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


def forward(dim: int, dtype: Any = BF16) -> ga.AttentionProblem:
    return forward_problem(ga.FlashForward(*(zeros(1, 64, 1, dim, dtype=dtype) for _ in "qkv")))


def backward(dim: int) -> ga.AttentionProblem:
    q, k, v, out, dout = (zeros(1, 64, 1, dim) for _ in range(5))
    lse = zeros(1, 1, 64, dtype=np.float32)
    return backward_problem(ga.FlashBackward(q, k, v, out=out, dout=dout, lse=lse))


def decode(dim: int, cache: Any = BF16) -> ga.AttentionProblem:
    caches = [zeros(1, 8, dim, dtype=cache)]
    return decode_problem(
        ga.BatchedDecode(q=zeros(1, 1, dim), k_caches=caches, v_caches=caches, seq_lens=np.array([3], np.int32))
    )


@pytest.mark.parametrize(
    ("problem", "nearest"),
    [
        (decode(59), 64),
        (decode(59, ml_dtypes.float8_e4m3fn), 64),
        (decode(50, ml_dtypes.float8_e4m3fn), 64),
        (decode(257), 264),
    ],
)
def test_the_nearest_head_dim_is_the_next_one_up(problem: ga.AttentionProblem, nearest: int) -> None:
    tensor_cores = tuple(family for family in FAMILIES if family.tensor_cores)
    with pytest.raises(ga.Unsupported) as caught:
        dispatch_key(problem, "sm_90a", tensor_cores)
    assert (caught.value.field, caught.value.nearest) == ("head_dim", nearest)
    assert dispatch_key(problem, "sm_90a").kernel == "decode_simple"


@pytest.mark.parametrize("dim", [9, 31, 33, 59, 61, 100, 201])
def test_no_family_names_a_smaller_head_dim_while_there_is_a_larger_one(dim: int) -> None:
    for problem in (forward(dim), forward(dim, ml_dtypes.float8_e4m3fn), decode(dim), backward(dim)):
        for family in FAMILIES:
            refusal = family.refusal(problem, "sm_90a")
            if refusal is not None and refusal.field == "head_dim":
                assert refusal.nearest > dim, family.name


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (forward(576), "head dims from 1 to 512"),
        (backward(576), "head dims from 1 to 512"),
        (decode(576), "head dims from 1 to 512"),
        (decode(576, ml_dtypes.float8_e4m3fn), "head dims from 1 to 512"),
    ],
)
def test_a_head_dim_beyond_all_kernels_is_refused_with_the_limits_of_those_for_its_kind(
    problem: ga.AttentionProblem, words: str
) -> None:
    nearest = int(words.split()[-1])
    with pytest.raises(ga.Unsupported, match=words) as caught:
        dispatch_key(problem, "sm_90a")
    assert (caught.value.field, caught.value.value, caught.value.nearest) == ("head_dim", 576, nearest)
    assert not any(verdict.taken for verdict in explain(problem, "sm_90a"))


def test_an_array_of_another_library_is_not_called_an_ndarray(ctx: ga.GpuContext) -> None:
    q, k = HostTensor(zeros(3, 2, 1, 8, dtype=np.float32)), HostTensor(zeros(2, 2, 1, 8, dtype=np.float32))
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.flash_attn.forward(q, k, k).result(60)
    assert str(caught.value) == "k='float32[2, 2, 1, 8]': must have q's batch, 3"


# One length for all sequences


def paged(ctx: ga.GpuContext, lengths: Any, **changes: Any) -> Any:
    rng = np.random.default_rng(3)
    given: dict[str, Any] = {
        "q": rng.standard_normal((3, 1, 2, 16)).astype(np.float32),
        "k_cache": rng.standard_normal((6, 8, 2, 16)).astype(np.float32),
        "v_cache": rng.standard_normal((6, 8, 2, 16)).astype(np.float32),
        "block_table": np.arange(6, dtype=np.int32).reshape(3, 2),
    }
    return ctx.flash_attn.paged_forward(**{**given, **changes}, cache_seqlens=lengths)


@pytest.mark.parametrize("length", [0, 11, np.int64(11)])
def test_an_int_is_the_length_of_every_sequence(ctx: ga.GpuContext, length: Any) -> None:
    each = np.full(3, length, np.int32)
    one, other = paged(ctx, length).result(60), paged(ctx, each).result(60)
    np.testing.assert_array_equal(one.out, other.out)
    packed = {"q": np.ones((4, 2, 16), np.float32), "cu_seqlens_q": np.array([0, 2, 3, 4], np.int32)}
    one, other = (paged(ctx, lengths, **packed).result(60) for lengths in (length, each))
    np.testing.assert_array_equal(one.out, other.out)


def test_an_int_is_the_length_of_every_cache_of_a_decode(ctx: ga.GpuContext) -> None:
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 16), (2, 2, 9, 16), (2, 2, 9, 16)))
    one, other = (ctx.flash_attn.decode(q, k, v, lengths).result(60) for lengths in (7, np.full(2, 7, np.int32)))
    np.testing.assert_array_equal(one.out, other.out)
    key = ctx.flash_attn.inspect_key(ga.BatchedDecode(q=q, k_caches=k, v_caches=v, seq_lens=7))
    assert key.layout == "pointers"


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (-1, "an int in"),
        (17, "at most the keys"),
        (True, "an int in"),
        (1 << 40, "an int in"),
        (1.0, "must be an array"),
    ],
)
def test_a_length_that_cannot_be_is_refused(ctx: ga.GpuContext, length: Any, reason: str) -> None:
    with pytest.raises(ga.InvalidRequest, match=reason) as caught:
        paged(ctx, length).result(60)
    assert caught.value.field == "cache_seqlens"
