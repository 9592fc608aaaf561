"""What a KvCache refuses, and the effects of opening and closing one."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from inside.devices import MockDevice
from support.kv_cache import Rows, holds, opened, outcome, spec, wait
from support.service import eventually, eventually_freed

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock


def wrong_requests(cache: ga.KvCache, seq: ga.KvSequence, other: ga.KvSequence) -> dict[str, tuple[Any, str]]:
    rows = Rows()
    k, v = rows.new(2)
    q, (kb, vb) = rows.q(1, 2), rows.new(1, 2)
    two = np.array([0, 2], np.int32)
    rope = ga.Rope(dim=8)
    return {
        "another cache's": (cache.append(other, k, v), "seqs"),
        "no sequence": (cache.append(3, k, v), "seqs"),
        "a list of others": (cache.attend(q, [None]), "seqs[0]"),
        "no sequences": (cache.attend(q, []), "seqs"),
        "too few": (cache.attend(rows.q(2, 1), [seq]), "seqs"),
        "twice": (cache.append([seq, seq], *rows.new(2, 1)), "seqs"),
        "three axes for a list": (cache.append([seq], k, v), "k"),
        "four axes for one": (cache.append(seq, kb, vb), "k"),
        "heads": (cache.append(seq, k[:, :1], v[:, :1]), "k"),
        "v's rows": (cache.append(seq, k, v[:1]), "v"),
        "no rows of v": (cache.append(seq, k, v[:0]), "v"),
        "no v": (cache.attend(q, seq, k=kb), "v"),
        "half": (cache.append(seq, k.astype(np.float64), v.astype(np.float64)), "k"),
        "v's dtype": (cache.append(seq, k, v.astype(np.float16)), "v"),
        "bounds of one": (cache.append(seq, k, v, cu_seqlens=two), "cu_seqlens"),
        "bounds that fall": (cache.append([seq], k, v, cu_seqlens=two[::-1].copy()), "cu_seqlens"),
        "bounds of another batch": (cache.append([seq], k, v, cu_seqlens=np.array([0, 1, 2], np.int32)), "cu_seqlens"),
        "rope without rows": (cache.attend(q, seq, rope=rope), "rope"),
        "rope": (cache.append(seq, k, v, rope=3), "rope"),
        "rope's dim": (cache.append(seq, k, v, rope=ga.Rope(dim=32)), "rope.dim"),
        "positions without rope": (cache.append(seq, k, v, positions=np.zeros(2, np.int32)), "positions"),
        "positions": (cache.append(seq, k, v, rope=rope, positions=np.zeros(3, np.int32)), "positions"),
        "tables": (cache.append(seq, k, v, rope=ga.Rope(dim=8, table_rows=4)), "rope_cos"),
        "tables that were not asked for": (
            cache.append(seq, k, v, rope=rope, rope_cos=np.zeros((4, 4), "f4")),
            "rope_cos",
        ),
        "q's dtype under rope": (
            cache.attend(q.astype(np.float64), seq, k=kb, v=vb, rope=rope),
            "cache",
        ),
        "softcap": (cache.attend(q, seq, softcap=-1.0), "softcap"),
        "tokens": (cache.append(seq, k, v, tokens=[1]), "tokens"),
        "another length": (cache.append(seq, k, v, expect_length=1000), "expect_length"),
        "another length to attend": (cache.attend(q, seq, k=kb, v=vb, expect_length=1000), "expect_length"),
        "another length to read": (cache.attend(q[:, :1], seq, expect_length=1000), "expect_length"),
        "no length": (cache.append(seq, k, v, expect_length=-1), "expect_length"),
        "lengths of one": (cache.append(seq, k, v, expect_length=[0]), "expect_length"),
        "a length of many": (cache.append([seq], kb, vb, expect_length=0), "expect_length"),
        "too many lengths": (cache.append([seq], kb, vb, expect_length=[0, 0]), "expect_length"),
        "half a length": (cache.append([seq], kb, vb, expect_length=[0.5]), "expect_length[0]"),
        "tokens of letters": (cache.create("ab"), "tokens"),
        "fractions": (cache.create([0.5]), "tokens"),
        "length": (cache.truncate(seq, 6), "length"),
        "negative length": (cache.truncate(seq, -1), "length"),
        "free of nothing": (cache.free(None), "seq"),
        "fork of a list": (cache.fork([seq]), "seq"),
    }


def test_what_is_wrong_is_refused_by_name_and_changes_nothing() -> None:
    with opened() as (ctx, cache), ctx.kv_cache(**spec()) as elsewhere:
        seq, other = wait(cache.create()), wait(elsewhere.create())
        k, v = Rows().new(5)
        wait(cache.append(seq, k, v))
        before = cache.stats()
        for name, (reply, field) in wrong_requests(cache, seq, other).items():
            error = outcome(reply)
            assert isinstance(error, ga.RequestError), (name, error)
            assert error.field == field, (name, error)
        assert cache.stats() == before
        assert holds(cache, seq, k, v)
        assert ctx.stats()["kv_cache"].launched == 1
        wait(cache.free(seq))
        for reply in (cache.append(seq, k, v), cache.fork(seq), cache.free(seq), cache.attend(Rows().q(1, 1), seq)):
            with pytest.raises(ga.InvalidRequest, match="or was freed"):
                wait(reply)
        with pytest.raises(ga.InvalidRequest, match="or was freed"):
            cache.length(seq)
        with pytest.raises(ga.InvalidRequest, match="a sequence of this cache, and is one of another"):
            cache.length(other)


NO_POOLS: list[tuple[dict[str, Any], str]] = [
    *(({"num_blocks": 0}, "num_blocks"), ({"kv_heads": 0}, "kv_heads")),
    *(({"page_size": size}, "page_size") for size in (0, -1, True, "8")),
    *(({"head_dim": 513}, "head_dim"), ({"head_dim_v": 0}, "head_dim_v")),
    *(({"dtype": "int8"}, "dtype"), ({"dtype": None}, "dtype")),
    ({"k_descale": np.ones(2, np.float32)}, "k_descale"),
    ({"dtype": "float8_e4m3fn", "k_descale": np.ones(3, np.float32)}, "k_descale"),
    ({"dtype": "float8_e4m3fn", "v_descale": np.zeros(2, np.float32)}, "v_descale"),
]


def test_a_pool_that_makes_no_sense_is_refused() -> None:
    with ga.open_context("mock") as ctx:
        for changes, field in NO_POOLS:
            with pytest.raises(ga.RequestError) as caught, ctx.kv_cache(**spec(**changes)):
                pass
            assert caught.value.field == field, changes


# Opening and closing


async def test_a_cache_is_opened_and_closed_around_its_use() -> None:
    async with ga.open_context("mock") as ctx:
        cache = ctx.kv_cache(**spec())
        with pytest.raises(ga.InvalidRequest, match="must be entered first"):
            await cache.create()
        async with cache:
            seq = await cache.create()
            with pytest.raises(ga.GpuActorsError, match="entered already"):
                await cache.__aenter__()
            pool = weakref.ref(cache._find().groups[0].k_pool)
        (k, v), q = Rows().new(1), Rows().q(1, 1)
        for reply in (cache.create(), cache.fork(seq), cache.append(seq, k, v), cache.attend(q, seq), cache.free(seq)):
            with pytest.raises(ga.StaleBuffer, match="was closed"):
                await reply
        for look in (cache.stats, lambda: cache.length(seq)):
            with pytest.raises(ga.StaleBuffer, match="was closed"):
                look()
        await asyncio.to_thread(eventually_freed, pool)


async def test_a_pool_whose_opener_was_cancelled_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    allocate = MockDevice.allocate

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(30.0)
        return allocate(*arguments)

    monkeypatch.setattr(MockDevice, "allocate", slowly)
    async with ga.open_context("mock") as ctx:
        cache = ctx.kv_cache(**spec())
        task = asyncio.ensure_future(cache.__aenter__())
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        store = ctx._children.cells["kv_cache"].shared
        await asyncio.to_thread(eventually, lambda: ctx.stats()["kv_cache"].submitted == 2 and not store._caches)


def pools(ctx: ga.GpuContext) -> Any:
    return ctx._children.cells["kv_cache"].shared._caches


async def test_a_cache_is_not_entered_with_with_on_a_running_loop() -> None:
    async with ga.open_context("mock") as ctx:
        cache = ctx.kv_cache(**spec())
        with pytest.raises(ga.WouldBlock, match="use async with"), cache:
            pass
        async with cache:
            assert len(pools(ctx)) == 1
        assert not pools(ctx)


def test_a_pool_whose_opener_was_interrupted_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with ga.open_context("mock") as ctx:
        with monkeypatch.context() as patch:
            patch.setattr(ga.Reply, "result", interrupted)
            with pytest.raises(KeyboardInterrupt), ctx.kv_cache(**spec()):
                pass
        eventually(lambda: ctx.stats()["kv_cache"].completed == 2)
        assert not pools(ctx)


@pytest.mark.parametrize("how", ["it takes longer than a request may", "the task that closes is cancelled"])
async def test_a_pool_is_given_back_whatever_becomes_of_who_waits_for_that(how: str) -> None:
    late, clock = how.startswith("it takes"), MockClock()
    options = ga.ContextOptions(
        default_timeout=1.0 if late else None, max_in_flight=1, fault_plan=FaultPlan().delay(10.0, 1), clock=clock
    )
    async with ga.open_context("mock", options) as ctx:
        cache = ctx.kv_cache(**spec())
        await cache.__aenter__()
        rows = Rows().new(1)[0]
        busy = cache.append(await cache.create(), rows, rows, timeout=60.0)
        await asyncio.to_thread(eventually, lambda: ctx.stats()["kv_cache"].in_flight == 1)
        asked = ctx.stats()["kv_cache"].submitted
        closing = asyncio.ensure_future(cache.__aexit__(None, None, None))
        await asyncio.to_thread(eventually, lambda: ctx.stats()["kv_cache"].submitted > asked)
        clock.advance(5.0)
        await asyncio.sleep(0.02)
        assert not closing.done()
        if not late:
            closing.cancel()
            await asyncio.sleep(0)
        clock.advance(5.0)
        await asyncio.wait([closing])
        assert closing.cancelled() == (not late)
        assert await busy == 1
        await asyncio.to_thread(eventually, lambda: not pools(ctx))
