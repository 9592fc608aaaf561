"""Requests over pages, dense caches and arrays of pointers, on mock: trees, padding, bits and keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import Batch, random_batch, random_tree, tree_bits
from emulated.decode import DecodeCase

import gpu_actors as ga
from gpu_actors.reference import attention_forward


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def ask_paged(ctx: ga.GpuContext, batch: Batch, page_size: int = 8, **options: Any) -> ga.AttentionOutput:
    pages = batch.pages(page_size)
    tables = {"block_table": pages.block_table, "cache_seqlens": pages.cache_seqlens}
    return ctx.flash_attn.paged_forward(batch.q, pages.k, pages.v, **tables, **options, return_lse=True).result(10.0)


@pytest.mark.parametrize("form", ["bits", "signed bits", "bool", "packed"])
def test_a_tree_mask_hides_new_keys_alone(ctx: ga.GpuContext, form: str) -> None:
    rng = np.random.default_rng(6)
    rows = 6
    batch = random_batch(6, (6, 30, 11), rows=rows)
    trees = np.stack([random_tree(rng, rows) for _ in batch.k])
    bias = [np.full((1, 1, rows, len(keys)), 0.0) for keys in batch.k]
    for one, tree in zip(bias, trees, strict=True):
        one[..., -rows:][:, :, ~tree] = -np.inf
    mask: Any = {"bool": trees, "signed bits": tree_bits(trees).view(np.int64)}.get(form, tree_bits(trees))
    pages = batch.pages(8)
    q, ends = batch.q, None
    if form == "packed":
        q, mask = q.reshape(-1, *q.shape[2:]), mask.reshape(-1)
        ends = np.arange(4, dtype=np.int32) * np.int32(rows)
    result = ctx.flash_attn.paged_forward(
        q, pages.k, pages.v, block_table=pages.block_table, cache_seqlens=pages.cache_seqlens, cu_seqlens_q=ends,
        tree_mask=mask, window_size=(20, -1),
    ).result(10.0)  # fmt: skip
    for index in range(3):
        out = attention_forward(
            batch.q[index : index + 1], batch.k[index][None], batch.v[index][None], bias=bias[index],
            window_size=(20, -1),
        ).out[0]  # fmt: skip
        np.testing.assert_allclose(result.out.reshape(batch.q.shape)[index], out, rtol=1e-5, atol=1e-6)


def test_sixty_four_tree_rows_use_every_bit(ctx: ga.GpuContext) -> None:
    batch = random_batch(7, (70,), rows=64)
    causal = ask_paged(ctx, batch)
    tree = ask_paged(ctx, batch, tree_mask=np.tril(np.ones((1, 64, 64), bool)))
    assert np.array_equal(causal.out, tree.out)


def test_a_sequence_is_answered_bitwise_alike_alone_and_in_a_batch(ctx: ga.GpuContext) -> None:
    batch = random_batch(9, (100, 3, 0, 57), rows=2)
    together = ask_paged(ctx, batch)
    for index in range(4):
        alone = ask_paged(
            ctx, Batch(batch.q[index : index + 1], batch.k[index : index + 1], batch.v[index : index + 1])
        )
        assert np.array_equal(alone.out[0], together.out[index])
        assert np.array_equal(alone.lse[0], together.lse[index])


def test_pages_may_be_shared(ctx: ga.GpuContext) -> None:
    batch = random_batch(10, (20,))
    pages = batch.pages(8)
    q = np.concatenate([batch.q, batch.q])
    table = np.concatenate([pages.block_table, pages.block_table])
    result = ctx.flash_attn.paged_forward(
        q, pages.k, pages.v, block_table=table, cache_seqlens=np.array([20, 20], np.int32)
    ).result(10.0)
    assert np.array_equal(result.out[0], result.out[1])


def test_the_output_goes_where_it_is_asked_to(ctx: ga.GpuContext) -> None:
    batch = random_batch(11, (4, 6))
    k, v = batch.arrays()
    out = np.full((2, 4, 16), np.nan, np.float32)
    result = ctx.flash_attn.decode(batch.q[:, 0], k, v, batch.lengths, out=out).result(10.0)
    assert result.out is out
    assert np.isfinite(out).all()
    with pytest.raises(ga.InvalidRequest, match=r"must not share memory with k_cache\.1"):
        ctx.flash_attn.decode(batch.q[:, 0], k, v, batch.lengths, out=k[1].reshape(-1)[:128].reshape(2, 4, 16)).result(
            10
        )


def test_the_key_says_where_keys_and_values_lie(ctx: ga.GpuContext) -> None:
    batch = random_batch(12, (4, 6), dtype="bfloat16", kv_dtype="float8_e4m3fn")
    pages, (k, v) = batch.pages(16), batch.dense()
    tables = {"block_table": pages.block_table, "cache_seqlens": pages.cache_seqlens}
    key = ctx.flash_attn.inspect_key(ga.PagedForward(q=batch.q, k_cache=pages.k, v_cache=pages.v, **tables))
    assert (key.layout, key.page_size, key.kv_dtype, key.dtype) == ("paged", 16, "float8_e4m3fn", "bfloat16")
    assert key.paged
    key = ctx.flash_attn.inspect_key(ga.PagedForward(q=batch.q, k_cache=k, v_cache=v, cache_seqlens=batch.lengths))
    assert (key.layout, key.page_size, key.mask, key.tree_mask) == ("cache", 0, "causal", False)
    tree = ga.PagedForward(
        q=batch.q, k_cache=k, v_cache=v, cache_seqlens=batch.lengths, tree_mask=np.ones((2, 1), np.uint64)
    )
    assert (ctx.flash_attn.inspect_key(tree).mask, ctx.flash_attn.inspect_key(tree).tree_mask) == ("full", True)
    arrays = dict(zip(("k_caches", "v_caches"), batch.arrays(), strict=True))
    key = ctx.flash_attn.inspect_key(ga.BatchedDecode(q=batch.q[:, 0], **arrays, seq_lens=batch.lengths))
    assert (key.layout, key.mask, key.gqa_ratio) == ("pointers", "full", 2)


def test_a_cache_has_sequences_for_other_requests(ctx: ga.GpuContext) -> None:
    """Two of a request's sequences may be the same one of the cache, as draws from one prompt are."""
    batch = random_batch(6, (30, 9, 7), rows=1)
    case = DecodeCase(batch, "cache", leftpad=[2, 0, 5], places=[4, 0, 2])
    operands = case.operands()
    result = ctx.flash_attn.paged_forward(**operands).result(10.0)
    np.testing.assert_array_equal(result.out, ask_paged(ctx, batch).out)
    both = np.array([0, 0, 2], np.int32)
    lengths = operands["cache_seqlens"][[1, 1, 2]]
    changed = {"cache_seqlens": lengths, "cache_batch_idx": both, "cache_leftpad": operands["cache_leftpad"][[1, 1, 2]]}
    result = ctx.flash_attn.paged_forward(**{**operands, **changed}).result(10.0)
    again = ask_paged(ctx, Batch(batch.q, [batch.k[1], *batch.k[1:]], [batch.v[1], *batch.v[1:]]))
    np.testing.assert_array_equal(result.out, again.out)


