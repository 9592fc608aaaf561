"""The cases of several workers over Ray actors: attention by rows, sharded caches, and sequences that move."""

from __future__ import annotations

import pytest
from cases import shards

import gpu_actors as ga

pytest.importorskip("ray")

from gpu_actors.interop.ray import ray_pool

pytestmark = pytest.mark.usefixtures("cluster")


async def test_they_equal_one_context() -> None:
    async with ga.open_context("mock") as whole, ray_pool(3, device="mock", seed=0) as pool:
        await shards.check_contexts(pool, whole)
        await shards.check_sharded_cache(pool, whole)
        for dtype in ("bfloat16", "float8_e4m3fn"):
            await shards.check_move(pool, whole, dtype)
