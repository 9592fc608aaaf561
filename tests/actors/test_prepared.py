"""A prepared request gives the bits of the awaited one, from any thread, and is refused if it could be wrong."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

RNG = np.random.default_rng(11)


def rows(*shape: int, dtype: str = "float16") -> Any:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.fixture(scope="module", params=["mock", "emulated"])
def ctx(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    with ga.open_context(request.param) as made:
        yield made


def dense(**options: Any) -> ga.FlashForward:
    return ga.FlashForward(rows(2, 17, 4, 64), rows(2, 33, 2, 64), rows(2, 33, 2, 64), **options)


def paged(**options: Any) -> ga.PagedForward:
    table, lengths = np.array([[1, 2], [3, 4]], np.int32), np.array([20, 30], np.int32)
    caches = {"k_cache": rows(8, 16, 2, 64), "v_cache": rows(8, 16, 2, 64)}
    return ga.PagedForward(q=rows(2, 1, 4, 64), **caches, block_table=table, cache_seqlens=lengths, **options)


class TestAnswers:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"causal": True, "return_lse": True},
            {"window_size": (5, 0), "softcap": 3.0},
            {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4], np.float32)},
            {"bias": rows(1, 4, 17, 33)},
        ],
        ids=["plain", "causal with lse", "window and softcap", "alibi", "bias"],
    )
    def test_runs_have_the_bits_of_forward(self, ctx: ga.GpuContext, options: Any) -> None:
        request = dense(**options)
        prepared = ctx.flash_attn.prepare(request).result(30)
        for q, k, v in ((request.q, request.k, request.v), [rows(*a.shape) for a in (request.q, request.k, request.v)]):
            answer = prepared.run(q, k, v)
            wanted = ctx.flash_attn.forward(q, k, v, **options).result(30)
            assert np.array_equal(answer.out, wanted.out)
            assert (answer.lse is None) == (wanted.lse is None)
            assert answer.lse is None or np.array_equal(answer.lse, wanted.lse)

    def test_packed_sequences(self, ctx: ga.GpuContext) -> None:
        ends_q, ends_k = np.array([0, 5, 12], np.int32), np.array([0, 9, 30], np.int32)
        q, k, v = rows(12, 4, 64), rows(30, 2, 64), rows(30, 2, 64)
        options: Any = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "causal": True}
        prepared = ctx.flash_attn.prepare(ga.FlashForward(q, k, v, **options)).result(30)
        q = rows(12, 4, 64)
        assert np.array_equal(prepared.run(q).out, ctx.flash_attn.forward(q, k, v, **options).result(30).out)

    def test_pages_are_those_of_the_request_unless_given(self, ctx: ga.GpuContext) -> None:
        request = paged()
        prepared = ctx.flash_attn.prepare(request).result(30)
        out = np.empty((2, 1, 4, 64), np.float16)
        answer = prepared.run(request.q, out=out)
        assert answer.out is out
        assert np.array_equal(out, ctx.flash_attn.submit(request).result(30).out)
        k, v = rows(8, 16, 2, 64), rows(8, 16, 2, 64)
        other = paged(num_splits=0)
        other.q, other.k_cache, other.v_cache = request.q, k, v
        assert np.array_equal(prepared.run(request.q, k, v).out, ctx.flash_attn.submit(other).result(30).out)

    def test_a_view_with_the_same_strides_is_as_good(self, ctx: ga.GpuContext) -> None:
        packed = rows(2, 33, 3, 2, 64)
        q, k, v = (packed[:, :, part] for part in range(3))
        prepared = ctx.flash_attn.prepare(ga.FlashForward(q, k, v)).result(30)
        again = rows(2, 33, 3, 2, 64)
        answer = prepared.run(*(again[:, :, part] for part in range(3)))
        wanted = ctx.flash_attn.forward(*(again[:, :, part].copy() for part in range(3))).result(30)
        assert np.array_equal(answer.out, wanted.out)

    def test_threads_run_it_one_after_the_other(self, ctx: ga.GpuContext) -> None:
        request = dense()
        prepared = ctx.flash_attn.prepare(request).result(30)
        many = [rows(2, 17, 4, 64) for _ in range(8)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda q: prepared.run(q).out, many))
        for q, answer in zip(many, answers, strict=True):
            assert np.array_equal(answer, ctx.flash_attn.forward(q, request.k, request.v).result(30).out)

    async def test_it_is_awaited_once(self) -> None:
        async with ga.open_context("mock") as ctx:
            request = dense()
            prepared = await ctx.flash_attn.prepare(request, timeout=30)
            assert isinstance(prepared, ga.PreparedAttention)
            assert prepared.run(request.q).out.shape == (2, 17, 4, 64)
            assert repr(prepared).startswith("<PreparedAttention ")


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"q": rows(2, 16, 4, 64)}, r"q='float16\[2, 16, 4, 64\]': must be float16 of shape \(2, 17, 4, 64\)"),
            ({"q": rows(2, 17, 4, 64, dtype="float32")}, "q='float32"),
            ({"q": rows(2, 17, 8, 64)[:, :, ::2]}, "q='float16"),
            ({"q": rows(2, 17, 4, 64), "k": rows(2, 34, 2, 64)}, "k='float16"),
            ({"q": rows(2, 17, 4, 64), "out": np.empty((2, 17, 4, 64), np.float32)}, "out='float32"),
            ({"q": rows(2, 17, 4, 64), "stream": "first"}, "stream=.*must be an int, or a stream"),
            ({"q": [1.0]}, "q="),
        ],
    )
    def test_arrays_are_as_prepared(self, ctx: ga.GpuContext, given: Any, text: str) -> None:
        prepared = ctx.flash_attn.prepare(dense()).result(30)
        with pytest.raises(ga.InvalidRequest, match=text):
            prepared.run(**given)
        assert prepared.run(rows(2, 17, 4, 64)).out.shape == (2, 17, 4, 64)

    def test_out_does_not_overlap_what_is_read(self, ctx: ga.GpuContext) -> None:
        request = ga.FlashForward(rows(1, 8, 2, 64), rows(1, 8, 2, 64), rows(1, 8, 2, 64))
        prepared = ctx.flash_attn.prepare(request).result(30)
        with pytest.raises(ga.InvalidRequest, match="out="):
            prepared.run(request.q, out=request.k)

    def test_the_request_is_checked(self, ctx: ga.GpuContext) -> None:
        prepare: Any = ctx.flash_attn.prepare
        request = paged()
        request.cache_seqlens = np.array([20, 33], np.int32)
        with pytest.raises(ga.InvalidRequest, match="cache_seqlens"):
            prepare(request).result(30)
        with pytest.raises(ga.InvalidRequest, match="request='int': must be a FlashForward or a PagedForward"):
            prepare(3).result(30)
        backward = ga.FlashBackward(*(rows(1, 8, 2, 64) for _ in range(3)), dout=None, out=None, lse=None)  # type: ignore[arg-type]
        with pytest.raises(ga.InvalidRequest, match="request='FlashBackward'"):
            prepare(backward).result(30)
        with pytest.raises(ga.Unsupported, match="seqused_k"):
            prepare(dense(seqused_k=np.array([3, 4], np.int32))).result(30)

    def test_another_process_launches_nothing_here(self) -> None:
        with (
            ga.open_context("mock", isolation="process") as ctx,
            pytest.raises(ga.Unsupported, match="another process"),
        ):
            ctx.flash_attn.prepare(dense()).result(30)


class TestEnds:
    def test_a_launch_that_fails_raises_its_error_and_the_next_answers(self) -> None:
        plan = FaultPlan().fail(launch=2, error=ga.LaunchError("a fault"))
        with ga.open_context("mock", ga.ContextOptions(fault_plan=plan)) as ctx:
            request = dense()
            prepared = ctx.flash_attn.prepare(request).result(30)
            wanted = prepared.run(request.q).out
            with pytest.raises(ga.LaunchError, match="a fault"):
                prepared.run(request.q)
            assert np.array_equal(prepared.run(request.q).out, wanted)

    def test_a_lost_context_is_lost_for_it_too(self) -> None:
        plan = FaultPlan().lose_context(launch=1)
        with ga.open_context("mock", ga.ContextOptions(fault_plan=plan)) as ctx:
            request = dense()
            prepared = ctx.flash_attn.prepare(request).result(30)
            for _ in range(2):
                with pytest.raises(ga.ContextLost):
                    prepared.run(request.q)
            assert ctx.health().state == "failed"

    @pytest.mark.parametrize("device", ["mock", "emulated"])
    def test_a_closed_context_launches_nothing(self, device: str) -> None:
        with ga.open_context(device) as ctx:
            request = dense()
            prepared = ctx.flash_attn.prepare(request).result(30)
        with pytest.raises(ga.ActorStopped):
            prepared.run(request.q)

    def test_a_dropped_one_keeps_nothing(self, ctx: ga.GpuContext) -> None:
        request = dense()
        prepared = ctx.flash_attn.prepare(request).result(30)
        prepared.run(request.q)
        del prepared
        gc.collect()
        assert ctx.flash_attn.submit(request).result(30).out.shape == (2, 17, 4, 64)
