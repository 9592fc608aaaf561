"""Requests over several workers, with any channel: checks that take a pool and compare with one context.

The tests that show, by feature, that several workers equal one context. "Channels" is test_over_each_channel.py, over
threads, child processes and, in tests/on_ray, Ray actors; its sweep runs all of it on the emulated device.

    causal decode and chunks, any interleave   test_sharded_cache, "plain"; channels
    causal prefill by blocks                   test_context_split, "causal"; channels
    windows of one row and of several          test_sharded_cache, "window", "window, not causal"; channels
    first keys                                 test_sharded_cache, "window and first keys", "first keys over workers"
    ALiBi of one row and of several            test_sharded_cache, "slopes", "slopes and a window"
    learned sinks, once                        test_sharded_cache, "sinks"; channels
    softcap                                    test_sharded_cache, "softcap and scale"
    bias                                       CONTEXT, "bias and sinks"; channels
    dropout                                    CONTEXT, "dropout"; test_head_split, "dropout"; channels
    gradients with dsinks and dbias            CONTEXT, "bias and sinks"; check_heads; channels
    heads                                      test_head_split; channels
    fp8, rope, trees                           test_shard_rows; channels
    varlen                                     CONTEXT, "varlen, ..."; channels
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.layer_rows import FP8, LATENT, OPTIONS, WIDE, LayerRows
from support.service import comes_true

import gpu_actors as ga
from gpu_actors import Rope
from gpu_actors.distributed import (
    ContextPool,
    ShardedKvCache,
    context_split,
    context_split_backward,
    head_split,
    head_split_backward,
)

ROWS, HEADS, KV_HEADS, DIM, DIM_V = 22, 4, 2, 8, 6


def arrays(shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def operands(
    rows: int = ROWS, keys: int = ROWS, batch: int = 2, dtype: Any = np.float32, dims: tuple[int, int] = (DIM, DIM_V)
) -> dict[str, Any]:
    shapes = {"q": (rows, HEADS, dims[0]), "k": (keys, KV_HEADS, dims[0]), "v": (keys, KV_HEADS, dims[1])}
    return {name: arrays((batch, *shape), seed, dtype) for seed, (name, shape) in enumerate(shapes.items())}


def packed(*lengths: tuple[int, int], dtype: Any = np.float32, dims: tuple[int, int] = (DIM, DIM_V)) -> dict[str, Any]:
    """Operands of a varlen request. lengths: rows and keys of each sequence."""
    ends = [np.cumsum([0, *side], dtype=np.int32) for side in zip(*lengths, strict=True)]
    given = {name: array[0] for name, array in operands(int(ends[0][-1]), int(ends[1][-1]), 1, dtype, dims).items()}
    return {**given, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}


SINKS, SLOPES = arrays((HEADS,), 3), np.abs(arrays((HEADS,), 4))
BIAS = {"bias": arrays((1, HEADS, ROWS, ROWS), 5)}
CONTEXT: dict[str, dict[str, Any]] = {
    "full": operands(),
    "causal": {**operands(), "causal": True},
    "causal, bfloat16": {**operands(dtype=ml_dtypes.bfloat16), "causal": True},
    "causal, float64": {**operands(dtype=np.float64), "causal": True, "sinks": SINKS},
    "fewer rows": {**operands(9, 30), "causal": True, "sinks": SINKS},
    "more rows": {**operands(30, 9), "causal": True},
    "more rows, top left": {**operands(30, 9), "causal": True, "alignment": "top_left", "window_size": (4, 0)},
    "more rows, window": {**operands(30, 9), "window_size": (3, 2), "sink_tokens": 2},
    "window": {**operands(), "window_size": (3, 2)},
    "right window": {**operands(), "window_size": (-1, 1)},
    "causal window": {**operands(), "causal": True, "window_size": (4, 0)},
    "sink tokens": {**operands(), "causal": True, "window_size": (4, 0), "sink_tokens": 3},
    "chunks": {**operands(), "causal": True, "attention_chunk": 5, "sink_tokens": 1},
    "chunks, more rows": {**operands(30, 9), "attention_chunk": 4, "sink_tokens": 2},
    "chunks, fewer rows": {**operands(9, 30), "attention_chunk": 4, "causal": True},
    "sinks": {**operands(), "causal": True, "sinks": SINKS},
    "slopes": {**operands(), "causal": True, "alibi_slopes": SLOPES},
    "slopes both ways": {**operands(9, 30), "alibi_slopes": SLOPES},
    "bias and sinks": {**operands(), "causal": True, "sinks": SINKS, **BIAS, "softcap": 2.0},
    "a bias for all": {**operands(), "bias": arrays((2, 1, ROWS, ROWS), 6)},
    "a bias of one row": {**operands(), "causal": True, "bias": arrays((1, HEADS, 1, ROWS), 7)},
    "a mask": {**operands(), "bias": arrays((2, 1, ROWS, ROWS), 8) > -1.0},
    "signed slopes": {**operands(), "alibi_slopes": SLOPES, "alibi_signed": True},
    "dropout": {**operands(), "causal": True, "dropout_p": 0.3, "dropout_seed": 9},
    "dropout, fewer rows": {**operands(9, 30), "dropout_p": 0.3, "dropout_seed": 9},
    "positions": {
        **operands(), "causal": True, "window_size": (9, 0), "dropout_p": 0.2,
        "q_positions": np.array([[30, 2], [4, 1]], np.int32), "k_positions": np.array([[1, 3], [0, 2]], np.int32),
    },
    "a first position": {**operands(), "causal": True, "q_positions": np.array([3, 0], np.int32)},
    "float16": {
        **{name: arrays((1, ROWS, heads, 32), 2, np.float16) for name, heads in (("q", 4), ("k", 2), ("v", 2))},
        "causal": True, "sinks": SINKS,
    },
    "float16, bias": {
        **operands(batch=1, dtype=np.float16, dims=(32, 32)), "causal": True, "sinks": SINKS, **BIAS, "dropout_p": 0.2,
    },
    "one q for all": {**operands(), "q": arrays((1, ROWS, HEADS, DIM), 9), "window_size": (3, 2)},
    "one k and v for all": {
        **operands(1, 40, batch=1), "q": arrays((2, 1, HEADS, DIM), 9), "causal": True, "alibi_slopes": SLOPES,
    },
    "few rows": {**operands(3, 5), "causal": True},
    "one row": {**operands(1, 40), "causal": True},
    "varlen": packed(*(RAGGED := ((9, 9), (0, 4), (13, 13), (1, 1), (5, 30), (21, 6), (4, 0)))),
    "varlen, causal": {**packed(*RAGGED), "causal": True, "sinks": SINKS, "max_seqlen_q": 40, "max_seqlen_k": 40},
    "varlen, causal, float64": {**packed(*RAGGED, dtype=np.float64), "causal": True, "sinks": SINKS, "softcap": 2.0},
    "varlen, top left": {**packed(*RAGGED), "causal": True, "alignment": "top_left", "window_size": (4, 0)},
    "varlen, window": {**packed(*RAGGED), "window_size": (3, 2), "sink_tokens": 2},
    "varlen, chunks": {**packed(*RAGGED), "causal": True, "attention_chunk": 4, "sink_tokens": 1},
    "varlen, slopes": {**packed(*RAGGED), "alibi_slopes": np.abs(arrays((len(RAGGED), HEADS), 4))},
    "varlen, dropout": {**packed((9, 9), (14, 14), (2, 2)), "causal": True, "dropout_p": 0.3, "dropout_seed": 9},
    "varlen, dropout of all": {**packed(*RAGGED), "dropout_p": 0.3, "dropout_seed": 9},
    "varlen, bias": {
        **packed(*RAGGED), "causal": True, "sinks": SINKS, "bias": arrays((len(RAGGED), HEADS, 21, 30), 5),
    },
    "varlen, a bias for all": {**packed(*RAGGED), "window_size": (5, 3), "bias": arrays((1, 1, 25, 33), 6)},
    "varlen, a bias of one row": {**packed(*RAGGED), "causal": True, "bias": arrays((len(RAGGED), 1, 1, 30), 7)},
    "varlen, a mask": {**packed(*RAGGED), "dropout_p": 0.2, "bias": arrays((1, HEADS, 21, 30), 8) > -1.0},
    "varlen, float64 bias": {
        **packed((9, 9), (5, 12), dtype=np.float64), "bias": arrays((1, HEADS, 9, 12), 5, np.float64),
    },
    "varlen, float16": {
        **packed((9, 9), (0, 4), (5, 12), dtype=np.float16, dims=(32, 32)), "causal": True, "sinks": SINKS,
    },
    "varlen, positions": {
        **packed((9, 9), (5, 12)), "causal": True, "window_size": (9, 0), "dropout_p": 0.2,
        "q_positions": np.array([[30, 2], [4, 1]], np.int32), "k_positions": np.array([[1, 3], [0, 2]], np.int32),
    },
}  # fmt: skip
# How far results may differ: by the order of float32 sums, and by one more rounding of each block's gradients.
_FAR = {"float32": 2e-6, "float64": 1e-13, "float16": 2.0**-9, "bfloat16": 2.0**-6}


def close(found: Any, wanted: Any, name: str = "") -> None:
    """Check that both are None, or equal but for rounding."""
    assert (found is None) == (wanted is None), name
    if wanted is None:
        return
    assert found.dtype == wanted.dtype, name
    assert found.shape == wanted.shape, name
    far = _FAR[wanted.dtype.name]
    scale = max(1.0, float(np.abs(np.nan_to_num(wanted.astype(np.float64), neginf=0)).max(initial=0)))
    np.testing.assert_allclose(
        found.astype(np.float64), wanted.astype(np.float64), rtol=0, atol=far * scale, err_msg=name
    )


async def check_context_split(pool: ContextPool, ctx: ga.GpuContext, name: str, parts: int) -> None:
    """A forward request and its gradients, split by rows, equal those of one context."""
    given = CONTEXT[name]
    whole = await ctx.flash_attn.submit(ga.FlashForward(**given, return_lse=True))
    found = await context_split(pool, ga.FlashForward(**given, return_lse=True), parts=parts)
    close(found.out, whole.out, "out")
    close(found.lse, whole.lse, "lse")
    dout = arrays(whole.out.shape, 9, whole.out.dtype)
    request = ga.FlashBackward(**given, out=whole.out, lse=whole.lse, dout=dout)
    wanted = await ctx.flash_attn.submit(request)
    gradients = await context_split_backward(pool, request, parts=parts)
    for field in ("dq", "dk", "dv", "dbias", "dsinks"):
        close(getattr(gradients, field), getattr(wanted, field), field)


async def check_contexts(pool: ContextPool, ctx: ga.GpuContext) -> None:
    """`check_context_split` of some requests, over three parts."""
    for name in ("bias and sinks", "causal window", "dropout", "varlen, causal"):
        await check_context_split(pool, ctx, name, 3)


async def check_heads(
    pool: ContextPool, ctx: ga.GpuContext, name: str = "bias and sinks", lse_bits: bool = True
) -> None:
    """A forward request and its gradients, split by heads, have the bits of one context's.

    lse_bits: whether the LSE has them too. With an offset of heads, another kernel computes it.
    """
    given = {**CONTEXT[name], "dropout_p": 0.3, "dropout_seed": 4}
    whole = await ctx.flash_attn.submit(ga.FlashForward(**given, return_lse=True))
    found = await head_split(pool, ga.FlashForward(**given, return_lse=True), parts=2)
    request = ga.FlashBackward(**given, out=whole.out, lse=whole.lse, dout=arrays(whole.out.shape, 9, whole.out.dtype))
    wanted = await ctx.flash_attn.submit(request)
    gradients = await head_split_backward(pool, request, parts=2)
    for name, one, other in (
        *((name, getattr(found, name), getattr(whole, name)) for name in ("out", "lse")),
        *((name, getattr(gradients, name), getattr(wanted, name)) for name in ("dq", "dk", "dv", "dbias", "dsinks")),
    ):
        if name == "lse" and not lse_bits:
            np.testing.assert_allclose(one, other, rtol=2e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(one, other, err_msg=name)


async def check_sharded_cache(
    pool: ContextPool, ctx: ga.GpuContext, dtype: str = "float32", dims: tuple[int, int] = (DIM, DIM_V)
) -> None:
    """Chunks and single rows over keys in short runs, with a window and first keys, equal those of one cache."""
    spec: dict[str, Any] = {
        "num_blocks": 16, "page_size": 8, "kv_heads": KV_HEADS, "head_dim": dims[0], "head_dim_v": dims[1],
        "dtype": dtype,
    }  # fmt: skip
    options: dict[str, Any] = {"window_size": (7, 0), "sink_tokens": 5, "sinks": SINKS, "return_lse": True}
    async with ctx.kv_cache(**spec) as own, ShardedKvCache(pool, **spec, interleave=3) as cache:
        seq, mine = await cache.create(), await own.create()
        for count in (11, 1, 1, 7, 1):
            given = {name: array[0] for name, array in operands(count, count, 1, np.dtype(dtype), dims).items()}
            q, new = given.pop("q"), {name: array[None] for name, array in given.items()}
            found = await cache.attend(q, seq, **given, **options)
            wanted = await own.attend(q[None], mine, **new, **options)
            close(found.out, wanted.out[0], "out")
            close(found.lse, wanted.lse[0], "lse")


async def check_shard_rows(pool: ContextPool, ctx: ga.GpuContext, dims: tuple[int, int] = (DIM, DIM_V)) -> None:
    """Rotated rows of an fp8 cache, and trees among them and among cached rows, equal those of one cache."""
    spec: dict[str, Any] = {
        "num_blocks": 16, "page_size": 8, "kv_heads": KV_HEADS, "head_dim": dims[0], "head_dim_v": dims[1],
        "dtype": "float8_e4m3fn", "k_descale": np.array([0.02, 0.7], np.float32),
        "v_descale": np.array([0.3, 0.011], np.float32),
    }  # fmt: skip
    rope = Rope(dim=8)
    async with ctx.kv_cache(**spec) as own, ShardedKvCache(pool, **spec, interleave=3) as cache:
        seq, mine = await cache.create(), await own.create()
        for count in (9, 1, 5):
            given = {name: array[0] for name, array in operands(count, count, 1, ml_dtypes.bfloat16, dims).items()}
            tree = np.tri(count, dtype=np.bool_) & (np.arange(count) % 2 == np.arange(count)[:, None] % 2)
            q, new = given.pop("q"), {name: array[None] for name, array in given.items()}
            found = await cache.attend(q, seq, **given, rope=rope, tree_mask=tree, return_lse=True)
            wanted = await own.attend(q[None], mine, **new, rope=rope, tree_mask=tree[None], return_lse=True)
            close(found.out, wanted.out[0], "out")
            close(found.lse, wanted.lse[0], "lse")
            found = await cache.attend(q, seq, tree_mask=tree, return_lse=True)
            wanted = await own.attend(q[None], mine, tree_mask=tree[None], return_lse=True)
            close(found.out, wanted.out[0], "out of cached rows")
            close(found.lse, wanted.lse[0], "lse of cached rows")


async def check_move(
    pool: ContextPool, ctx: ga.GpuContext, dtype: str = "bfloat16", dims: tuple[int, int] = (DIM, DIM_V)
) -> None:
    """A sequence that is prefilled at one worker and moved to another has the bits of one that stayed."""
    spec: dict[str, Any] = {
        "num_blocks": 16, "page_size": 8, "kv_heads": KV_HEADS, "head_dim": dims[0], "head_dim_v": dims[1],
        "dtype": dtype,
    }  # fmt: skip
    if dtype.startswith("float8"):
        spec |= {"k_descale": np.array([0.5, 2.0], np.float32), "v_descale": np.array([0.25, 1.0], np.float32)}
    prompt = list(range(21))
    given = {name: array[0] for name, array in operands(22, 22, 1, ml_dtypes.bfloat16, dims).items()}
    async with ctx.kv_cache(**spec) as own, pool.kv_cache(**spec) as cache:
        seq, mine = await cache.create(prompt), await own.create(prompt)
        for one, at in ((cache, seq), (own, mine)):
            await one.append(at, given["k"][:21], given["v"][:21], tokens=prompt)  # type: ignore[attr-defined]
        moved = await cache.move(seq)
        assert moved.worker != seq.worker
        new = {name: array[None, 21:] for name, array in given.items()}
        found = await cache.attend(new["q"], [moved], k=new["k"], v=new["v"], expect_length=[21])
        wanted = await own.attend(new["q"], [mine], k=new["k"], v=new["v"])
        np.testing.assert_array_equal(found.out, wanted.out)
        twin = await cache.create(prompt)  # at the worker that has the pages of its beginning
        assert twin.cached == 16
        for one in (moved, twin):
            await cache.free(one)
        await held(cache, 0)


async def check_move_of_layers(pool: ContextPool, ctx: ga.GpuContext) -> None:
    """The same for a sequence in layers that differ, two of which have freed pages."""
    local = dataclasses.replace(WIDE, window=9, slack=3, num_blocks=12)
    layers = [WIDE, local, LATENT, local, FP8]
    spec: dict[str, Any] = {"num_blocks": 16, "page_size": 8, "dtype": "bfloat16", "layers": layers}
    rows = LayerRows(layers, "bfloat16")
    # The local layers keep the pages from (length - 1 - 9 - 3) // 8 on. A twin that continues at row 40 needs page 3.
    for length, kept in ((41, 3), (45, 4)):
        prompt = list(range(length))
        async with ctx.kv_cache(**spec) as own, pool.kv_cache(**spec) as cache:
            seq, mine = await cache.create(prompt), await own.create(prompt)
            for count in (40, length - 40):
                new, tokens = rows.of_all(1, count), [prompt[cache.length(seq) :][:count]]
                await cache.append([seq], **new, tokens=tokens)
                await own.append([mine], **new, tokens=tokens)
            moved = await cache.move(seq)
            assert moved.worker != seq.worker
            await held(cache, 1)
            stats = cache.group_stats()
            assert [each.free_blocks for each in stats[seq.worker]] == [16, 12, 9, 16]
            assert [each.blocks - each.free_blocks for each in stats[moved.worker]] == [6, 6 - kept, 6, 6]
            for count in (1, 4):
                new = rows.of_all(1, count)
                await cache.append([moved], **new, expect_length=[own.length(mine)])
                await own.append([mine], **new)
                for layer in range(len(layers)):
                    q = rows.q(layer, 1, 3)
                    found = await cache.attend(q, [moved], layer=layer, **OPTIONS)
                    wanted = await own.attend(q, [mine], layer=layer, **OPTIONS)
                    np.testing.assert_array_equal(found.out, wanted.out)
            with pytest.raises(ga.InvalidRequest, match="at least 42"):
                await cache.truncate(moved, 41)
            await cache.truncate(moved, 43)
            twin = await cache.create(prompt)  # at the worker that has all pages that it needs
            assert (twin.worker, twin.cached) == ((moved if kept == 3 else seq).worker, 40)
            for one in (moved, twin):
                await cache.free(one)
            await held(cache, 0)


async def held(cache: Any, sequences: int) -> None:
    """Wait until all workers of a pooled cache together have so many sequences, and if 0 no used page."""

    def counts() -> tuple[int, ...]:
        return tuple(stats.sequences for stats in cache.stats().values())

    await comes_true(lambda: sum(counts()) == sequences)
    if not sequences:
        await comes_true(lambda: all(stats.free_blocks == stats.blocks for stats in cache.stats().values()))
