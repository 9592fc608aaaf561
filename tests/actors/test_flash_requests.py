"""Flash requests end to end on the mock device: outputs, keys, plans, waiting, and the device's own options."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.rejections import backward as sound_request
from inside.reference import rounder

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, ShardedKvCache
from gpu_actors.reference import attention_backward, attention_forward
from gpu_actors.testing import random_backward


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(seed: int = 0, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v of batch 2, seqlens 5 and 7, 4 and 2 heads, head_dim 16."""
    shapes = ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))
    q, k, v = (normal(*shape, dtype=dtype, seed=seed + index) for index, shape in enumerate(shapes))
    return q, k, v


def forward(ctx: ga.GpuContext, *arrays: np.ndarray, **options: Any) -> ga.AttentionOutput:
    return ctx.flash_attn.forward(*arrays, **options).result(10.0)


def agrees(result: ga.AttentionOutput, *arrays: np.ndarray, **options: Any) -> None:
    """Assert that the mock device's answer is the oracle's, rounded once."""
    np.testing.assert_array_equal(result.out, attention_forward(*arrays, **options).out.astype(np.float32))


# The caller's outputs


def test_out_of_the_same_plan_goes_to_each_requests_own_array(ctx: ga.GpuContext) -> None:
    arrays = [operands(seed) for seed in range(0, 30, 3)]
    outs = [np.empty_like(q) for q, _, _ in arrays]
    replies = [ctx.flash_attn.forward(*one, out=out) for one, out in zip(arrays, outs, strict=True)]
    for one, out, reply in zip(arrays, outs, replies, strict=True):
        assert reply.result(30.0).out is out
        agrees(ga.AttentionOutput(out), *one)


