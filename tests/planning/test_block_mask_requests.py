"""Block masks of requests: NumPy's answers, plans and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases.packed_block_masks import BLOCK, HEADS, KINDS, PACKED, C, R, arrays_of, explicit, mask_of, near
from inside.distributed import host_operands
from inside.validation import forward_problem

import gpu_actors as ga
from gpu_actors.planning.block_masks import planned_mask


@pytest.mark.parametrize(("causal", "full"), [(True, True), (False, False)])
def test_the_oracle_hides_what_is_not_listed(causal: bool, full: bool) -> None:
    arrays = arrays_of("float64")
    with ga.open_context("mock") as ctx:
        found = ctx.flash_attn.forward(
            **arrays, **PACKED, causal=causal, block_mask=mask_of(full=full), return_lse=True
        ).result(100.0)
    out, lse = explicit(arrays, causal, modified=True)
    np.testing.assert_allclose(found.out, out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-6)
    assert np.isneginf(lse).any()


# Plans and refusals


QKV = (np.zeros((2, 300, 4, 32), np.float16), *[np.zeros((2, 520, 2, 32), np.float16)] * 2)


def dense(**options: Any) -> ga.FlashForward:
    return ga.FlashForward(*QKV, **options)


def test_dense_requests_have_block_masks_too() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 4, 16)) for n in (300, 520, 520))
    kinds = KINDS[:1]
    with ga.open_context("mock") as ctx:
        found = ctx.flash_attn.forward(q, k, v, block_mask=mask_of(kinds)).result(100.0)
    scores = np.einsum("brhd,bkhd->bhrk", q, k) / 4
    seen = (kinds > 0).repeat(BLOCK, 2).repeat(BLOCK, 3)[:, :, :300, :520]
    b, h = np.arange(2)[:, None, None, None], np.arange(HEADS)[:, None, None]
    seen = seen & near(b, h, np.arange(300)[:, None], np.arange(520))
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    wanted = np.einsum("bhrk,bkhd->brhd", weights / np.where(total == 0, 1, total), v)
    np.testing.assert_allclose(found.out, wanted, rtol=1e-10, atol=1e-10)


def test_lists_may_be_larger_than_the_longest_sequence() -> None:
    """A plan depends on lengths; numbers in lists behind them are not read."""
    arrays = arrays_of("float64")
    fitting = mask_of()
    spare = {3: ((0, 0), (0, 0), (0, 2)), 4: ((0, 0), (0, 0), (0, 2), (0, 1))}
    larger = dataclasses.replace(
        fitting,
        **{
            name: np.pad(array, spare[array.ndim], constant_values=-7)
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
            if (array := getattr(fitting, name)) is not None
        },
    )
    with ga.open_context("mock") as ctx:
        replies = [ctx.flash_attn.forward(**arrays, **PACKED, block_mask=lists) for lists in (fitting, larger)]
        np.testing.assert_array_equal(*(reply.result(100.0).out for reply in replies))


def test_new_lists_need_no_new_plan() -> None:
    arrays = arrays_of("float64")
    with ga.open_context("mock") as ctx:
        for seed in range(3):
            ctx.flash_attn.forward(**arrays, **PACKED, block_mask=mask_of(seed=seed)).result(100.0)
        assert ctx.flash_attn.plan_cache_stats().misses == 1
        ctx.flash_attn.forward(**arrays, **PACKED, block_mask=mask_of(mask_mod=None)).result(100.0)
        assert ctx.flash_attn.plan_cache_stats().misses == 2


def changed(**lists: Any) -> ga.BlockMask:
    return dataclasses.replace(mask_of(KINDS[:1]), **lists)


@pytest.mark.parametrize("size", [(128.0, 128.0), (np.int64(128), 128)])
def test_a_size_that_is_refused_finds_no_plan_of_one_that_equals_it(size: Any) -> None:
    with ga.open_context("mock") as ctx:
        ctx.flash_attn.submit(dense(block_mask=changed())).result(100.0)
        with pytest.raises(ga.InvalidRequest, match="two positive ints"):
            ctx.flash_attn.submit(dense(block_mask=changed(block_size=size))).result(100.0)


def twice(full: bool) -> ga.BlockMask:
    """Lists of the first blocks of keys, in which a block is listed twice."""
    counts, indices = np.full((1, 1, R), 2, np.int32), np.zeros((1, 1, R, C), np.int32)
    indices[..., 1] = 1
    if full:
        return ga.BlockMask(counts, indices, counts[:1] - 1, indices[:1])
    return ga.BlockMask(counts, np.zeros_like(indices))


def raises(b: Any, h: Any, q: Any, kv: Any) -> Any:
    raise ValueError("no mask today")


COUNTS = np.full((1, HEADS, R), C, np.int32)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"block_mask": "causal"}, ga.InvalidRequest, "must be a BlockMask"),
        ({"block_mask": changed(kv_indices=None)}, ga.InvalidRequest, "kv_num_blocks and kv_indices, or neither"),
        ({"block_mask": changed(full_kv_num_blocks=None)}, ga.InvalidRequest, "full_kv_indices, or neither"),
        (
            {"block_mask": changed(full_q_num_blocks=None, full_q_indices=None)},
            ga.InvalidRequest,
            "must have full_q_indices where",
        ),
        ({"block_mask": changed(kv_num_blocks=COUNTS.astype(np.int64))}, ga.InvalidRequest, "must be int32"),
        ({"block_mask": changed(kv_num_blocks=COUNTS[:, :3])}, ga.InvalidRequest, "1 or 2, 1 or 4"),
        ({"block_mask": changed(kv_num_blocks=COUNTS[..., :2])}, ga.InvalidRequest, r"at least \(1, 4, 3\)"),
        ({"block_mask": changed(kv_num_blocks=COUNTS + 1)}, ga.InvalidRequest, "from 0 to 5"),
        ({"block_mask": changed(kv_num_blocks=COUNTS - 6)}, ga.InvalidRequest, "from 0 to 5"),
        (
            {"block_mask": changed(kv_num_blocks=COUNTS, kv_indices=np.full((1, HEADS, R, C), 5, np.int32))},
            ga.InvalidRequest,
            "must name blocks from 0 to 4, those of the longest",
        ),
        ({"block_mask": changed(block_size=(0, 128))}, ga.InvalidRequest, "two positive ints"),
        ({"block_mask": changed(block_size=(64, 128))}, ga.InvalidRequest, r"at least \(1, 4, 5\)"),
        ({"block_mask": changed(mask_mod=3)}, ga.InvalidRequest, "must be a function"),
        ({"block_mask": changed(mask_mod=lambda b, h, q, kv: q)}, ga.InvalidRequest, "must return a bool"),
        ({"block_mask": changed(mask_mod=raises)}, ga.InvalidRequest, "block_mask=.*raises.*no mask today"),
        ({"block_mask": twice(False)}, ga.InvalidRequest, "kv_indices.*each block once"),
        ({"block_mask": twice(True)}, ga.InvalidRequest, "kv_indices and full_kv_indices.*each block once"),
        ({"softcap": 3.0}, ga.Unsupported, "hidden scores finite"),
        ({"bias": np.zeros((1, 1, 300, 520), np.float16)}, ga.Unsupported, "say both in mask_mod"),
        ({"q_positions": np.zeros(2, np.int32)}, ga.Unsupported, "from the first one of a sequence"),
        ({"seqused_k": np.full(2, 7, np.int32)}, ga.Unsupported, "give packed sequences"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    request = dense(**{"block_mask": changed(), **options})
    with ga.open_context("mock") as ctx, pytest.raises(error, match=said):
        ctx.flash_attn.submit(request).result(100.0)


def test_parts_of_a_request_have_no_block_mask() -> None:
    """head_split and context_split make such parts."""
    with pytest.raises(ga.Unsupported, match="blocks and heads of one request"):
        host_operands(dense(block_mask=changed()), ("q", "k"))


def test_gradients_want_lists_of_rows_that_agree_where_blocks_take_turns() -> None:
    given = {"out": QKV[0], "dout": QKV[0], "lse": np.zeros((2, 4, 300), np.float32)}
    lists = dict.fromkeys(("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"))
    other = changed(q_num_blocks=np.zeros((1, HEADS, C), np.int32))
    with ga.open_context("mock") as ctx:
        for mask, said in ((changed(**lists), "walk along the lists of rows"), (other, "the other way round")):
            request = ga.FlashBackward(*QKV, **given, block_mask=mask, deterministic=mask is other)
            with pytest.raises(ga.InvalidRequest, match=said):
                ctx.flash_attn.submit(request).result(100.0)


def test_gradients_walk_along_the_lists_of_rows() -> None:
    """Gradients that take turns read the lists of keys too."""
    request = dense(block_mask=changed())
    for deterministic, sides in ((False, "q"), (True, "qk")):
        problem = dataclasses.replace(forward_problem(request), direction="backward", deterministic=deterministic)
        planned = planned_mask(request, problem)
        assert planned is not None
        assert [name.removeprefix("full_")[0] for name in planned.lists] == [side for side in sides for _ in range(4)]


def test_explain_knows_the_mask() -> None:
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_90a")) as ctx:
        found = ctx.flash_attn.explain(dense(block_mask=changed()))
    assert found.key is not None
    assert found.key.score_mod is not None
    assert found.key.score_mod.block_size == (BLOCK, BLOCK)
    assert "a graph's `block_mask`" in {cell.option for cell in found.options}


def test_a_request_without_rows_or_keys_reads_no_lists() -> None:
    none = np.zeros((0, 4, 32), np.float16)
    bounds = np.zeros(3, np.int32)
    mask = mask_of(np.ones((1, 1, 1, 1), int))
    with ga.open_context("mock") as ctx:
        found = ctx.flash_attn.forward(none, none, none, cu_seqlens_q=bounds, cu_seqlens_k=bounds, block_mask=mask)
        assert found.result(100.0).out.shape == none.shape
        rows, no_keys = np.ones((1, 4, 2, 32), np.float16), np.ones((1, 0, 2, 32), np.float16)
        empty = ga.BlockMask(np.zeros((1, 1, 1), np.int32), np.zeros((1, 1, 1, 0), np.int32))
        found = ctx.flash_attn.forward(rows, no_keys, no_keys, block_mask=empty, return_lse=True)
        assert not found.result(100.0).out.any()
