"""What only a worker in a process of its own can suffer."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import numpy as np
import psutil
import pytest
from fakes import beside

import gpu_actors as ga
from gpu_actors.remote import RemoteContext, open_remote

QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
OPTIONS = ga.ContextOptions(hang_timeout=1.5, restart=QUICK)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_function_that_ends_or_stops_the_process_is_one_worker_lost(number: int) -> None:
    with open_remote("mock", OPTIONS, name="w") as ctx:
        dying = ctx.run(beside.dies, number)
        beside_it = ctx.run(beside.sleeps, 30.0)
        for reply in (dying, beside_it):
            with pytest.raises(ga.WorkerLost) as caught:
                reply.result(30.0)
            assert (caught.value.worker, caught.value.generation, caught.value.happened) == ("w", 1, "unknown")
        assert ctx.run(beside.describe).result(30.0)[1] == 2


def test_a_function_that_lets_no_thread_run_counts_as_hung() -> None:
    with open_remote("mock", OPTIONS) as ctx:
        with pytest.raises(ga.WorkerLost, match="has not answered"):
            ctx.run(beside.holds_on, 30.0).result(20.0)
        assert ctx.run(beside.describe).result(30.0)[1] == 2


def test_a_function_or_a_result_that_cannot_be_pickled_is_refused() -> None:
    with open_remote("mock") as ctx:
        with pytest.raises(ga.InvalidRequest, match="cannot cross"):
            ctx.run(lambda _: 1).result(30.0)
        with pytest.raises(ga.InvalidRequest, match="cannot cross"):
            ctx.run(beside.unsendable).result(30.0)
        assert ctx.run(beside.describe).result(30.0)[1] == 1


def test_a_sequence_of_a_dead_process_is_never_anothers() -> None:
    rows = np.ones((4, 2, 16), np.float32)
    spec: dict[str, Any] = {"num_blocks": 8, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    with (
        open_remote("mock", OPTIONS) as one,
        open_remote("mock", OPTIONS) as other,
        one.kv_cache(**spec) as cache,
        other.kv_cache(**spec) as stranger,
    ):
        seq, foreign = cache.create().result(30.0), stranger.create().result(30.0)
        assert (seq.cache, seq.number, seq.generation) == (foreign.cache, foreign.number, foreign.generation)
        with pytest.raises(ga.StaleBuffer, match="another process"):
            cache.append(foreign, rows, rows).result(30.0)
        os.kill(one.pid or 0, signal.SIGKILL)
        with pytest.raises((ga.WorkerLost, ga.StaleBuffer)):
            cache.append(seq, rows, rows).result(30.0)
        one.probe(30.0).result()
        with one.kv_cache(**spec) as later:
            young = later.create().result(30.0)
            with pytest.raises(ga.StaleBuffer):
                later.append(seq, rows, rows).result(30.0)
            assert later.append(young, rows, rows, expect_length=0).result(30.0) == 4


def _kill(ctx: RemoteContext) -> None:
    generation = ctx.generation
    os.kill(ctx.pid or 0, signal.SIGKILL)
    end = time.monotonic() + 20.0
    while ctx.generation == generation or ctx.health().state != "ready":
        assert time.monotonic() < end
        time.sleep(0.005)


def test_generations_leave_nothing_behind() -> None:
    here = psutil.Process()
    big = np.ones((1 << 20,), np.float32)
    with open_remote("mock", OPTIONS) as ctx:
        for _ in range(2):
            ctx.run(beside.twice, big).result(30.0)
            _kill(ctx)
        gc.collect()  # what earlier tests left would be counted until some collection
        before = here.num_fds(), here.num_threads(), len(here.children(recursive=True))
        for _ in range(6):
            ctx.run(beside.twice, big).result(30.0)
            waiting = ctx.run(beside.sleeps, 30.0)
            _kill(ctx)
            assert isinstance(waiting.exception(), ga.WorkerLost)
        assert (here.num_fds(), here.num_threads(), len(here.children(recursive=True))) == before
        pid = ctx.pid
    assert pid is not None
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
