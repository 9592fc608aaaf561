"""A request keeps its arrays while it needs them, and nothing afterwards, however it ends."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
from support.service import NO_COMPUTE, comes_true, eventually, launch_of, rows, scripted

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

pytestmark = pytest.mark.usefixtures("all_threads_end")


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    # Captured log records keep logged tracebacks alive.
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


def gone(reference: weakref.ref) -> bool:
    return reference() is None


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("mock", [ga.MockOptions(), NO_COMPUTE, ga.MockOptions(latency=0.001)])
def test_inputs_are_released_with_the_reply(mock: ga.MockOptions) -> None:
    with ga.open_context("mock", ga.ContextOptions(mock=mock)) as ctx:
        q = rows(4)
        inputs = weakref.ref(q)
        reply = ctx.flash_attn.forward(q, q, q)
        del q
        eventually(reply.done)
        assert inputs() is not None
        del reply
        eventually(lambda: gone(inputs))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_inputs_of_a_request_that_is_answered_in_the_queue_are_released_at_once(how: str) -> None:
    options = ga.ContextOptions(fault_plan=FaultPlan().hang(launch=1), max_in_flight=1, drain_timeout=0.0)
    with ga.open_context("mock", options) as ctx:
        ctx.flash_attn.forward(rows(), rows(), rows())
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        q = rows(4)
        inputs = weakref.ref(q)
        reply = ctx.flash_attn.forward(q, q, q, timeout=0.01 if how == "expired" else None)
        del q
        if how == "cancelled":
            assert reply.cancel()
        eventually(reply.done)
        del reply
        eventually(lambda: gone(inputs))


@pytest.mark.usefixtures("no_collector")
async def test_a_result_is_released_with_the_reply() -> None:
    async with ga.open_context("mock") as ctx:
        result = weakref.ref((await ctx.flash_attn.forward(rows(4), rows(4), rows(4))).out)
        await comes_true(lambda: gone(result))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("options", [{"softcap": -1.0}, {}, {"timeout": -1.0}], ids=["refused", "launch", "late"])
async def test_a_failed_reply_makes_no_reference_cycle(options: dict) -> None:
    async with ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE)) as ctx:

        async def ask() -> weakref.ref:
            q = rows(4)
            reference = weakref.ref(q)
            with pytest.raises(ga.GpuActorsError):
                await ctx.flash_attn.forward(q, q, q, **options)
            return reference

        inputs = await ask()
        await comes_true(lambda: gone(inputs))


class Cargo:
    """A message that fails in its handler, in its launch, or when the launch is finished."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, actor: ga.ServiceActor, call: ga.Call) -> None:
        if self.where == "handler":
            raise ZeroDivisionError(np.ones(3).sum())
        call.claim()
        work, finish = (self.fail, lambda outputs: (None,)) if self.where == "launch" else (lambda: None, self.fail)
        actor.launch((call,), launch_of(work), finish)

    def fail(self, *outputs: object) -> None:
        raise ZeroDivisionError


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("where", ["handler", "finish", "launch"])
def test_a_request_that_fails_by_a_bug_is_released_too(where: str) -> None:
    with scripted() as (_, actor):
        cargo = Cargo(where)
        reference = weakref.ref(cargo)
        reply = actor.submit(cargo)
        del cargo
        assert_fails(reply, ga.LaunchError if where == "launch" else ga.ActorFailed)
        del reply
        eventually(lambda: gone(reference))


def assert_fails(reply: ga.Reply, error: type[ga.GpuActorsError]) -> None:
    try:
        reply.result(30.0)
    except error:
        return
    finally:
        del reply
    raise AssertionError("answered")


def test_the_repr_says_what_became_of_the_request() -> None:
    with ga.open_context("mock") as ctx:
        reply = ctx.flash_attn.forward(rows(), rows(), rows())
        reply.result(30.0)
        assert repr(reply) == "<Reply #1 done of FlashForward>"
