"""Backward requests end to end on the mock device: precision, arrays of other libraries, plans and refusals."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.rejections import backward as sound_request
from inside.reference import rounder
from inside.testing import poison_unseen_backward
from support.forward import normal

import gpu_actors as ga
from gpu_actors.reference import attention_backward
from gpu_actors.testing import BackwardCase, check_gradients, random_backward

SMALL = (13, 17)
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


def backward(ctx: ga.GpuContext, case: BackwardCase, **changes: Any) -> ga.AttentionGradients:
    return ctx.flash_attn.backward(*case.inputs, **{**case.options, **changes}).result(10.0)


def agrees(gradients: ga.AttentionGradients, case: BackwardCase) -> None:
    """The mock device's answer is the oracle's on the results that it was given, rounded once."""
    expected = attention_backward(*case.arguments, out=case.out, lse=case.lse, **case.options)
    like = dict(zip(("dq", "dk", "dv"), case.forward.inputs, strict=True))
    like |= {f"d{name}": case.options[name] for name in ("bias", "sinks") if name in case.options}
    for name in GRADIENTS:
        actual, wanted = getattr(gradients, name), getattr(expected, name)
        assert (actual is None) == (wanted is None) == (name not in like)
        if actual is not None:
            assert (actual.shape, actual.dtype) == (like[name].shape, like[name].dtype)
            np.testing.assert_array_equal(actual, wanted.astype(actual.dtype), err_msg=case.repro)


# The whole list of options


def test_rows_without_keys_and_empty_sequences_have_zero_gradients(ctx: ga.GpuContext) -> None:
    case = random_backward(5, dtype="float32", varlen=True, batch=3, seqlens=(9, 4), head_dim=8, always=("causal",))
    poisoned = poison_unseen_backward(case)
    gradients = backward(ctx, poisoned)
    for name in ("dq", "dk", "dv"):
        assert np.isfinite(getattr(gradients, name)).all()
    agrees(gradients, poisoned)
    blind = np.isneginf(case.lse).T
    assert "sinks" in case.options or blind.any()
    assert not gradients.dq[blind].any()


@pytest.mark.parametrize("compute", ["tf32", "f16", "bf16"])
def test_float32_operands_may_be_multiplied_in_less(ctx: ga.GpuContext, compute: str) -> None:
    case = random_backward(2, compute=compute, dtype="float32", seqlens=SMALL, head_dim=16)
    gradients = backward(ctx, case, compute=compute)
    check_gradients(gradients, *case.arguments, repro=case.repro, compute=compute, **case.options)
    assert not np.array_equal(gradients.dq, backward(ctx, case).dq)
    # dout is multiplied, too, and so it is rounded; out and lse are not.
    step = rounder({"tf32": "tf32", "f16": "wide_float16", "bf16": "bfloat16"}[compute])
    rounded = (step(array) for array in case.arguments)
    expected = attention_backward(*rounded, out=case.out, lse=case.lse, **case.options)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(gradients, name), getattr(expected, name).astype(np.float32))


def test_single_precision_arithmetic_is_an_option_of_the_mock_device() -> None:
    case = random_backward(3, dtype="float32", seqlens=SMALL, head_dim=16)
    options = ga.ContextOptions(mock=ga.MockOptions(dtype="float32"))
    with ga.open_context("mock", options) as ctx:
        gradients = backward(ctx, case)
    expected = attention_backward(*case.arguments, out=case.out, lse=case.lse, accumulate="float32", **case.options)
    np.testing.assert_array_equal(gradients.dq, expected.dq)


# What a request is made of


def test_the_loop_awaits_gradients_of_an_awaited_forward() -> None:
    q, k, v = normal(1, 6, 4, 8), normal(1, 6, 2, 8, seed=1), normal(1, 6, 2, 8, seed=2)
    dout = normal(1, 6, 4, 8, seed=3)

    async def train() -> ga.AttentionGradients:
        async with ga.open_context("mock") as ctx:
            out, lse = await ctx.flash_attn.forward(q, k, v, causal=True, return_lse=True)
            return await ctx.flash_attn.backward(dout, q, k, v, out, lse, causal=True, deterministic=True)

    gradients = asyncio.run(train())
    exact = attention_backward(dout, q, k, v, causal=True)
    np.testing.assert_allclose(gradients.dv, exact.dv, rtol=1e-5, atol=1e-5)
    assert gradients.dbias is None
    assert gradients.dsinks is None


class Foreign:
    """An array that this package knows by DLPack alone, and whose library takes results back."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> type[Foreign]:
        return Foreign

    @classmethod
    def from_dlpack(cls, array: Any) -> Foreign:
        return cls(np.from_dlpack(array))


