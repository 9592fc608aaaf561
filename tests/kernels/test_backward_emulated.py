"""Backward requests end to end on the emulated device, whose kernels compute them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from emulated.gradients import case_of
from test_backward_mma import SWEEPS

import gpu_actors as ga
from gpu_actors.testing import BackwardCase, check_gradients


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    # Architectures and variants are those that test_backward_mma compiles.
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        yield ctx


def check(case: BackwardCase, gradients: ga.AttentionGradients) -> None:
    given = {"out": case.out, "lse": case.lse}
    check_gradients(gradients, *case.arguments, repro=case.repro, **given, **case.options)


def test_requests_of_several_lengths_share_the_kernels(ctx: ga.GpuContext) -> None:
    cases = [case_of(SWEEPS[0], seed, lengths) for seed, lengths in enumerate(((70, 150), (1, 1), (130, 90)))]
    replies = [ctx.flash_attn.backward(*case.inputs, **case.options) for case in cases]
    for case, reply in zip(cases, replies, strict=True):
        check(case, reply.result(60.0))


def test_what_forward_answers_is_what_backward_takes(ctx: ga.GpuContext) -> None:
    case = case_of(SWEEPS[0], 3, (90, 90))
    dout, *inputs = case.arguments
    out, lse = ctx.flash_attn.forward(*inputs, **case.options, return_lse=True).result(60.0)
    gradients = ctx.flash_attn.backward(dout, *inputs, out, lse, **case.options).result(60.0)
    check_gradients(gradients, *case.arguments, out=out, lse=lse, **case.options)


def test_every_optional_gradient_comes_back_in_its_own_dtype() -> None:
    sweep = SWEEPS[2]
    with ga.open_context("emulated", ga.ContextOptions(arch=sweep.arch)) as ctx:
        for seed in range(4):  # biases of either dtype, broadcast or not
            case = case_of(sweep, seed, (40, 50), heads=(2, 1), batch=2)
            gradients = ctx.flash_attn.backward(*case.inputs, **case.options).result(60.0)
            check(case, gradients)
            for name in ("bias", "sinks"):
                given, gradient = case.options[name], getattr(gradients, f"d{name}")
                assert (gradient.shape, gradient.dtype) == (given.shape, given.dtype)


def test_the_key_names_the_kernel_and_whether_it_is_deterministic(ctx: ga.GpuContext) -> None:
    case = case_of(SWEEPS[0], 3, (9, 9))
    dout, q, k, v, out, lse = case.inputs
    request = ga.FlashBackward(q=q, k=k, v=v, out=out, dout=dout, lse=lse, deterministic=True)
    key = ctx.flash_attn.inspect_key(request)
    assert (key.kernel, key.direction, key.deterministic) == ("backward_mma", "backward", True)


def test_what_tensor_cores_do_not_multiply_goes_to_cuda_cores(ctx: ga.GpuContext) -> None:
    for dtype in (np.float32, np.float64):
        arrays = [np.zeros((1, 8, 2, 20), dtype) for _ in range(5)]
        request = ga.FlashBackward(
            **dict(zip(("q", "k", "v", "out", "dout"), arrays, strict=True)), lse=np.zeros((1, 2, 8), np.float32)
        )
        assert ctx.flash_attn.inspect_key(request).kernel == "backward_simple"


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
