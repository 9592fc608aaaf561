"""Requests without sequences, rows or keys are answered: nothing, zeros, and the LSE of rows that see no key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.bench import Bench, on_device
from inside.arrays import DeviceArray
from inside.devices import OutputSpec, zero_launch
from inside.emulation import EmulatedModule

import gpu_actors as ga
from gpu_actors.reference import (
    attention_backward,
    attention_forward,
    gather_cache,
    gather_pages,
    paged_attention_forward,
)

HEADS, DIM = 2, 32
SINKS = np.array([0.5, -3.0], np.float32)
DEVICES = {
    "mock": ("mock", "sm_90a", "float32"),
    "sm_90a": ("emulated", "sm_90a", "bfloat16"),
    "sm_80": ("emulated", "sm_80", "bfloat16"),
    "simple": ("emulated", "sm_80", "float32"),
}
CACHING = ("mock", "sm_90a", "sm_80")


class Asker:
    """A context and arrays of ones of its dtype."""

    def __init__(self, ctx: ga.GpuContext, dtype: str) -> None:
        self.ctx = ctx
        self.dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def ones(self, *shape: int) -> np.ndarray:
        return np.ones(shape, self.dtype)

    def forward(self, rows: tuple[int, ...], keys: tuple[int, ...], **options: Any) -> Any:
        q, k = self.ones(*rows, HEADS, DIM), self.ones(*keys, HEADS, DIM)
        return self.ctx.flash_attn.forward(q, k, k, **options, return_lse=True).result(120)

    def backward(self, rows: tuple[int, ...], keys: tuple[int, ...], **options: Any) -> Any:
        q, k = self.ones(*rows, HEADS, DIM), self.ones(*keys, HEADS, DIM)
        lse = np.zeros((*rows[:-1], HEADS, rows[-1]), np.float32)
        return self.ctx.flash_attn.backward(q, q, k, k, q, lse, **options).result(120)


@pytest.fixture(scope="module", params=DEVICES)
def asker(request: pytest.FixtureRequest) -> Iterator[Asker]:
    device, arch, dtype = DEVICES[request.param]
    with ga.open_context(device, ga.ContextOptions(arch=arch)) as ctx:
        yield Asker(ctx, dtype)
        assert ctx.flash_attn.restarts == 0


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of the kernels that the emulated device launches."""
    seen: list[tuple[int, ...]] = []
    launch = EmulatedModule.launch

    def noted(self: EmulatedModule, entry: str, grid: tuple[int, ...], *rest: Any, **options: Any) -> Any:
        seen.append(grid)
        return launch(self, entry, grid, *rest, **options)

    monkeypatch.setattr(EmulatedModule, "launch", noted)
    return seen


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(("rows", "keys"), [((0, 4), (0, 4)), ((2, 0), (2, 4)), ((0, 0), (0, 0)), ((2, 0), (2, 0))])
def test_no_rows_have_an_empty_output_and_need_no_kernel(asker: Asker, grids: list[Any], rows: Any, keys: Any) -> None:
    result = asker.forward(rows, keys, causal=True, sinks=SINKS)
    assert result.out.shape == (*rows, HEADS, DIM)
    assert result.out.dtype == asker.dtype
    assert result.lse.shape == (rows[0], HEADS, rows[1])
    assert not grids


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (1, 0)}, {"softcap": 2.0}])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sink", "sinks"])
def test_rows_without_keys_are_zero_with_the_lse_of_their_sink(
    asker: Asker, grids: list[Any], options: Any, sinks: Any
) -> None:
    result = asker.forward((2, 3), (2, 0), **options, sinks=sinks)
    np.testing.assert_array_equal(result.out, np.zeros((2, 3, HEADS, DIM)))
    lse = np.full(HEADS, -np.inf) if sinks is None else sinks
    np.testing.assert_array_equal(result.lse, np.broadcast_to(lse[None, :, None], (2, HEADS, 3)))
    assert all(0 not in grid for grid in grids)


def test_rows_without_keys_need_no_kernel_where_no_lse_is_asked_for(asker: Asker, grids: list[Any]) -> None:
    q, k = asker.ones(2, 3, HEADS, DIM), asker.ones(2, 0, HEADS, DIM)
    out = np.full_like(q, 7)
    assert asker.ctx.flash_attn.forward(q, k, k, out=out).result(120).out is out
    np.testing.assert_array_equal(out, np.zeros_like(q))
    assert not grids


