"""Forward requests end to end on the mock device, held against the oracle and, where it is short, the plain formula."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.forward import agrees, forward, normal, operands

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import check_output, random_forward
from gpu_actors.testing.problems import FEATURES, poison_unseen

DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
SMALL = (13, 17)


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


# The whole list of options


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_problems_with_random_options(ctx: ga.GpuContext, dtype: str, seed: int) -> None:
    features = [feature for feature in FEATURES if not (dtype.startswith("float8") and feature == "dropout")]
    case = random_forward(seed, dtype=dtype, seqlens=SMALL, head_dim=24, features=features)
    result = forward(ctx, *case.inputs, return_lse=True, **case.options)
    agrees(result, *case.inputs, **case.options)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("varlen", [False, True])
def test_every_option_changes_the_answer_as_the_oracle_has_it(ctx: ga.GpuContext, feature: str, varlen: bool) -> None:
    if feature == "bias" and varlen:
        return  # drawn for dense batches alone: test_packed_bias.py has the others
    dtype = "float8_e4m3fn" if feature == "descales" else "float32"
    always = ("window", feature) if feature == "sink_tokens" else (feature,)
    case = random_forward(7, dtype=dtype, varlen=varlen, seqlens=(40, 40), head_dim=16, features=always, always=always)
    without = {name: value for name, value in case.options.items() if name.startswith("cu_seqlens")}
    if feature == "sink_tokens":
        without["window_size"] = case.options["window_size"]
    assert case.options.keys() > without.keys()
    result = forward(ctx, *case.inputs, return_lse=True, **case.options)
    agrees(result, *case.inputs, **case.options)
    check_output(result.out, result.lse, *case.inputs, repro=case.repro, **case.options)
    assert not np.array_equal(result.out, forward(ctx, *case.inputs, **without).out), "the option did nothing"


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("seqlens", [(3, 9), (9, 3), (5, 5)])
def test_both_alignments_of_a_causal_mask(ctx: ga.GpuContext, alignment: str, seqlens: tuple[int, int]) -> None:
    q, k, v = normal(1, seqlens[0], 2, 8), normal(1, seqlens[1], 2, 8, seed=1), normal(1, seqlens[1], 2, 8, seed=2)
    options: dict[str, Any] = {"causal": True, "alignment": alignment}
    result = forward(ctx, q, k, v, return_lse=True, **options)
    agrees(result, q, k, v, **options)
    shift = seqlens[1] - seqlens[0] if alignment == "bottom_right" else 0
    for row in range(seqlens[0]):
        if row + shift < 0:
            assert not result.out[0, row].any(), "a row without keys is zero"
            assert np.isneginf(result.lse[0, :, row]).all()
        else:
            assert np.isfinite(result.lse[0, :, row]).all()


def test_keys_that_the_mask_hides_are_not_read(ctx: ga.GpuContext) -> None:
    case = poison_unseen(
        random_forward(3, dtype="float32", seqlens=(4, 24), features=("causal", "window"), always=("window",))
    )
    result = forward(ctx, *case.inputs, **case.options)
    assert np.isfinite(result.out).all()
    agrees(result, *case.inputs, **case.options)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_grouped_queries_read_their_own_kv_head(ctx: ga.GpuContext, heads_kv: int) -> None:
    """Against the formula in five lines, not against the oracle."""
    q, k, v = normal(2, 5, 4, 8), normal(2, 7, heads_kv, 8, seed=1), normal(2, 7, heads_kv, 6, seed=2)
    wide_k, wide_v = (np.repeat(array.astype(np.float64), 4 // heads_kv, axis=2) for array in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, wide_k) / np.sqrt(8)
    hidden = np.arange(7)[None, :] > np.arange(5)[:, None] + 2
    expected = np.einsum("bhij,bjhd->bihd", softmax(np.where(hidden, -np.inf, scores)), wide_v)
    result = forward(ctx, q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(result.out, expected, rtol=1e-5, atol=1e-6)
    lse = np.log(np.exp(np.where(hidden, -np.inf, scores)).sum(-1))
    np.testing.assert_allclose(result.lse, lse, rtol=1e-5)


def test_varlen_is_each_sequence_alone_to_the_last_bit(ctx: ga.GpuContext) -> None:
    case = random_forward(11, dtype="bfloat16", varlen=True, batch=3, seqlens=(9, 14), features=("causal", "softcap"))
    whole = forward(ctx, *case.inputs, return_lse=True, **case.options)
    options = {name: value for name, value in case.options.items() if not name.startswith("cu_seqlens")}
    row = key = 0
    for rows, keys in case.seqlens:
        if rows and keys:
            one = (case.q[None, row : row + rows], case.k[None, key : key + keys], case.v[None, key : key + keys])
            alone = forward(ctx, *one, return_lse=True, **options)
            np.testing.assert_array_equal(whole.out[row : row + rows], alone.out[0])
            np.testing.assert_array_equal(whole.lse[:, row : row + rows], alone.lse[0])
        elif rows:
            assert not whole.out[row : row + rows].any()
        row, key = row + rows, key + keys


@pytest.mark.parametrize(
    "given", [{}, {"max_seqlen_q": 3, "max_seqlen_k": 4}, {"max_seqlen_q": 64, "max_seqlen_k": 64}]
)
def test_max_seqlens_may_be_given_or_found(ctx: ga.GpuContext, given: dict[str, int]) -> None:
    q, k, v = normal(4, 2, 8), normal(6, 2, 8, seed=1), normal(6, 2, 8, seed=2)
    cu: dict[str, Any] = {"cu_seqlens_q": np.int32([0, 1, 1, 4]), "cu_seqlens_k": np.int32([0, 2, 2, 6])}
    result = forward(ctx, q, k, v, return_lse=True, **cu, **given)
    agrees(result, q, k, v, **cu)


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


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_out_is_filled_in_place_and_returned(ctx: ga.GpuContext, dtype: Any) -> None:
    q, k, v = operands(dtype=dtype)
    out = np.full(q.shape, np.nan, dtype)
    result = forward(ctx, q, k, v, out=out, return_lse=True)
    assert result.out is out
    agrees(result, q, k, v)


def test_out_may_have_any_strides_and_nothing_beside_it_is_touched(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    backing = np.full((2, 4, 5, 40), np.nan, np.float32)
    out = backing.transpose(0, 2, 1, 3)[..., 8:24]
    result = forward(ctx, q, k, v, out=out)
    assert result.out is out
    agrees(result, q, k, v)
    assert np.isnan(backing[..., :8]).all()
    assert np.isnan(backing[..., 24:]).all()


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
