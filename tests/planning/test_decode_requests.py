"""`paged_forward` and `decode` on the emulated device: through actor, dispatch, packing and kernels to the oracle."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch, random_tree, tree_bits
from emulated.decode import DecodeCase, check_results
from inside.kernels import check_key, decode_keys, dispatch_key, usual_decode_problems

import gpu_actors as ga

LENGTHS = (300, 9, 0, 70)


@pytest.fixture(scope="module")
def emulated() -> Iterator[ga.GpuContext]:
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        yield ctx


def case_of(rows: int, **options: Any) -> DecodeCase:
    return DecodeCase(random_batch(0, LENGTHS, rows=rows, heads=(6, 2), dim=64, dtype="float16"), options=options)


def ask(ctx: ga.GpuContext, case: DecodeCase, **options: Any) -> ga.Reply[ga.AttentionOutput]:
    operands = case.operands()
    return ctx.flash_attn.paged_forward(
        case.q,
        operands["k_cache"],
        operands["v_cache"],
        block_table=operands.get("block_table"),
        cache_seqlens=operands["cache_seqlens"],
        cu_seqlens_q=operands.get("cu_seqlens_q"),
        tree_mask=case.tree_mask,
        return_lse=True,
        **{**case.options, **options},
    )


@pytest.mark.parametrize("layout", ["paged", "cache"])
@pytest.mark.parametrize("num_splits", [0, 2])
def test_new_rows_over_pages_and_caches(emulated, layout, num_splits):
    case = case_of(3, causal=True, num_splits=num_splits)
    case.layout = layout
    answer = ask(emulated, case).result(120)
    check_results(case, answer.out, answer.lse)


def test_a_draft_sees_its_ancestors_in_the_tree_alone(emulated):
    case = case_of(5)
    case.tree = np.stack([tree_bits(random_tree(np.random.default_rng(n), 5)) for n in range(len(LENGTHS))])
    answer = ask(emulated, case).result(120)
    check_results(case, answer.out, answer.lse)


@pytest.mark.parametrize("stacked", [False, True])
def test_one_array_a_sequence_is_a_cache(emulated, stacked):
    case = case_of(1)
    k, v = case.batch.arrays()
    caches = (np.stack(k), np.stack(v)) if stacked else (k, v)
    lengths = case.batch.lengths.astype(np.uint32)
    answer = emulated.flash_attn.decode(case.q[:, 0], *caches, lengths, return_lse=True).result(120)
    check_results(case, answer.out[:, None], answer.lse[..., None])


def test_requests_that_wait_together_share_a_launch_and_its_kernels():
    """With pinned splits the answers have the bits of the requests alone."""
    case = case_of(2, causal=True, num_splits=2)
    options = ga.ContextOptions(arch="sm_80", coalesce_delay_us=50_000.0, coalesce_max=len(LENGTHS))
    pages = case.batch.pages(16)

    def one(ctx: ga.GpuContext, index: int) -> ga.Reply[ga.AttentionOutput]:
        own = slice(index, index + 1)
        return ctx.flash_attn.paged_forward(
            case.q[own],
            pages.k,
            pages.v,
            block_table=pages.block_table[own],
            cache_seqlens=pages.cache_seqlens[own],
            num_splits=2,
            return_lse=True,
        )

    async def together() -> tuple[list[ga.AttentionOutput], ga.ActorStats]:
        async with ga.open_context("emulated", options) as ctx:
            await one(ctx, 0)  # compiles
            before = ctx.stats()["flash_attn"].launched
            answers = await asyncio.gather(*(one(ctx, index) for index in range(len(LENGTHS))))
            assert ctx.stats()["flash_attn"].launched - before == 1
            return list(answers), ctx.stats()["flash_attn"]

    answers, _ = asyncio.run(together())
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        for index, answer in enumerate(answers):
            alone = one(ctx, index).result(60)
            np.testing.assert_array_equal(answer.out, alone.out)
            np.testing.assert_array_equal(answer.lse, alone.lse)


class TestRefusals:
    def test_what_tensor_cores_do_not_take_goes_to_cuda_cores_with_the_reason(self, emulated):
        for changes, words in (
            ({"dtype": "float32"}, "16-bit queries"),
            ({"dtype": "float64"}, "16-bit queries"),
            ({"scale": -1.0}, "positive scale"),
            ({"dim": 20}, "nearest supported: 24"),
            ({"dim": 72, "kv_dtype": "float8_e4m3fn"}, "multiples of 16 from 16 to 512 (nearest supported: 80)"),
        ):
            given: dict[str, Any] = {"dim": 64, "dtype": "float16", **changes}
            scale = given.pop("scale", None)
            batch = random_batch(0, LENGTHS, **given)
            pages = batch.pages(16)
            request = ga.PagedForward(
                q=batch.q,
                k_cache=pages.k,
                v_cache=pages.v,
                block_table=pages.block_table,
                cache_seqlens=pages.cache_seqlens,
                softmax_scale=scale,
            )
            found = emulated.flash_attn.explain(request)
            assert found.key is not None
            assert found.key.kernel == "decode_simple"
            assert words in next(verdict.reason for verdict in found.verdicts if verdict.family == "decode_mma")

    def test_a_length_past_the_table_is_refused_before_anything_runs(self, emulated):
        case = case_of(1, causal=True)
        pages = case.batch.pages(16)
        lengths = pages.cache_seqlens.copy()
        lengths[1] = pages.block_table.shape[1] * 16 + 1
        with pytest.raises(ga.InvalidRequest) as refused:
            emulated.flash_attn.paged_forward(
                case.q, pages.k, pages.v, block_table=pages.block_table, cache_seqlens=lengths
            ).result(30)
        assert refused.value.field == "cache_seqlens"


def test_the_key_names_the_kernel_and_its_rows(emulated):
    case = case_of(3, causal=True)
    operands = case.operands()
    request = ga.PagedForward(
        q=case.q,
        k_cache=operands["k_cache"],
        v_cache=operands["v_cache"],
        block_table=operands["block_table"],
        cache_seqlens=operands["cache_seqlens"],
    )
    key = emulated.flash_attn.inspect_key(request)
    assert (key.kernel, key.layout, key.row_tile) == ("decode_mma", "paged", 16)


def test_the_keys_of_a_launch_pass_the_checks_of_warm():
    for problem in usual_decode_problems("sm_90a"):
        for key in decode_keys(problem, dispatch_key(problem, "sm_90a"), planned=False):
            assert check_key(key) is key
            with pytest.raises(ga.Unsupported, match="rows a block"):
                check_key(dataclasses.replace(key, row_tile=48))
