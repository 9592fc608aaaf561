"""Chunks of attention: gradients and caches in whole kernels. Forward's chunks are rows of the matrix."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.testing import check_gradients, check_output

LLAMA: dict[str, Any] = {"causal": True, "attention_chunk": 50}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": LLAMA,
    "both sides": {"attention_chunk": 37, "window_size": (30, 20), "sink_tokens": 5},
    "top left": {"attention_chunk": 50, "alignment": "top_left"},
    "positions": {**LLAMA, "q_positions": np.array([70, 20], np.int32)},
}


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_its_gradients(name: str, arch: str) -> None:
    options, (rows, keys, dim) = OPTIONS[name], (90, 130, 32) if arch == "sm_80" else (150, 300, 64)
    rng = np.random.default_rng(3)
    shapes = ((2, rows, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim), (2, rows, 4, dim))
    q, k, v, dout = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes)
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        kernel = ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, return_lse=True, **options)).kernel
        assert kernel == ("forward_sm90" if arch == "sm_90a" else "forward_mma")
        answer = ctx.flash_attn.forward(q, k, v, return_lse=True, **options).result(300)
        check_output(answer.out, answer.lse, q, k, v, **options)
        for deterministic in (False, True):
            reply = ctx.flash_attn.backward(dout, q, k, v, *answer, deterministic=deterministic, **options)
            check_gradients(reply.result(300), dout, q, k, v, out=answer.out, lse=answer.lse, **options)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.sweep)])
def test_rows_over_pages(arch: str) -> None:
    """One length ends in the middle of a chunk, one at its end; the host and the device split the work."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 3, 4, 64)).astype(np.float16)
    k, v = rng.standard_normal((2, 20, 16, 2, 64)).astype(np.float16)
    table, lengths = rng.permutation(20).reshape(2, 10).astype(np.int32), np.array([150, 96], np.int32)
    options: dict[str, Any] = {"attention_chunk": 48, "window_size": (40, -1), "sink_tokens": 3}
    gathered = [pool[table].reshape(2, 160, 2, 64) for pool in (k, v)]
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        given = {"block_table": table, "cache_seqlens": lengths, "return_lse": True}
        answer = ctx.flash_attn.paged_forward(q, k, v, **given, **options).result(300)
    for n, length in enumerate(lengths):
        own = [array[n : n + 1, :length] for array in gathered]
        check_output(answer.out[n : n + 1], answer.lse[n : n + 1], q[n : n + 1], *own, causal=True, **options)