@pytest.mark.parametrize("rows", [(0, 4), (2, 0)])
def test_an_output_may_be_given_that_has_no_elements(asker: Asker, rows: tuple[int, int]) -> None:
    """NumPy gives such an array strides of 0, as it gives a broadcast one."""
    q, k = asker.ones(*rows, HEADS, DIM), asker.ones(rows[0], 4, HEADS, DIM)
    out = np.empty_like(q)
    assert asker.ctx.flash_attn.forward(q, k, k, out=out).result(120).out is out


@pytest.mark.parametrize(
    "longest", [{}, {"max_seqlen_q": 0, "max_seqlen_k": 4}, {"max_seqlen_q": 3, "max_seqlen_k": 4}]
)
def test_varlen_batches_may_be_without_rows(asker: Asker, grids: list[Any], longest: Any) -> None:
    result = asker.forward((0,), (4,), cu_seqlens_q=ints(0, 0, 0), cu_seqlens_k=ints(0, 1, 4), **longest)
    assert result.out.shape == (0, HEADS, DIM)
    assert result.lse.shape == (HEADS, 0)
    assert not grids


def test_a_varlen_batch_may_be_without_sequences(asker: Asker, grids: list[Any]) -> None:
    result = asker.forward((0,), (0,), cu_seqlens_q=ints(0), cu_seqlens_k=ints(0))
    assert result.out.shape == (0, HEADS, DIM)
    assert not grids


def test_a_varlen_batch_may_be_without_keys(asker: Asker) -> None:
    ends = {"cu_seqlens_q": ints(0, 1, 4), "cu_seqlens_k": ints(0, 0, 0)}
    for longest in ({}, {"max_seqlen_q": 3, "max_seqlen_k": 0}):
        result = asker.forward((4,), (0,), **ends, **longest, sinks=SINKS)
        np.testing.assert_array_equal(result.out, np.zeros((4, HEADS, DIM)))
        np.testing.assert_array_equal(result.lse, np.broadcast_to(SINKS[:, None], (HEADS, 4)))


@pytest.mark.parametrize("asker", ["mock", "simple"], indirect=True)
def test_a_varlen_batch_without_keys_may_have_a_bias_without_any(asker: Asker) -> None:
    ends = {"cu_seqlens_q": ints(0, 1, 4), "cu_seqlens_k": ints(0, 0, 0)}
    for bias in (asker.ones(1, HEADS, 3, 0), np.ones((2, 1, 3, 0), np.bool_)):
        result = asker.forward((4,), (0,), **ends, bias=bias)
        np.testing.assert_array_equal(result.out, np.zeros((4, HEADS, DIM)))
        np.testing.assert_array_equal(result.lse, np.full((HEADS, 4), -np.inf))
        gradients = asker.backward((4,), (0,), **ends, bias=bias)
        np.testing.assert_array_equal(gradients.dq, np.zeros((4, HEADS, DIM)))
        assert (gradients.dbias is None) == (bias.dtype == np.bool_)
    with pytest.raises(ga.InvalidRequest, match="must be an array") as refused:
        asker.forward((4,), (2,), **{**ends, "cu_seqlens_k": ints(0, 0, 2)}, bias=bias)
    assert refused.value.field == "bias"


def test_a_varlen_batch_without_rows_may_have_a_bias_without_any(asker: Asker, grids: list[Any]) -> None:
    ends = {"cu_seqlens_q": ints(0, 0, 0), "cu_seqlens_k": ints(0, 1, 4)}
    result = asker.forward((0,), (4,), **ends, bias=asker.ones(1, HEADS, 0, 3))
    assert (result.out.shape, result.lse.shape) == ((0, HEADS, DIM), (HEADS, 0))
    assert not grids


