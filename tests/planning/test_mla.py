"""Multi-head latent attention over one cache, whose first columns are values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inside.testing import cast

import gpu_actors as ga
from gpu_actors.testing import check_output

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
SCALE = (128 + 64) ** -0.5
POISON = 2147480000


class Batch:
    """Sequences in pages of a pool whose other rows are NaN, behind a table whose other entries name no page."""

    def __init__(
        self,
        lengths: tuple[int, ...] = (40, 0, 203, 1),
        *,
        rows: int = 1,
        heads: int = 6,
        dims: tuple[int, int] = (512, 64),
        page: int = 16,
        dtype: Any = BF16,
        kv_dtype: Any = BF16,
    ) -> None:
        rng = np.random.default_rng(len(lengths) + rows + heads)
        self.rows, self.heads, (self.latent, rotary) = rows, heads, dims
        self.lengths = np.array(lengths, np.int32)
        shape = (len(lengths), rows, heads)
        self.q_nope, self.q_pe = (cast(rng.standard_normal((*shape, dim)), dtype.name) for dim in dims)
        self.k = [cast(rng.standard_normal((length, 1, sum(dims))), kv_dtype.name) for length in lengths]
        width = -(-max(lengths) // page)
        blocks = rng.permutation(len(lengths) * width)
        self.pool = np.full((len(blocks), page, 1, self.latent + rotary), np.nan, np.float32).astype(kv_dtype)
        self.table = np.full((len(lengths), width), POISON, np.int32)
        for index, keys in enumerate(self.k):
            for number in range(-(-len(keys) // page)):
                self.table[index, number] = block = blocks[index * width + number]
                part = keys[number * page : (number + 1) * page]
                self.pool[block, : len(part)] = part
        scales = rng.uniform(0.5, 2.0, (len(lengths), 1)).astype(np.float32)
        self.options: dict[str, Any] = {"k_descale": scales} if kv_dtype == FP8 else {}

    def arguments(self, **changes: Any) -> dict[str, Any]:
        named = {"block_table": self.table, "cache_seqlens": self.lengths, "softmax_scale": SCALE, "return_lse": True}
        return {**named, **self.options, **changes}

    def check(self, result: Any, **options: Any) -> None:
        ends = np.arange(len(self.k) + 1, dtype=np.int32) * self.rows
        ends_k = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        q = np.concatenate((self.q_nope, self.q_pe), axis=-1).reshape(-1, self.heads, self.pool.shape[-1])
        k = np.concatenate(self.k)
        if self.options:
            options |= {"k_descale": self.options["k_descale"], "v_descale": self.options["k_descale"]}
        lse = result.lse.swapaxes(0, 1).reshape(self.heads, -1)
        out = result.out.reshape(-1, self.heads, self.latent)
        bounds: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends_k, "causal": True}
        check_output(out, lse, q, k, k[..., : self.latent], softmax_scale=SCALE, **bounds, **options)


@pytest.fixture
def mock() -> Any:
    with ga.open_context("mock") as ctx:
        yield ctx


@pytest.mark.parametrize("batch", [Batch(heads=12, rows=3), Batch(kv_dtype=FP8)], ids=["bfloat16", "fp8"])
def test_values_are_the_first_columns_of_the_cache(mock: ga.GpuContext, batch: Batch) -> None:
    batch.check(mock.flash_attn.mla_decode(batch.q_nope, batch.q_pe, batch.pool, **batch.arguments()).result(30.0))
    query = np.concatenate((batch.q_nope, batch.q_pe), axis=-1)
    arguments = batch.arguments(latent_dim=batch.latent)
    batch.check(mock.flash_attn.paged_forward(query, batch.pool, **arguments).result(30.0))


def test_rows_may_be_packed_and_the_cache_dense(mock: ga.GpuContext) -> None:
    batch = Batch((9, 5), rows=2, dims=(24, 8))
    cache = np.full((2, 12, 1, 32), np.nan, BF16)
    for index, keys in enumerate(batch.k):
        cache[index, : len(keys)] = keys
    query = [part.reshape(4, 6, -1) for part in (batch.q_nope, batch.q_pe)]
    arguments = batch.arguments(block_table=None, cu_seqlens_q=np.array([0, 2, 4], np.int32))
    result = mock.flash_attn.mla_decode(*query, cache, **arguments).result(30.0)
    batch.check(ga.AttentionOutput(result.out, result.lse.reshape(6, 2, 2).swapaxes(0, 1)))


def test_requests_over_one_latent_cache_share_launches_bit_for_bit(mock: ga.GpuContext) -> None:
    batch = Batch((40, 7), dims=(24, 8))
    replies = [
        mock.flash_attn.mla_decode(
            batch.q_nope[part],
            batch.q_pe[part],
            batch.pool,
            **batch.arguments(block_table=batch.table[part], cache_seqlens=batch.lengths[part]),
        )
        for part in (slice(0, 1), slice(1, 2))
    ]
    whole = mock.flash_attn.mla_decode(batch.q_nope, batch.q_pe, batch.pool, **batch.arguments()).result(30.0)
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
    cache = np.zeros((1, 4, 1, 32), BF16)
    given: dict[str, Any] = {"cache_seqlens": np.array([3], np.int32), "softmax_scale": 0.2, "latent_dim": 24}
    with pytest.raises(ga.InvalidRequest, match=words) as refused:
        mock.flash_attn.paged_forward(np.zeros((1, 1, 6, 32), BF16), cache, **{**given, **changes}).result(30.0)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "q_pe", [np.zeros((1, 1, 5, 8), BF16), np.zeros((1, 1, 6, 8), np.float16), [[1.0]], np.zeros(8, BF16)]
)
def test_parts_of_q_that_do_not_belong_together_are_refused(mock: ga.GpuContext, q_pe: Any) -> None:
    cache, lengths = np.zeros((1, 4, 1, 32), BF16), np.array([3], np.int32)
    with pytest.raises(ga.InvalidRequest, match=r"other part|must be an array") as refused:
        mock.flash_attn.mla_decode(
            np.zeros((1, 1, 6, 24), BF16), q_pe, cache, cache_seqlens=lengths, softmax_scale=0.2
        ).result(30.0)
    assert refused.value.field == "q_pe"


def test_a_wide_latent_whose_warps_cannot_share_it_goes_to_cuda_cores(mock: ga.GpuContext) -> None:
    cache, lengths = np.zeros((1, 4, 1, 576), BF16), np.array([3], np.int32)
    request = ga.PagedForward(
        q=np.zeros((1, 1, 6, 576), BF16), k_cache=cache, latent_dim=500, cache_seqlens=lengths, softmax_scale=0.2
    )
    found = mock.flash_attn.explain(request)
    assert found.key is not None
    assert found.key.kernel == "decode_simple"
    reasons = {verdict.family: verdict.reason for verdict in found.verdicts}
    assert "multiples of 128" in reasons["decode_mma"]
    assert "nearest supported: 512" in reasons["decode_mma"]


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
def test_every_number_of_heads_and_rows_agrees_with_the_oracle(arch: str, kv_dtype: Any) -> None:
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        for heads, rows, page in ((6, 1, 16), (12, 3, 64), (24, 1, 1), (48, 2, 5), (96, 1, 64), (128, 1, 16)):
            batch = Batch(heads=heads, rows=rows, page=page, kv_dtype=kv_dtype)
            reply = ctx.flash_attn.mla_decode(batch.q_nope, batch.q_pe, batch.pool, **batch.arguments())
            batch.check(reply.result(300.0))
