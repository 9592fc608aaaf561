"""Multi-head latent attention over one cache, whose first columns are values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from properties.doors import Asked, answer_of, ask_of, check
from properties.problems import Spec, problem_of

import gpu_actors as ga

BF16 = np.dtype(ml_dtypes.bfloat16)
CACHE: dict[str, Any] = {"k_cache": np.zeros((1, 4, 1, 32), BF16), "cache_seqlens": np.array([3], np.int32)}
OPTIONS = ("block_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "k_descale", "return_lse")


def asked_of(door: str = "paged", dims: tuple[int, int] = (576, 512), dtype: str = "bfloat16", **how: Any) -> Asked:
    options = {"causal": True, "softmax_scale": 0.2, **({"k_descale": True} if dtype != "bfloat16" else {})}
    how = {"latent": True, "return_lse": True, **how}
    keys = (40, 0, 203, 1)
    spec = Spec(door=door, dtype=dtype, rows=(2,) * 4, keys=keys, heads=(6, 1), dims=dims, options=options, how=how)
    return ask_of(spec, problem_of(spec))


def decode(ctx: ga.GpuContext, asked: Asked, **changes: Any) -> ga.Reply[ga.AttentionOutput]:
    """Make the request of `asked` by the method that takes the parts of q."""
    given = {**asked.arguments, **changes}
    q, latent = given["q"], given["latent_dim"]
    options = {name: given[name] for name in OPTIONS if name in given}
    return ctx.flash_attn.mla_decode(q[..., :latent], q[..., latent:], given["k_cache"], **options)


@pytest.mark.parametrize(
    "asked",
    [asked_of(), asked_of(dtype="float8_e4m3fn"), asked_of("cache", (32, 24), packed_rows=True)],
    ids=["bfloat16", "fp8", "packed rows of a dense cache"],
)
def test_values_are_the_first_columns_of_the_cache(mock: ga.GpuContext, asked: Asked) -> None:
    check(asked, answer_of(asked, decode(mock, asked).result(30.0)), kernels=False)


def test_requests_over_one_latent_cache_share_launches_bit_for_bit(mock: ga.GpuContext) -> None:
    asked = asked_of(dims=(32, 24))
    names = ("q", "block_table", "cache_seqlens")
    replies = [decode(mock, asked, **{n: asked.arguments[n][part : part + 1] for n in names}) for part in range(4)]
    whole = decode(mock, asked).result(30.0)
    np.testing.assert_array_equal(np.concatenate([reply.result(30.0).out for reply in replies]), whole.out)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"v_cache": np.zeros((1, 4, 1, 24), BF16)}, "v_cache", "latent_dim"),
        ({"latent_dim": 33}, "latent_dim", "at most k_cache's head_dim, 32"),
        ({"latent_dim": -1}, "latent_dim", ">= 0"),
        ({"latent_dim": 0}, "v_cache", "must be an array"),
        ({"softmax_scale": None}, "softmax_scale", "before absorption"),
        ({"v_descale": np.ones((1, 1), np.float32)}, "v_descale", "k_descale"),
    ],
    ids=lambda value: "",
)
def test_a_contradiction_is_refused_by_name(mock: ga.GpuContext, changes: Any, field: str, words: str) -> None:
    given = {"q": np.zeros((1, 1, 6, 32), BF16), **CACHE, "softmax_scale": 0.2, "latent_dim": 24, **changes}
    with pytest.raises(ga.InvalidRequest, match=words) as refused:
        mock.flash_attn.paged_forward(**given).result(30.0)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "q_pe", [np.zeros((1, 1, 5, 8), BF16), np.zeros((1, 1, 6, 8), np.float16), [[1.0]], np.zeros(8, BF16)]
)
def test_parts_of_q_that_do_not_belong_together_are_refused(mock: ga.GpuContext, q_pe: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match=r"other part|must be an array") as refused:
        mock.flash_attn.mla_decode(
            np.zeros((1, 1, 6, 24), BF16), q_pe, CACHE["k_cache"], cache_seqlens=3, softmax_scale=0.2
        ).result(30.0)
    assert refused.value.field == "q_pe"


def test_a_wide_latent_whose_warps_cannot_share_it_goes_to_cuda_cores(mock: ga.GpuContext) -> None:
    q, cache = np.zeros((1, 1, 6, 576), BF16), np.zeros((1, 4, 1, 576), BF16)
    request = ga.PagedForward(
        q=q, k_cache=cache, latent_dim=500, cache_seqlens=CACHE["cache_seqlens"], softmax_scale=0.2
    )
    found = mock.flash_attn.explain(request)
    assert found.key is not None
    assert found.key.kernel == "decode_simple"
    reasons = {verdict.family: verdict.reason for verdict in found.verdicts}
    assert "multiples of 128" in reasons["decode_mma"]
    assert "nearest supported: 512" in reasons["decode_mma"]