def test_gradients_come_back_in_the_kind_of_q(ctx: ga.GpuContext) -> None:
    always = ("bias", "sinks")
    case = random_backward(1, dtype="float32", varlen=False, seqlens=SMALL, head_dim=8, features=always, always=always)
    options = {name: Foreign(value) for name, value in case.options.items()}
    foreign = ctx.flash_attn.backward(*map(Foreign, case.inputs), **options).result(10.0)
    plain = backward(ctx, case)
    for name in GRADIENTS:
        assert type(getattr(foreign, name)) is Foreign
        np.testing.assert_array_equal(getattr(foreign, name).array, getattr(plain, name))


# Plans


def other_strides(array: np.ndarray) -> np.ndarray:
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide[..., : array.shape[-1]]


PLANS: dict[str, Any] = {
    "deterministic": True,
    "causal": True,
    "alignment": "top_left",
    "window_size": (2, 3),
    "softmax_scale": 0.3,
    "softcap": 4.0,
    "sink_tokens": 2,
    "dropout_p": 0.25,
    "compute": "tf32",
    "alibi_slopes": np.ones(4, np.float32),
    "sinks": np.ones(4, np.float32),
    "bias": np.ones((1, 1, 4, 6), np.float32),
    "dout": other_strides(np.zeros((2, 4, 4, 8), np.float32)),
    "out": other_strides(np.zeros((2, 4, 4, 8), np.float32)),
    "lse": other_strides(np.zeros((2, 4, 4), np.float32)),
    "q": other_strides(np.zeros((2, 4, 4, 8), np.float32)),
}


@pytest.mark.parametrize("field", PLANS)
def test_requests_that_differ_in_one_field_never_share_a_plan(field: str) -> None:
    with ga.open_context("mock") as ctx:
        request = sound_request()
        for _ in range(2):
            ctx.flash_attn.submit(request).result(30.0)
        assert tuple(ctx.flash_attn.plan_cache_stats()) == (1, 1, 0, 1)
        ctx.flash_attn.submit(dataclasses.replace(request, **{field: PLANS[field]})).result(30.0)
        assert tuple(ctx.flash_attn.plan_cache_stats()) == (1, 2, 0, 2)


def test_forward_and_backward_of_the_same_arrays_never_share_a_plan() -> None:
    with ga.open_context("mock") as ctx:
        request = sound_request()
        forward = ga.FlashForward(q=request.q, k=request.k, v=request.v)
        ctx.flash_attn.submit(forward).result(30.0)
        gradients = ctx.flash_attn.submit(request).result(30.0)
        assert isinstance(gradients, ga.AttentionGradients)
        assert ctx.flash_attn.plan_cache_stats().misses == 2


def test_the_seed_is_no_part_of_the_plan_and_decides_what_is_dropped() -> None:
    with ga.open_context("mock") as ctx:
        q, k, v, dout = (normal(1, 9, 2, 8, seed=seed) for seed in range(4))
        answers = []
        before = ctx.flash_attn.plan_cache_stats().misses
        for seed in (1, 2, 1):
            options = {"dropout_p": 0.5, "dropout_seed": seed}
            out, lse = ctx.flash_attn.forward(q, k, v, return_lse=True, **options).result(30.0)
            answers.append(ctx.flash_attn.backward(dout, q, k, v, out, lse, **options).result(30.0).dv)
            exact = attention_backward(dout, q, k, v, **options).dv
            np.testing.assert_allclose(answers[-1], exact, rtol=1e-5, atol=1e-5)
        assert ctx.flash_attn.plan_cache_stats().misses == before + 2
        assert not np.array_equal(answers[0], answers[1])
        assert np.array_equal(answers[0], answers[2])


def test_the_key_names_the_direction_and_determinism(ctx: ga.GpuContext) -> None:
    request = sound_request(causal=True)
    keys = [ctx.flash_attn.inspect_key(dataclasses.replace(request, deterministic=flag)) for flag in (False, True)]
    assert [key.direction for key in keys] == ["backward"] * 2
    assert [key.deterministic for key in keys] == [False, True]
    assert keys[0].digest != keys[1].digest
    assert keys[0].mask == "causal"


def test_a_deadline_and_a_cancellation_reach_backward_requests(ctx: ga.GpuContext) -> None:
    case = random_backward(0, dtype="float32", seqlens=SMALL, head_dim=8)
    with pytest.raises(ga.DeadlineExceeded):
        ctx.flash_attn.backward(*case.inputs, **case.options, deadline=1.0).result(30.0)
    reply = ctx.flash_attn.backward(*case.inputs, **case.options, timeout=30.0, priority=3)
    assert reply.result(10.0).dq.shape == case.forward.q.shape


def test_fp8_is_refused_with_its_reason(ctx: ga.GpuContext) -> None:
    eight = sound_request(**{name: np.zeros((2, 4, 4, 8), ml_dtypes.float8_e4m3fn) for name in ("q", "k", "v")})
    with pytest.raises(ga.Unsupported, match="fp8 gradients would be lost in rounding") as refusal:
        ctx.flash_attn.submit(eight).result(30.0)
    assert (refusal.value.field, refusal.value.nearest) == ("q", "bfloat16")
