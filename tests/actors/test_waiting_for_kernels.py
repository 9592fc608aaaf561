"""Requests that wait for their kernel: one compilation for all, off every mailbox, and an answer for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from inside.devices import Kernel
from support.service import Gate, ask, eventually, has_handled, rows
from support.supervision import break_down

import gpu_actors as ga
from gpu_actors.actors import nvrtc
from gpu_actors.testing import MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end")


class Compilations(Gate):
    """Holds compilations back until it is opened. They end with `outcome`; `compiled` holds the variant of each."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome: BaseException | None = None
        self.compiled: list[Any] = []


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilations]:
    """Compilations on the mock device that end when the gate is opened."""
    gate = Compilations()

    def make(workshop: Any, variant: Any, for_device: bool) -> Kernel:
        gate.compiled.append(variant)
        gate()
        if gate.outcome is not None:
            raise gate.outcome
        return Kernel("entry", None)

    monkeypatch.setattr(nvrtc._Workshop, "_make", make)
    yield gate
    gate.open()


COMPILING = ga.ContextOptions(compile_on_mock=True, drain_timeout=2.0)


def test_requests_of_one_kernel_wait_for_one_compilation_and_others_go_on(compiling: Compilations) -> None:
    with ga.open_context("mock", COMPILING) as ctx:
        waiting = [ask(ctx) for _ in range(5)]
        assert compiling.entered.wait(30.0)
        refused = ask(ctx, softcap=-1.0)
        with pytest.raises(ga.InvalidRequest):
            refused.result(30.0)
        assert not any(reply.done() for reply in waiting)
        compiling.open()
        for reply in waiting:
            assert reply.result(30.0).out.shape == (1, 1, 1, 8)
        assert len(compiling.compiled) == 1
        ask(ctx).result(30.0)
        assert len(compiling.compiled) == 1


def test_actors_and_keys_of_one_variant_wait_for_one_compilation(compiling: Compilations) -> None:
    q, k = np.zeros((1, 64, 4, 64), np.float16), np.zeros((1, 64, 2, 64), np.float16)
    requests = [ga.FlashForward(q, k[:, :, :heads], k[:, :, :heads]) for heads in (1, 2)]
    options = ga.ContextOptions(arch="sm_80", compile_on_mock=True, drain_timeout=2.0)
    with ga.open_context("mock", options) as ctx:
        keys = [ctx.flash_attn.inspect_key(request) for request in requests]
        assert keys[0] != keys[1]  # they differ in the ratio of heads, on which no macro depends
        waiting: list[ga.Reply[Any]] = [ctx.flash_attn.submit(request) for request in requests]
        params = ga.AttentionParams(batch=1, seq_q=64, seq_kv=64, heads_q=4, heads_kv=2, head_dim=64)
        waiting.append(ctx.cudnn.mha_forward(params, *(x.transpose(0, 2, 1, 3) for x in (q, k, k))))
        assert compiling.entered.wait(30.0)
        has_handled(ctx.flash_attn)
        has_handled(ctx.cudnn)
        compiling.open()
        for reply in waiting:
            reply.result(30.0)
        assert len(compiling.compiled) == 1


def test_a_compilation_that_failed_is_tried_again_by_the_next_request(compiling: Compilations) -> None:
    compiling.open()
    with ga.open_context("mock", COMPILING) as ctx:
        compiling.outcome = ga.CompileError("line 3")
        with pytest.raises(ga.CompileError):
            ask(ctx).result(30.0)
        compiling.outcome = None
        assert ask(ctx).result(30.0).out.shape == (1, 1, 1, 8)
        assert len(compiling.compiled) == 2


def test_the_default_time_limit_is_of_who_waits_and_not_of_the_compilation(compiling: Compilations) -> None:
    clock = MockClock()
    options = ga.ContextOptions(compile_on_mock=True, default_timeout=1.0, drain_timeout=2.0, clock=clock)
    with ga.open_context("mock", options) as ctx:
        hurried, patient = ask(ctx), ask(ctx, timeout=60.0)
        assert compiling.entered.wait(30.0)
        clock.advance(10.0)
        with pytest.raises(ga.DeadlineExceeded, match="before its launch"):
            hurried.result(30.0)
        has_handled(ctx.flash_attn)
        has_handled(ctx.nvrtc)
        assert ctx.stats()["nvrtc"].in_flight == 1
        assert not patient.done()
        compiling.open()
        assert patient.result(30.0).out.shape == (1, 1, 1, 8)
        assert ask(ctx, timeout=60.0).result(60.0).out.shape == (1, 1, 1, 8)
        assert len(compiling.compiled) == 1


@pytest.mark.parametrize("error", [ga.CompileError("line 3"), ZeroDivisionError("in the compiler"), SystemExit(1)])
def test_a_compilation_that_fails_answers_every_request_that_waits_for_it(
    compiling: Compilations, error: BaseException
) -> None:
    compiling.outcome = error
    with ga.open_context("mock", COMPILING) as ctx:
        waiting = [ask(ctx) for _ in range(3)]
        assert compiling.entered.wait(30.0)
        compiling.open()
        for reply in waiting:
            with pytest.raises(ga.GpuActorsError) as caught:
                reply.result(30.0)
            assert type(error) in (type(caught.value), type(caught.value.__cause__))
        assert ctx.health().ready


