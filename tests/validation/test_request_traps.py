"""Requests that look wrong but are valid must get neither a wrong number nor a refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inside.arrays import DeviceArray
from inside.reference import round_inputs, rounder

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.validation.overlap import check_output_memory

RNG = np.random.default_rng(11)
Q, K, V = RNG.standard_normal((3, 1, 8, 2, 16), dtype=np.float32)


def answer(ctx: ga.GpuContext, *arrays: Any, **options: Any) -> np.ndarray[Any, Any]:
    return ctx.flash_attn.forward(*(arrays or (Q, K, V)), **options).result(20).out


@pytest.mark.parametrize("compute", ["tf32", "bf16", "f16"])
def test_mock_multiplies_in_the_precision_asked_for(ctx: ga.GpuContext, compute: str) -> None:
    rounded = round_inputs(Q, K, V, compute)
    expected = attention_forward(*rounded).out
    assert np.abs(expected - attention_forward(Q, K, V).out).max() > 1e-5
    # Operands have fp16's precision but not its range, and the smallest ones keep more bits.
    np.testing.assert_allclose(answer(ctx, compute=compute), expected, atol=1e-6 if compute != "f16" else 1e-5)


def test_f16_rounds_as_float16_where_that_is_normal_and_keeps_what_would_overflow(ctx: ga.GpuContext) -> None:
    step = rounder("wide_float16")
    values = (RNG.standard_normal(10_000) * 10.0 ** RNG.integers(-4, 4, 10_000)).astype(np.float32)
    values = np.concatenate([values, np.float32([1 + 2**-11, 1 + 3 * 2**-11, np.inf, -np.inf])])
    normal = np.abs(values) >= 2**-14
    np.testing.assert_array_equal(step(values)[normal], values.astype(np.float16).astype(np.float32)[normal])
    assert step(np.float32([1e20]))[0] == pytest.approx(1e20, rel=2**-11)
    assert np.isnan(step(np.float32([np.nan])))[0]


def test_a_result_beyond_the_dtype_is_infinite_without_a_warning(ctx: ga.GpuContext) -> None:
    big = np.full((1, 2, 1, 8), 6e4, np.float16)
    out = ctx.flash_attn.forward(big * 0, big * 0, big, sinks=np.full(1, -np.inf, np.float32)).result(20).out
    assert np.isfinite(out).all()
    lse = ctx.flash_attn.forward(Q, K, V, softmax_scale=1e36, return_lse=True).result(20).lse
    assert lse.dtype == np.float32


def test_max_seqlen_beyond_all_rows_makes_no_grid_beyond_them() -> None:
    bounds = np.array([0, 5, 20], np.int32)
    rows = RNG.standard_normal((20, 2, 16), dtype=np.float32)
    options = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    with ga.open_context("emulated") as emulated:
        out = emulated.flash_attn.forward(rows, rows, rows, **options, max_seqlen_q=10**9, max_seqlen_k=10**9)
        expected = attention_forward(rows, rows, rows, **options).out
        np.testing.assert_allclose(out.result(60).out, expected, atol=1e-5)


class TestWhereOutLies:
    def test_a_slice_between_the_operands_is_filled(self, ctx: ga.GpuContext) -> None:
        together = np.zeros((1, 8, 4, 2, 16), np.float32)
        for index, operand in enumerate((Q, K, V)):
            together[:, :, index] = operand
        out = together[:, :, 3]
        result = answer(ctx, together[:, :, 0], together[:, :, 1], together[:, :, 2], out=out)
        assert result is out
        np.testing.assert_array_equal(out, answer(ctx))

    @pytest.mark.parametrize("strides", [(0, 0, 0, 4), (1024, 64, 64, 4), (1024, 128, 32, 4)])
    def test_a_view_that_overlaps_itself_is_refused(self, ctx: ga.GpuContext, strides: tuple[int, ...]) -> None:
        out = np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), Q.shape, strides)
        with pytest.raises(ga.InvalidRequest, match="place of its own"):
            answer(ctx, out=out)

    def test_an_operand_as_output_is_refused(self, ctx: ga.GpuContext) -> None:
        k = K.copy()
        with pytest.raises(ga.InvalidRequest, match="share memory with k"):
            answer(ctx, Q, k, V, out=k)

    def test_on_a_device_address_ranges_decide(self) -> None:
        def at(address: int) -> DeviceArray:
            return DeviceArray(address, (2, 4), (16, 4), np.dtype(np.float32), 0)

        check_output_memory(at(0), {"q": at(32)})
        with pytest.raises(ga.InvalidRequest, match="with q"):
            check_output_memory(at(0), {"q": at(28)})
