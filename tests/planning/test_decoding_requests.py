"""Requests over pages, dense caches and arrays of pointers, on mock: trees, padding, bits and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.cached_batches import Batch, random_batch, random_tree, tree_bits
from emulated.decode import DecodeCase

import gpu_actors as ga


def ask_paged(mock: ga.GpuContext, batch: Batch, page_size: int = 8, **options: Any) -> ga.AttentionOutput:
    pages = batch.pages(page_size)
    tables = {"block_table": pages.block_table, "cache_seqlens": pages.cache_seqlens}
    return mock.flash_attn.paged_forward(batch.q, pages.k, pages.v, **tables, **options, return_lse=True).result(10.0)


@pytest.mark.parametrize("form", ["signed bits", "bool", "packed"])
def test_a_tree_mask_has_several_forms(mock: ga.GpuContext, form: str) -> None:
    rows = 6
    batch = random_batch(6, (6, 30, 11), rows=rows)
    trees = np.stack([random_tree(np.random.default_rng(n), rows) for n in range(3)])
    wanted = ask_paged(mock, batch, tree_mask=tree_bits(trees), window_size=(20, -1))
    mask: Any = {"bool": trees, "signed bits": tree_bits(trees).view(np.int64)}.get(form, tree_bits(trees))
    given: dict[str, Any] = {"tree_mask": mask, "window_size": (20, -1)}
    if form == "packed":
        batch.q, given["tree_mask"] = batch.q.reshape(-1, *batch.q.shape[2:]), mask.reshape(-1)
        given["cu_seqlens_q"] = np.arange(4, dtype=np.int32) * np.int32(rows)
    found = ask_paged(mock, batch, **given)
    np.testing.assert_array_equal(found.out.reshape(wanted.out.shape), wanted.out)


def test_sixty_four_tree_rows_use_every_bit(mock: ga.GpuContext) -> None:
    batch = random_batch(7, (70,), rows=64)
    causal = ask_paged(mock, batch)
    tree = ask_paged(mock, batch, tree_mask=np.tril(np.ones((1, 64, 64), bool)))
    assert np.array_equal(causal.out, tree.out)


def test_a_sequence_is_answered_bitwise_alike_alone_and_in_a_batch(mock: ga.GpuContext) -> None:
    batch = random_batch(9, (100, 3, 0, 57), rows=2)
    together = ask_paged(mock, batch)
    for index in range(4):
        alone = ask_paged(
            mock, Batch(batch.q[index : index + 1], batch.k[index : index + 1], batch.v[index : index + 1])
        )
        assert np.array_equal(alone.out[0], together.out[index])
        assert np.array_equal(alone.lse[0], together.lse[index])


def test_the_key_says_where_keys_and_values_lie(mock: ga.GpuContext) -> None:
    batch = random_batch(12, (4, 6), dtype="bfloat16", kv_dtype="float8_e4m3fn")
    pages, (k, v) = batch.pages(16), batch.dense()
    tables = {"block_table": pages.block_table, "cache_seqlens": pages.cache_seqlens}
    key = mock.flash_attn.inspect_key(ga.PagedForward(q=batch.q, k_cache=pages.k, v_cache=pages.v, **tables))
    assert (key.layout, key.page_size, key.kv_dtype, key.dtype) == ("paged", 16, "float8_e4m3fn", "bfloat16")
    assert key.paged
    key = mock.flash_attn.inspect_key(ga.PagedForward(q=batch.q, k_cache=k, v_cache=v, cache_seqlens=batch.lengths))
    assert (key.layout, key.page_size, key.mask, key.tree_mask) == ("cache", 0, "causal", False)
    tree = ga.PagedForward(
        q=batch.q, k_cache=k, v_cache=v, cache_seqlens=batch.lengths, tree_mask=np.ones((2, 1), np.uint64)
    )
    assert (mock.flash_attn.inspect_key(tree).mask, mock.flash_attn.inspect_key(tree).tree_mask) == ("full", True)
    arrays = dict(zip(("k_caches", "v_caches"), batch.arrays(), strict=True))
    key = mock.flash_attn.inspect_key(ga.BatchedDecode(q=batch.q[:, 0], **arrays, seq_lens=batch.lengths))
    assert (key.layout, key.mask, key.gqa_ratio) == ("pointers", "full", 2)


def test_requests_behind_padding_share_a_launch() -> None:
    batch = random_batch(7, (30, 9), rows=1)
    cases = [DecodeCase(batch, page_size=5, leftpad=[n, 3 * n]) for n in range(4)]
    pool = [case.operands() for case in cases]
    k, v = (np.concatenate([operands[name] for operands in pool]) for name in ("k_cache", "v_cache"))
    starts = np.cumsum([0, *(len(operands["k_cache"]) for operands in pool)])
    with ga.open_context("mock", ga.ContextOptions(coalesce_delay_us=200_000)) as mock:
        replies = []
        for operands, start in zip(pool, starts[:-1], strict=True):
            table = np.where(operands["block_table"] < len(k), operands["block_table"] + start, -1).astype(np.int32)
            replies.append(
                mock.flash_attn.paged_forward(**{**operands, "k_cache": k, "v_cache": v, "block_table": table})
            )
        answers = [reply.result(10.0).out for reply in replies]
        wanted = ask_paged(mock, batch).out
        assert mock.stats()["flash_attn"].launched < 5
    for answer in answers:
        np.testing.assert_array_equal(answer, wanted)


def test_arrays_have_capacities_and_strides_of_their_own(mock: ga.GpuContext) -> None:
    batch = random_batch(8, (30, 1, 7, 64), rows=1)
    operands = DecodeCase(batch, "pointers", own=True).operands()
    k, v = ([operands[f"{side}_cache.{index}"] for index in range(4)] for side in "kv")
    request = ga.BatchedDecode(q=batch.q[:, 0], k_caches=k, v_caches=v, seq_lens=batch.lengths)
    assert mock.flash_attn.inspect_key(request).own_layouts
    result = mock.flash_attn.submit(request).result(10.0)
    np.testing.assert_array_equal(result.out, ask_paged(mock, batch).out[:, 0])
