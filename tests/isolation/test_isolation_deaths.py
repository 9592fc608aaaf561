"""When a context's process ends, stops or loses its device, each request of the program gets one typed answer."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fakes.fault_injector import FaultInjector
from inside.handles import gpu_context
from support.service import eventually

import gpu_actors as ga
from gpu_actors.isolation import generations

# Seconds of silence after which a process counts as hung in these tests, enough for a busy machine.
HANG = 1.5

QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
OPTIONS = ga.ContextOptions(actors=(FaultInjector,), hang_timeout=HANG, restart=QUICK)
WAYS = ("SIGKILL", "os._exit", "SIGSTOP")
STEPS = ("read", "asked", "answered", "packed", "half sent", "sent")
# By default each step and each way at least once.
SAMPLE = {*zip(STEPS, ("SIGKILL", "os._exit") * 3, strict=True), ("half sent", "SIGSTOP")}
DEATHS = [
    pytest.param(step, way, marks=() if (step, way) in SAMPLE else pytest.mark.sweep) for step in STEPS for way in WAYS
]


def rows(value: float = 1.0, heads: int = 2) -> np.ndarray[Any, Any]:
    return np.full((1, 4, heads, 16), value, np.float32)


@pytest.fixture(scope="module")
def context() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock", OPTIONS, isolation="process") as ctx:
        yield ctx


def submit(ctx: ga.GpuContext, *message: object, **options: Any) -> ga.Reply[Any]:
    return ctx.actor(FaultInjector).submit(message, **options)


def answers(ctx: ga.GpuContext) -> None:
    q = rows()
    assert np.allclose(ctx.flash_attn.forward(q, q, q).result(30.0).out, 1.0)


@pytest.mark.parametrize(("step", "way"), DEATHS)
def test_a_death_at_any_step_of_a_request_is_one_context_lost(context: ga.GpuContext, step: str, way: str) -> None:
    generation = context.generation
    told: list[ga.Reply[Any]] = []
    try:
        assert submit(context, "trap", step, way).result(30.0) == step
    except ga.ContextLost:  # these traps may hit the answer to the trap's own request
        assert step in ("half sent", "packed", "sent")
    replies = [context.flash_attn.forward(rows(), rows(), rows()) for _ in range(3)]
    for reply in replies:
        reply.add_done_callback(told.append)
    lost: list[ga.ContextLost] = []
    for reply in replies:
        try:
            assert np.allclose(reply.result(30.0).out, 1.0)
        except ga.ContextLost as error:
            lost.append(error)
    assert all(error.generation >= generation and "generation" in str(error) for error in lost)
    assert lost or step in ("sent", "half sent", "packed")
    assert len(told) == 3
    answers(context)
    assert context.generation > generation
    assert context.health().ready


@pytest.mark.parametrize("way", WAYS)
def test_a_death_in_the_middle_of_a_request(context: ga.GpuContext, way: str) -> None:
    generation = context.generation
    sleeping, dying = submit(context, "sleep", 0.05), submit(context, "now", way)
    behind = submit(context, "echo", 1)
    assert sleeping.result(30.0) == 0.05
    for reply in (dying, behind):
        with pytest.raises(ga.ContextLost) as caught:
            reply.result(30.0)
        assert caught.value.generation == generation
    answers(context)
    assert context.generation == generation + 1


def test_everything_unanswered_is_told_at_once_though_the_next_process_takes_longer() -> None:
    slow = ga.RestartPolicy(backoff=1.0, backoff_max=1.0)
    options = ga.ContextOptions(restart=slow, mock=ga.MockOptions(latency=30.0), max_in_flight=2)
    with ga.open_context("mock", options, isolation="process") as ctx:
        replies = [ctx.flash_attn.forward(rows(), rows(), rows()) for _ in range(64)]
        while not ctx.stats()["flash_attn"].in_flight:
            ctx.probe(0.0)
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(ctx.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        for reply in replies:
            with pytest.raises(ga.ContextLost):
                reply.result(10.0)
        assert time.monotonic() - began < 0.9
        health = ctx.health()
        assert (health.state, health.ready, health.generation) == ("degraded", False, 2)
        assert "being replaced" in health.reason
        stats = ctx.stats()["flash_attn"]
        assert stats.errors["ContextLost"] == 64
        waiting = ctx.flash_attn.forward(rows(), rows(), rows())
        assert ctx.stats()["flash_attn"].queued == 1
        assert waiting.cancel()
        with pytest.raises(ga.DeadlineExceeded):
            ctx.flash_attn.forward(rows(), rows(), rows(), timeout=0.05).result(10.0)


def test_what_is_asked_of_the_next_generation_is_answered_by_it() -> None:
    """The request is made when the loss is logged, before the lost generation's requests are answered."""
    asked: list[ga.Reply[Any]] = []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("context.lost"):
                assert ctx.generation == 2
                # On another thread, because requests of the channel's thread always wait.
                asking = threading.Thread(target=lambda: asked.append(ctx.flash_attn.forward(rows(), rows(), rows())))
                asking.start()
                asking.join()

    told, handler = logging.getLogger("gpu_actors.trace"), Asking()
    told.addHandler(handler)
    try:
        with ga.open_context("mock", OPTIONS, isolation="process") as ctx:
            with pytest.raises(ga.ContextLost):
                submit(ctx, "now", "SIGSTOP").result(30.0)
            eventually(lambda: asked)
            assert np.allclose(asked[0].result(30.0).out, 1.0)
    finally:
        told.removeHandler(handler)
    assert len(asked) == 1


