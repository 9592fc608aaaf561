"""Chunks of attention: the oracle by its definition, then gradients and caches of whole kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.gate import code_faults, code_of, register_limit

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.variants import block_threads, kernel_source
from gpu_actors.testing import check_gradients, check_output

LLAMA: dict[str, Any] = {"causal": True, "attention_chunk": 50}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": LLAMA,
    "both sides": {"attention_chunk": 37, "window_size": (30, 20), "sink_tokens": 5},
    "top left": {"attention_chunk": 50, "alignment": "top_left"},
    "positions": {**LLAMA, "q_positions": np.array([70, 20], np.int32)},
}


def arrays(rows: int, keys: int, dtype: Any = np.float32, dim: int = 32) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = ((2, rows, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim), (2, rows, 4, dim))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


# The oracle


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_sees_the_keys_of_its_own_chunk(causal: bool) -> None:
    q, k, v, dout = arrays(23, 40)
    own = np.arange(23)[:, None] + 40 - 23
    keys = np.arange(40)
    seen = (own // 9 == keys // 9) & ((keys <= own) | (not causal))
    bias = np.where(seen, 0, -np.inf).astype(np.float32)[None, None]
    with ga.open_context("mock") as ctx:
        chunked = ctx.flash_attn.forward(q, k, v, causal=causal, attention_chunk=9, return_lse=True).result(30)
        biased = ctx.flash_attn.forward(q, k, v, bias=bias, return_lse=True).result(30)
        np.testing.assert_allclose(chunked.out, biased.out, atol=1e-6)
        np.testing.assert_allclose(chunked.lse, biased.lse, atol=1e-6)
        found = ctx.flash_attn.backward(dout, q, k, v, *chunked, causal=causal, attention_chunk=9).result(30)
        wanted = ctx.flash_attn.backward(dout, q, k, v, *biased, bias=bias).result(30)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=1e-5, err_msg=name)


def test_rows_before_the_first_key_and_chunks_longer_than_the_sequence() -> None:
    q, k, v, _ = arrays(30, 10)
    with ga.open_context("mock") as ctx:
        rows = ctx.flash_attn.forward(q, k, v, attention_chunk=8, return_lse=True).result(30)
        assert np.isneginf(rows.lse[:, :, :20]).all()
        assert (rows.out[:, :20] == 0).all()
        assert np.isfinite(rows.lse[:, :, 20:]).all()
        whole = ctx.flash_attn.forward(q, k, v, causal=True).result(30)
        one = ctx.flash_attn.forward(q, k, v, causal=True, attention_chunk=10).result(30)
    np.testing.assert_array_equal(one.out, whole.out)


@pytest.mark.parametrize("chunk", [-1, 1.5, True, "8"])
def test_a_chunk_is_a_count(chunk: Any) -> None:
    q, k, v, _ = arrays(3, 3)
    with ga.open_context("mock") as ctx, pytest.raises(ga.InvalidRequest) as caught:
        ctx.flash_attn.forward(q, k, v, attention_chunk=chunk).result(30)
    assert caught.value.field == "attention_chunk"


def test_a_row_decoded_from_a_cache_sees_what_it_sees_in_a_prefill() -> None:
    q, k, v, _ = arrays(40, 40)
    lengths = np.array([40, 27], np.int32)
    with ga.open_context("mock") as ctx:
        whole = ctx.flash_attn.forward(q, k, v, causal=True, attention_chunk=16).result(30)
        last = q[[0, 1], lengths - 1][:, None]
        paged = ctx.flash_attn.paged_forward(last, k, v, cache_seqlens=lengths, attention_chunk=16).result(30)
        k_caches, v_caches = (list(np.ascontiguousarray(array.swapaxes(1, 2))) for array in (k, v))
        single = ctx.flash_attn.decode(last[:, 0], k_caches, v_caches, lengths, attention_chunk=16).result(30)
        with ctx.kv_cache(page_size=8, num_blocks=8, kv_heads=2, head_dim=32, dtype="float32") as cache:
            seq = cache.create().result(30)
            kept = cache.attend(q[:1], seq, k=k[:1], v=v[:1], attention_chunk=16).result(30)
    np.testing.assert_allclose(paged.out[:, 0], whole.out[[0, 1], lengths - 1], atol=1e-6)
    np.testing.assert_allclose(single.out, paged.out[:, 0], atol=1e-6)
    np.testing.assert_allclose(kept.out, whole.out[:1], atol=1e-6)


# Whole kernels


def run(arch: str, options: dict[str, Any], dim: int = 32) -> None:
    rows, keys = (90, 130) if arch == "sm_80" else (150, 300)
    q, k, v, dout = arrays(rows, keys, ml_dtypes.bfloat16, dim)
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        kernel = ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, return_lse=True, **options)).kernel
        assert kernel == ("forward_sm90" if arch == "sm_90a" else "forward_mma")
        answer = ctx.flash_attn.forward(q, k, v, return_lse=True, **options).result(300)
        check_output(answer.out, answer.lse, q, k, v, **options)
        for deterministic in (False, True):
            reply = ctx.flash_attn.backward(dout, q, k, v, *answer, deterministic=deterministic, **options)
            check_gradients(reply.result(300), dout, q, k, v, out=answer.out, lse=answer.lse, **options)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("options", OPTIONS)
def test_forward_and_its_gradients(options: str, arch: str) -> None:
    run(arch, OPTIONS[options], 32 if arch == "sm_80" else 64)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.sweep)])
def test_rows_over_pages(arch: str) -> None:
    """Two lengths, of which one ends in the middle of a chunk and one at its end, split on the host and the device."""
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


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_variants_pass_the_gate(arch: str, direction: Any) -> None:
    for causal in (True, False):
        problem = example_problem(
            "bfloat16", 64, direction=direction, causal=causal, attention_chunk=128, return_lse=direction == "forward"
        )
        for key in program_of(problem, dispatch_key(problem, arch)).keys:
            code = code_of(kernel_source(key), key.kernel)
            assert code_faults(code, register_limit(block_threads(key))) == [], key
        assert check_key(dispatch_key(problem, arch)).attention_chunk
