"""Requests over several workers equal one context's, whatever the channel of the workers is."""

from __future__ import annotations

import pytest
from cases import shards

import gpu_actors as ga
from gpu_actors.distributed import ContextPool


async def test_attention_by_rows(pool_of_three: ContextPool, whole: ga.GpuContext) -> None:
    await shards.check_contexts(pool_of_three, whole)


async def test_attention_by_heads(pool_of_three: ContextPool, whole: ga.GpuContext) -> None:
    await shards.check_heads(pool_of_three, whole)


async def test_a_sharded_cache(pool_of_three: ContextPool, whole: ga.GpuContext) -> None:
    await shards.check_sharded_cache(pool_of_three, whole)
    await shards.check_shard_rows(pool_of_three, whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
async def test_prefill_here_and_decode_there(pool_of_three: ContextPool, whole: ga.GpuContext, dtype: str) -> None:
    await shards.check_move(pool_of_three, whole, dtype)


async def test_layers_that_differ_move_too(pool_of_three: ContextPool, whole: ga.GpuContext) -> None:
    await shards.check_move_of_layers(pool_of_three, whole)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
async def test_all_of_it_on_the_emulated_device() -> None:
    async with ga.open_context("emulated") as one, ga.open_context("emulated") as other:
        pool = ContextPool({"one": one, "other": other}, seed=0)
        await shards.check_context_split(pool, one, "float16", 2)
        for name in ("float16, bias", "varlen, float16"):
            await shards.check_context_split(pool, one, name, 2)
        await shards.check_heads(pool, one, "float16, bias", lse_bits=False)
        await shards.check_sharded_cache(pool, one, "float16", (64, 64))
        await shards.check_shard_rows(pool, one, (64, 64))
        await shards.check_move(pool, one, "bfloat16", (64, 64))
        await shards.check_move_of_layers(pool, one)
