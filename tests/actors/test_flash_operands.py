"""Operands as programs really pass them, the messages that carry them, and the plans that they share."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from support.forward import agrees, forward, normal, operands

import gpu_actors as ga
from gpu_actors.testing import check_output


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


# Odd operands that are sound


def test_subclasses_of_ndarray_are_arrays(ctx: ga.GpuContext) -> None:
    class Labelled(np.ndarray):
        pass

    q, k, v = operands()
    agrees(forward(ctx, q.view(Labelled), k, v.view(Labelled)), q, k, v)


def test_one_array_may_be_all_three_operands(ctx: ga.GpuContext) -> None:
    q, _, _ = operands()
    agrees(forward(ctx, q, q, q, causal=True), q, q, q, causal=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_values_come_out_as_the_formula_has_them(ctx: ga.GpuContext, value: float) -> None:
    q, k, v = operands()
    v[0, 3, 0, 5] = value
    result = forward(ctx, q, k, v)
    agrees(result, q, k, v)
    assert np.isfinite(result.out[1]).all()
    assert not np.isfinite(result.out[0, :, 0, 5]).any()


@pytest.mark.parametrize("compute", ["f32", "tf32", "f16", "bf16"])
def test_fp32_inputs_choose_the_precision_of_their_products(ctx: ga.GpuContext, compute: str) -> None:
    q, k, v = operands()
    result = forward(ctx, q, k, v, compute=compute)
    check_output(result.out, None, q, k, v, compute=compute)
    request = ga.FlashForward(q=q, k=k, v=v, compute=compute)
    assert ctx.flash_attn.inspect_key(request).compute == compute


# Messages, keys and plans


def test_a_message_is_the_call(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    message = ga.FlashForward(q=q, k=k, v=v, causal=True, softcap=5.0, return_lse=True)
    by_message = ctx.flash_attn.submit(message).result(30.0)
    by_call = forward(ctx, q, k, v, causal=True, softcap=5.0, return_lse=True)
    np.testing.assert_array_equal(by_message.out, by_call.out)
    np.testing.assert_array_equal(by_message.lse, by_call.lse)


def test_every_option_of_the_message_is_an_option_of_the_call() -> None:
    import dataclasses
    import inspect

    parameters = inspect.signature(ga.FlashAttnHandle.forward).parameters
    for field in dataclasses.fields(ga.FlashForward):
        given = parameters[field.name]
        if field.default is not dataclasses.MISSING:
            assert given.default == field.default, field.name
            assert given.kind is inspect.Parameter.KEYWORD_ONLY
    assert set(parameters) - {field.name for field in dataclasses.fields(ga.FlashForward)} == {
        *("self", "deadline", "timeout", "priority")
    }


def test_arguments_arrive_under_their_own_names(ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are handed on by position."""
    import dataclasses

    sent: list[ga.FlashForward] = []
    names = [field.name for field in dataclasses.fields(ga.FlashForward)]
    monkeypatch.setattr(type(ctx.flash_attn), "send", lambda self, message, *waiting: sent.append(message))
    values = {name: f"value of {name}" for name in names}
    operands_given = [values.pop(name) for name in "qkv"]
    ctx.flash_attn.forward(*operands_given, **values)
    for name in names:
        assert getattr(sent[0], name) == f"value of {name}"


def test_inspect_key_tells_without_launching(ctx: ga.GpuContext) -> None:
    q, k, v = operands(dtype=ml_dtypes.bfloat16)
    launched = ctx.stats()["flash_attn"].launched
    message = ga.FlashForward(
        q=q, k=k, v=v, causal=True, window_size=(3, 0), sinks=np.zeros(4, np.float32), softcap=2.0
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
        q=bigger.q, k=bigger.k, v=bigger.k, causal=True, window_size=(3, 0), sinks=message.sinks, softcap=9
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