@pytest.mark.parametrize(("rows", "keys"), [((0, 4), (0, 4)), ((2, 0), (2, 4)), ((2, 3), (2, 0))])
def test_gradients_of_nothing_are_zero(asker: Asker, grids: list[Any], rows: Any, keys: Any) -> None:
    if asker.dtype == np.float32 and asker.ctx.info.kind != "mock":
        options: dict[str, Any] = {"compute": "tf32"}
    else:
        options = {}
    bias = asker.ones(rows[0], HEADS, rows[1], keys[1])
    gradients = asker.backward(rows, keys, sinks=SINKS, bias=bias, **options)
    shapes = [(*rows, HEADS, DIM), (*keys, HEADS, DIM), (*keys, HEADS, DIM), bias.shape, SINKS.shape]
    for gradient, shape in zip(gradients, shapes, strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(shape))
    assert not grids


@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_cudnns_params_may_be_empty(asker: Asker, batch: int, rows: int, keys: int) -> None:
    params = ga.AttentionParams(batch, rows, keys, HEADS, HEADS, DIM)
    q, k = asker.ones(batch, HEADS, rows, DIM), asker.ones(batch, HEADS, keys, DIM)
    out, stats = asker.ctx.cudnn.mha_forward(params, q, k, k, return_stats=True).result(120)
    np.testing.assert_array_equal(out, np.zeros_like(q))
    np.testing.assert_array_equal(stats, np.full((batch, HEADS, rows, 1), -np.inf))


# Caches


@pytest.fixture(scope="module", params=CACHING)
def cached(request: pytest.FixtureRequest) -> Iterator[Asker]:
    device, arch, dtype = DEVICES[request.param]
    with ga.open_context(device, ga.ContextOptions(arch=arch)) as ctx:
        yield Asker(ctx, dtype)
        assert ctx.flash_attn.restarts == 0


PAGED: dict[str, Callable[[Asker], tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]]] = {
    "no sequences": lambda a: (
        {"q": a.ones(0, 1, HEADS, DIM), "block_table": ints().reshape(0, 2), "cache_seqlens": ints()},
        (0, 1, HEADS, DIM),
        (0, HEADS, 1),
    ),
    "no rows": lambda a: (
        {"q": a.ones(2, 0, HEADS, DIM), "block_table": ints(0, 1).reshape(2, 1), "cache_seqlens": ints(3, 4)},
        (2, 0, HEADS, DIM),
        (2, HEADS, 0),
    ),
    "no packed rows": lambda a: (
        {
            "q": a.ones(0, HEADS, DIM),
            "block_table": ints(0, 1).reshape(2, 1),
            "cache_seqlens": ints(3, 4),
            "cu_seqlens_q": ints(0, 0, 0),
        },
        (0, HEADS, DIM),
        (HEADS, 0),
    ),
    "no packed rows of a bias": lambda a: (
        {
            "q": a.ones(0, HEADS, DIM),
            "block_table": ints(0, 1).reshape(2, 1),
            "cache_seqlens": ints(3, 4),
            "cu_seqlens_q": ints(0, 0, 0),
            "bias": a.ones(1, 1, 0, 4),
        },
        (0, HEADS, DIM),
        (HEADS, 0),
    ),
}


@pytest.mark.parametrize("name", PAGED)
def test_paged_requests_may_be_empty(cached: Asker, grids: list[Any], name: str) -> None:
    given, out, lse = PAGED[name](cached)
    pool = cached.ones(3, 8, HEADS, DIM)
    replies = [
        cached.ctx.flash_attn.paged_forward(k_cache=pool, v_cache=pool, **given, return_lse=True) for _ in range(3)
    ]
    for reply in replies:
        result = reply.result(120)
        assert (result.out.shape, result.lse.shape) == (out, lse)
    assert not grids


def test_a_decode_of_no_sequences_is_empty(cached: Asker) -> None:
    q, array = cached.ones(0, HEADS, DIM), cached.ones(0, HEADS, 8, DIM)
    for caches in ([], array):
        result = cached.ctx.flash_attn.decode(q, caches, caches, ints(), return_lse=True).result(120)
        assert (result.out.shape, result.lse.shape) == ((0, HEADS, DIM), (0, HEADS))


def test_recorded_steps_may_be_empty() -> None:
    with ga.open_context("mock", ga.ContextOptions(record_launches=True)) as ctx:
        asker = Asker(ctx, "float32")
        pool = asker.ones(3, 8, HEADS, DIM)
        for name in PAGED:
            given, out, _ = PAGED[name](asker)
            assert ctx.flash_attn.paged_forward(k_cache=pool, v_cache=pool, **given).result(60).out.shape == out


