"""Backward requests: which kernel takes them, and what comes back from the emulated device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulated.backward import backward_problem_of
from emulated.gradients import answered, case_of
from matrix.backward import SIMPLE_SWEEPS, SWEEPS

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key, explain
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
    """0 times NaN is NaN: values whose weights were dropped get a gradient of NaN, too, as on the mock device."""
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


def test_the_key_says_whether_it_is_deterministic(ctx: ga.GpuContext) -> None:
    dout, q, k, v, out, lse = case_of(SWEEPS[0], 3, (9, 9)).inputs
    request = ga.FlashBackward(q=q, k=k, v=v, out=out, dout=dout, lse=lse, deterministic=True)
    key = ctx.flash_attn.inspect_key(request)
    assert (key.kernel, key.direction, key.deterministic) == ("backward_mma", "backward", True)


def typed(dtype: str, compute: str) -> dict[str, Any]:
    return {"dtype": dtype, "kv_dtype": dtype, "out_dtype": dtype, "compute": compute}


Q = np.zeros((2, 200, 4, 64), np.float16)
KV = np.zeros((2, 300, 2, 64), np.float16)
BASE = backward_problem_of(Q, KV, KV)
BIAS = ("float16", False, False)


def dims(of_keys: int, of_values: int) -> dict[str, int]:
    return {"head_dim": of_keys, "head_dim_v": of_values}


@pytest.mark.parametrize(
    ("kernel", "arch", "changes"),
    [
        *(("backward_mma", arch, {}) for arch in ("sm_80", "sm_89", "sm_100a", "sm_120a")),
        ("backward_mma", "sm_80", typed("float32", "tf32")),
        ("backward_mma", "sm_80", {"softmax_scale": -0.5}),
        ("backward_mma", "sm_80", dims(32, 256)),
        ("backward_simple", "sm_80", typed("float32", "f32")),
        ("backward_simple", "sm_90a", typed("float64", "f64")),
        ("backward_simple", "sm_86", {"head_dim": 36}),
        ("backward_simple", "sm_90a", dims(1, 255)),
        *(("backward_sm90", "sm_90a", dims(*widths)) for widths in ((32, 32), (96, 128), (136, 192), (256, 256))),
        *(
            ("backward_sm90", "sm_90a", changes)
            for changes in (
                {"layout": "varlen"},
                {"bias": BIAS},
                {"dropout_p": 0.1},
                {"softcap": 20.0},
                {"alibi": "heads"},
            )
        ),
    ],
)
def test_the_fastest_kernel_that_can_takes_a_problem(kernel: str, arch: str, changes: dict[str, Any]) -> None:
    assert dispatch_key(dataclasses.replace(BASE, **changes), arch).kernel == kernel


@pytest.mark.parametrize(
    ("kernel", "changes", "taker", "nearest", "reason"),
    [
        ("backward_mma", {"head_dim": 36}, "backward_simple", 40, "multiples of 8"),
        ("backward_mma", {"head_dim_v": 4}, "backward_simple", 8, "from 8 to 256"),
        ("backward_mma", typed("float32", "f32"), "backward_simple", "tf32", "no float32"),
        ("backward_mma", typed("float64", "f64"), "backward_simple", "bfloat16", "float16, float32, bfloat16"),
        ("backward_sm90", {"bias": BIAS, "softcap": 20.0, "head_dim": 136}, "backward_mma", 128, "beside a derivative"),
        ("backward_sm90", {"head_dim": 36}, "backward_simple", 40, "multiples of 8"),
        ("backward_sm90", {"softmax_scale": 2.0**-40}, "backward_mma", 2.0**-30, "in fp32"),
    ],
)
def test_what_a_kernel_refuses_another_takes_and_explain_says_why_and_what_comes_nearest(
    kernel: str, changes: dict[str, Any], taker: str, nearest: object, reason: str
) -> None:
    problem, arch = dataclasses.replace(BASE, **changes), "sm_90a" if kernel == "backward_sm90" else "sm_80"
    assert dispatch_key(problem, arch).kernel == taker
    verdict = next(verdict for verdict in explain(problem, arch) if verdict.family == kernel)
    assert not verdict.taken
    assert reason in verdict.reason
    assert f"nearest supported: {nearest!r}" in verdict.reason
