"""A step over the layers of a KvCache that fails or ends early leaves every sequence as before.

A context counts launches: the first appends the sequences' initial rows, and each layer of the first step is one more.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from support.kv_cache import LATER, PAGE, in_flight, outcome, slow, spec, taken, wait
from support.service import eventually
from support.steps import EACH_PLACE, LAYERS, Isolation, Model, error_of, model, over
from support.supervision import break_down

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock

EACH_LAYER = pytest.mark.parametrize("layer", range(LAYERS))


@pytest.fixture(scope="module")
def isolated() -> Iterator[ga.GpuContext]:
    """A context for tests that leave it usable."""
    with ga.open_context("mock", isolation="process") as ctx:
        yield ctx


@pytest.fixture(params=["here", "process"])
def one(request: pytest.FixtureRequest) -> Iterator[Model]:
    """A cache in a context of this process or of another process."""
    if request.param == "here":
        with model() as one:
            yield one
        return
    ctx: ga.GpuContext = request.getfixturevalue("isolated")
    with ctx.kv_cache(**spec(layers=LAYERS)) as cache:
        yield Model(ctx, cache)


# How a program ends a step


@EACH_LAYER
def test_a_step_that_is_aborted_at_any_layer_leaves_no_trace(layer: int, one: Model) -> None:
    step = one.step()
    one.attend(step, range(layer))
    waits = one.append()
    taken(one.ctx)
    assert not waits.done()
    wait(step.abort())
    assert wait(waits) == 6
    one.cut(5, PAGE)
    over(one, step, ga.StaleBuffer)
    one.check()


@EACH_LAYER
def test_an_exception_in_the_block_aborts_the_step(layer: int, one: Model) -> None:
    step = one.step()

    def block() -> None:
        with step:
            one.attend(step, range(layer))
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError):
        block()
    over(one, step, ga.StaleBuffer)
    one.check()


@EACH_LAYER
def test_a_cancelled_block_aborts_the_step(layer: int, one: Model) -> None:
    async def block(reached: asyncio.Event) -> None:
        async with await one.begin() as step:
            one.attend(step, range(layer))
            reached.set()
            await asyncio.sleep(60.0)

    async def cancelled() -> None:
        reached = asyncio.Event()
        task = asyncio.create_task(block(reached))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    one.check()


@EACH_LAYER
def test_a_step_that_is_dropped_is_aborted(layer: int, one: Model) -> None:
    step = one.step()
    one.attend(step, range(layer))
    del step
    gc.collect()
    one.check()


@pytest.mark.parametrize("received", [True, False])
def test_a_step_that_no_task_receives_is_aborted(received: bool) -> None:
    with model() as one:
        earlier = one.step(0)
        reply = one.begin(0)
        taken(one.ctx)
        assert reply.cancel() or not received
        if not received:
            del reply
        wait(earlier.abort())
        one.check()


@EACH_LAYER
def test_a_commit_without_all_layers_names_those_that_are_missing(layer: int, one: Model) -> None:
    step = one.step()
    one.attend(step, range(layer))
    refusal = outcome(step.commit())
    assert isinstance(refusal, ga.InvalidRequest)
    assert (refusal.field, refusal.value) == ("layers", list(range(layer, LAYERS)))
    one.attend(step, range(layer))  # the step stays open until its block ends
    with pytest.raises(ga.InvalidRequest, match="layers"), step:
        pass
    assert [one.cache.length(seq) for seq in one.seqs] == [5, PAGE]
    over(one, step, ga.StaleBuffer)
    one.check()


def test_a_second_commit_is_refused_and_an_abort_undoes_nothing(one: Model) -> None:
    step = one.step()
    one.attend(step, range(LAYERS))
    assert wait(step.commit()) == [6, PAGE + 1]
    over(one, step, ga.StaleBuffer)
    one.cut(5, PAGE)
    one.check()


@pytest.mark.parametrize(
    "limits", [{"priority": None}, {"priority": 0.5}, {"timeout": "x"}, {"deadline": "x"}], ids=str
)
def test_a_commit_with_a_limit_that_is_none_is_refused_by_its_reply(limits: Any, one: Model) -> None:
    step = one.step()
    one.attend(step, range(LAYERS))
    refusal = outcome(step.commit(**limits))
    assert isinstance(refusal, ga.InvalidRequest)
    assert refusal.field == next(iter(limits))
    assert wait(step.commit()) == [6, PAGE + 1]
    one.cut(5, PAGE)
    one.check()


@pytest.mark.parametrize("priority", [0, 5, -5])
def test_a_commit_whose_step_is_dropped_before_its_answer_is_kept(priority: int) -> None:
    clock, options = slow(FaultPlan(), 10, max_in_flight=1)
    with model(options) as one:
        step = one.step(0)
        one.attend(step, range(LAYERS))
        other = one.append(1)
        for _ in range(4):
            wait(other)
            other = one.append(1)
        in_flight(one.ctx, 1)
        commit = step.commit(priority=priority)
        del step
        gc.collect()
        assert not commit.done()
        clock.advance(LATER)
        assert wait(commit) == [6]


# Time


@EACH_LAYER
def test_the_deadline_of_a_step_aborts_it_at_any_layer(layer: int) -> None:
    clock = MockClock()
    with model(ga.ContextOptions(clock=clock)) as one:
        step = one.step(timeout=LATER)
        one.attend(step, range(layer))
        waits = one.append()
        taken(one.ctx)
        clock.advance(LATER)
        assert wait(waits) == 6
        one.cut(5, PAGE)
        over(one, step, ga.DeadlineExceeded)
        one.check()


def test_a_deadline_that_passes_after_the_commit_changes_nothing() -> None:
    clock = MockClock()
    with model(ga.ContextOptions(clock=clock)) as one:
        step = one.step(timeout=LATER)
        one.attend(step, range(LAYERS))
        assert wait(step.commit()) == [6, PAGE + 1]
        clock.advance(2 * LATER)
        assert [one.cache.length(seq) for seq in one.seqs] == [6, PAGE + 1]
        one.cut(5, PAGE)
        one.check()


def test_a_step_that_has_ended_is_not_kept_until_its_deadline() -> None:
    with model(ga.ContextOptions(clock=MockClock())) as one:
        step = one.step(timeout=1e6)
        one.attend(step, range(LAYERS))
        wait(step.commit())
        kept = weakref.ref(step._step)
        del step
        one.attend(one.step(0), [0])  # so that the actor and its stream release the earlier step
        eventually(lambda: gc.collect() >= 0 and kept() is None)


# Launches that fail


@EACH_PLACE
@EACH_LAYER
@pytest.mark.parametrize("kind", [ga.LaunchError, ga.OutOfDeviceMemory])
def test_a_launch_that_fails_aborts_the_step(layer: int, kind: Any, isolation: Isolation) -> None:
    with model(ga.ContextOptions(fault_plan=FaultPlan().fail(2 + layer, kind)), isolation) as one:
        step = one.step()
        waits = one.append()
        one.attend(step, range(layer))
        assert type(error_of(lambda: one.attend(step, [layer]))) is kind
        assert wait(waits) == 6, "it waited for the step to end"
        one.cut(5, PAGE)
        over(one, step, kind)
        one.check()


@EACH_PLACE
@EACH_LAYER
def test_a_lost_context_ends_a_step_at_any_layer(layer: int, isolation: Isolation) -> None:
    with model(ga.ContextOptions(fault_plan=FaultPlan().lose_context(2 + layer)), isolation) as one:
        step, other = one.step(0), one.step(1)
        waits = one.append()
        one.attend(step, range(layer))
        assert isinstance(error_of(lambda: one.attend(step, [layer])), ga.ContextLost)
        assert isinstance(outcome(waits), ga.ContextLost)
        eventually(lambda: one.ctx.generation == 2)
        lost = (ga.ContextLost, ga.StaleBuffer)
        for open_one in (step, other):
            assert isinstance(error_of(lambda open_one=open_one: one.attend(open_one, [0])), lost)
            assert isinstance(outcome(open_one.commit()), lost)
        assert isinstance(outcome(one.begin()), ga.StaleBuffer)
        assert one.ctx.generation == 2, "an old step costs a new generation nothing"


@pytest.mark.parametrize("layer", [0, 2, LAYERS])
@pytest.mark.parametrize("last", ["attend", "commit", "block"])
def test_a_launch_before_the_step_that_fails_takes_the_step_with_it(layer: int, last: str) -> None:
    """The step ends by itself: waiting requests proceed whether or not the program aborts it."""
    clock, options = slow(FaultPlan().fail(2), 2)
    with model(options) as one:
        append = one.append()
        in_flight(one.ctx, 1)
        step = one.step()
        assert step.lengths == [7, PAGE + 1]
        one.attend(step, range(layer))
        waits = one.append()
        taken(one.ctx)
        clock.advance(LATER)
        assert isinstance(outcome(append), ga.LaunchError)
        assert one.cache.length(one.seqs[0]) == 5
        if last == "attend":
            error = error_of(lambda: one.attend(step, [0]))
        elif last == "commit":
            error = outcome(step.commit())
        else:
            error = error_of(lambda: step.__exit__(None, None, None))
        assert isinstance(error, ga.LaunchError)
        assert wait(waits) == 6
        one.cut(5, PAGE)
        over(one, step, ga.LaunchError)
        one.check()


def test_a_commit_fails_with_the_launch_that_the_step_builds_on() -> None:
    """All layers are done on the device, but the commit waits for an earlier launch, which fails."""
    clock, options = slow(FaultPlan().fail(2), 2)
    with model(options) as one:
        append = one.append()
        in_flight(one.ctx, 1)
        step = one.step()
        one.attend(step, range(LAYERS))
        commit, waits = step.commit(), one.append(1)
        in_flight(one.ctx, 2)
        assert not commit.done()
        clock.advance(LATER)
        error = outcome(append)
        assert isinstance(error, ga.LaunchError)
        assert outcome(commit) is error
        assert wait(waits) == PAGE + 1
        one.cut(5, PAGE)
        one.check()


@EACH_PLACE
def test_the_copy_of_a_shared_page_that_fails_takes_the_step_with_it(isolation: Isolation) -> None:
    with model(ga.ContextOptions(fault_plan=FaultPlan().fail(2)), isolation) as one:
        fork = wait(one.cache.fork(one.seqs[0]))
        step = one.step(0)
        assert isinstance(error_of(lambda: one.attend(step, range(LAYERS))), ga.LaunchError)
        wait(one.cache.free(fork))
        over(one, step, ga.LaunchError)
        one.check()


# The cache, the context and the actor


@pytest.mark.parametrize(("rows", "full"), [(1 + 8 * PAGE, True), (6 * PAGE, True), (3 * PAGE, False)])
def test_a_step_without_room_takes_nothing(rows: int, full: bool, one: Model) -> None:
    result = outcome(one.begin(rows=rows))
    assert isinstance(result, ga.CacheFull) == full
    if not full:
        assert one.cache.stats().free_blocks == 0
        wait(result.abort())
    one.check()


@EACH_PLACE
@pytest.mark.parametrize("layer", [0, 2, LAYERS])
def test_a_cache_that_is_closed_ends_its_steps(layer: int, isolation: Isolation) -> None:
    with ga.open_context("mock", isolation=isolation) as ctx:
        with ctx.kv_cache(**spec(layers=LAYERS)) as cache:
            one = Model(ctx, cache)
            step, dropped = one.step(0), one.step(1)
            one.attend(step, range(layer))
            waits = one.append()
            taken(ctx)
        assert isinstance(outcome(waits), ga.StaleBuffer), "leaving did not wait for what waits for the step"
        over(one, step, ga.StaleBuffer)
        opened_step = dropped._step
        del dropped
        eventually(lambda: not opened_step.open)
        with ctx.kv_cache(**spec(layers=LAYERS)) as cache:
            Model(ctx, cache).check()


@EACH_PLACE
@pytest.mark.parametrize("layer", [0, 2, LAYERS])
def test_a_context_that_is_closed_ends_its_steps(layer: int, isolation: Isolation) -> None:
    with model(ga.ContextOptions(drain_timeout=0.1), isolation) as one:
        step, dropped = one.step(0), one.step(1)
        one.attend(step, range(layer))
        waits = one.append()
        taken(one.ctx)
    gone = (ga.ActorStopped, ga.StaleBuffer)
    assert isinstance(outcome(waits), gone)
    for _ in range(2):
        assert isinstance(error_of(lambda: one.attend(step, [0])), gone)
    assert isinstance(outcome(step.commit()), gone)
    with pytest.raises(ZeroDivisionError), step:
        raise ZeroDivisionError("not hidden by the end of the context")
    del dropped


@EACH_LAYER
@pytest.mark.parametrize("commits", [True, False])
def test_a_step_outlives_its_actor(layer: int, commits: bool) -> None:
    with model(ga.ContextOptions(restart=ga.RestartPolicy(backoff=0.0))) as one:
        step = one.step()
        one.attend(step, range(layer))
        waits = one.append()
        taken(one.ctx)
        actor = one.ctx.actor(ga.KvCacheActor)
        break_down(actor, cache=0)
        eventually(lambda: actor.restarts == 1 and actor.state == "running")
        assert not waits.done()
        one.attend(step, range(layer, LAYERS))
        assert outcome(step.commit() if commits else step.abort()) == ([6, PAGE + 1] if commits else None)
        assert wait(waits) == 6 + commits
        one.cut(5, PAGE)
        one.check()


@EACH_PLACE
def test_a_full_mailbox_refuses_a_step_and_takes_its_end(isolation: Isolation) -> None:
    with model(ga.ContextOptions(mailbox_capacity=2), isolation) as one:
        step = one.step()
        one.attend(step, range(LAYERS))
        waits = [one.append(), one.append()]
        taken(one.ctx)
        assert isinstance(outcome(one.begin()), ga.Overloaded)
        assert wait(step.commit()) == [6, PAGE + 1]
        assert wait(*waits) == [7, 8]
        one.cut(5, PAGE)
        step = one.step()
        waits = [one.append(), one.append()]
        taken(one.ctx)
        wait(step.abort())
        assert wait(*waits) == [6, 7]
        one.cut(5, PAGE)
        one.check()


# Order


def test_two_steps_at_once_on_different_sequences(one: Model) -> None:
    first, second = one.step(0), one.step(1)
    for layer in range(LAYERS):
        one.attend(first, [layer])
        one.attend(second, [LAYERS - 1 - layer])
    wait(second.abort())
    assert wait(first.commit()) == [6]
    one.cut(5, PAGE)
    one.check()


def test_a_second_step_on_a_sequence_waits_for_the_first(one: Model) -> None:
    first = one.step(0)
    second = one.begin(0, 1)
    taken(one.ctx)
    assert not second.done()
    one.attend(first, range(LAYERS))
    wait(first.commit())
    step = wait(second)
    assert step.lengths == [7, PAGE + 1]
    wait(step.abort())
    one.cut(5, PAGE)
    one.check()


def test_a_step_comes_after_what_was_asked_for_before_it() -> None:
    """The limit of launches in flight is reached, so the requests wait in order."""
    clock, options = slow(FaultPlan(), 2, max_in_flight=1)
    with model(options) as one:
        busy = one.append(1)
        in_flight(one.ctx, 1)
        before = [one.append(0), one.append(0)]
        begun = one.begin(0)
        clock.advance(LATER)
        step = wait(begun)
        assert step.lengths == [8]
        assert wait(busy, *before) == [PAGE + 1, 6, 7]
        wait(step.abort())
        one.cut(5, PAGE)
        one.check()


def test_each_reader_of_a_reply_gets_the_same_step(one: Model) -> None:
    reply = one.begin()
    first, second = wait(reply), wait(reply)
    assert first is second
    del second
    one.attend(first, range(LAYERS))
    assert wait(first.commit()) == [6, PAGE + 1]


def test_a_known_step_without_new_rows_is_planned_for_the_table_that_there_is(one: Model) -> None:
    for _ in range(2 * PAGE):
        step = one.step(0, append=False, rows=PAGE)
        q = one.rows.q(1, PAGE)
        out = step.attend(1, q)
        wait(step.commit())
        assert out.tobytes() == wait(one.cache.attend(q, [one.seqs[0]], layer=1)).out.tobytes()
        wait(one.append(0))


def test_the_others_do_not_wait_for_a_step(one: Model) -> None:
    step = one.step(0)
    waits = one.append(0)
    taken(one.ctx)
    assert wait(one.append(1)) == PAGE + 1
    wait(one.cache.attend(one.rows.q(1, 1), [one.seqs[1]], layer=2))
    new = wait(one.cache.create())
    wait(one.cache.free(new))
    fork = wait(one.cache.fork(one.seqs[1]))
    wait(one.cache.free(fork))
    wait(one.cache.truncate(one.seqs[1], PAGE))
    assert not waits.done()
    wait(step.abort())
    assert wait(waits) == 6
    one.cut(5, PAGE)
    one.check()
