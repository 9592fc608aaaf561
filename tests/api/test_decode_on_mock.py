"""The grid of the decode kernels' tests, asked of the service on mock: pages, caches and arrays gathered right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cases.decode import VARIANTS, Variant, draw
from emulated.decode import DecodeCase, check_results

import gpu_actors as ga


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def ask(ctx: ga.GpuContext, case: DecodeCase) -> ga.AttentionOutput:
    operands = case.operands()
    options = {"causal": False, **case.options}
    if case.layout != "pointers":
        reply = ctx.flash_attn.paged_forward(
            case.q,
            operands["k_cache"],
            operands["v_cache"],
            block_table=operands.get("block_table"),
            cache_seqlens=operands["cache_seqlens"],
            cache_leftpad=operands.get("cache_leftpad"),
            cache_batch_idx=operands.get("cache_batch_idx"),
            cu_seqlens_q=operands.get("cu_seqlens_q"),
            tree_mask=case.tree_mask,
            return_lse=True,
            **options,
        )
        return reply.result(60)
    options.pop("causal", None)  # one new row, the last
    caches = ([operands[f"{name}.{index}"] for index in range(len(case.batch.k))] for name in ("k_cache", "v_cache"))
    answer = ctx.flash_attn.decode(case.q[:, 0], *caches, operands["cache_seqlens"], return_lse=True, **options)
    out, lse = answer.result(60)
    return ga.AttentionOutput(out[:, None], lse[..., None])


def check_drawn(ctx: ga.GpuContext, variant: Variant, seed: int, longest: int) -> None:
    case = draw(variant, seed, longest)
    answer = ask(ctx, case)
    check_results(case, answer.out, answer.lse)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_sample_agrees_with_the_oracle_over_packed_sequences(mock: ga.GpuContext, variant: Variant) -> None:
    for seed in range(2):
        check_drawn(mock, variant, seed, 500)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_whole_grid_agrees_with_the_oracle_over_packed_sequences(mock: ga.GpuContext, variant: Variant) -> None:
    for seed in range(100, 140):
        check_drawn(mock, variant, seed, 2000)
