"""Gradients, cached keys and graphs if a bias hides keys by a large finite number."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases.finite_masks import FLOAT32_MIN, LOW, check_close
from cases.large_scores import KEYS, SINKS, STEEP, masked
from inside.testing import cast

import gpu_actors as ga

_opened = ExitStack()


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    context.cache_clear()
    _opened.close()


@functools.cache
def context(arch: str | None) -> ga.GpuContext:
    """The mock device, or that architecture's kernels with products fused into sums and the hardware's errors."""
    options = ga.ContextOptions(arch=arch, emulation=ga.EmulationOptions(contraction=True, arithmetic="hardware"))
    return _opened.enter_context(ga.open_context("mock" if arch is None else "emulated", options))


class Kernel(NamedTuple):
    name: str
    arch: str
    dtype: str
    dim: int


MMA = Kernel("backward_mma", "sm_80", "float16", 64)
SIMPLE = Kernel("backward_simple", "sm_80", "float32", 20)
SM90 = Kernel("backward_sm90", "sm_90a", "bfloat16", 64)


@pytest.mark.parametrize(
    ("kernel", "sinks"),
    [(MMA, False), (MMA, True), (SIMPLE, False), (SM90, False)],
    ids=["mma", "mma with sinks", "simple", "sm90"],
)
def test_gradients_are_the_oracles(kernel: Kernel, sinks: bool) -> None:
    """Both devices get the same LSE, which loses the number of keys if it is as low as a mask."""
    mock, ctx = context(None), context(kernel.arch)
    for low in (FLOAT32_MIN, -1e9) if sinks else (FLOAT32_MIN, 0.7 * FLOAT32_MIN, -1e9, -1e4):
        (q, k, v), bias = masked(kernel.dtype, kernel.dim, low)
        options = {"bias": bias} | ({"sinks": SINKS} if sinks else {})
        out, lse = mock.flash_attn.forward(q, k, v, **options, return_lse=True).result(60)
        dout = cast(np.random.default_rng(2).standard_normal(out.shape), kernel.dtype)
        request = ga.FlashBackward(dout=dout, q=q, k=k, v=v, out=out, lse=lse, **options)
        assert ctx.flash_attn.inspect_key(request).kernel == kernel.name
        expected = mock.flash_attn.submit(request).result(60)
        gradients = ctx.flash_attn.submit(request).result(120)
        for name in ("dq", "dk", "dv", "dbias", *(("dsinks",) if sinks else ())):
            right = np.asarray(getattr(expected, name), np.float64)
            assert np.isfinite(right).all()
            check_close(f"{name} at {low:g}", getattr(gradients, name), right, 0.02 * np.abs(right).max(), 0.02)


@pytest.mark.parametrize(
    "kernel",
    [Kernel("decode_mma", "sm_80", "float16", 64), Kernel("decode_simple", "sm_80", "float32", 20)],
    ids=["mma", "simple"],
)
def test_cached_keys_are_hidden_likewise(kernel: Kernel) -> None:
    """Pieces of unequal length count by their keys, which a piece's LSE does not tell."""
    for low, splits in itertools.product(LOW, (0, 3)):
        inputs, bias = masked(kernel.dtype, kernel.dim, low)
        check_cached(kernel, *inputs, bias=bias, causal=False, num_splits=splits)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_new_rows_of_a_cache_have_steep_slopes_and_large_products(arch: str) -> None:
    kernel = Kernel("decode_mma" if arch == "sm_80" else "decode_sm90", arch, "bfloat16", 64)
    (q, k, v), _ = masked(kernel.dtype, kernel.dim, 0.0)
    q, k = (np.repeat(q, 4, axis=1) * 2**15).astype(q.dtype), (np.sign(k) * 2**14).astype(k.dtype)
    check_cached(kernel, q, k, v, alibi_slopes=STEEP)
    check_cached(kernel, q, k, v, sinks=SINKS)


def check_cached(kernel: Kernel, q: Any, k: Any, v: Any, **options: Any) -> None:
    caches = {"k_cache": k, "v_cache": v, "cache_seqlens": np.full(2, KEYS, np.int32)}
    request = ga.PagedForward(q=q, **caches, **options, return_lse=True)
    ctx = context(kernel.arch)
    assert ctx.flash_attn.inspect_key(request).kernel == kernel.name
    expected = context(None).flash_attn.submit(request).result(60)
    answer = ctx.flash_attn.submit(request).result(120)
    check_close("out", answer.out, expected.out, 0.02)
    check_close("lse", answer.lse, expected.lse, 1e-3, 2.0**-22)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_graph_may_select_as_low_a_score(arch: str) -> None:
    arrays = [np.ascontiguousarray(each.swapaxes(1, 2)) for each in masked("float16", 64, 0.0)[0]]
    shape = {name: array.shape for name, array in zip("qkv", arrays, strict=True)}
    answers = []
    for ctx in (context(None), context(arch)):
        graph = ga.OperationGraph()
        tq, tk, tv = (graph.tensor(uid=n, dims=shape[name], dtype="float16") for n, name in enumerate("qkv", 1))
        s = graph.matmul(tq, graph.transpose(tk)) * 0.125
        row, key = graph.index(s, 2), graph.index(s, 3)
        hidden = graph.select(row < 2, -1e9, graph.select(key < 100 + row, FLOAT32_MIN, s))
        graph.output(graph.matmul(graph.softmax(hidden), tv), uid=4, dtype="float16")
        answers.append(ctx.cudnn.execute(graph, dict(enumerate(arrays, 1))).result(120)[4])
    check_close("out", answers[1], answers[0], 0.01)
