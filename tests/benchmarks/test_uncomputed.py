"""`uncomputed` takes only the refusal of a mock device that computes nothing for an answer."""

from __future__ import annotations

import numpy as np
import pytest

import gpu_actors as ga
from benchmarks.isolation import uncomputed


async def test_only_what_computes_nothing_is_measured() -> None:
    row = np.ones((1, 1, 1, 8), np.float32)
    async with ga.open_context("mock", ga.ContextOptions(mock=ga.MockOptions(compute=False))) as idle:
        await uncomputed(lambda: idle.flash_attn.forward(row, row, row))()
        with pytest.raises(ga.InvalidRequest):
            await uncomputed(lambda: idle.flash_attn.forward(row, row, row, softcap=-1.0))()
    async with ga.open_context("mock") as ctx:
        with pytest.raises(AssertionError, match="has answered"):
            await uncomputed(lambda: ctx.flash_attn.forward(row, row, row))()
