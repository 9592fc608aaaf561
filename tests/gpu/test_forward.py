"""Forward attention on a GPU through the public entrance, on the problems that the emulated kernels are tested on.

GPU_ACTORS_TEST_DEVICE=emulated rehearses these tests where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.poison import poison_unseen
from inside.testing import DTYPES, HEADS, SEQLENS

import gpu_actors as ga
from gpu_actors.testing import ForwardCase, check_output, random_forward

pytestmark = pytest.mark.gpu

MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"always": ("causal",)},
    {"always": ("causal",), "alignment": "top_left"},
    {"always": ("window", "sink_tokens")},
    {"always": ("causal", "window")},
)
OPTIONS = ("softcap", "alibi", "sinks", "bias", "dropout", "scale")
COMPUTES = ("f32", "tf32", "f16", "bf16")


def answer(context: Any, case: ForwardCase, **more: Any) -> tuple[Any, Any]:
    result = context.flash_attn.forward(*case.inputs, **case.options, return_lse=True, **more).result(120)
    return result.out, result.lse


def check(context: Any, case: ForwardCase, compute: str | None = None) -> None:
    case = poison_unseen(case)
    out, lse = answer(context, case, **({} if compute is None else {"compute": compute}))
    reduced = None if compute == "f32" else compute
    check_output(out, lse, *case.inputs, repro=case.repro, compute=reduced, **case.options)


@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_forward_agrees_with_the_oracle_at_every_length(context, dtype, mask, seqlens):
    for seed, (heads, varlen) in enumerate(zip(HEADS, (False, True, False), strict=True)):
        case = random_forward(
            seed,
            dtype=dtype,
            head_dim=(64, 128, 80)[seed],
            heads=heads,
            seqlens=seqlens,
            varlen=varlen,
            features=(),
            **mask,
        )
        check(context, case)


@pytest.mark.parametrize("head_dim", range(32, 257, 8))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_forward_agrees_with_the_oracle_at_every_head_dim(context, dtype, head_dim):
    for seed, head_dim_v in enumerate((head_dim, 288 - head_dim)):
        case = random_forward(
            seed,
            dtype=dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            seqlens=(150, 300),
            features=(),
            always=("causal",) * seed,
        )
        check(context, case)


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("option", OPTIONS)
def test_forward_agrees_with_the_oracle_under_every_option(context, option, head_dim):
    for seed, dtype in enumerate(DTYPES):
        case = random_forward(
            seed,
            dtype=dtype,
            head_dim=head_dim,
            seqlens=(150, 300),
            varlen=False,
            features=(),
            always=(option, "causal")[: 1 + seed % 2],
        )
        check(context, case, "tf32" if dtype == "float32" else None)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_forward_agrees_with_the_oracle_in_every_precision_of_float32(context, head_dim, compute):
    case = random_forward(1, dtype="float32", head_dim=head_dim, seqlens=(150, 300), features=(), always=("causal",))
    check(context, case, compute)


@pytest.mark.parametrize("seed", range(100, 160))
def test_forward_agrees_with_the_oracle_on_random_problems(context, seed):
    case = random_forward(seed)
    check(context, case, "tf32" if case.q.dtype == np.float32 else None)


def test_the_kernels_agree_with_each_other(context):
    """The plain kernel with a negative scale and -q agrees with the tensor cores' kernel."""
    case = random_forward(5, dtype="float16", head_dim=64, seqlens=(150, 300), varlen=False, features=())
    out, lse = answer(context, case)
    negated = context.flash_attn.forward(-case.q, case.k, case.v, softmax_scale=-(64.0**-0.5), return_lse=True).result(
        120
    )
    np.testing.assert_allclose(negated.out.astype(np.float32), out.astype(np.float32), atol=4e-3)
    np.testing.assert_allclose(negated.lse, lse, atol=1e-3)


def test_a_batch_changes_no_bits(context):
    case = random_forward(
        6, dtype="bfloat16", head_dim=128, seqlens=(384, 256), batch=4, varlen=False, features=(), always=("causal",)
    )
    out, lse = answer(context, case)
    for index in range(4):
        alone = context.flash_attn.forward(
            *(x[index : index + 1] for x in case.inputs), causal=True, return_lse=True
        ).result(120)
        np.testing.assert_array_equal(alone.out[0], out[index])
        np.testing.assert_array_equal(alone.lse[0], lse[index])


def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_others(context):
    case = random_forward(7, dtype="float16", head_dim=64, seqlens=(256, 256), varlen=False, features=())
    q, k, v = case.inputs
    v[0, 100, :, 3] = np.nan
    result = context.flash_attn.forward(q, k, v, causal=True, return_lse=True).result(120)
    check_output(result.out, result.lse, q, k, v, causal=True)
    assert np.isfinite(result.out[0, :100]).all()


def test_the_tensor_core_kernel_is_what_answers(context):
    case = random_forward(8, dtype="bfloat16", head_dim=128, varlen=False, features=())
    request = ga.FlashForward(*case.inputs)
    assert context.flash_attn.inspect_key(request).kernel != "forward_simple"
