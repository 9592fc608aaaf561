"""Attention by heads over several workers has the bits of one context's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import shards
from inside.attention import array_fields
from support.service import comes_true

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, head_split, head_split_backward, open_pool, tensor_parallel
from gpu_actors.remote import InProcess, RemoteContext


def arrays(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def dense(dtype: Any = np.float32) -> dict[str, Any]:
    return {
        "q": arrays((2, 24, 8, 16), dtype),
        "k": arrays((2, 30, 4, 16), dtype, 1),
        "v": arrays((2, 30, 4, 8), dtype, 2),
    }


# Requests with options that those of `shards` lack, with more heads, and some of those.
REQUESTS: dict[str, dict[str, Any]] = {
    "slopes a sequence and head": {**dense(), "alibi_slopes": arrays((2, 8), seed=3)},
    "dropout": {**dense(), "causal": True, "dropout_p": 0.4, "dropout_seed": 3, "return_lse": True},
    "dropout of some heads": {**dense(), "dropout_p": 0.4, "dropout_first_head": 5, "dropout_heads": 20},
    "fp8": {
        **dense(ml_dtypes.float8_e4m3fn),
        "k_descale": np.abs(arrays((2, 4), seed=6)) + 0.5,
        "q_descale": np.abs(arrays((2, 4), seed=7)) + 0.5,
    },
    "one bias": {**dense(), "bias": arrays((2, 1, 24, 30), seed=5)},
    "bias a head and sinks": {**dense(), "bias": arrays((1, 8, 24, 30), seed=5), "sinks": arrays((8,), seed=4)},
    "slopes a head": {**dense(), "alibi_slopes": arrays((8,), seed=3), "return_lse": True},
    "window": {**shards.CONTEXT["sink tokens"], "softcap": 2.0},
    "varlen": {**shards.CONTEXT["varlen"], "return_lse": True},
    "padded sequences, as many as heads": {
        **{name: arrays((8, 6, heads, 16), seed=heads) for name, heads in (("q", 8), ("k", 4), ("v", 4))},
        "seqused_q": np.arange(1, 9, dtype=np.int32).clip(max=6),
        "seqused_k": np.arange(1, 9, dtype=np.int32).clip(max=6),
    },
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_forward_has_the_bits_of_one_context(
    pool_of: Callable[[int], ContextPool], whole: ga.GpuContext, name: str
) -> None:
    request = ga.FlashForward(**REQUESTS[name])
    expected = await whole.flash_attn.submit(request)
    for parts in (1, request.k.shape[-2]):
        pool = pool_of(4)
        result = await head_split(pool, request, parts=parts)
        assert result.out.dtype == expected.out.dtype
        np.testing.assert_array_equal(result.out, expected.out)
        assert (result.lse is None) == (expected.lse is None)
        if expected.lse is not None:
            np.testing.assert_array_equal(result.lse, expected.lse)
        assert sorted(worker.requests for worker in pool.stats().workers.values()) == [0] * (4 - parts) + [1] * parts


async def test_the_gradient_of_a_bias_of_all_heads_is_their_sum(
    pool_of: Callable[[int], ContextPool], whole: ga.GpuContext
) -> None:
    arguments = {**dense(), "causal": True, "bias": arrays((1, 1, 24, 30), seed=5)}
    forward = await whole.flash_attn.forward(**arguments, return_lse=True)
    request = ga.FlashBackward(**arguments, out=forward.out, lse=forward.lse, dout=arrays((2, 24, 8, 8), seed=9))
    expected = await whole.flash_attn.submit(request)
    result = await head_split_backward(pool_of(4), request, parts=4)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(result.dbias, expected.dbias, rtol=1e-5, atol=1e-6)


async def test_what_is_refused(pool: ContextPool) -> None:
    def request(**changed: Any) -> ga.FlashForward:
        return ga.FlashForward(**{**dense(), **changed})

    for arguments, parts, field in (
        (request(), 3, "parts"),
        (request(), 8, "parts"),
        (request(out=arrays((2, 24, 8, 8))), 2, "out"),
    ):
        with pytest.raises(ga.Unsupported) as refused:
            await head_split(pool, arguments, parts=parts)
        assert refused.value.field == field
        assert field == "out" or refused.value.nearest in (2, 4)
    for arguments, parts, field in (
        (request(), 0, "parts"),
        (request(q=arrays((2, 24, 6, 16))), 2, "q"),
        (request(sinks=arrays((4,))), 2, "sinks"),
        (request(q=arrays((16,))), 2, "q"),
        ("q", 2, "request"),  # type: ignore[list-item]
    ):
        with pytest.raises(ga.InvalidRequest) as wrong:
            await head_split(pool, arguments, parts=parts)
        assert wrong.value.field == field
    with pytest.raises(ga.InvalidRequest, match="FlashBackward"):
        await head_split_backward(pool, request(), parts=2)  # type: ignore[arg-type]
    with pytest.raises(ga.InvalidRequest):  # raised by the worker that gets a part
        await head_split(pool, request(softcap=-1.0), parts=2)
    assert not any(worker.outstanding for worker in pool.stats().workers.values())


async def test_a_part_of_a_lost_worker_is_repeated(whole: ga.GpuContext) -> None:
    options = ga.ContextOptions(mock=ga.MockOptions(latency=0.3))
    async with open_pool("mock", workers=3, options=options, workplace=InProcess, seed=0) as pool:

        def busy() -> list[str]:
            return [name for name, worker in pool.stats().workers.items() if worker.outstanding]

        asking = asyncio.create_task(head_split(pool, ga.FlashForward(**dense()), parts=2))
        await comes_true(lambda: len(busy()) == 2)
        victim = pool.workers[busy()[0]]
        assert isinstance(victim, RemoteContext)
        victim._generations.connection.kill()  # type: ignore[union-attr]
        result = await asking
        assert pool.stats().repeated == 1
    np.testing.assert_array_equal(result.out, (await whole.flash_attn.forward(**dense())).out)


def test_every_array_of_a_request_is_cut_by_heads_or_has_none() -> None:
    """An array that is in neither table goes whole to every worker."""
    without = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "q_positions", "k_positions"}
    assert set(array_fields(ga.FlashBackward)) == {*tensor_parallel._OF_Q, *tensor_parallel._OF_K} | without
