"""Endless values and values of terabytes are refused before anything reads through them or copies them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

HUGE: dict[str, Callable[[], Any]] = {
    "integers": lambda: np.broadcast_to(np.int32(0), (1 << 40,)),
    "a matrix": lambda: np.broadcast_to(np.float32(0), (1 << 20, 1 << 20)),
    "four axes": lambda: np.broadcast_to(np.float32(0.5), (1, 1 << 38, 1, 8)),
    "booleans": lambda: np.broadcast_to(np.True_, (1 << 41,)),
    "a range": lambda: range(1 << 40),
    "no end": lambda: itertools.repeat(1),
}
X = np.ones((1, 4, 2, 8), np.float32)
PAGES = np.ones((3, 4, 2, 8), np.float32)
ROW = X[:, :1]
HEADS = np.ones((2, 4, 8), np.float32)
LSE = np.zeros((1, 2, 4), np.float32)
TABLES: dict[str, Any] = {"block_table": np.array([[0, 1]], np.int32), "cache_seqlens": np.array([5], np.int32)}
REQUESTS: list[Any] = [
    ga.FlashForward(q=X, k=X, v=X),
    ga.FlashBackward(dout=X, q=X, k=X, v=X, out=X, lse=LSE),
    ga.PagedForward(q=ROW, k_cache=PAGES, v_cache=PAGES, **TABLES),
    ga.BatchedDecode(q=X[:, 0], k_caches=[HEADS], v_caches=[HEADS], seq_lens=np.array([3], np.int32)),
]


def error_of(reply: ga.Reply[Any]) -> BaseException | None:
    try:
        reply.result(20.0)
    except Exception as error:
        return error
    return None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", HUGE)
def test_every_field_of_a_request_is_refused_by_name(ctx: ga.GpuContext, kind: str) -> None:
    for message, field in ((sound, field) for sound in REQUESTS for field in dataclasses.fields(sound)):
        error = error_of(ctx.flash_attn.submit(dataclasses.replace(message, **{field.name: HUGE[kind]()})))
        assert isinstance(error, ga.RequestError), (field.name, error)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", HUGE)
def test_every_argument_of_a_cache_is_refused_by_name(ctx: ga.GpuContext, kind: str) -> None:
    with ctx.kv_cache(num_blocks=8, page_size=4, kv_heads=2, head_dim=8, dtype="float32") as cache:
        seq = cache.create().result(10.0)
        cache.append(seq, X[0], X[0]).result(10.0)
        calls: list[tuple[str, Callable[[Any], Any]]] = [
            *((name, lambda value, name=name: cache.attend(ROW, [seq], **{name: value})) for name in ATTEND),
            ("q", lambda value: cache.attend(value, [seq])),
            ("seqs", lambda value: cache.attend(ROW, value)),
            ("k", lambda value: cache.append(seq, value, X[0])),
            ("tokens", lambda value: cache.append(seq, X[0], X[0], tokens=value)),
            ("tokens", lambda value: cache.create(tokens=value)),
        ]
        for name, call in calls:
            error = error_of(call(HUGE[kind]()))
            assert isinstance(error, ga.RequestError), (name, error)


ATTEND = ("window_size", "softmax_scale", "softcap", "alibi_slopes", "sinks", "sink_tokens", "bias", "causal")


def test_keys_to_warm_without_an_end_are_refused(ctx: ga.GpuContext) -> None:
    error = error_of(ctx.nvrtc.warm(itertools.repeat(1)))
    assert isinstance(error, ga.InvalidRequest)
    assert error.field == "keys"
