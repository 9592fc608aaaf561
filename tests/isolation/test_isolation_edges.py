"""Isolated contexts: arguments that cannot cross, other observers, and contexts beside them."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import Any

import numpy as np
import pytest
from fakes.fault_injector import FailingActor, FaultInjector
from prometheus_client import CollectorRegistry, generate_latest
from support.service import comes_true, run_python

import gpu_actors as ga
from gpu_actors.isolation.context import IsolatedContext
from gpu_actors.metrics import ContextCollector
from gpu_actors.testing import MockClock

ACTORS = (FaultInjector, FailingActor)


def rows() -> np.ndarray[Any, Any]:
    return np.ones((1, 4, 2, 16), np.float32)


def local_actor() -> type[ga.ServiceActor]:
    class Here(ga.ServiceActor):
        label = "here"

    return Here


def main_actor() -> type[ga.ServiceActor]:
    return type("InMain", (ga.ServiceActor,), {"label": "main", "__module__": "__main__"})


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"clock": MockClock()}, "clock"),
        ({"on_event": print}, "on_event"),
        ({"actors": (local_actor(),)}, "actors"),
        ({"actors": (main_actor(),)}, "actors"),
    ],
)
def test_options_that_cannot_cross_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        ga.open_context("mock", ga.ContextOptions(**options), isolation="process").__enter__()
    assert caught.value.field == field
    assert "process" in caught.value.reason


@pytest.mark.parametrize("isolation", ["thread", 1, True])
def test_another_isolation_is_refused(isolation: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match="isolation"):
        ga.open_context("mock", isolation=isolation)


def test_what_opening_raises_is_raised_here() -> None:
    for isolation in (None, "process"):
        with pytest.raises(ga.GpuActorsError, match="cannot be used"):
            ga.open_context("cuda:99", isolation=isolation).__enter__()  # type: ignore[arg-type]


def test_messages_and_answers_that_cannot_cross_are_refused(isolated: ga.GpuContext) -> None:
    actor = isolated.actor(FaultInjector)
    with pytest.raises(ga.InvalidRequest, match="cannot cross"):
        actor.submit(("echo", lambda: 1)).result(30.0)
    with pytest.raises(ga.InvalidRequest, match="belongs to the process"):
        actor.submit(("echo", isolated)).result(30.0)
    with pytest.raises(ga.InvalidRequest, match="cannot cross"):
        isolated.actor(FailingActor).submit(0).result(30.0)
    with pytest.raises(ga.InvalidRequest, match="progress"):
        isolated.nvrtc.warm((), lambda *_: None).result(30.0)
    with pytest.raises(ga.Unsupported, match="context's process"):
        isolated.flash_attn._cell.shared.decoding
    assert actor.submit(("echo", 1)).result(30.0) == 1


class OnDevice:
    dtype, shape = np.dtype("float32"), (1, 4, 2, 16)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("its memory is not asked for")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 10, 0


class OnHost:
    """An array of a library that is known by DLPack alone."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.dtype, self.shape = array.dtype, array.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __array_namespace__(self) -> Any:
        return OnHost

    @staticmethod
    def from_dlpack(array: Any) -> OnHost:
        return OnHost(np.asarray(array))


def test_arrays_of_other_libraries(direct: ga.GpuContext, isolated: ga.GpuContext) -> None:
    q = OnHost(rows())
    for ctx in (direct, isolated):
        assert isinstance(ctx.flash_attn.forward(q, rows(), q).result(30.0).out, OnHost)
        out = OnHost(np.zeros((1, 4, 2, 16), np.float32))
        assert ctx.flash_attn.forward(q, q, q, out=out).result(30.0).out is out
        assert np.allclose(out.array, 1.0)
        with pytest.raises(ga.InvalidRequest) as caught:
            ctx.flash_attn.forward(rows(), OnDevice(), rows()).result(30.0)
        assert caught.value.field == "k"


def test_metrics_tell_of_generations_and_go_on_between_two_of_them() -> None:
    slow = ga.RestartPolicy(backoff=2.5, backoff_max=2.5)
    with ga.open_context("mock", ga.ContextOptions(actors=ACTORS, restart=slow), isolation="process") as ctx:
        registry = CollectorRegistry()
        registry.register(ContextCollector(ctx))
        ctx.flash_attn.forward(rows(), rows(), rows()).result(30.0)
        text = generate_latest(registry).decode()
        assert 'gpu_actors_ready{device="mock"} 1.0' in text
        assert 'gpu_actors_generation{device="mock"} 1.0' in text
        assert 'gpu_actors_request_seconds_count{actor="flash_attn",outcome="completed"} 1.0' in text
        assert 'gpu_actors_launches_total{actor="flash_attn"} 1.0' in text
        with pytest.raises(ga.ContextLost):
            ctx.actor(FaultInjector).submit(("now", "SIGKILL")).result(30.0)
        text = generate_latest(registry).decode()
        assert 'gpu_actors_ready{device="mock"} 0.0' in text
        assert 'gpu_actors_state{device="mock",state="degraded"} 1.0' in text
        assert 'gpu_actors_generation{device="mock"} 2.0' in text
        assert 'gpu_actors_request_errors_total{actor="fault_injector",error="ContextLost"} 1.0' in text
        assert 'gpu_actors_launches_total{actor="flash_attn"} 1.0' in text  # the counts continue from the lost process
        assert "gpu_actors_cubin_cache_events_total" in text


