"""The caller's thread recognises a request that was made before and mistakes no other request for it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.service import eventually, rows

import gpu_actors as ga
from gpu_actors.planning.plan import PlanCache


def recognised(reply: ga.Reply[Any]) -> bool:
    reply.result(30.0)
    return reply._call.prepared is not None


def test_a_repeated_request_is_recognised() -> None:
    with ga.open_context("mock") as mock:
        q = rows(3)
        assert not recognised(mock.flash_attn.forward(q, q, q, causal=True))
        before = mock.flash_attn.plan_cache_stats()
        assert recognised(mock.flash_attn.forward(q, q, q, causal=True))
        assert recognised(mock.flash_attn.forward(q + 1, q, q, causal=True)), "data does not matter"
        after = mock.flash_attn.plan_cache_stats()
        assert (after.hits - before.hits, after.misses) == (2, before.misses), "counted once each"


def test_a_recognised_request_is_answered_like_the_first(mock: ga.GpuContext) -> None:
    q, other = rows(4), rows(4)[..., ::-1].copy()
    first = mock.flash_attn.forward(q, other, q, return_lse=True, window_size=(1, 0)).result(30.0)
    again = mock.flash_attn.forward(q, other, q, return_lse=True, window_size=(1, 0))
    assert recognised(again)
    np.testing.assert_array_equal(again.result().out, first.out)
    np.testing.assert_array_equal(again.result().lse, first.lse)


@pytest.mark.parametrize(
    ("option", "sound", "equal"),
    [
        ("softmax_scale", 1.0, True),
        ("causal", True, 1),
        ("causal", False, np.float32(0)),
        ("sink_tokens", 0, False),
        ("window_size", (3, 0), (3.0, 0.0)),
        ("return_lse", True, 1),
    ],
)
def test_what_is_refused_is_not_taken_for_its_equal(mock: ga.GpuContext, option: str, sound: Any, equal: Any) -> None:
    q = rows(5)
    for given in (sound, sound, sound, equal, sound, equal):
        reply = mock.flash_attn.forward(q, q, q, **{option: given})
        if given is not equal:
            reply.result(30.0)
            continue
        with pytest.raises(ga.InvalidRequest, match=option):
            reply.result(30.0)


@pytest.mark.parametrize("operand", ["out", "sinks", "alibi_slopes", "bias"])
def test_a_request_with_more_operands_is_left_to_the_actor(mock: ga.GpuContext, operand: str) -> None:
    q = rows(6)
    shape = {"out": q.shape, "sinks": (1,), "alibi_slopes": (1,), "bias": (1, 1, 6, 6)}[operand]
    for _ in range(3):
        options: dict[str, Any] = {operand: np.zeros(shape, np.float32)}
        assert not recognised(mock.flash_attn.forward(q, q, q, **options))
        mock.flash_attn.forward(q, q, q).result(30.0)
        options = {operand: None}
        mock.flash_attn.forward(q, q, q, **options).result(30.0)


class Strange:
    """An option that raises whenever it is used."""

    def __hash__(self) -> int:
        raise ZeroDivisionError

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError


@pytest.mark.parametrize("value", [[], Strange(), np.ones(2)], ids=["list", "strange", "array"])
def test_what_cannot_be_looked_up_is_reported_by_the_reply(mock: ga.GpuContext, value: Any) -> None:
    reply = mock.flash_attn.forward(rows(), rows(), rows(), softmax_scale=value)
    with pytest.raises(ga.InvalidRequest):
        reply.result(30.0)
    assert mock.flash_attn.state == "running"


def test_looking_at_a_plan_does_not_keep_it_and_using_it_does() -> None:
    cache: PlanCache[str] = PlanCache(2)
    for name in "ab":
        cache.add(name, name.upper())
    planned = cache.peek("a")
    assert planned is not None
    assert cache.peek("c") is None
    assert cache.stats() == (0, 2, 0, 2)
    assert cache.use(planned) == "A"
    cache.add("c", "C")
    assert (cache.peek("b"), cache.find("a")) == (None, "A"), "used later than b"
    assert cache.stats() == (2, 3, 1, 2)


def test_a_plan_that_was_forgotten_meanwhile_can_still_be_used() -> None:
    cache: PlanCache[str] = PlanCache(1)
    cache.add("a", "A")
    planned = cache.peek("a")
    cache.add("b", "B")
    assert planned is not None
    assert cache.use(planned) == "A"
    assert cache.stats() == (1, 2, 1, 1)
    cache.add("a", "A again")
    assert (cache.find("a"), cache.find("b")) == ("A again", None)


class Forgotten(str):
    """A signature whose look-up makes the cache forget every plan."""

    __slots__ = ("cache",)
    cache: PlanCache[str]

    def __hash__(self) -> int:
        self.cache.forget()
        return hash(str(self))


def test_what_callers_wrote_is_forgotten_with_the_plans() -> None:
    cache: PlanCache[str] = PlanCache(2)
    cache.add("a", "A")
    planned = cache.peek("a", "as called")
    assert cache.called == {"as called": planned}
    cache.forget()
    assert cache.called == {}
    cache.add("a", "A")
    meanwhile = Forgotten("a")
    meanwhile.cache = cache
    assert cache.peek(meanwhile, "as called") is not None
    assert cache.called == {}, "forgotten while it was looked up"


def test_what_callers_wrote_takes_no_more_room_than_the_plans() -> None:
    cache: PlanCache[str] = PlanCache(2)
    cache.add("a", "A")
    for call in range(7):
        assert cache.peek("a", call) is cache.called[call]
        assert len(cache.called) <= 2


def test_a_call_is_told_from_one_of_other_options_or_arrays(mock: ga.GpuContext) -> None:
    q = rows(6)
    given: list[tuple[Any, dict[str, Any]]] = [
        (q, {}),
        (q, {"causal": True}),
        (q, {"causal": False}),
        (q, {"softmax_scale": 1.0}),
        (q, {"softcap": 1.0}),
        (q, {"causal": True, "alignment": "top_left"}),
        (q, {"alignment": "top_left", "causal": True}),
        (q[:, :3], {"causal": True}),
        (q[:, ::2], {"causal": True}),
        (q[:, ::2], {"causal": True, "dropout_p": 0.5, "dropout_seed": 3}),
        (q[:, ::2], {"causal": True, "dropout_p": 0.5, "dropout_seed": 4}),
    ]
    first = [mock.flash_attn.forward(each, q, q, **options).result(30.0).out for each, options in given]
    for _ in range(3):
        for (each, options), expected in zip(given, first, strict=True):
            reply = mock.flash_attn.forward(each, q, q, **options)
            assert recognised(reply)
            np.testing.assert_array_equal(reply.result().out, expected)


def test_others_may_look_while_the_actor_adds_and_forgets() -> None:
    cache: PlanCache[str] = PlanCache(8)
    ended = threading.Event()
    errors: list[BaseException] = []
    seen = 0

    def look() -> None:
        nonlocal seen
        try:
            while not ended.is_set():
                for signature in range(13):
                    planned = cache.peek(signature)
                    assert planned is None or planned.plan == f"plan {signature}"
                    seen += planned is not None
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for turn in range(5_000):
        signature = turn * 7919 % 13
        if cache.find(signature) is None:
            cache.add(signature, f"plan {signature}")
    eventually(lambda: seen)
    ended.set()
    thread.join()
    assert not errors
    stats = cache.stats()
    assert (stats.hits + stats.misses, stats.entries) == (5_000, 8)
