"""The same requests over a direct channel, a child process and a faulty channel: equal answers, equal errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import runnables
from support.service import eventually

import gpu_actors as ga
from gpu_actors.remote import Faults, Faulty, RemoteContext, Workplace, open_remote
from gpu_actors.testing import FaultPlan

SPEC: dict[str, Any] = {"num_blocks": 64, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}

Ask = Callable[[ga.GpuContext], Any]


def arrays(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def forward(ctx: ga.GpuContext) -> Any:
    q, k = arrays((2, 24, 4, 16)), arrays((2, 24, 2, 16), 1)
    return ctx.flash_attn.forward(q, k, k, causal=True, return_lse=True).result(30.0)


def forward_of_much(ctx: ga.GpuContext) -> Any:
    q = arrays((1, 700, 2, 16))  # more than fits in its record
    return ctx.flash_attn.forward(q, q, q).result(30.0)


def refused(ctx: ga.GpuContext) -> Any:
    return ctx.flash_attn.forward(arrays((1, 4, 3, 16)), arrays((1, 4, 2, 16)), arrays((1, 4, 2, 16))).result(30.0)


def cached(ctx: ga.GpuContext) -> Any:
    with ctx.kv_cache(**SPEC) as cache:
        seq = cache.create(range(20)).result(30.0)
        rows = arrays((20, 2, 16))
        length = cache.append(seq, rows, rows, tokens=range(20)).result(30.0)
        fork = cache.fork(seq).result(30.0)
        cache.truncate(fork, 5).result(30.0)
        q = arrays((2, 1, 4, 16))
        new = arrays((2, 1, 2, 16), 2)
        out = cache.attend(q, [seq, fork], k=new, v=new, expect_length=[20, 5]).result(30.0).out
        return length, cache.length(seq), cache.length(fork), cache.stats().shared_blocks, out


def stepped(ctx: ga.GpuContext) -> Any:
    with ctx.kv_cache(**SPEC, layers=3) as cache:
        seq = cache.create().result(30.0)
        outs = []
        for _ in range(2):
            with cache.step([seq], heads_q=4, rows=3).result(30.0) as step:
                for layer in range(3):
                    new = arrays((1, 3, 2, 16), layer)
                    outs.append(step.attend(layer, arrays((1, 3, 4, 16), 9), new, new))
        step = cache.step([seq], heads_q=4).result(30.0)
        step.attend(0, arrays((1, 1, 4, 16)), new[:, :1], new[:, :1])
        step.abort().result(30.0)
        return cache.length(seq), tuple(step.lengths), tuple(outs)


def moved(ctx: ga.GpuContext) -> Any:
    with ctx.kv_cache(**SPEC) as cache, ctx.kv_cache(**SPEC) as other:
        seq = cache.create().result(30.0)
        rows = arrays((500, 2, 16))  # more than fits in its record
        cache.append(seq, rows, rows).result(30.0)
        pages = cache.export_pages(seq).result(30.0)
        there = other.import_pages(pages).result(30.0)
        cache.release(pages).result(30.0)
        again = other.export_pages(there).result(30.0)
        return pages.pages, pages.k, again.k, again.checks, other.length(there), cache.stats().sequences


def outcome(ask: Ask, ctx: ga.GpuContext) -> Any:
    try:
        return ask(ctx)
    except ga.GpuActorsError as error:
        return type(error), str(error)


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize(
    "ask", [forward, forward_of_much, refused, cached, stepped, moved], ids=lambda ask: ask.__name__
)
def test_it_answers_as_a_context_of_this_process(remote: RemoteContext, ask: Ask) -> None:
    with ga.open_context("mock") as ctx:
        same(outcome(ask, remote), outcome(ask, ctx))


def test_an_out_is_the_callers_own_array(remote: RemoteContext) -> None:
    q = arrays((1, 700, 2, 16))
    for out in (np.empty_like(q), remote.empty(q.shape)):
        found = remote.flash_attn.forward(q, q, q, out=out).result(30.0)
        assert found.out is out
        np.testing.assert_array_equal(out, remote.flash_attn.forward(q, q, q).result(30.0).out)


def test_requests_on_a_sequence_take_effect_in_their_order(remote: RemoteContext) -> None:
    big, small = arrays((700, 2, 16)), arrays((1, 2, 16))
    with remote.kv_cache(**{**SPEC, "num_blocks": 4096}) as cache:
        seq = cache.create().result(30.0)
        replies, expected = [], []
        for turn in range(80):
            rows = big if turn % 8 == 0 else small
            before = expected[-1] if expected else 0
            replies.append(cache.append(seq, rows, rows, expect_length=before))
            expected.append(before + len(rows))
        assert [reply.result(30.0) for reply in replies] == expected


def test_an_append_that_is_repeated_takes_effect_once(remote: RemoteContext) -> None:
    rows = arrays((3, 2, 16))
    with remote.kv_cache(**SPEC) as cache:
        seq = cache.create().result(30.0)
        first = cache.append(seq, rows, rows, expect_length=0)
        again = cache.append(seq, rows, rows, expect_length=0)
        assert first.result(30.0) == 3
        with pytest.raises(ga.InvalidRequest, match=r"expect_length=\[0\].*\[3\]"):
            again.result(30.0)
        assert cache.length(seq) == 3
        assert cache.append(seq, rows, rows, expect_length=3).result(30.0) == 6


# Functions beside the context


def test_a_function_runs_beside_the_context(remote: RemoteContext) -> None:
    assert remote.run(runnables.describe, 1, "two").result(30.0) == ("mock", remote.generation, (1, "two"))
    big = arrays((700, 16))
    np.testing.assert_array_equal(remote.run(runnables.double, big).result(30.0), big * 2)
    q = arrays((1, 4, 2, 16))
    out = remote.run(runnables.attend, q).result(30.0)
    np.testing.assert_array_equal(out, remote.flash_attn.forward(q, q, q).result(30.0).out)
    assert remote.run(runnables.Adder(2), 3).result(30.0) == 5
    assert remote.run(functools.partial(runnables.describe), 1).result(30.0)[2] == (1,)


def test_a_function_gets_the_workers_own_cache(remote: RemoteContext) -> None:
    rows = arrays((2, 2, 16))
    with remote.kv_cache(**SPEC) as cache:
        seq = cache.create().result(30.0)
        assert remote.run(runnables.append_turns, cache, seq, rows, 5).result(30.0) == [2, 4, 6, 8, 10]
        assert cache.length(seq) == 10
    reply = remote.run(runnables.append_turns, cache, seq, rows, 1)
    with pytest.raises(ga.StaleBuffer, match="closed"):
        reply.result(30.0)


@pytest.mark.parametrize("function", [runnables.raise_error, runnables.raise_error_async])
@pytest.mark.parametrize("error", [ValueError("mine", 3), ga.CacheFull("none left"), ga.Overloaded("later", 2.5)])
def test_what_a_function_raises_arrives_as_itself(
    remote: RemoteContext, function: Callable[..., Any], error: Exception
) -> None:
    with pytest.raises(type(error)) as caught:
        remote.run(function, pickle.loads(pickle.dumps(error))).result(30.0)
    assert caught.value.args == error.args
    assert isinstance(error, ga.GpuActorsError) or "in the worker" in caught.value.__notes__[0]


@pytest.mark.parametrize("function", [runnables.raise_error, runnables.raise_error_async])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_function_cannot_end_the_worker(remote: RemoteContext, function: Callable[..., Any], error: Any) -> None:
    with pytest.raises(ga.GpuActorsError, match=type(error).__name__):
        remote.run(function, error).result(30.0)
    assert remote.run(runnables.describe).result(30.0)[1] == 1


def test_functions_that_cannot_run_are_refused(remote: RemoteContext) -> None:
    with pytest.raises(ga.InvalidRequest, match="must be callable"):
        remote.run(3).result(30.0)  # type: ignore[arg-type]
    with pytest.raises(ga.InvalidRequest, match="cache of this context, and entered"):
        remote.run(runnables.describe, remote.kv_cache(**SPEC)).result(30.0)
    with pytest.raises(ga.InvalidRequest, match="finite number"):
        remote.run(runnables.describe, timeout=float("nan")).result(30.0)
    with ga.open_context("mock") as other, other.kv_cache(**SPEC) as cache, pytest.raises(ga.InvalidRequest):
        remote.run(runnables.describe, cache).result(30.0)


def test_a_cancelled_coroutine_is_cancelled_in_the_worker(remote: RemoteContext, tmp_path: Path) -> None:
    for way in ("cancel", "timeout", "task"):
        flag = tmp_path / way

        async def ask(flag: Path = flag, way: str = way) -> None:
            reply = remote.run(runnables.wait_until_cancelled, str(flag), timeout=0.5 if way == "timeout" else None)
            await asyncio.to_thread(eventually, flag.exists)
            if way == "cancel":
                reply.cancel()
                with pytest.raises(ga.RequestCancelled):
                    await reply
            elif way == "timeout":
                with pytest.raises(ga.DeadlineExceeded):
                    await reply
            else:
                task = asyncio.create_task(reply.wait())
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        asyncio.run(ask())
        eventually(lambda flag=flag: flag.read_text() == "cancelled")


def test_draining_waits_for_functions(workplace: Workplace) -> None:
    with open_remote("mock", workplace=workplace) as ctx:
        sleeping = ctx.run(runnables.sleep, 0.3)
        with pytest.raises(ga.DeadlineExceeded):
            ctx.drain(0.02).result(30.0)
        with pytest.raises(ga.ActorStopped, match="draining"):
            ctx.run(runnables.describe).result(30.0)
        assert ctx.drain(30.0).result() is None
        assert sleeping.result(0) == 0.3
        assert ctx.health().state == "draining"
    with pytest.raises(ga.ActorStopped):
        ctx.run(runnables.describe).result(30.0)


# Workers that end


def test_a_lost_device_costs_one_generation_and_says_so(workplace: Workplace) -> None:
    plan = FaultPlan().lose_context(launch=2)
    quick = ga.RestartPolicy(backoff=0.0)
    with open_remote("mock", ga.ContextOptions(fault_plan=plan, restart=quick), workplace=workplace, name="w7") as ctx:
        cache = ctx.kv_cache(**SPEC).__enter__()
        seq = cache.create().result(30.0)
        rows = arrays((1, 2, 16))
        assert cache.append(seq, rows, rows).result(30.0) == 1
        with pytest.raises(ga.WorkerLost) as caught:
            cache.append(seq, rows, rows, expect_length=1).result(30.0)
        error = caught.value
        assert (error.worker, error.generation, error.happened) == ("w7", 1, "unknown")
        assert str(error).startswith("w7: generation 1")
        assert "fault plan" in str(error)
        assert isinstance(error, ga.ContextLost)
        again = pickle.loads(pickle.dumps(error))
        assert (again.worker, again.generation, again.happened) == ("w7", 1, "unknown")
        with pytest.raises(ga.StaleBuffer):
            cache.append(seq, rows, rows).result(30.0)
        with pytest.raises(ga.InvalidRequest, match="generation 1"):
            ctx.run(runnables.describe, cache).result(30.0)
        assert ctx.run(runnables.describe).result(30.0)[1] == ctx.generation == 2


def test_what_never_reached_a_worker_did_not_happen(workplace: Workplace) -> None:
    plan = FaultPlan().lose_context(launch=1)
    options = ga.ContextOptions(fault_plan=plan, restart=ga.RestartPolicy(max_restarts=0))
    with open_remote("mock", options, workplace=workplace) as ctx:
        q = arrays((1, 4, 2, 16))
        with pytest.raises(ga.WorkerLost) as first:
            ctx.flash_attn.forward(q, q, q).result(30.0)
        assert first.value.happened == "unknown"
        eventually(lambda: ctx.health().state == "failed")
        for ask in (lambda: ctx.flash_attn.forward(q, q, q), lambda: ctx.run(runnables.describe), ctx.probe):
            reply: ga.Reply[Any] = ask()
            with pytest.raises(ga.WorkerLost) as caught:
                reply.result(30.0)
            assert caught.value.happened == "no"


def test_nobody_waits_for_a_record_that_is_missing() -> None:
    workplace = Faulty(patience=0.2)
    quick = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
    with open_remote("mock", ga.ContextOptions(restart=quick, hang_timeout=3.0), workplace=workplace) as ctx:
        q = arrays((1, 4, 2, 16))
        expected = ctx.flash_attn.forward(q, q, q).result(30.0).out
        workplace.faults = Faults(drop=0.1)
        answered, lost = 0, []
        for _ in range(2):
            replies = [ctx.flash_attn.forward(q, q, q) for _ in range(20)]
            for reply in replies:
                try:
                    np.testing.assert_array_equal(reply.result(30.0).out, expected)
                    answered += 1
                except ga.WorkerLost as error:
                    lost.append(error.happened)
        assert workplace.dropped
        assert lost
        assert set(lost) == {"unknown"}
        assert answered + len(lost) == 40
        workplace.faults = Faults()

        def answers() -> bool:
            with contextlib.suppress(ga.WorkerLost):
                np.testing.assert_array_equal(ctx.flash_attn.forward(q, q, q).result(30.0).out, expected)
                return True
            return False

        eventually(answers)
    assert workplace.doubled
    assert workplace.overtaken