def test_a_forked_child_of_the_program_does_not_disturb(isolated: ga.GpuContext) -> None:
    isolated.flash_attn.forward(rows(), rows(), rows()).result(30.0)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                isolated.flash_attn.forward(rows(), rows(), rows()).result(5.0)
            except ga.ActorStopped:
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert isolated.flash_attn.forward(rows(), rows(), rows()).result(30.0).out is not None
    assert isolated.health().ready


async def test_tasks_that_the_collector_ends_cancel_their_requests(isolated: ga.GpuContext) -> None:
    before = isolated.flash_attn.stats()
    for turn in range(40):
        reply = isolated.flash_attn.forward(rows(), rows(), rows())
        waiting = reply.__await__()
        if not reply.done():
            waiting.send(None)
        cycle: list[Any] = [waiting]
        cycle.append(cycle)
        if turn % 20 == 0:
            gc.collect()
        del waiting, cycle, reply
    gc.collect()
    assert (await isolated.flash_attn.forward(rows(), rows(), rows())).out is not None

    def all_told() -> bool:
        after = isolated.flash_attn.stats()
        told = ("completed", "failed", "cancelled")
        return after.submitted - before.submitted == sum(getattr(after, n) - getattr(before, n) for n in told)

    await comes_true(all_told)


def test_an_auto_context_warns_here_and_nothing_of_isolation_is_imported_without_it() -> None:
    run_python(
        """
        import sys, warnings, gpu_actors as ga
        with ga.open_context("mock"):
            pass
        assert not [name for name in sys.modules if "isolation" in name]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with ga.open_context("auto", isolation="process") as ctx:
                kind = ctx.info.kind
        assert kind == "cuda" or [each.category for each in seen] == [ga.MockDeviceWarning], seen
        assert "cupy" not in sys.modules
        """
    )


def test_two_contexts_share_a_zygote_and_nothing_else() -> None:
    options = ga.ContextOptions(actors=(FaultInjector,), restart=ga.RestartPolicy(backoff=0.0))
    with (
        ga.open_context("mock", options, isolation="process") as one,
        ga.open_context("mock", options, isolation="process") as other,
    ):
        assert isinstance(one, IsolatedContext)
        assert isinstance(other, IsolatedContext)
        assert one.pid != other.pid
        with pytest.raises(ga.ContextLost):
            one.actor(FaultInjector).submit(("now", "SIGKILL")).result(30.0)
        assert other.actor(FaultInjector).submit(("echo", 1)).result(30.0) == 1
        assert other.generation == 1
        q = one.empty(rows().shape)
        q[...] = 1.0
        assert np.allclose(other.flash_attn.forward(q, q, q).result(30.0).out, 1.0)  # copied, as any array


async def test_the_loop_goes_on_while_the_process_stands_still() -> None:
    options = ga.ContextOptions(actors=(FaultInjector,), hang_timeout=60.0, mailbox_capacity=64)
    ctx = await ga.open_context("mock", options, isolation="process")
    assert isinstance(ctx, IsolatedContext)
    stopped = ctx.actor(FaultInjector).submit(("now", "SIGSTOP"))
    await asyncio.sleep(0.3)
    big, longest = np.zeros((1, 2048, 2, 16), np.float32), 0.0
    replies = []
    for _ in range(300):
        began = time.monotonic()
        replies.append(ctx.flash_attn.forward(big, big[:, :1], big[:, :1], timeout=20.0))
        ctx.health()
        ctx.stats()
        longest = max(longest, time.monotonic() - began)
        await asyncio.sleep(0)
    assert longest < 5.0
    assert ctx._generations.connection is not None
    ctx._generations.connection.kill()
    with pytest.raises(ga.ContextLost):
        await stopped
    found = await asyncio.gather(*(reply.wait() for reply in replies), return_exceptions=True)
    assert {type(each) for each in found} <= {ga.ContextLost, ga.Overloaded, ga.AttentionOutput}
    await ctx.aclose()
