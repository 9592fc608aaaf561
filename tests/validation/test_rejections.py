"""Requests that cannot be answered as asked: each names its field, the value, what would be accepted, and the nearest.

A request is refused by its reply, never by the call, and the actor that checks it stays unharmed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.cache_rejections import CASES as CACHE_CASES
from cases.cache_rejections import cached, decode, paged
from cases.rejections import CASES as PLAIN_CASES
from cases.rejections import F8_WIDE, array, backward, dense, fp8, ints, varlen
from support.service import eventually

import gpu_actors as ga

CASES = PLAIN_CASES | CACHE_CASES
# Faults that `inspect_key` cannot see, because it does not read data.
OF_THE_DATA = ("must begin with 0", "must not fall", "number of rows", "longest sequence", "in [0, 184467")
OF_THE_DATA += ("in the pool", "pool: ", "room for, ", "must not be negative", "rows in the cache, ", "of the cache: ")


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0, "a request cost the actor its life"
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 0)


@pytest.mark.parametrize("name", CASES)
def test_a_request_that_cannot_be_answered_is_refused_by_name(ctx: ga.GpuContext, name: str) -> None:
    case = CASES[name]
    launched = ctx.stats()["flash_attn"].launched
    with pytest.raises(ga.RequestError) as caught:
        ctx.flash_attn.submit(case.request).result(30.0)
    error = caught.value
    assert type(error) is case.error
    assert (error.field, error.value) == (case.field, case.value)
    assert case.reason in error.reason
    assert str(error).startswith(f"{case.field}={case.value!r}: ")
    if isinstance(error, ga.Unsupported):
        assert error.nearest == case.nearest
        assert f"(nearest supported: {case.nearest!r})" in str(error)
    assert ctx.stats()["flash_attn"].launched == launched, "refused before any launch"
    if not any(reason in case.reason for reason in OF_THE_DATA):
        with pytest.raises(case.error) as caught:
            ctx.flash_attn.inspect_key(case.request)
        assert caught.value.field == case.field


def test_fp8_is_refused_below_hopper() -> None:
    request = fp8(**{name: array(2, 4, 2, 8, dtype=F8_WIDE) for name in "qkv"})
    reason = "fp8 attention needs sm_90a or newer, and sm_89 is older"
    options = ga.ContextOptions(arch="sm_89")
    with ga.open_context("mock", options) as ctx, pytest.raises(ga.Unsupported, match=reason) as caught:
        ctx.flash_attn.submit(request).result(30.0)
    assert (caught.value.field, caught.value.nearest) == ("q", "bfloat16")


def test_gradients_that_no_kernel_computes_are_unsupported_where_kernels_run() -> None:
    wide = {name: array(1, 4, 1, 513) for name in ("q", "k", "v", "out", "dout")}
    with ga.open_context("emulated") as ctx:
        with pytest.raises(ga.Unsupported) as caught:
            ctx.flash_attn.submit(backward(**wide, lse=array(1, 1, 4))).result(10.0)
        assert ctx.flash_attn.restarts == 0
    assert (caught.value.field, caught.value.value, caught.value.nearest) == ("head_dim", 513, 512)


# Operands as real programs pass them


ODD = {
    "big-endian": array(2, 4, 4, 8, dtype=">f4"),
    "objects": array(2, 4, 4, 8, dtype=object),
    "strings": array(2, 4, 4, 8, dtype="U4"),
    "records": array(2, 4, 4, 8, dtype=[("x", "f4")]),
    "complex": array(2, 4, 4, 8, dtype=np.complex64),
    "dates": array(2, 4, 4, 8, dtype="M8[s]"),
    "masked": np.ma.zeros((2, 4, 4, 8), np.float32),
    "lists": [[[[0.0] * 8] * 4] * 4] * 2,
    "numbers": 3.0,
    "bytes": b"0123",
    "zero axes": np.float32(3.0),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_operands_are_refused_by_name(ctx: ga.GpuContext, name: str) -> None:
    sound = dense(k=array(2, 4, 4, 8), v=array(2, 4, 4, 8))
    for field in "qkv":
        with pytest.raises(ga.RequestError) as caught:
            ctx.flash_attn.submit(dataclasses.replace(sound, **{field: ODD[name]})).result(30.0)
        assert caught.value.field == field


def test_out_must_be_writeable_and_apart_from_the_operands_in_every_request(ctx: ga.GpuContext) -> None:
    """The second request finds the plan of the first and must be checked all the same."""
    sound = dense(v=array(2, 6, 2, 8))
    for _ in range(2):
        sealed = array(2, 4, 4, 8)
        sealed.flags.writeable = False
        with pytest.raises(ga.InvalidRequest, match="must be writeable"):
            ctx.flash_attn.submit(dataclasses.replace(sound, out=sealed)).result(30.0)
        with pytest.raises(ga.InvalidRequest, match="must not share memory with q"):
            ctx.flash_attn.submit(dataclasses.replace(sound, out=sound.q)).result(30.0)
        base = array(2, 16, 4, 8)
        overlapping = dataclasses.replace(sound, q=base[:, :4], out=base[:, 3:7])
        with pytest.raises(ga.InvalidRequest, match="must not share memory with q"):
            ctx.flash_attn.submit(overlapping).result(30.0)
        out = array(2, 4, 4, 8)
        assert ctx.flash_attn.submit(dataclasses.replace(sound, out=out)).result(30.0).out is out


def test_what_depends_on_the_data_is_checked_in_every_request(ctx: ga.GpuContext) -> None:
    ctx.flash_attn.submit(varlen()).result(30.0)
    ctx.flash_attn.submit(dense(dropout_p=0.5, dropout_seed=3)).result(30.0)
    for _ in range(2):
        with pytest.raises(ga.InvalidRequest, match="must begin with 0"):
            ctx.flash_attn.submit(varlen(cu_seqlens_q=ints(1, 1, 4))).result(30.0)
        for seed in (-1, 1 << 64, "x", 0.0, False, array(2)):
            for request in (dense, backward):
                with pytest.raises(ga.InvalidRequest, match="must be an int in"):
                    ctx.flash_attn.submit(request(dropout_p=0.5, dropout_seed=seed)).result(30.0)
                with pytest.raises(ga.InvalidRequest, match="must be an int in"):
                    ctx.flash_attn.inspect_key(request(dropout_p=0.5, dropout_seed=seed))


def test_bounds_that_wrap_around_in_32_bits_are_no_lengths(ctx: ga.GpuContext) -> None:
    """Five steps of 2^32 / 5 wrap around to the start: every 32-bit difference looks like a valid length."""
    steps = np.cumsum([0] + [((1 << 32) + 4) // 5] * 4 + [0]).astype(np.int64)
    steps[-1] = (1 << 32) + 4
    bounds = steps.astype(np.uint32).view(np.int32)
    assert (np.diff(bounds) >= 0).all()
    assert int(bounds[-1]) == 4
    request = varlen(cu_seqlens_q=bounds, cu_seqlens_k=ints(0, 1, 2, 3, 4, 6), max_seqlen_q=(1 << 30) - 1)
    with pytest.raises(ga.RequestError) as caught:
        ctx.flash_attn.submit(request).result(30.0)
    assert (caught.value.field, caught.value.reason[:13]) == ("cu_seqlens_q", "must not fall")


# Other values that programs pass


class Hostile:
    """Raises in each of its methods."""

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class HostileArray:
    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("no shape")


class Impostor:
    shape = (2, 4, 4, 8)
    dtype = "float32"


# `tests/properties` has more common values for every option, and other arrays for every array.
GARBAGE: list[Any] = [
    *(10**400, -(10**400), 1e308, 1j, "causal", b"x", {1: 2}, set(), ..., np.int64(1), np.array([]), range(4)),
    *(np.zeros((2, 4, 4, 8), dtype) for dtype in (">f4", object, "U3", [("a", "f4")])),
    *(
        ints(0, 4),
        ints(0, (1 << 31) - 1),
        Hostile(),
        HostileArray(),
        Impostor(),
        type,
        np.dtype("f4"),
        memoryview(b"a"),
    ),
]
SOUND = {
    "dense": dense(dropout_p=0.5, causal=True, window_size=(2, 2), sink_tokens=1, return_lse=True),
    "varlen": varlen(),
    "fp8": fp8(q_descale=array(2, 2)),
    "backward": backward(dropout_p=0.5, bias=array(1, 4, 4, 6), sinks=array(4), deterministic=True),
    "paged": paged(),
    "cached": cached(),
    "decode": decode(),
}


def refusal(reply: ga.Reply[Any]) -> ga.RequestError | None:
    """The error of a refused request, or None if it is answered. Other errors are raised."""
    try:
        reply.result(30.0)
    except ga.RequestError as error:
        return error
    return None


@pytest.mark.parametrize("name", SOUND)
def test_no_value_of_any_field_harms_the_actor(ctx: ga.GpuContext, name: str) -> None:
    """With any garbage in any field, a valid request is answered or refused by a field's name."""
    fields = [field.name for field in dataclasses.fields(SOUND[name])]
    assert refusal(ctx.flash_attn.submit(SOUND[name])) is None
    refused = 0
    logging.disable()
    for field in fields:
        for value in GARBAGE:
            error = refusal(ctx.flash_attn.submit(dataclasses.replace(SOUND[name], **{field: value})))
            if error is not None:
                refused += 1
                assert error.field.partition("[")[0] in {*fields, "head_dim", "head_dim_v", "seqlen_q", "seqlen_k"}
                assert str(error)
    logging.disable(logging.NOTSET)
    assert refused > len(fields) * len(GARBAGE) // 2
    assert ctx.flash_attn.restarts == 0


def test_an_operand_whose_own_code_raises_is_refused_and_logged(
    ctx: ga.GpuContext, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(str):
        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError("in __eq__")

        __hash__ = str.__hash__

    reason = "could not be read, it raised ZeroDivisionError"
    with caplog.at_level(logging.WARNING, "gpu_actors"), pytest.raises(ga.InvalidRequest, match=reason) as caught:
        ctx.flash_attn.submit(dense(alignment=Raising("bottom_right"))).result(30.0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.field, caught.value.value) == ("message", "FlashForward")
    assert "in __eq__" in caplog.text, "with its traceback"
