"""Random operations on contexts that fail in random ways: each request is answered exactly once.

Hypothesis draws the operations and a seed; the seed draws a fault plan. Time stands still between `advance` rules, so
that deadlines and delays come in every order. Whatever happened, closing the context leaves nothing unanswered, no
thread, and no array.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.service import Scripted, answer, eventually, eventually_freed, launches, no_threads_left, raises

import gpu_actors as ga
from gpu_actors import Call
from gpu_actors.testing import FaultPlan, MockClock

CAPACITY, IN_FLIGHT = 32, 4

priorities = st.integers(-2, 2)
timeouts = st.sampled_from([None, None, None, 0.0, 0.5, 2.0, 10.0])
picks = st.integers(0, 10_000)

settled: Counter[Call[Any]] = Counter()
operations = Counter[str]()


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count how often each call is given an answer."""
    original = Call.settle

    def settle(self: Call[Any], *arguments: Any) -> bool:
        did = original(self, *arguments)
        if did:
            settled[self] += 1
        return did

    monkeypatch.setattr(Call, "settle", settle)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def seeded_plan(seed: int) -> FaultPlan:
    """Failures and delays at random launches; in some plans also a hang or the loss of the context, never at once."""
    dice = random.Random(seed)
    plan = FaultPlan()
    for launch in range(1, 60):
        match dice.randrange(12):
            case 0:
                plan = plan.fail(launch, dice.choice([ga.LaunchError, ga.OutOfDeviceMemory]))
            case 1:
                plan = plan.delay(dice.choice([0.1, 1.0, 5.0]), launch)
    match dice.randrange(6):
        case 0:
            plan = plan.hang(dice.randrange(20, 200))
        case 1:
            plan = plan.lose_context(dice.randrange(20, 200))
    return plan


