"""Backward requests: which kernel takes them, and the emulated device's answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulated.gradients import answered, case_of
from matrix.backward import SIMPLE_SWEEPS, SWEEPS

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import BackwardCase, check_gradients


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    # Architectures and variants are those that test_backward compiles.
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        yield ctx


def check(case: BackwardCase, gradients: ga.AttentionGradients) -> None:
    given = {"out": case.out, "lse": case.lse}
    check_gradients(gradients, *case.arguments, repro=case.repro, **given, **case.options)


def test_every_optional_gradient_comes_back_in_its_own_dtype() -> None:
    sweep = SWEEPS[2]
    with ga.open_context("emulated", ga.ContextOptions(arch=sweep.arch)) as ctx:
        for seed in range(2):  # biases of either dtype, broadcast or not
            case = case_of(sweep, seed, (40, 50), heads=(2, 1), batch=2)
            gradients = ctx.flash_attn.backward(*case.inputs, **case.options).result(60.0)
            check(case, gradients)
            for name in ("bias", "sinks"):
                given, gradient = case.options[name], getattr(gradients, f"d{name}")
                assert (gradient.shape, gradient.dtype) == (given.shape, given.dtype)


def test_a_bias_that_sequences_heads_or_rows_share_gets_the_sum_of_theirs(ctx: ga.GpuContext) -> None:
    case = case_of(SIMPLE_SWEEPS[0], 9, (40, 50), batch=2, heads=(2, 1))
    whole = np.broadcast_to(case.options["bias"], (2, 2, 40, 50))
    for shape in ((1, 2, 40, 50), (2, 1, 40, 50), (1, 1, 1, 50), (2, 2, 1, 50)):
        shared = np.ascontiguousarray(whole[tuple(slice(extent) for extent in shape)])
        each = answered(case, case.options | {"bias": shared})
        gradients = ctx.flash_attn.backward(*each.inputs, **each.options).result(60.0)
        assert gradients.dbias.shape == shape
        check(each, gradients)


def test_a_mask_hides_keys_and_has_no_gradient(ctx: ga.GpuContext) -> None:
    case = case_of(SIMPLE_SWEEPS[0], 9, (40, 50), batch=2, heads=(2, 1))
    each = answered(case, {"causal": True, "bias": np.random.default_rng(0).random((2, 1, 40, 50)) > 0.4})
    gradients = ctx.flash_attn.backward(*each.inputs, **each.options).result(60.0)
    assert gradients.dbias is None
    check(each, gradients)


def test_positions_chunks_signed_slopes_and_dropout_mean_the_same_pairs_as_in_the_oracle(ctx: ga.GpuContext) -> None:
    options: dict[str, Any] = {
        "attention_chunk": 16,
        "alibi_slopes": np.array([-0.2, 0.1, 0.3, 0.05], np.float32),
        "alibi_signed": True,
        "dropout_p": 0.3,
        "dropout_seed": 5,
        "q_positions": np.array([[3, 2], [20, 3]], np.int32),
        "k_positions": np.array([[0, 2], [2, 1]], np.int32),
    }
    case = answered(case_of(SIMPLE_SWEEPS[0], 9, (37, 45), batch=2, heads=(4, 2)), options)
    check(case, ctx.flash_attn.backward(*case.inputs, **case.options).result(60.0))


def test_a_row_that_is_nan_reaches_its_keys_whatever_was_dropped(ctx: ga.GpuContext) -> None:
    """0 times NaN is NaN: values whose weights are dropped get a gradient of NaN too, as on the mock device."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 40, 2, 32)).astype(np.float16)
    q[0, 3, 1, 5] = np.nan
    options = {"dropout_p": 0.5, "dropout_seed": 7, "causal": True}
    out, lse = ctx.flash_attn.forward(q, k, v, **options, return_lse=True).result(60.0)
    gradients = ctx.flash_attn.backward(dout, q, k, v, out, lse, **options).result(60.0)
    rows = np.arange(40)
    for name, spoiled in (("dq", rows == 3), ("dk", rows <= 3), ("dv", rows <= 3)):
        found = np.isnan(getattr(gradients, name)[0])
        assert not found[:, 0].any(), f"{name} of the other head"
        np.testing.assert_array_equal(found[:, 1].all(axis=-1), spoiled, err_msg=name)
        np.testing.assert_array_equal(found[:, 1].any(axis=-1), spoiled, err_msg=name)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_part_with_small_values_has_the_gradients_that_it_has_in_the_whole(arch: str) -> None:
    """`out` and `lse` are those of all keys, so dS of this part is as large as dO O, and dO V is far smaller."""
    rng = np.random.default_rng(3)
    q, dout = rng.standard_normal((2, 1, 64, 2, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 1, 128, 2, 64)).astype(np.float16)
    v[:, :64] *= np.float16(2**-10)
    v[:, 64:] *= np.float16(64)
    whole = attention_forward(q, k, v)
    out, lse = whole.out.astype(np.float16), whole.lse.astype(np.float32)
    part = np.ascontiguousarray(k[:, :64]), np.ascontiguousarray(v[:, :64])
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        gradients = ctx.flash_attn.backward(dout, q, *part, out, lse).result(60.0)
    check_gradients(gradients, dout, q, *part, out=out, lse=lse)


def test_the_key_says_whether_it_is_deterministic(ctx: ga.GpuContext) -> None:
    dout, q, k, v, out, lse = case_of(SWEEPS[0], 3, (9, 9)).inputs
    request = ga.FlashBackward(q=q, k=k, v=v, out=out, dout=dout, lse=lse, deterministic=True)
    key = ctx.flash_attn.inspect_key(request)
    assert (key.kernel, key.direction, key.deterministic) == ("backward_mma", "backward", True)
