"""Attention by heads over several workers has the bits of one context's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, head_split, head_split_backward, open_pool
from gpu_actors.remote import InProcess, RemoteContext

QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)


def arrays(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.fixture
async def pool() -> AsyncIterator[ContextPool]:
    async with open_pool("mock", workers=4, workplace=InProcess, seed=0) as opened:
        yield opened


def dense(dtype: Any = np.float32) -> dict[str, Any]:
    return {
        "q": arrays((2, 24, 8, 16), dtype),
        "k": arrays((2, 30, 4, 16), dtype, 1),
        "v": arrays((2, 30, 4, 8), dtype, 2),
    }


REQUESTS: dict[str, dict[str, Any]] = {
    "causal": {**dense(), "causal": True, "return_lse": True},
    "bfloat16": dense(ml_dtypes.bfloat16),
    "slopes a head": {**dense(), "alibi_slopes": arrays((8,), seed=3)},
    "slopes a sequence and head": {**dense(), "alibi_slopes": arrays((2, 8), seed=3)},
    "sinks": {**dense(), "sinks": arrays((8,), seed=4), "return_lse": True},
    "bias a head": {**dense(), "bias": arrays((1, 8, 24, 30), seed=5)},
    "one bias": {**dense(), "bias": arrays((2, 1, 24, 30), seed=5)},
    "window and softcap": {**dense(), "causal": True, "window_size": (5, 0), "softcap": 2.0, "sink_tokens": 2},
    "dropout": {**dense(), "causal": True, "dropout_p": 0.4, "dropout_seed": 3, "return_lse": True},
    "dropout of some heads": {**dense(), "dropout_p": 0.4, "dropout_first_head": 5, "dropout_heads": 20},
    "varlen": {
        "q": arrays((20, 8, 16)),
        "k": arrays((20, 4, 16), seed=1),
        "v": arrays((20, 4, 16), seed=2),
        "cu_seqlens_q": np.array([0, 5, 20], np.int32),
        "cu_seqlens_k": np.array([0, 5, 20], np.int32),
        "return_lse": True,
    },
    "fp8": {
        **dense(ml_dtypes.float8_e4m3fn),
        "k_descale": np.abs(arrays((2, 4), seed=6)) + 0.5,
        "q_descale": np.abs(arrays((2, 4), seed=7)) + 0.5,
    },
}


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_forward_has_the_bits_of_one_context(pool: ContextPool, name: str, parts: int) -> None:
    request = ga.FlashForward(**REQUESTS[name])
    found = await head_split(pool, request, parts=parts)
    async with ga.open_context("mock") as ctx:
        wanted = await ctx.flash_attn.submit(request)
    assert found.out.dtype == wanted.out.dtype
    np.testing.assert_array_equal(found.out, wanted.out)
    assert (found.lse is None) == (wanted.lse is None)
    if wanted.lse is not None:
        np.testing.assert_array_equal(found.lse, wanted.lse)
    assert sorted(worker.requests for worker in pool.stats().workers.values()) == [0] * (4 - parts) + [1] * parts


@pytest.mark.parametrize("shared", [False, True])
async def test_gradients_are_those_of_one_context(pool: ContextPool, shared: bool) -> None:
    given = {**dense(), "causal": True, "sinks": arrays((8,), seed=4), "dropout_p": 0.3, "dropout_seed": 2}
    given["bias"] = arrays((1, 1 if shared else 8, 24, 30), seed=5)
    dout = arrays((2, 24, 8, 8), seed=9)
    async with ga.open_context("mock") as ctx:
        forward = await ctx.flash_attn.forward(**given, return_lse=True)
        request = ga.FlashBackward(**given, out=forward.out, lse=forward.lse, dout=dout)
        wanted = await ctx.flash_attn.submit(request)
    found = await head_split_backward(pool, request, parts=4)
    for name in ("dq", "dk", "dv", "dsinks"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    np.testing.assert_allclose(
        found.dbias, wanted.dbias, rtol=0 if not shared else 1e-5, atol=0 if not shared else 1e-6
    )


async def test_what_is_refused(pool: ContextPool) -> None:
    def request(**changed: Any) -> ga.FlashForward:
        return ga.FlashForward(**{**dense(), **changed})

    for given, parts, field in (
        (request(), 3, "parts"),
        (request(), 8, "parts"),
        (request(out=arrays((2, 24, 8, 8))), 2, "out"),
    ):
        with pytest.raises(ga.Unsupported) as refused:
            await head_split(pool, given, parts=parts)
        assert refused.value.field == field
        assert field == "out" or refused.value.nearest in (2, 4)
    for given, parts, field in (
        (request(), 0, "parts"),
        (request(q=arrays((2, 24, 6, 16))), 2, "q"),
        (request(sinks=arrays((4,))), 2, "sinks"),
        (request(q=arrays((16,))), 2, "q"),
        ("q", 2, "request"),  # type: ignore[list-item]
    ):
        with pytest.raises(ga.InvalidRequest) as wrong:
            await head_split(pool, given, parts=parts)
        assert wrong.value.field == field
    with pytest.raises(ga.InvalidRequest, match="FlashBackward"):
        await head_split_backward(pool, request(), parts=2)  # type: ignore[arg-type]
    with pytest.raises(ga.InvalidRequest):  # by the worker that gets a part
        await head_split(pool, request(softcap=-1.0), parts=2)
    assert not any(worker.outstanding for worker in pool.stats().workers.values())


async def test_a_part_of_a_lost_worker_is_repeated() -> None:
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.3), restart=QUICK)
    async with open_pool("mock", workers=3, options=options, seed=0) as pool:
        asking = asyncio.create_task(head_split(pool, ga.FlashForward(**dense()), parts=2))
        await asyncio.sleep(0.1)
        busy = [name for name, worker in pool.stats().workers.items() if worker.outstanding]
        assert len(busy) == 2
        victim = pool.workers[busy[0]]
        assert isinstance(victim, RemoteContext)
        victim._generations.connection.kill()  # type: ignore[union-attr]
        found = await asking
        assert pool.stats().repeated == 1
    async with ga.open_context("mock") as ctx:
        np.testing.assert_array_equal(found.out, (await ctx.flash_attn.forward(**dense())).out)
