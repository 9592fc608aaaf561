"""Every example of docs/decoding.md runs, as a reader would type it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.docs import examples, run_example
from support.service import REPOSITORY

import gpu_actors as ga

PAGE = REPOSITORY / "docs" / "decoding.md"


def test_the_examples_of_the_decoding_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[str, Any] = {}
    for number, source in enumerate(examples(PAGE), 1):
        run_example(source, shown, f"{PAGE.name}, example {number}")
    assert "(1, 40, 8, 64) 40\n(2, 1, 8, 64) KvCacheStats(blocks=64, free_blocks=60" in capsys.readouterr().out

    async def twice() -> list[int]:
        async with (
            ga.open_context("mock") as ctx,
            ctx.kv_cache(num_blocks=8, page_size=8, kv_heads=1, head_dim=8, dtype="float32") as cache,
        ):
            tokens, k = list(range(20)), np.ones((20, 1, 8), np.float32)
            return [(await shown["prefill"](cache, tokens, k, k)).cached for _ in range(2)]

    assert asyncio.run(twice()) == [0, 16]
