"""Requests without sequences, rows or keys are answered: nothing, zeros, and the LSE of rows that see no key.

`tests/properties` draws sequences without rows and keys, with every option. Here no sequence of a batch has any, and
some requests need no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.bench import Bench, on_device
from inside.arrays import DeviceArray
from inside.devices import OutputSpec, zero_launch

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
DEVICES = {"mock": np.dtype(np.float32), "emulated": np.dtype(ml_dtypes.bfloat16)}


class Asker:
    """A context, arrays of ones of its dtype, and the kernels that were launched since the last look."""

    ctx: ga.GpuContext

    def __init__(self, device: str, **options: Any) -> None:
        self.events: list[Any] = []
        self.opener = ga.open_context(device, ga.ContextOptions(on_event=self.events.append, **options))
        self.dtype = DEVICES[device]

    def ones(self, *shape: int) -> np.ndarray:
        return np.ones(shape, self.dtype)

    def kernels(self) -> set[str]:
        launched = {event.fields["kernel"] for event in self.events if event.name == "request.launched"}
        self.events.clear()
        return launched - {"none", "oracle"}

    def forward(self, rows: tuple[int, ...], keys: tuple[int, ...], **options: Any) -> Any:
        """Make a request, and check the shapes of its answer."""
        q, k = self.ones(*rows, HEADS, DIM), self.ones(*keys, HEADS, DIM)
        found = self.ctx.flash_attn.forward(q, k, k, **options, return_lse=True).result(120)
        assert (found.out.shape, found.out.dtype) == (q.shape, self.dtype)
        assert found.lse.shape == (*rows[:-1], HEADS, rows[-1])
        return found

    def backward(self, rows: tuple[int, ...], keys: tuple[int, ...], **options: Any) -> Any:
        q, k = self.ones(*rows, HEADS, DIM), self.ones(*keys, HEADS, DIM)
        lse = np.zeros((*rows[:-1], HEADS, rows[-1]), np.float32)
        return self.ctx.flash_attn.backward(q, q, k, k, q, lse, **options).result(120)


@pytest.fixture(scope="module", params=DEVICES)
def asker(request: pytest.FixtureRequest) -> Iterator[Asker]:
    asker = Asker(request.param)
    with asker.opener as asker.ctx:
        yield asker
        assert asker.ctx.flash_attn.restarts == 0


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def ends(q: tuple[int, ...], k: tuple[int, ...]) -> dict[str, Any]:
    return {"cu_seqlens_q": ints(*q), "cu_seqlens_k": ints(*k)}


def test_no_rows_have_an_empty_output_and_need_no_kernel(asker: Asker) -> None:
    for rows, keys in (((0, 4), (0, 4)), ((2, 0), (2, 4)), ((0, 0), (0, 0)), ((2, 0), (2, 0))):
        asker.forward(rows, keys, causal=True, sinks=SINKS)
        q, k = asker.ones(*rows, HEADS, DIM), asker.ones(*keys, HEADS, DIM)
        # NumPy gives arrays without elements strides of 0, like broadcast ones.
        out = np.empty_like(q)
        assert asker.ctx.flash_attn.forward(q, k, k, out=out).result(120).out is out
    for longest in ({}, {"max_seqlen_q": 0, "max_seqlen_k": 4}, {"max_seqlen_q": 3, "max_seqlen_k": 4}):
        asker.forward((0,), (4,), **ends((0, 0, 0), (0, 1, 4)), **longest)
    asker.forward((0,), (0,), **ends((0,), (0,)))
    asker.forward((0,), (4,), **ends((0, 0, 0), (0, 1, 4)), bias=asker.ones(1, HEADS, 0, 3))
    assert not asker.kernels()


def test_rows_without_keys_are_zero_with_the_lse_of_their_sink(asker: Asker) -> None:
    for sinks in (None, SINKS):
        lse = np.full(HEADS, -np.inf) if sinks is None else sinks
        found = asker.forward((2, 3), (2, 0), sinks=sinks)
        np.testing.assert_array_equal(found.out, np.zeros((2, 3, HEADS, DIM)))
        np.testing.assert_array_equal(found.lse, np.broadcast_to(lse[None, :, None], (2, HEADS, 3)))
    for longest in ({}, {"max_seqlen_q": 3, "max_seqlen_k": 0}):
        found = asker.forward((4,), (0,), **ends((0, 1, 4), (0, 0, 0)), **longest, sinks=SINKS)
        np.testing.assert_array_equal(found.out, np.zeros((4, HEADS, DIM)))
        np.testing.assert_array_equal(found.lse, np.broadcast_to(SINKS[:, None], (HEADS, 4)))


def test_rows_without_keys_need_no_kernel_where_no_lse_is_asked_for(asker: Asker) -> None:
    asker.kernels()
    q, k = asker.ones(2, 3, HEADS, DIM), asker.ones(2, 0, HEADS, DIM)
    out = np.full_like(q, 7)
    assert asker.ctx.flash_attn.forward(q, k, k, out=out).result(120).out is out
    np.testing.assert_array_equal(out, np.zeros_like(q))
    assert not asker.kernels()


@pytest.mark.parametrize("asker", ["mock"], indirect=True)
def test_a_varlen_batch_without_keys_may_have_a_bias_without_any(asker: Asker) -> None:
    none = ends((0, 1, 4), (0, 0, 0))
    for bias in (asker.ones(1, HEADS, 3, 0), np.ones((2, 1, 3, 0), np.bool_)):
        found = asker.forward((4,), (0,), **none, bias=bias)
        np.testing.assert_array_equal(found.out, np.zeros((4, HEADS, DIM)))
        np.testing.assert_array_equal(found.lse, np.full((HEADS, 4), -np.inf))
        gradients = asker.backward((4,), (0,), **none, bias=bias)
        np.testing.assert_array_equal(gradients.dq, np.zeros((4, HEADS, DIM)))
        assert (gradients.dbias is None) == (bias.dtype == np.bool_)
    with pytest.raises(ga.InvalidRequest, match="must be an array") as refused:
        asker.forward((4,), (2,), **{**none, "cu_seqlens_k": ints(0, 0, 2)}, bias=bias)
    assert refused.value.field == "bias"


def test_gradients_of_nothing_are_zero_and_need_no_kernel(asker: Asker) -> None:
    asker.kernels()
    for rows, keys in (((0, 4), (0, 4)), ((2, 0), (2, 4)), ((2, 3), (2, 0))):
        bias = asker.ones(rows[0], HEADS, rows[1], keys[1])
        gradients = asker.backward(rows, keys, sinks=SINKS, bias=bias)
        shapes = [(*rows, HEADS, DIM), (*keys, HEADS, DIM), (*keys, HEADS, DIM), bias.shape, SINKS.shape]
        for gradient, shape in zip(gradients, shapes, strict=True):
            np.testing.assert_array_equal(gradient, np.zeros(shape))
    assert not asker.kernels()


def test_cudnns_params_may_be_empty(asker: Asker) -> None:
    for batch, rows, keys in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        params = ga.AttentionParams(batch, rows, keys, HEADS, HEADS, DIM)
        q, k = asker.ones(batch, HEADS, rows, DIM), asker.ones(batch, HEADS, keys, DIM)
        out, stats = asker.ctx.cudnn.mha_forward(params, q, k, k, return_stats=True).result(120)
        np.testing.assert_array_equal(out, np.zeros_like(q))
        np.testing.assert_array_equal(stats, np.full((batch, HEADS, rows, 1), -np.inf))


# Caches


def empty_requests(asker: Asker) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Requests over pages, and the shapes of their LSE."""
    two = {"block_table": ints(0, 1).reshape(2, 1), "cache_seqlens": ints(3, 4)}
    none = {"block_table": ints().reshape(0, 2), "cache_seqlens": ints()}
    packed = {**two, "q": asker.ones(0, HEADS, DIM), "cu_seqlens_q": ints(0, 0, 0)}
    yield {**none, "q": asker.ones(0, 1, HEADS, DIM)}, (0, HEADS, 1)
    yield {**two, "q": asker.ones(2, 0, HEADS, DIM)}, (2, HEADS, 0)
    yield packed, (HEADS, 0)
    yield {**packed, "bias": asker.ones(1, 1, 0, 4)}, (HEADS, 0)


