"""The whole service on a CUDA device over a fake driver: packed parameters, staging, errors and losses end to end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.cuda import FakeCuda
from fakes.service import forward_on_host, operands, service
from inside.planning import KernelStore
from support.service import eventually, no_threads_left

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import MockClock


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda({"forward_simple": forward_on_host, "forward_mma": forward_on_host})


def test_a_request_comes_back_right_and_nothing_is_left(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    with no_threads_left(), service(cuda, monkeypatch) as ctx:
        replies = [ctx.flash_attn.forward(q, k, v) for _ in range(20)]
        for reply in replies:
            expected = attention_forward(q, k, v).out.astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(reply.result(20).out, expected)
        assert ctx.stats()["flash_attn"].launched == 20
    assert cuda.leaks() == {}


def test_a_caller_whose_streams_are_unknown_is_refused_by_the_reply(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(index: int) -> None:
        raise RuntimeError("no driver")

    q, k, v = operands()
    with service(cuda, monkeypatch) as ctx:
        monkeypatch.setattr("gpu_actors.devices.cuda.device.caller_streams", broken)
        reply = ctx.flash_attn.forward(q, k, v)
        with pytest.raises(ga.LaunchError, match="no driver"):
            reply.result(20)


def test_a_sticky_error_answers_everything_and_health_says_so(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    with service(cuda, monkeypatch, max_in_flight=4) as ctx:
        ctx.flash_attn.forward(q, k, v).result(20)
        cuda.fail_kernel(700)
        replies = [ctx.flash_attn.forward(q, k, v) for _ in range(30)]
        generations = []
        for reply in replies:
            with pytest.raises(ga.ContextLost) as caught:
                reply.result(20)
            generations.append(caught.value.generation)
        assert generations == [1] * 30
        assert ctx.generation == 2
        assert ctx.health().state == "failed"
        assert not ctx.health().ready
        with pytest.raises(ga.ContextLost):
            ctx.flash_attn.forward(q, k, v).result(20)


def test_a_hung_launch_meets_its_deadline_and_loses_the_context(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = operands()
    clock = MockClock()
    with service(cuda, monkeypatch, clock=clock, hang_timeout=8.0, drain_timeout=0.1) as ctx:
        ctx.flash_attn.forward(q, k, v).result(20)
        for stream in cuda.open_streams:
            cuda.hang(stream)
        late = ctx.flash_attn.forward(q, k, v, timeout=1.0)
        patient = ctx.flash_attn.forward(q, k, v)
        clock.advance(1.0)
        with pytest.raises(ga.DeadlineExceeded):
            late.result(30.0)
        assert not patient.done()
        eventually(lambda: clock.advance(1.0) or patient.done())
        with pytest.raises(ga.ContextLost):
            patient.result(30.0)
        assert ctx.health().state == "failed"
    for stream in cuda.open_streams:
        cuda.resume(stream)
    eventually(lambda: not [thread for thread in threading.enumerate() if "completion" in thread.name])


def test_plans_hold_no_kernel_that_the_store_has_let_go(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelStore.__init__, "__defaults__", (2,))
    cuda.kernels.update(forward_simple=lambda *_: None, forward_mma=lambda *_: None)
    q, k, v = operands()
    variants: list[dict[str, Any]] = [{}, {"causal": True}, {"softcap": 5.0}, {"return_lse": True}]
    with service(cuda, monkeypatch) as ctx:
        for variant in variants * 2:
            ctx.flash_attn.forward(q, k, v, **variant).result(60)
        loaded = cuda.calls.count("load_module") - cuda.calls.count("unload_module")
        assert loaded <= 3  # two of the store, and the one of the last launch


class ThreadedCuda(FakeCuda):
    """Notes which thread launches a kernel. interruption: raised once, by the thread that has launched one."""

    current = True
    interruption: BaseException | None = None

    def __init__(self) -> None:
        super().__init__({"forward_simple": forward_on_host})
        self.launching: list[int] = []

    def is_current(self) -> bool:
        return self.current

    def launch_kernel(self, *arguments: Any) -> None:
        self.launching.append(threading.get_ident())
        super().launch_kernel(*arguments)
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            raise interruption


def in_a_loop(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine in a loop of its own thread, where no signal's handler can raise."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result(60)


@pytest.mark.parametrize("current", [True, False])
def test_a_loops_thread_launches_if_the_device_is_its_current_one(
    current: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = ThreadedCuda()
    q, k, v = operands()
    expected = attention_forward(q, k, v).out.astype(ml_dtypes.bfloat16)

    async def requests() -> None:
        await ctx.flash_attn.forward(q, k, v)  # compiles
        cuda.current = current
        cuda.launching.clear()
        await asyncio.sleep(0.05)  # the actor falls asleep
        np.testing.assert_array_equal((await ctx.flash_attn.forward(q, k, v)).out, expected)
        assert (cuda.launching == [threading.get_ident()]) is current
        cuda.launching.clear()
        result = await asyncio.to_thread(lambda: ctx.flash_attn.forward(q, k, v).result(20))
        np.testing.assert_array_equal(result.out, expected)
        assert threading.get_ident() not in cuda.launching

    with service(cuda, monkeypatch) as ctx:
        in_a_loop(requests)
    assert cuda.leaks() == {}


def test_arrays_of_the_host_that_take_long_to_copy_are_left_to_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = ThreadedCuda()
    q, k, v = operands()
    monkeypatch.setattr("gpu_actors.arrays.request_arrays._LITTLE", q.nbytes + k.nbytes + v.nbytes - 1)

    async def requests() -> None:
        for _ in range(3):
            await ctx.flash_attn.forward(q, k, v)
            await asyncio.sleep(0.02)
        assert threading.get_ident() not in cuda.launching

    with service(cuda, monkeypatch) as ctx:
        in_a_loop(requests)
    assert cuda.launching


@pytest.mark.timeout(60, method="thread")  # the usual method uses SIGALRM
@pytest.mark.parametrize("handled", ["SIGINT", "SIGALRM", None])
def test_a_main_thread_that_a_handler_may_interrupt_leaves_the_launch_to_the_actor(
    handled: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = ThreadedCuda()
    q, k, v = operands()

    async def requests() -> None:
        for _ in range(3):
            await ctx.flash_attn.forward(q, k, v)
            await asyncio.sleep(0.02)
        assert (threading.get_ident() in cuda.launching) is (handled is None)

    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT)}
    with service(cuda, monkeypatch) as ctx, asyncio.Runner() as runner:
        loop = runner.get_loop()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes lack it
        signal.signal(signal.SIGALRM, (lambda *_: None) if handled == "SIGALRM" else signal.SIG_DFL)
        try:
            if handled == "SIGINT":
                loop.run_until_complete(requests())  # which leaves Python's own handler in place
            else:
                runner.run(requests())
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def test_a_deep_stack_leaves_the_launch_to_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = ThreadedCuda()
    q, k, v = operands()

    def ask(depth: int) -> ga.Reply[Any]:
        return ask(depth - 1) if depth else ctx.flash_attn.forward(q, k, v)

    async def requests() -> None:
        await ctx.flash_attn.forward(q, k, v)
        for depth in range(500, 900, 25):
            await asyncio.sleep(0.01)
            await ask(depth)
        assert ctx.health().ready
        assert set(cuda.launching) > {threading.get_ident()}, "both launch"

    with service(cuda, monkeypatch) as ctx:
        in_a_loop(requests)
        assert ctx.flash_attn.restarts == 0


def test_ctrl_c_in_the_middle_of_a_launch_frees_nothing_early_and_fails_the_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted launch may be incomplete, so no later request may build on it."""
    cuda = ThreadedCuda()
    q, k, v = operands()

    async def requests() -> None:
        await ctx.flash_attn.forward(q, k, v)
        await asyncio.sleep(0.05)
        cuda.interruption = KeyboardInterrupt()
        ctx.flash_attn.forward(q, k, v)

    with service(cuda, monkeypatch) as ctx:
        with pytest.raises(KeyboardInterrupt):
            in_a_loop(requests)
        eventually(lambda: ctx.health().state == "failed")
        with pytest.raises(ga.ActorStopped, match="KeyboardInterrupt"):
            ctx.flash_attn.forward(q, k, v).result(20)
        cuda.run_all()  # the launch that was interrupted ends
        assert ctx._children.device.driver.lost is None  # type: ignore[attr-defined]
    assert cuda.leaks() == {}
