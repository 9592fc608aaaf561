"""Gradients, cached keys and graphs where a bias hides keys by a large finite number."""

from __future__ import annotations

import functools
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
def context(arch: str | None, fused: bool = True) -> ga.GpuContext:
    """Of that architecture's kernels, or the mock device."""
    options = ga.ContextOptions(arch=arch, emulation=ga.EmulationOptions(contraction=fused))
    return _opened.enter_context(ga.open_context("mock" if arch is None else "emulated", options))


class Kernel(NamedTuple):
    name: str
    arch: str
    dtype: str
    dim: int
    fused: bool = True

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{'fused' if self.fused else 'separate'}"


BACKWARD = (
    Kernel("backward_mma", "sm_80", "float16", 64),
    Kernel("backward_mma", "sm_80", "float16", 64, False),
    Kernel("backward_simple", "sm_80", "float32", 20),
    Kernel("backward_sm90", "sm_90a", "bfloat16", 64),
    Kernel("backward_sm90", "sm_90a", "bfloat16", 64, False),
)


def problem(kernel: Kernel, low: float) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k, v, options."""
    inputs, bias = masked(kernel.dtype, kernel.dim, low)
    return (*inputs, {"bias": bias})


GRADIENTS = [(kernel, sinks) for kernel in BACKWARD for sinks in ((False, True) if kernel.fused else (False,))]


@pytest.mark.parametrize(("kernel", "sinks"), GRADIENTS, ids=str)
def test_gradients_are_the_oracles(kernel: Kernel, sinks: bool) -> None:
    """Of the same LSE, which has lost the number of keys where it is as low as a mask."""
    mock, ctx = context(None), context(kernel.arch, kernel.fused)
    for low in (FLOAT32_MIN, -1e9) if sinks else (FLOAT32_MIN, 0.7 * FLOAT32_MIN, -1e9, -1e4):
        q, k, v, options = problem(kernel, low)
        options |= {"sinks": SINKS} if sinks else {}
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


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize(
    "kernel", [Kernel("decode_mma", "sm_80", "float16", 64), Kernel("decode_simple", "sm_80", "float32", 20)], ids=str
)
def test_cached_keys_are_hidden_likewise(kernel: Kernel, splits: int) -> None:
    """Pieces of unequal length count by their keys, which the LSE of a piece would not tell."""
    for low in LOW:
        q, k, v, options = problem(kernel, low)
        caches = {"k_cache": k, "v_cache": v, "cache_seqlens": np.full(2, KEYS, np.int32)}
        options |= {"causal": False, "num_splits": splits, "return_lse": True}
        check_cached(kernel, ga.PagedForward(q=q, **caches, **options))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_new_rows_of_a_cache_have_steep_slopes_and_large_products(arch: str) -> None:
    kernel = Kernel("decode_mma" if arch == "sm_80" else "decode_sm90", arch, "bfloat16", 64)
    q, k, v, _ = problem(kernel, 0.0)
    q, k = (np.repeat(q, 4, axis=1) * 2**15).astype(q.dtype), (np.sign(k) * 2**14).astype(k.dtype)
    caches = {"k_cache": k, "v_cache": v, "cache_seqlens": np.full(2, KEYS, np.int32)}
    for options in ({}, {"alibi_slopes": STEEP}, {"sinks": SINKS}):
        check_cached(kernel, ga.PagedForward(q=q, **caches, **options, return_lse=True))


def check_cached(kernel: Kernel, request: ga.PagedForward) -> None:
    ctx = context(kernel.arch, kernel.fused)
    assert ctx.flash_attn.inspect_key(request).kernel == kernel.name
    expected = context(None).flash_attn.submit(request).result(60)
    answer = ctx.flash_attn.submit(request).result(120)
    check_close("out", answer.out, expected.out, 0.02)
    check_close("lse", answer.lse, expected.lse, 1e-3, 2.0**-22)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_graph_may_select_as_low_a_score(arch: str) -> None:
    q, k, v, _ = problem(Kernel("", arch, "float16", 64), 0.0)
    arrays = [np.ascontiguousarray(each.swapaxes(1, 2)) for each in (q, k, v)]
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
