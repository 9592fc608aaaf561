"""A pooled cache whose layers differ: its sequences are placed and move as those of one layer do."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from cases import shards
from support.layer_rows import FP8, HEADS_Q, LATENT, OPTIONS, WIDE, LayerRows
from support.service import comes_true

import gpu_actors as ga
from gpu_actors.distributed import open_pool
from gpu_actors.remote import InProcess, RemoteContext

LOCAL = dataclasses.replace(WIDE, window=9, slack=3, num_blocks=16)
LAYERS = [WIDE, LOCAL, LATENT, LOCAL, FP8]
SPEC: dict[str, Any] = {"num_blocks": 16, "page_size": 8, "dtype": "bfloat16"}


async def test_sequences_that_move_under_load_have_the_bits_of_those_that_stay() -> None:
    """Tasks append, truncate, attend and move at once. Some moves find no room, and their sequences stay at home."""
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.001))
    done = Counter[str]()
    async with (
        open_pool("mock", workers=3, options=options, workplace=InProcess, seed=0) as pool,
        ga.open_context("mock") as ctx,
        ctx.kv_cache(**{**SPEC, "num_blocks": 200}, layers=_roomy(LAYERS)) as own,
        pool.kv_cache(**SPEC, layers=LAYERS) as cache,
    ):

        async def decode(number: int) -> None:
            dice, rows = random.Random(number), LayerRows(LAYERS, "bfloat16", number)
            seq, mine = await cache.create(), await own.create()
            for _ in range(30):
                new = rows.of_all(1, dice.randrange(1, 9))
                try:
                    length = (await cache.append([seq], **new, expect_length=[own.length(mine)]))[0]
                except ga.CacheFull:
                    done["full"] += 1
                    await cache.free(seq)
                    seq, mine = await cache.create(), await own.create()
                    continue
                assert await own.append([mine], **new) == [length]
                if dice.random() < 0.3:
                    least = max(0, length - dice.randrange(4))
                    await cache.truncate(seq, least)
                    await own.truncate(mine, least)
                moving = None
                if dice.random() < 0.5:
                    moving = asyncio.create_task(cache.move(seq))
                queries = [(layer, rows.q(layer, 1, 1)) for layer in range(len(LAYERS) if own.length(mine) else 0)]
                # Asked for at once, because the sequence leaves its home once it has moved.
                here = [cache.attend(q, [seq], layer=layer, **OPTIONS) for layer, q in queries]
                there = [own.attend(q, [mine], layer=layer, **OPTIONS) for layer, q in queries]
                for found, wanted in zip(here, there, strict=True):
                    assert (await found).out.tobytes() == (await wanted).out.tobytes()
                if moving is not None:
                    try:
                        seq = await moving
                        done["moved"] += 1
                    except ga.CacheFull:
                        done["no room"] += 1
            await cache.free(seq)

        await asyncio.gather(*map(decode, range(10)))
        await shards.held(cache, 0)
        stats = cache.group_stats()
        assert all(each.free_blocks == each.blocks for groups in stats.values() for each in groups)
        assert (len(stats), len(stats["worker-1"])) == (3, 4)
    assert min(done[name] for name in ("moved", "no room", "full")) > 3, done


def _roomy(layers: list[ga.KvLayer]) -> list[ga.KvLayer]:
    return [dataclasses.replace(layer, num_blocks=None) for layer in layers]


async def test_a_prompt_may_be_as_long_as_a_workers_cache_takes() -> None:
    small, local = dataclasses.replace(WIDE, num_blocks=3), dataclasses.replace(LOCAL, num_blocks=4)
    async with open_pool("mock", workers=1, workplace=InProcess) as pool, ga.open_context("mock") as ctx:
        for layers, most in (([WIDE, small, local], 24), ([local], None), ([WIDE], 128), ([LOCAL, WIDE], 128)):
            async with pool.kv_cache(**SPEC, layers=layers) as cache, ctx.kv_cache(**SPEC, layers=layers) as own:
                for length in (24, 25, 128, 129, 1000):
                    if most is None or length <= most:
                        assert (await cache.create(range(length))).cached == 0
                        continue
                    refusals = []
                    for one in (cache, own):
                        with pytest.raises(ga.InvalidRequest, match=f"at most {most}") as refused:
                            await one.create(range(length))  # type: ignore[attr-defined]
                        refusals.append(str(refused.value))
                    assert refusals[0] == refusals[1]


async def test_a_later_generation_opens_the_layers_that_the_pool_was_given() -> None:
    options = ga.ContextOptions(restart=ga.RestartPolicy(max_restarts=10, backoff=0.0))
    layers = list(LAYERS)
    async with (
        open_pool("mock", workers=1, options=options, workplace=InProcess) as pool,
        pool.kv_cache(**SPEC, layers=layers) as cache,
    ):
        context = pool.workers["worker-1"]
        assert isinstance(context, RemoteContext)
        assert context._generations.connection is not None
        layers.clear()
        context._generations.connection.kill()
        await comes_true(lambda: context.generation == 2 and context.health().ready)
        seq = await cache.create()
        assert await cache.append([seq], **LayerRows(LAYERS, "bfloat16").of_all(1, 3)) == [3]
        q = np.zeros((1, 1, HEADS_Q, 16), "bfloat16")
        assert (await cache.attend(q, [seq], layer=4)).out.shape == q.shape


async def test_layers_that_no_worker_takes_are_refused_on_entering() -> None:
    async with open_pool("mock", workers=1, workplace=InProcess) as pool:
        for layers, field in (([], "layers"), ([WIDE, 3], "layers[1]"), ([ga.KvLayer()], "kv_heads")):
            with pytest.raises(ga.InvalidRequest) as refused:
                async with pool.kv_cache(**SPEC, layers=layers):
                    pass
            assert refused.value.field == field