def test_requests_behind_padding_share_a_launch() -> None:
    batch = random_batch(7, (30, 9), rows=1)
    cases = [DecodeCase(batch, page_size=5, leftpad=[n, 3 * n]) for n in range(4)]
    pool = [case.operands() for case in cases]
    k, v = (np.concatenate([operands[name] for operands in pool]) for name in ("k_cache", "v_cache"))
    starts = np.cumsum([0, *(len(operands["k_cache"]) for operands in pool)])
    with ga.open_context("mock", ga.ContextOptions(coalesce_delay_us=200_000, record_launches=True)) as ctx:
        replies = []
        for operands, start in zip(pool, starts[:-1], strict=True):
            table = np.where(operands["block_table"] < len(k), operands["block_table"] + start, -1).astype(np.int32)
            replies.append(
                ctx.flash_attn.paged_forward(**{**operands, "k_cache": k, "v_cache": v, "block_table": table})
            )
        answers = [reply.result(10.0).out for reply in replies]
        wanted = ask_paged(ctx, batch).out
        assert ctx.stats()["flash_attn"].launched < 5
    for answer in answers:
        np.testing.assert_array_equal(answer, wanted)


def test_arrays_have_capacities_and_strides_of_their_own(ctx: ga.GpuContext) -> None:
    batch = random_batch(8, (30, 1, 7, 64), rows=1)
    case = DecodeCase(batch, "pointers", own=True)
    operands = case.operands()
    k, v = ([operands[f"{side}_cache.{index}"] for index in range(4)] for side in "kv")
    assert len({array.shape for array in k}) == 4
    result = ctx.flash_attn.decode(batch.q[:, 0], k, v, batch.lengths).result(10.0)
    np.testing.assert_array_equal(result.out, ask_paged(ctx, batch).out[:, 0])
    request = ga.BatchedDecode(q=batch.q[:, 0], k_caches=k, v_caches=v, seq_lens=batch.lengths)
    assert ctx.flash_attn.inspect_key(request).own_layouts