def test_caches_and_sequences_of_a_lost_generation_are_stale(context: ga.GpuContext) -> None:
    spec: dict[str, Any] = {"num_blocks": 8, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    with context.kv_cache(**spec) as cache:
        seq = cache.create().result(30.0)
        assert cache.append(seq, rows()[0], rows()[0]).result(30.0) == 4
        assert cache.length(seq) == 4
        with pytest.raises(ga.ContextLost):
            submit(context, "now", "SIGKILL").result(30.0)
        for stale in (cache.append(seq, rows()[0], rows()[0]), cache.create(), cache.attend(rows(), [seq])):
            with pytest.raises(ga.StaleBuffer):
                stale.result(30.0)
        with pytest.raises(ga.StaleBuffer):
            cache.length(seq)
        with context.kv_cache(**spec) as fresh:
            own = fresh.create().result(30.0)
            assert fresh.append(own, rows()[0], rows()[0]).result(30.0) == 4
            with pytest.raises(ga.StaleBuffer):
                fresh.append(seq, rows()[0], rows()[0]).result(30.0)
            with pytest.raises((ga.StaleBuffer, ga.InvalidRequest)):
                fresh.length(seq)


def test_an_allowance_that_is_used_up_fails_the_context() -> None:
    options = ga.ContextOptions(actors=(FaultInjector,), restart=ga.RestartPolicy(max_restarts=1, backoff=0.0))
    with ga.open_context("mock", options, isolation="process") as ctx:
        ended: list[ga.Terminated] = []
        ctx.flash_attn.watch(lambda terminated: 1 / 0)
        ctx.flash_attn.watch(ended.append)
        for _ in range(2):
            with pytest.raises(ga.ContextLost):
                submit(ctx, "now", "SIGKILL").result(30.0)
        with pytest.raises(ga.ContextLost, match="no process follows"):
            ctx.flash_attn.forward(rows(), rows(), rows()).result(30.0)
        health = ctx.health()
        assert (health.state, health.ready) == ("failed", False)
        eventually(lambda: [type(each.error) for each in ended] == [ga.ContextLost])


def test_shared_arrays_outlive_the_process(context: ga.GpuContext) -> None:
    shared, out = context.empty((1, 300, 2, 16)), context.empty((1, 300, 2, 16))
    shared[...], out[...] = 3.0, 0.0
    with pytest.raises(ga.ContextLost):
        submit(context, "now", "os._exit").result(30.0)
    reply = context.flash_attn.forward(shared, shared, shared, out=out).result(30.0)
    assert reply.out is out
    assert np.allclose(out, 3.0)


# One way to end a process stands for all.
@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_ends_or_stops_as_it_opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str) -> None:
    monkeypatch.setitem(generations._OPENING, "mock", 1.5)
    flag = tmp_path / "die"
    monkeypatch.setenv("TEST_DIE_IN_OPEN", str(flag))
    flag.write_text(way)
    with pytest.raises(ga.GpuActorsError, match="could not open"):
        ga.open_context("mock", OPTIONS, isolation="process").__enter__()
    assert not flag.exists()
    with ga.open_context("mock", OPTIONS, isolation="process") as ctx:
        answers(ctx)
        flag.write_text(way)  # the next process ends too, and the third one answers
        with pytest.raises(ga.ContextLost):
            submit(ctx, "now", way).result(30.0)
        answers(ctx)
        assert ctx.generation == 2
        assert not flag.exists()


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_does_not_let_itself_be_closed(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(gpu_context, "_CLOSE_SECONDS", 1.0)
    with ga.open_context("mock", OPTIONS, isolation="process") as ctx:
        assert submit(ctx, "trap", "closing", way).result(30.0) == "closing"
        process = psutil.Process(ctx.pid)  # type: ignore[attr-defined]
        began = time.monotonic()
    assert time.monotonic() - began < 10.0
    assert not psutil.wait_procs([process], 5.0)[1]


def _generations(count: int) -> None:
    with ga.open_context("mock", OPTIONS, isolation="process") as ctx:
        answers(ctx)
        me = psutil.Process()
        before, threads = me.num_fds(), me.num_threads()
        big = np.ones((1, 4096, 2, 16), np.float32)
        resident = 0
        for turn in range(count):
            replies = [submit(ctx, "echo", big) for _ in range(4)] + [submit(ctx, "now", WAYS[turn % 2], big)]
            for reply in replies[:4]:
                try:
                    reply.result(30.0)
                except ga.ContextLost:
                    pass
            with pytest.raises(ga.ContextLost):
                replies[4].result(30.0)
            assert submit(ctx, "echo", 5).result(30.0) == 5
            if turn == min(count - 1, 4):
                resident = me.memory_info().rss
        assert me.num_fds() <= before  # fewer if the start was still ending at the first count
        assert me.num_threads() <= threads
        assert me.memory_info().rss - resident < 16 << 20
        pid = ctx.pid  # type: ignore[attr-defined]
        family = [child for parent in psutil.Process().children() for child in parent.children()]
        assert [child.pid for child in family if child.ppid() == psutil.Process(pid).ppid()].count(pid) == 1
        assert ctx._generations.launcher.arena.used() < 3 * big.nbytes  # type: ignore[attr-defined]
    eventually(lambda: not psutil.pid_exists(pid))


def test_generations_leave_nothing_behind() -> None:
    _generations(4)


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_fifty_generations_leave_nothing_behind() -> None:
    _generations(50)


_PROGRAM = """
import time
import gpu_actors as ga
from fakes.fault_injector import FaultInjector
options = ga.ContextOptions(actors=(FaultInjector,), hang_timeout=100.0)
with (
    ga.open_context("mock", options, isolation="process") as running,
    ga.open_context("mock", options, isolation="process") as stopped,
):
    stopped.actor(FaultInjector).submit(("now", "SIGSTOP"))
    print(running.pid, stopped.pid, flush=True)
    time.sleep(100)
"""


def test_no_process_outlives_the_program_that_is_killed() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1] / "lib"), str(Path(__file__).parents[2])])
    run = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert run.stdout is not None
    running, stopped = (psutil.Process(int(pid)) for pid in run.stdout.readline().split())
    family = [running, stopped, *psutil.Process(run.pid).children()]
    eventually(lambda: stopped.status() == psutil.STATUS_STOPPED)
    run.kill()
    run.wait()
    run.stdout.close()
    gone, alive = psutil.wait_procs(family, timeout=10.0)
    assert not alive
    assert len(gone) == 3


async def test_a_task_that_waits_in_the_loop_is_told(context: ga.GpuContext) -> None:
    tasks = [asyncio.ensure_future(context.flash_attn.forward(rows(), rows(), rows()).wait()) for _ in range(4)]
    with pytest.raises(ga.ContextLost):
        await submit(context, "now", "SIGKILL")
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, ga.AttentionOutput | ga.ContextLost) for each in found)
    await asyncio.to_thread(answers, context)