def test_requests_over_caches_may_be_empty_and_need_no_kernel(asker: Asker) -> None:
    asker.kernels()
    pool = asker.ones(3, 8, HEADS, DIM)
    for given, lse in empty_requests(asker):
        ask = {**given, "k_cache": pool, "v_cache": pool, "return_lse": True}
        for reply in [asker.ctx.flash_attn.paged_forward(**ask) for _ in range(2)]:
            found = reply.result(120)
            assert (found.out.shape, found.lse.shape) == (given["q"].shape, lse)
    q, array = asker.ones(0, HEADS, DIM), asker.ones(0, HEADS, 8, DIM)
    for caches in ([], array):
        found = asker.ctx.flash_attn.decode(q, caches, caches, ints(), return_lse=True).result(120)
        assert (found.out.shape, found.lse.shape) == ((0, HEADS, DIM), (0, HEADS))
    assert not asker.kernels()


def test_no_rows_are_appended_and_attended_to(asker: Asker) -> None:
    pages: dict[str, Any] = {"num_blocks": 4, "page_size": 8, "kv_heads": HEADS, "head_dim": DIM}
    rows = asker.ones
    with asker.ctx.kv_cache(**pages, dtype=asker.dtype.name) as cache:
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


def test_the_oracle_answers_empty_batches() -> None:
    for rows, keys in (((0, 4), (0, 4)), ((2, 0), (2, 4)), ((2, 3), (2, 0))):
        q, k = np.ones((*rows, HEADS, DIM)), np.ones((*keys, HEADS, DIM))
        result = attention_forward(q, k, k, causal=True, sinks=SINKS)
        np.testing.assert_array_equal(result.out, np.zeros_like(q))
        np.testing.assert_array_equal(result.lse, np.broadcast_to(SINKS[:, None], (rows[0], HEADS, rows[1])))
        gradients = attention_backward(q, q, k, k, sinks=SINKS)
        for gradient, like in ((gradients.dq, q), (gradients.dk, k), (gradients.dv, k), (gradients.dsinks, SINKS)):
            np.testing.assert_array_equal(gradient, np.zeros_like(like))
    pool, table = np.ones((3, 8, HEADS, DIM)), ints().reshape(0, 2)
    for gathered in (gather_pages(pool, pool, table, ints()), gather_cache(pool[:0], pool[:0], ints())):
        found = paged_attention_forward(np.ones((0, 1, HEADS, DIM)), gathered)
        assert (found.out.shape, found.lse.shape) == ((0, 1, HEADS, DIM), (0, HEADS, 1))