def test_the_wait_for_a_kernel_outlives_both_actors(compiling: Compilations) -> None:
    with ga.open_context("mock", ga.ContextOptions(compile_on_mock=True, restart=ga.RestartPolicy(backoff=0))) as ctx:
        waiting = ask(ctx)
        assert compiling.entered.wait(30.0)
        for actor in (ctx.flash_attn, ctx.nvrtc):
            break_down(actor)
            eventually(lambda actor=actor: actor.restarts == 1 and actor.state == "running")
        assert not waiting.done()
        compiling.open()
        assert waiting.result(30.0).out.shape == (1, 1, 1, 8)


def test_requests_that_wait_for_a_kernel_count_towards_the_mailboxs_capacity(compiling: Compilations) -> None:
    options = ga.ContextOptions(compile_on_mock=True, mailbox_capacity=5, drain_timeout=2.0)
    with ga.open_context("mock", options) as ctx:
        waiting = [ask(ctx)]
        assert compiling.entered.wait(30.0)
        mailbox = ctx.flash_attn._cell.mailbox
        waiting += [ask(ctx) for _ in range(4)]
        eventually(lambda: mailbox._parked == 5)
        with pytest.raises(ga.Overloaded, match="flash_attn has 5 requests waiting"):
            ask(ctx).result(30.0)
        assert waiting[0].cancel()
        waiting.append(ask(ctx))
        eventually(lambda: mailbox._parked == 5)
        with pytest.raises(ga.Overloaded):
            ask(ctx).result(30.0)
        compiling.open()
        for reply in waiting[1:]:
            reply.result(30.0)
        assert ask(ctx).result(30.0).out.shape == (1, 1, 1, 8)
        assert mailbox._parked == 0


@pytest.mark.parametrize("error", [ga.CompileError("line 3"), None])
def test_requests_that_waited_for_a_kernel_give_their_capacity_back(compiling: Compilations, error: Any) -> None:
    compiling.outcome = error
    options = ga.ContextOptions(compile_on_mock=True, mailbox_capacity=4, drain_timeout=2.0)
    with ga.open_context("mock", options) as ctx:
        waiting = [ask(ctx), ask(ctx, timeout=0.02), ask(ctx)]
        assert compiling.entered.wait(30.0)
        waiting[2].cancel()
        eventually(waiting[1].done)
        compiling.open()
        eventually(waiting[0].done)
        assert ctx.flash_attn._cell.mailbox._parked == ctx.nvrtc._cell.mailbox._parked == 0


def test_draining_waits_for_requests_that_wait_for_a_kernel(compiling: Compilations) -> None:
    with ga.open_context("mock", COMPILING) as ctx:
        waiting = ask(ctx)
        assert compiling.entered.wait(30.0)
        drained = ctx.drain()
        with pytest.raises(TimeoutError):
            drained.result(0.1)
        compiling.open()
        assert drained.result(30.0) is None
        assert waiting.result(0.0).out.shape == (1, 1, 1, 8)


def test_a_request_accepted_before_the_drain_still_gets_its_kernel(compiling: Compilations) -> None:
    options = ga.ContextOptions(compile_on_mock=True, max_in_flight=1, drain_timeout=5.0)
    with ga.open_context("mock", options) as ctx:
        compiling.open()
        ctx.flash_attn._cell.mailbox.launch_began()  # the actor is busy, so the request stays in its mailbox
        waiting = ask(ctx)
        drained = ctx.drain()
        ctx.flash_attn._cell.mailbox.launch_ended()
        assert waiting.result(30.0).out.shape == (1, 1, 1, 8)
        assert drained.result(30.0) is None


def test_closing_answers_requests_that_wait_for_a_kernel(compiling: Compilations) -> None:
    with ga.open_context("mock", ga.ContextOptions(compile_on_mock=True, drain_timeout=0.05)) as ctx:
        waiting = ask(ctx)
        assert compiling.entered.wait(30.0)
    with pytest.raises(ga.ActorStopped, match="closed"):
        waiting.result(0.0)
    compiling.open()


def test_warming_answers_whatever_its_progress_callback_does(compiling: Compilations) -> None:
    compiling.open()
    with ga.open_context("mock") as ctx:
        key = ctx.flash_attn.inspect_key(ga.FlashForward(q=rows(), k=rows(), v=rows()))
        for error in (ZeroDivisionError(), SystemExit(1)):

            def progress(done: int, total: int, key: Any, error: BaseException = error) -> None:
                raise error

            with pytest.raises(ga.GpuActorsError, match="progress callback raised"):
                ctx.nvrtc.warm([key, key], progress).result(30.0)
        eventually(lambda: ctx.stats()["nvrtc"].in_flight == 0)


def test_a_compilation_whose_thread_cannot_start_is_answered(no_more_threads: Any, compiling: Compilations) -> None:
    compiling.open()
    with ga.open_context("mock", COMPILING) as ctx:
        with no_more_threads(), pytest.raises(ga.GpuActorsError, match="can't start new thread"):
            ask(ctx).result(30.0)
        assert ask(ctx).result(30.0).out.shape == (1, 1, 1, 8)
        eventually(lambda: ctx.stats()["nvrtc"].in_flight == 0)
