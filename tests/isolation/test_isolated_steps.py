"""A step over the layers of a KvCache whose context is in another process: failures that only isolation has.

tests/kv/test_step_faults.py tests what ends a step in contexts of either kind.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes.fault_injector import FaultInjector
from fakes.tensor import HostTensor
from support.kv_cache import PAGE, outcome, spec, wait
from support.service import eventually
from support.steps import LAYERS, Model, error_of, model, over

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

LOST = (ga.ContextLost, ga.StaleBuffer)
QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
EACH_LAYER = pytest.mark.parametrize("layer", range(LAYERS))


@pytest.fixture(scope="module")
def context() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock", ga.ContextOptions(actors=(FaultInjector,), restart=QUICK), isolation="process") as ctx:
        yield ctx


@pytest.fixture
def one(context: ga.GpuContext) -> Iterator[Model]:
    with context.kv_cache(**spec(layers=LAYERS)) as cache:
        yield Model(context, cache)


def trap(one: Model, where: str) -> None:
    """Make the process end when it next reaches that point."""
    assert wait(one.ctx.actor(FaultInjector).submit(("trap", where, "SIGKILL"))) == where


def next_generation(one: Model, generation: int) -> None:
    """Check that a new cache works in the next process, whatever became of an old step."""
    eventually(lambda: one.ctx.generation == generation + 1 and one.ctx.health().ready)
    with one.ctx.kv_cache(**spec(layers=LAYERS)) as cache:
        Model(one.ctx, cache).check()
    assert one.ctx.generation == generation + 1


@EACH_LAYER
@pytest.mark.parametrize("where", ["layer asked", "layer done"])
def test_a_process_that_ends_in_a_layer_ends_the_step(one: Model, where: str, layer: int) -> None:
    generation = one.ctx.generation
    step, other = one.step(0), one.step(1)
    waits = one.append()
    one.attend(step, range(layer))
    trap(one, where)
    lost = error_of(lambda: one.attend(step, [layer]))
    assert type(lost) is ga.ContextLost
    assert lost.generation == generation
    assert isinstance(outcome(waits), ga.ContextLost)
    for ended in (step, other):
        assert isinstance(error_of(lambda ended=ended: one.attend(ended, [0])), ga.StaleBuffer)
        assert isinstance(outcome(ended.commit()), ga.StaleBuffer)
        assert isinstance(outcome(ended.abort()), ga.StaleBuffer)
    next_generation(one, generation)


@EACH_LAYER
def test_a_process_that_ends_between_two_layers_ends_the_step(one: Model, layer: int) -> None:
    generation, pid = one.ctx.generation, one.ctx.pid  # type: ignore[attr-defined]
    step = one.step()
    one.attend(step, range(layer))
    os.kill(pid, signal.SIGKILL)
    assert isinstance(error_of(lambda: one.attend(step, [layer])), LOST)
    with pytest.raises(ZeroDivisionError), step:
        raise ZeroDivisionError("not hidden by the end of the process")
    next_generation(one, generation)


def test_a_process_that_ends_in_a_commit_loses_the_rows(one: Model) -> None:
    generation = one.ctx.generation
    step = one.step()
    one.attend(step, range(LAYERS))
    trap(one, "asked")
    assert type(outcome(step.commit())) is ga.ContextLost
    next_generation(one, generation)


def test_a_step_of_a_lost_process_does_not_wait_for_the_next_one() -> None:
    slow = ga.RestartPolicy(backoff=1.0, backoff_max=1.0)
    with model(ga.ContextOptions(restart=slow), "process") as one:
        step, dropped = one.step(0), one.step(1)
        os.kill(one.ctx.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        eventually(lambda: one.ctx.generation == 2)
        assert isinstance(error_of(lambda: one.attend(step, [0])), ga.StaleBuffer)
        with pytest.raises(ga.StaleBuffer), step:
            pass
        del dropped
        assert one.ctx.health().state == "degraded", "they have waited for the next process"


@EACH_LAYER
def test_the_deadline_of_a_step_aborts_it_at_any_layer(one: Model, layer: int) -> None:
    step = one.step(timeout=0.5)
    one.attend(step, range(layer))
    waits = one.append()
    assert wait(waits) == 6
    one.cut(5, PAGE)
    over(one, step, ga.DeadlineExceeded)
    one.check()


def test_a_layer_ends_by_the_deadline_though_the_process_has_stopped(one: Model) -> None:
    pid = one.ctx.pid  # type: ignore[attr-defined]
    step = one.step(timeout=1.0)
    one.attend(step, [0])
    out = np.full((2, 1, 4, 16), 7.0, np.float32)
    os.kill(pid, signal.SIGSTOP)
    try:
        error = error_of(lambda: step.attend(1, one.rows.q(2, 1), *one.rows.new(2, 1), out=out))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(error, ga.DeadlineExceeded)
    over(one, step, ga.DeadlineExceeded)
    assert (out == 7.0).all(), "an answer that came too late was written"
    one.check()


def test_a_layer_that_is_interrupted_aborts_the_step(one: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    step = one.step()
    one.attend(step, [0])
    held, go_on = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        held.set()
        go_on.wait(30.0)

    def interrupted(*_: Any) -> bool:
        time.sleep(0.2)  # the process answers while the receiving thread is held
        raise KeyboardInterrupt

    out = np.full((2, 1, 4, 16), 7.0, np.float32)
    one.ctx.actor(FaultInjector).submit(("sleep", 0.1)).add_done_callback(hold)
    assert held.wait(30.0)
    with monkeypatch.context() as patch:
        patch.setattr(ga.Call, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.attend(1, one.rows.q(2, 1), *one.rows.new(2, 1), out=out)
    go_on.set()
    assert isinstance(error_of(lambda: one.attend(step, [2])), ga.LaunchError)
    assert isinstance(outcome(step.commit()), ga.StaleBuffer)
    assert wait(step.abort()) is None
    assert (out == 7.0).all(), "an answer that came too late was written"
    one.check()


async def test_layers_are_attended_to_on_the_thread_of_a_loop(one: Model) -> None:
    async with await one.begin() as step:
        others = [one.ctx.flash_attn.forward(*[one.rows.q(1, 8)] * 3) for _ in range(3)]
        one.attend(step, range(LAYERS))
    for other in others:
        await other
    assert one.cache.length(one.seqs[0]) == 6


def test_the_thread_that_receives_answers_attends_to_no_layer(one: Model) -> None:
    step = one.step()
    errors: list[BaseException] = []

    def attend(_: Any) -> None:
        try:
            one.attend(step, [0])
        except ga.WouldBlock as error:
            errors.append(error)

    one.ctx.actor(FaultInjector).submit(("sleep", 0.2)).add_done_callback(attend)
    eventually(lambda: errors)
    wait(step.abort())
    one.check()


def test_others_are_answered_while_a_layer_takes_long() -> None:
    """No thread that requests, queries and the ends of other steps need waits for the layer."""
    with model(ga.ContextOptions(fault_plan=FaultPlan().delay(1.5, 2)), "process") as one:
        step, other = one.step(0), one.step(1)
        slow = threading.Thread(target=one.attend, args=(step, [0]))
        slow.start()
        time.sleep(0.1)
        one.ctx.flash_attn.forward(*[one.rows.q(1, 8)] * 3).result(30.0)
        wait(other.abort())
        assert one.cache.length(one.seqs[1]) == PAGE
        assert slow.is_alive()
        slow.join(30.0)
        wait(step.abort())
        one.check()


def test_many_threads_have_steps_at_once(context: ga.GpuContext) -> None:
    """There are more steps than the process has threads for steps."""
    count = 40
    with context.kv_cache(**spec(layers=LAYERS, num_blocks=count)) as cache:
        seqs = wait(*[cache.create() for _ in range(count)])
        row, q = np.ones((1, 1, 2, 16), np.float32), np.ones((1, 1, 4, 16), np.float32)

        def steps(seq: ga.KvSequence) -> None:
            for _ in range(3):
                with cache.step([seq], heads_q=4).result(30.0) as step:
                    for layer in range(LAYERS):
                        step.attend(layer, q, row, row)

        threads = [threading.Thread(target=steps, args=(seq,)) for seq in seqs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert [cache.length(seq) for seq in seqs] == [3] * count


def test_a_stream_is_refused_and_the_step_goes_on(one: Model) -> None:
    step = one.step()
    q, new = one.rows.q(2, 1), one.rows.new(2, 1)
    refusal = error_of(lambda: step.attend(0, q, *new, stream=1))
    assert isinstance(refusal, ga.InvalidRequest)
    assert (refusal.field, refusal.value) == ("stream", 1)
    one.attend(step, range(LAYERS))
    assert wait(step.commit()) == [6, PAGE + 1]


def test_arrays_of_another_library_cross(one: Model) -> None:
    step = one.step()
    q, (k, v) = one.rows.q(2, 1), one.rows.new(2, 1)
    tensors = [HostTensor(array) for array in (q, k, v)]
    out = HostTensor(np.zeros_like(q))
    assert step.attend(0, *tensors, out=out) is out
    plain = step.attend(0, q, HostTensor(k), v)
    assert type(plain) is np.ndarray
    assert np.array_equal(np.from_dlpack(out), plain)
    wait(step.abort())
    one.check()


@pytest.mark.parametrize("rows", [1, 64])
def test_out_is_written_in_place_wherever_it_lies(context: ga.GpuContext, rows: int) -> None:
    """64 rows are too many to travel inside the request."""
    with context.kv_cache(**spec(layers=1, num_blocks=32)) as cache:
        seqs = wait(cache.create(), cache.create())
        rng = np.random.default_rng(0)
        q = rng.standard_normal((2, rows, 4, 16)).astype(np.float32)
        k, v = rng.standard_normal((2, 2, rows, 2, 16)).astype(np.float32)
        with cache.step(seqs, heads_q=4, rows=rows).result(30.0) as step:
            want = step.attend(0, q, k, v)
            for out in (np.zeros_like(q), context.empty(q.shape), np.zeros((3, *q.shape), np.float32)[1]):
                assert step.attend(0, q, k, v, out=out) is out
                assert out.tobytes() == want.tobytes()


@pytest.mark.parametrize("priority", [0, 5, -5])
def test_a_commit_whose_step_is_dropped_before_its_answer_is_kept(priority: int) -> None:
    with model(ga.ContextOptions(fault_plan=FaultPlan().delay(0.3, 2)), "process") as one:
        other = one.append(1)
        step = one.step(0)
        one.attend(step, range(LAYERS))
        commit = step.commit(priority=priority)
        del step
        gc.collect()
        assert wait(commit) == [6]
        assert wait(other) == PAGE + 1
        one.cut(5, PAGE)
        one.check()