def test_fresh_outputs_are_the_callers_own(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    first, second = forward(ctx, q, k, v), forward(ctx, q, k, v)
    kept = first.out.copy()
    second.out[:] = 0
    np.testing.assert_array_equal(first.out, kept)
    assert first.out.flags.writeable
    assert first.lse is None


# Messages, keys and plans


def test_every_option_of_the_message_is_an_option_of_the_call() -> None:
    parameters = inspect.signature(ga.FlashAttnHandle.forward).parameters
    for field in dataclasses.fields(ga.FlashForward):
        given = parameters[field.name]
        if field.default is not dataclasses.MISSING:
            assert given.default == field.default, field.name
            assert given.kind is inspect.Parameter.KEYWORD_ONLY
    assert set(parameters) - {field.name for field in dataclasses.fields(ga.FlashForward)} == {
        *("self", "deadline", "timeout", "priority")
    }


MLA_OPTIONS = {
    *("cache_seqlens", "softmax_scale", "block_table", "cu_seqlens_q", "max_seqlen_q", "causal", "tree_mask"),
    *("k_descale", "num_splits", "return_lse", "out"),
}
CALLS = {
    ga.FlashAttnHandle.forward: (ga.FlashForward, set()),
    ga.FlashAttnHandle.backward: (
        ga.FlashBackward,
        {"return_lse", "out_dtype", "lse_dtype", "pack_gqa", "q_descale", "k_descale", "v_descale"},
    ),
    ga.FlashAttnHandle.paged_forward: (ga.PagedForward, set()),
    ga.FlashAttnHandle.mla_decode: (
        ga.PagedForward,
        {field.name for field in dataclasses.fields(ga.PagedForward)} - MLA_OPTIONS,
    ),
    ga.FlashAttnHandle.decode: (ga.BatchedDecode, set()),
    ga.KvCache.append: (ga.AppendRows, {"cache"}),
    ga.KvCache.attend: (ga.AttendCache, {"cache"}),
    ga.GpuContext.kv_cache: (ga.KvCacheSpec, set()),
    ContextPool.kv_cache: (ga.KvCacheSpec, set()),
    ShardedKvCache.__init__: (ga.KvCacheSpec, set()),
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_the_options_of_a_call_are_those_of_its_message(call: Any) -> None:
    message, left = CALLS[call]
    fields = {field.name: field for field in dataclasses.fields(message)}
    parameters = inspect.signature(call).parameters
    assert fields.keys() - parameters.keys() == left, "what the call does not take"
    keywords = typing.get_type_hints(inspect.unwrap(call), include_extras=True)["options"].__args__[0]
    hints = typing.get_type_hints(message, include_extras=True)
    for name, hint in typing.get_type_hints(keywords, include_extras=True).items():
        assert hint == hints[name], name
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        required = fields[name].default is dataclasses.MISSING
        assert parameters[name].default == (inspect.Parameter.empty if required else fields[name].default), name


def test_an_unknown_option_is_told_the_nearest(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'windw_size'; the nearest option is 'window_size'"
    ):
        ctx.flash_attn.forward(q, k, v, windw_size=(1, 1))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"FlashAttnHandle\.forward\(\) got an unexpected keyword argument 'zzz'$"):
        ctx.flash_attn.forward(q, k, v, zzz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"backward\(\) got an unexpected keyword argument 'return_lse'"):
        ctx.flash_attn.backward(v, q, k, v, v, q, return_lse=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"kv_cache\(\) got .* 'page_sise'; the nearest option is 'page_size'"):
        ctx.kv_cache(num_blocks=1, page_sise=1, kv_heads=1, head_dim=8)  # type: ignore[call-arg]


def test_inspect_key_tells_without_launching(ctx: ga.GpuContext) -> None:
    q, k, v = operands(dtype=ml_dtypes.bfloat16)
    launched = ctx.stats()["flash_attn"].launched
    message = ga.FlashForward(
        q=q, k=k, v=v, causal=True, window_size=(3, 0), sinks=np.zeros(4, np.float32), softcap=2.0, pack_gqa=False
    )
    key = ctx.flash_attn.inspect_key(message)
    assert (key.direction, key.dtype, key.kv_dtype, key.out_dtype) == ("forward", *["bfloat16"] * 3)
    assert (key.arch, key.head_dim, key.gqa_ratio, key.layout) == ("sm_90a", 16, 2, "dense")
    assert (key.mask, key.causal, key.sliding_window) == ("causal_window", True, True)
    assert (key.softcap, key.sinks, key.alibi, key.dropout, key.lse) == (True, True, False, False, False)
    assert (key.varlen, key.paged, key.sink_tokens, key.page_size) == (False, False, False, 0)
    assert ctx.stats()["flash_attn"].launched == launched
    bigger = ga.FlashForward(q=normal(7, 99, 4, 16, dtype=q.dtype), k=normal(7, 3, 2, 16, dtype=q.dtype), v=v)
    bigger = ga.FlashForward(
        q=bigger.q,
        k=bigger.k,
        v=bigger.k,
        causal=True,
        window_size=(3, 0),
        sinks=message.sinks,
        softcap=9,
        pack_gqa=False,
    )
    assert ctx.flash_attn.inspect_key(bigger) == key, "sizes and values are no part of it"


def test_plans_are_found_again_whatever_the_data(ctx: ga.GpuContext) -> None:
    with ga.open_context("mock") as fresh:
        for seed in range(5):
            q, k, v = operands(seed)
            agrees(forward(fresh, q, k, v, softcap=3.0), q, k, v, softcap=3.0)
        assert fresh.flash_attn.plan_cache_stats()[:2] == (4, 1)
        for changed in ({"softcap": 4.0}, {"causal": True}, {"softmax_scale": 0.5}, {"window_size": (1, 1)}):
            q, k, v = operands()
            agrees(forward(fresh, q, k, v, **{"softcap": 3.0, **changed}), q, k, v, **{"softcap": 3.0, **changed})
        assert fresh.flash_attn.plan_cache_stats()[:2] == (4, 5)


def test_options_that_cannot_be_hashed_are_answered(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    for _ in range(2):
        agrees(forward(ctx, q, k, v, window_size=[2, 1]), q, k, v, window_size=(2, 1))


def test_the_key_names_the_direction_and_determinism(ctx: ga.GpuContext) -> None:
    request = sound_request(causal=True)
    keys = [ctx.flash_attn.inspect_key(dataclasses.replace(request, deterministic=flag)) for flag in (False, True)]
    assert [key.direction for key in keys] == ["backward"] * 2
    assert [key.deterministic for key in keys] == [False, True]
    assert keys[0].digest != keys[1].digest
    assert keys[0].mask == "causal"


def test_a_deadline_and_a_priority_reach_backward_requests(ctx: ga.GpuContext) -> None:
    case = random_backward(0, dtype="float32", seqlens=(13, 17), head_dim=8)
    with pytest.raises(ga.DeadlineExceeded):
        ctx.flash_attn.backward(*case.inputs, **case.options, deadline=1.0).result(30.0)
    reply = ctx.flash_attn.backward(*case.inputs, **case.options, timeout=30.0, priority=3)
    assert reply.result(10.0).dq.shape == case.forward.q.shape


# The device's own options


def test_the_oracle_may_accumulate_in_float32() -> None:
    q, k, v = operands()
    with ga.open_context("mock", ga.ContextOptions(mock=ga.MockOptions(dtype="float32"))) as ctx:
        single = forward(ctx, q, k, v).out
    np.testing.assert_array_equal(single, attention_forward(q, k, v, accumulate="float32").out)
    with ga.open_context("mock") as ctx:
        np.testing.assert_allclose(forward(ctx, q, k, v).out, single, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("latency", [0.0, 0.01])
def test_a_mock_that_computes_nothing_says_so(latency: float) -> None:
    q, k, v = operands()
    options = ga.ContextOptions(mock=ga.MockOptions(compute=False, latency=latency))
    with ga.open_context("mock", options) as ctx:
        with pytest.raises(ga.MockModeError, match=r"MockOptions\(compute=False\)"):
            forward(ctx, q, k, v)
        with pytest.raises(ga.InvalidRequest):
            forward(ctx, q, k, v, softcap=-1.0)
        assert ctx.flash_attn.inspect_key(ga.FlashForward(q=q, k=k, v=v)).head_dim == 16
        assert ctx.stats()["flash_attn"].launched == 1


def test_backward_may_accumulate_in_float32_too() -> None:
    case = random_backward(3, dtype="float32", seqlens=(13, 17), head_dim=16)
    with ga.open_context("mock", ga.ContextOptions(mock=ga.MockOptions(dtype="float32"))) as ctx:
        found = ctx.flash_attn.backward(*case.inputs, **case.options).result(10.0)
    expected = attention_backward(*case.arguments, out=case.out, lse=case.lse, accumulate="float32", **case.options)
    np.testing.assert_array_equal(found.dq, expected.dq)


@pytest.mark.parametrize("compute", ["tf32", "f16", "bf16"])
def test_backward_rounds_what_it_multiplies_in_less(ctx: ga.GpuContext, compute: str) -> None:
    """dout is a factor of products too. out and lse are not, so they are not rounded."""
    case = random_backward(2, compute=compute, dtype="float32", seqlens=(13, 17), head_dim=16)
    found = ctx.flash_attn.backward(*case.inputs, **case.options, compute=compute).result(10.0)
    step = rounder({"tf32": "tf32", "f16": "wide_float16", "bf16": "bfloat16"}[compute])
    rounded = (step(array) for array in case.arguments)
    expected = attention_backward(*rounded, out=case.out, lse=case.lse, **case.options)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name).astype(np.float32))
