"""Failures that only a worker in its own process can have."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
from fakes import runnables

import gpu_actors as ga
from gpu_actors.remote import open_remote

QUICK = ga.RestartPolicy(max_restarts=1000, backoff=0.0)
OPTIONS = ga.ContextOptions(hang_timeout=1.5, restart=QUICK)


def test_a_function_that_ends_the_process_is_one_worker_lost() -> None:
    with open_remote("mock", OPTIONS, name="w") as ctx:
        dying = ctx.run(runnables.kill_process)
        beside_it = ctx.run(runnables.sleep, 30.0)
        for reply in (dying, beside_it):
            with pytest.raises(ga.WorkerLost) as caught:
                reply.result(30.0)
            assert (caught.value.worker, caught.value.generation, caught.value.happened) == ("w", 1, "unknown")
        assert ctx.run(runnables.describe).result(30.0)[1] == 2


def test_a_function_that_lets_no_thread_run_counts_as_hung() -> None:
    with open_remote("mock", OPTIONS) as ctx:
        with pytest.raises(ga.WorkerLost, match="has not answered"):
            ctx.run(runnables.hold_gil, 30.0).result(20.0)
        assert ctx.run(runnables.describe).result(30.0)[1] == 2


def test_a_function_or_a_result_that_cannot_be_pickled_is_refused() -> None:
    with open_remote("mock") as ctx:
        with pytest.raises(ga.InvalidRequest, match="cannot cross"):
            ctx.run(lambda _: 1).result(30.0)
        with pytest.raises(ga.InvalidRequest, match="cannot cross"):
            ctx.run(runnables.return_lock).result(30.0)
        assert ctx.run(runnables.describe).result(30.0)[1] == 1


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
