"""Requests that several workers answer together equal those of one context, over a Ray channel too."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from support.adopting import adopt

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, head_split

pytest.importorskip("ray")

from gpu_actors.interop.ray import ray_pool

adopt("test_over_each_channel", {"pool_of_three"}, globals())


@pytest.fixture(scope="module")
def pool_of_three(cluster: Any) -> Iterator[ContextPool]:
    opening = ray_pool(3, device="mock", seed=0)
    with asyncio.Runner() as runner:
        yield runner.run(opening.__aenter__())
        runner.run(opening.__aexit__(None, None, None))


@pytest.fixture
async def whole() -> AsyncIterator[ga.GpuContext]:
    async with ga.open_context("mock") as ctx:
        yield ctx


async def test_heads_have_the_bits_of_one_context(pool_of_three: ContextPool, whole: ga.GpuContext) -> None:
    for given in importlib.import_module("test_head_split").REQUESTS.values():
        request = ga.FlashForward(**given)
        found, wanted = await head_split(pool_of_three, request, parts=2), await whole.flash_attn.submit(request)
        np.testing.assert_array_equal(found.out, wanted.out)
        assert (found.lse is None) == (wanted.lse is None)
        if wanted.lse is not None:
            np.testing.assert_array_equal(found.lse, wanted.lse)


def test_the_suite_of_all_channels_is_run() -> None:
    adopted = {"test_attention_by_rows", "test_attention_by_heads", "test_a_sharded_cache"}
    adopted |= {"test_prefill_here_and_decode_there", "test_layers_that_differ_move_too"}
    assert adopted <= set(globals())