class Service(RuleBasedStateMachine):
    """One context, from opening to closing."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        strategy=st.sampled_from(["one_for_one", "all_for_one"]),
        restarts=st.sampled_from([0, 3, 1000, 1000, 1000]),
        compute=st.booleans(),
    )
    def open(self, seed: int, strategy: Any, restarts: int, compute: bool) -> None:
        self.threads = no_threads_left()
        self.threads.__enter__()
        self.clock = MockClock()
        options = ga.ContextOptions(
            actors=(Scripted,),
            fault_plan=seeded_plan(seed),
            clock=self.clock,
            mock=ga.MockOptions(compute=compute),
            restart=ga.RestartPolicy(strategy=strategy, max_restarts=restarts, backoff=0.0),
            mailbox_capacity=CAPACITY,
            max_in_flight=IN_FLIGHT,
            degraded_after=10**6,  # a probe would be a request that this test did not make
            hang_timeout=1e6,
            drain_timeout=0.0,
        )
        self.opener = ga.open_context("mock", options)
        self.ctx = self.opener.__enter__()
        self.actor = self.ctx.actor(Scripted)
        self.replies: list[tuple[ga.Reply[Any], float]] = []
        self.arrays: list[weakref.ref[Any]] = []

    def did(self, what: str, count: int = 1) -> None:
        operations[what] += count

    def keep(self, reply: ga.Reply[Any], value: float) -> None:
        self.replies.append((reply, value))

    def forward(self, **options: Any) -> None:
        """Make a forward request whose answer is a unique number."""
        value = float(len(self.replies))
        array = np.full((1, 1, 1, 8), value, np.float32)
        self.arrays.append(weakref.ref(array))
        self.keep(self.ctx.flash_attn.forward(array, array, array, **options), value)

    def submit(self, message: Any, **options: Any) -> None:
        self.keep(self.actor.submit(message, **options), 0.0)

    def check(self, reply: ga.Reply[Any], value: float, error: BaseException | None, result: Any) -> None:
        """Check that an error is typed and that an answer is the request's own."""
        if error is not None:
            assert isinstance(error, ga.GpuActorsError), error
        elif isinstance(result, ga.AttentionOutput):
            assert (result.out == value).all(), "another request's answer"
        else:
            assert result == "scripted"

    # Operations of a program

    @rule(priority=priorities, timeout=timeouts, causal=st.booleans())
    def ask(self, priority: int, timeout: float | None, causal: bool) -> None:
        self.did("ask")
        self.forward(priority=priority, timeout=timeout, causal=causal)

    @rule(count=st.integers(2, 60), timeout=timeouts)
    def burst(self, count: int, timeout: float | None) -> None:
        self.did("ask", count)
        for _ in range(count):
            self.forward(timeout=timeout)

    @rule(
        wrong=st.sampled_from(
            [
                {"softcap": -1.0},
                {"priority": "x"},
                {"timeout": float("nan")},
                {"timeout": 1.0, "deadline": 1.0},
                {"window_size": "all"},
                {"dropout_p": 2.0},
            ]
        )
    )
    def ask_wrongly(self, wrong: dict[str, Any]) -> None:
        self.did("ask wrongly")
        self.forward(**wrong)

    @rule(priority=priorities, timeout=timeouts)
    def ask_to_hold(self, priority: int, timeout: float | None) -> None:
        """Make a request that the actor takes and never answers."""
        self.did("hold")
        self.submit(lambda actor, call: None, priority=priority, timeout=timeout)

    @rule(timeout=timeouts)
    def ask_to_launch(self, timeout: float | None) -> None:
        self.did("launch")
        self.submit(launches(lambda: None, "scripted"), timeout=timeout)

    @rule(count=st.integers(1, 20))
    def ask_to_answer(self, count: int) -> None:
        self.did("answer", count)
        for _ in range(count):
            self.submit(answer("scripted"))

    @rule(error=st.sampled_from([ZeroDivisionError, SystemExit, KeyboardInterrupt, ga.LaunchError]))
    def ask_to_raise(self, error: type[BaseException]) -> None:
        self.did("raise")
        self.submit(raises(error("on purpose")))

    @precondition(lambda self: self.replies)
    @rule(pick=picks, count=st.integers(1, 10))
    def cancel(self, pick: int, count: int) -> None:
        for offset in range(count):
            self.did("cancel")
            reply, _ = self.replies[(pick + offset) % len(self.replies)]
            if reply.cancel():
                assert isinstance(reply._call.error, ga.RequestCancelled)

    @precondition(lambda self: self.replies)
    @rule(pick=picks, timeout=st.sampled_from([0.0, 0.001]))
    def wait(self, pick: int, timeout: float) -> None:
        self.did("wait")
        reply, value = self.replies[pick % len(self.replies)]
        try:
            self.check(reply, value, None, reply.result(timeout))
        except ga.GpuActorsError:
            assert reply.done()
        except TimeoutError:
            pass

    @precondition(lambda self: self.replies)
    @rule(picks=st.lists(picks, min_size=1, max_size=20), patience=st.sampled_from([0.0, 0.002]))
    def await_some(self, picks: list[int], patience: float) -> None:
        """Await several on a loop with a timeout, which cancels those not launched yet."""
        self.did("await", len(picks))
        chosen = [self.replies[pick % len(self.replies)] for pick in picks]

        async def wait(reply: ga.Reply[Any], value: float) -> None:
            try:
                self.check(reply, value, None, await reply)
            except ga.GpuActorsError:
                assert reply.done()

        async def main() -> None:
            tasks = [asyncio.ensure_future(wait(*one)) for one in chosen]
            await asyncio.wait(tasks, timeout=patience)
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome

        asyncio.run(main())

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.0, 5.0, 30.0]))
    def advance(self, seconds: float) -> None:
        self.did("advance")
        self.clock.advance(seconds)

    # Invariants

    @invariant()
    def account(self) -> None:
        if not hasattr(self, "ctx"):
            return
        for stats in self.ctx.stats().values():
            assert stats.submitted >= stats.completed + stats.failed + stats.cancelled
            assert 0 <= stats.in_flight <= IN_FLIGHT
            assert 0 <= stats.queued <= 2 * CAPACITY
        health = self.ctx.health()
        assert health.ready == (health.state in ("ready", "degraded"))
        assert health.ready or health.reason

    # The end

    def check_answers(self) -> None:
        # A thread may have answered a call but not counted it yet.
        eventually(lambda: all(settled[reply._call] for reply, _ in self.replies if reply.done()))
        for reply, value in self.replies:
            assert reply.done(), f"never answered: {reply}"
            assert settled[reply._call] == 1
            self.check(reply, value, reply._call.error, reply._call.value)
        assert set(settled.values()) <= {1}

    def teardown(self) -> None:
        if not hasattr(self, "ctx"):
            return
        self.opener.__exit__(None, None, None)
        self.check_answers()
        for stats in self.ctx.stats().values():
            assert stats.submitted == stats.completed + stats.failed + stats.cancelled
            assert stats.queued == stats.in_flight == 0
        asked = sum(stats.submitted for stats in self.ctx.stats().values())
        assert asked == len(self.replies)
        self.threads.__exit__(None, None, None)
        # The counter holds calls, and so does each reply.
        settled.clear()
        self.replies.clear()
        eventually_freed(*self.arrays)


@pytest.fixture
def _small_collections() -> None:
    """Hide existing objects from the collector: it runs after each context, and modules are large."""
    gc.freeze()


@pytest.mark.usefixtures("_small_collections")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 12))])
def test_random_operations_answer_every_request_exactly_once(seed: int) -> None:
    """At least 1,200 operations; thirty times more in the sweep."""
    sweep = seed > 1
    operations.clear()
    run_state_machine_as_test(
        hypothesis.seed(seed)(type("Service", (Service,), {})),
        settings=settings(
            max_examples=30 if sweep else 10,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a failure may mean a wait until a timeout, so shrinking would take too long
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert sum(operations.values()) >= (4_000 if sweep else 1_200), operations
    assert len(operations) == 10, operations
