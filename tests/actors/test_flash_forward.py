"""Forward requests end to end on the mock device: descales, dropout, outputs and the device's own options."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.forward import agrees, forward, operands

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import random_forward


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


# The whole list of options


# fp8


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_descales_multiply_fp8_inputs_and_the_output_is_bfloat16(ctx: ga.GpuContext, dtype: str) -> None:
    q, k, v = operands(dtype=getattr(ml_dtypes, dtype))
    descales: dict[str, Any] = {
        f"{name}_descale": np.random.default_rng(index).uniform(0.25, 4.0, (2, 2)).astype(np.float32)
        for index, name in enumerate("qkv")
    }
    result = forward(ctx, q, k, v, return_lse=True, **descales)
    assert result.out.dtype == ml_dtypes.bfloat16
    agrees(result, q, k, v, **descales)
    heads = {name: np.repeat(scale, 2, axis=1) if name == "q_descale" else scale for name, scale in descales.items()}
    scaled = forward(
        ctx,
        q.astype(np.float32) * heads["q_descale"][:, None, :, None],
        k.astype(np.float32) * descales["k_descale"][:, None, :, None],
        v.astype(np.float32) * descales["v_descale"][:, None, :, None],
    )
    np.testing.assert_allclose(result.out.astype(np.float32), scaled.out, rtol=2**-7, atol=1e-4)


# Dropout


def test_dropout_is_the_same_for_the_same_seed_and_another_for_another(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    first, second, other, none = (
        forward(ctx, q, k, v, dropout_p=p, dropout_seed=seed).out
        for p, seed in ((0.5, 7), (0.5, 7), (0.5, 8), (0.0, 7))
    )
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, none)
    agrees(forward(ctx, q, k, v, dropout_p=0.5, dropout_seed=7), q, k, v, dropout_p=0.5, dropout_seed=7)


def test_dropout_keeps_the_expectation_and_leaves_the_lse_alone(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    plain = forward(ctx, q, k, v, return_lse=True)
    dropped = [forward(ctx, q, k, v, dropout_p=0.5, dropout_seed=seed, return_lse=True) for seed in range(200)]
    for result in dropped:
        np.testing.assert_array_equal(result.lse, plain.lse)
    mean = np.mean([result.out for result in dropped], axis=0)
    assert np.abs(mean - plain.out).max() < 0.35
    assert np.abs(mean - plain.out).mean() < 0.06


# Outputs of the caller's


def test_out_of_the_same_plan_goes_to_each_requests_own_array(ctx: ga.GpuContext) -> None:
    arrays = [operands(seed) for seed in range(0, 30, 3)]
    outs = [np.empty_like(q) for q, _, _ in arrays]
    replies = [ctx.flash_attn.forward(*one, out=out) for one, out in zip(arrays, outs, strict=True)]
    for one, out, reply in zip(arrays, outs, replies, strict=True):
        assert reply.result(30.0).out is out
        agrees(ga.AttentionOutput(out), *one)


def test_fresh_outputs_are_the_callers_own(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    first, second = forward(ctx, q, k, v), forward(ctx, q, k, v)
    kept = first.out.copy()
    second.out[:] = 0
    np.testing.assert_array_equal(first.out, kept)
    assert first.out.flags.writeable
    assert first.lse is None


# The device's own options


def test_the_oracle_may_accumulate_in_float32() -> None:
    q, k, v = operands()
    with ga.open_context("mock", ga.ContextOptions(mock=ga.MockOptions(dtype="float32"))) as ctx:
        single = forward(ctx, q, k, v).out
    np.testing.assert_array_equal(single, attention_forward(q, k, v, accumulate="float32").out)
    with ga.open_context("mock") as ctx:
        np.testing.assert_allclose(forward(ctx, q, k, v).out, single, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("latency", [0.0, 0.01])
def test_a_mock_that_computes_nothing_says_so(latency: float) -> None:
    q, k, v = operands()
    options = ga.ContextOptions(mock=ga.MockOptions(compute=False, latency=latency))
    with ga.open_context("mock", options) as ctx:
        with pytest.raises(ga.MockModeError, match=r"MockOptions\(compute=False\)"):
            forward(ctx, q, k, v)
        with pytest.raises(ga.InvalidRequest):
            forward(ctx, q, k, v, softcap=-1.0)
        assert ctx.flash_attn.inspect_key(ga.FlashForward(q=q, k=k, v=v)).head_dim == 16
        assert ctx.stats()["flash_attn"].launched == 1


async def test_many_requests_at_once_get_their_own_answers() -> None:
    cases = [random_forward(seed, dtype="float32", seqlens=(6, 9), head_dim=8) for seed in range(40)]
    async with ga.open_context("mock") as ctx:
        replies = [ctx.flash_attn.forward(*case.inputs, return_lse=True, **case.options) for case in cases]
        for case, result in zip(cases, await asyncio.gather(*replies), strict=True):
            agrees(result, *case.inputs, **case.options)