def test_no_rows_are_appended_and_attended_to(cached: Asker) -> None:
    pages: dict[str, Any] = {"num_blocks": 4, "page_size": 8, "kv_heads": HEADS, "head_dim": DIM}
    rows = cached.ones
    with cached.ctx.kv_cache(**pages, dtype=cached.dtype.name) as cache:
        seq = cache.create().result(60)
        assert cache.append(seq, rows(3, HEADS, DIM), rows(3, HEADS, DIM)).result(120) == 3
        nothing, tokens = rows(0, HEADS, DIM), np.zeros(0, np.int64)
        assert cache.append(seq, nothing, nothing).result(120) == 3
        assert cache.append(seq, nothing, nothing, tokens=tokens).result(120) == 3
        assert cache.append([seq], nothing[None], nothing[None]).result(120) == [3]
        assert cache.append([seq], nothing, nothing, cu_seqlens=ints(0, 0)).result(120) == [3]
        assert cache.append(seq, nothing, nothing, rope=ga.Rope(dim=DIM)).result(120) == 3
        assert cache.append([], nothing[:, None], nothing[:, None]).result(120) == []
        for keys in ({}, {"k": nothing[None], "v": nothing[None]}):
            assert cache.attend(nothing[None], [seq], **keys).result(120).out.shape == (1, 0, HEADS, DIM)
        empty = rows(0, 1, HEADS, DIM)
        for keys in ({}, {"k": empty, "v": empty}):
            result = cache.attend(empty, [], **keys, return_lse=True).result(120)
            assert (result.out.shape, result.lse.shape) == (empty.shape, (0, HEADS, 1))
        assert cache.append(seq, rows(1, HEADS, DIM), rows(1, HEADS, DIM)).result(120) == 4
        assert cache.stats().free_blocks == 3


# Below the actors


def test_a_launch_whose_answer_is_zero_needs_no_kernel_on_cuda() -> None:
    bench = Bench()
    outputs = {"out": OutputSpec((2, 3), "float32"), "lse": OutputSpec((0, 2), "float32")}
    for q in (np.zeros((0, 3), np.float32), np.ones((2, 3), np.float32)):
        for place in (q, on_device(bench, q)):
            event = bench.stream.launch(zero_launch(None, place, outputs))
            event.wait()
            assert event.outputs["lse"].shape == (0, 2)
            out = event.outputs["out"]
            assert type(out) is type(place)
            if isinstance(out, DeviceArray):
                out = bench.cuda.memory.array(out.address, (2, 3), np.float32)
            np.testing.assert_array_equal(out, np.zeros((2, 3)))
    assert "launch_kernel" not in bench.cuda.calls


@pytest.mark.parametrize(("rows", "keys"), [((0, 4), (0, 4)), ((2, 0), (2, 4)), ((2, 3), (2, 0))])
def test_the_oracle_answers_empty_batches(rows: Any, keys: Any) -> None:
    q, k = np.ones((*rows, HEADS, DIM)), np.ones((*keys, HEADS, DIM))
    result = attention_forward(q, k, k, causal=True, sinks=SINKS)
    np.testing.assert_array_equal(result.out, np.zeros_like(q))
    np.testing.assert_array_equal(result.lse, np.broadcast_to(SINKS[:, None], (rows[0], HEADS, rows[1])))
    gradients = attention_backward(q, q, k, k, sinks=SINKS)
    for gradient, like in ((gradients.dq, q), (gradients.dk, k), (gradients.dv, k), (gradients.dsinks, SINKS)):
        np.testing.assert_array_equal(gradient, np.zeros_like(like))


def test_the_oracle_over_caches_answers_empty_batches() -> None:
    pool, table = np.ones((3, 8, HEADS, DIM)), ints().reshape(0, 2)
    for gathered in (gather_pages(pool, pool, table, ints()), gather_cache(pool[:0], pool[:0], ints())):
        result = paged_attention_forward(np.ones((0, 1, HEADS, DIM)), gathered)
        assert (result.out.shape, result.lse.shape) == ((0, 1, HEADS, DIM), (0, HEADS, 1))
