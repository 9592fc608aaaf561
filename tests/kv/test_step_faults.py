"""A step over the layers of a KvCache that fails, or ends early: every sequence is as before, the next one right.

Launches are counted over a context: the first appends the rows that the sequences begin with, and each layer of the
first step is one more.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.kv_cache import LATER, PAGE, Rows, attention, in_flight, opened, outcome, slow, spec, taken, wait
from support.service import eventually
from support.supervision import break_down

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock

LAYERS, HEADS_Q = 4, 4
EACH_LAYER = pytest.mark.parametrize("layer", range(LAYERS))


class Model:
    """A cache of four layers with two sequences of five and of eight rows, and what they hold."""

    def __init__(self, ctx: ga.GpuContext, cache: ga.KvCache) -> None:
        self.ctx, self.cache, self.rows = ctx, cache, Rows(7)
        self.seqs: list[ga.KvSequence] = wait(cache.create(), cache.create())
        k, v = self.rows.new(LAYERS, 5 + PAGE)
        ends = np.array([0, 5, 5 + PAGE], np.int32)
        wait(cache.append(self.seqs, k, v, cu_seqlens=ends))
        self.held = [(side[:, :5], side[:, 5:]) for side in (k, v)]

    def step(self, *seqs: int, **options: Any) -> Any:
        return wait(self.begin(*seqs, **options))

    def begin(self, *seqs: int, **options: Any) -> ga.Reply[Any]:
        return self.cache.step([self.seqs[index] for index in seqs or (0, 1)], heads_q=HEADS_Q, **options)

    def attend(self, step: Any, layers: Iterable[int]) -> None:
        for layer in layers:
            count = len(step.lengths)
            step.attend(layer, self.rows.q(count, 1), *self.rows.new(count, 1))

    def append(self, seq: int = 0) -> ga.Reply[Any]:
        return self.cache.append(self.seqs[seq], *self.rows.new(LAYERS, 1))

    def cut(self, *lengths: int) -> None:
        for seq, length in zip(self.seqs, lengths, strict=True):
            wait(self.cache.truncate(seq, length))

    def check(self) -> None:
        """Everything is as it was in the beginning, and a step over both sequences is right."""
        cache, state = self.cache, self.cache._find()
        eventually(lambda: not state._in_flight and not state.stepping)
        assert [cache.length(seq) for seq in self.seqs] == [5, PAGE]
        assert (cache.stats().free_blocks, cache.stats().sequences) == (6, 2)
        self.check_contents(0)
        new = [self.rows.new(2, 1) for _ in range(LAYERS)]
        q = self.rows.q(2, 1)
        step = self.step()
        assert step.lengths == [6, PAGE + 1]
        outs = [step.attend(layer, q, *new[layer]) for layer in range(LAYERS)]
        assert wait(step.commit()) == [6, PAGE + 1]
        for layer, out in enumerate(outs):
            for index in range(2):
                k, v = (
                    np.concatenate([held[index][layer], more[index]])
                    for held, more in zip(self.held, new[layer], strict=True)
                )
                np.testing.assert_allclose(out[index], attention(q[index], k, v), rtol=1e-5, atol=1e-6)
        self.held = [
            tuple(
                np.concatenate([held[index], np.stack([one[side][index] for one in new])], axis=1) for index in range(2)
            )
            for side, held in enumerate(self.held)
        ]
        self.check_contents(1)
        assert cache.stats().free_blocks == 5

    def check_contents(self, more: int) -> None:
        state = self.cache._find()
        for index, seq in enumerate(self.seqs):
            table = state.table(seq)
            for pool, held in zip((state.k_pool, state.v_pool), self.held, strict=True):
                rows = pool[:, table.pages].reshape(LAYERS, -1, *pool.shape[3:])[:, : table.length]
                np.testing.assert_array_equal(rows, held[index])
                assert rows.shape[1] == (5, PAGE)[index] + more


@contextmanager
def model(options: ga.ContextOptions | None = None, **changes: Any) -> Iterator[Model]:
    with opened(options, **{"layers": LAYERS, **changes}) as (ctx, cache):
        yield Model(ctx, cache)


def error_of(ask: Callable[[], Any]) -> Any:
    with pytest.raises(ga.GpuActorsError) as caught:
        ask()
    return caught.value


def over(model: Model, step: Any, kind: type[ga.GpuActorsError]) -> None:
    """Every call of a step that has ended raises this, but an abort."""
    assert isinstance(error_of(lambda: model.attend(step, [0])), kind)
    assert isinstance(outcome(step.commit()), kind)
    assert wait(step.abort()) is None


# How a program ends a step


@EACH_LAYER
def test_a_step_that_is_aborted_at_any_layer_leaves_no_trace(layer: int) -> None:
    with model() as one:
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
def test_an_exception_in_the_block_aborts_the_step(layer: int) -> None:
    with model() as one:
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
def test_a_cancelled_block_aborts_the_step(layer: int) -> None:
    async def block(one: Model, reached: asyncio.Event) -> None:
        async with await one.begin() as step:
            one.attend(step, range(layer))
            reached.set()
            await asyncio.sleep(60.0)

    async def cancelled(one: Model) -> None:
        reached = asyncio.Event()
        task = asyncio.create_task(block(one, reached))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with model() as one:
        asyncio.run(cancelled(one))
        one.check()


@EACH_LAYER
def test_a_step_that_is_dropped_is_aborted(layer: int) -> None:
    with model() as one:
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
def test_a_commit_without_all_layers_names_those_that_are_missing(layer: int) -> None:
    with model() as one:
        step = one.step()
        one.attend(step, range(layer))
        refusal = outcome(step.commit())
        assert isinstance(refusal, ga.InvalidRequest)
        assert (refusal.field, refusal.value) == ("layers", list(range(layer, LAYERS)))
        one.attend(step, range(layer))  # it goes on until its block ends
        with pytest.raises(ga.InvalidRequest, match="layers"), step:
            pass
        assert [one.cache.length(seq) for seq in one.seqs] == [5, PAGE]
        over(one, step, ga.StaleBuffer)
        one.check()


def test_a_second_commit_is_refused_and_an_abort_undoes_nothing() -> None:
    with model() as one:
        step = one.step()
        one.attend(step, range(LAYERS))
        assert wait(step.commit()) == [6, PAGE + 1]
        over(one, step, ga.StaleBuffer)
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
        one.attend(one.step(0), [0])  # the actor and its stream have gone on
        eventually(lambda: gc.collect() >= 0 and kept() is None)


# Launches that fail


@EACH_LAYER
@pytest.mark.parametrize("kind", [ga.LaunchError, ga.OutOfDeviceMemory])
def test_a_launch_that_fails_aborts_the_step(layer: int, kind: Any) -> None:
    with model(ga.ContextOptions(fault_plan=FaultPlan().fail(2 + layer, kind))) as one:
        step = one.step()
        waits = one.append()
        one.attend(step, range(layer))
        assert type(error_of(lambda: one.attend(step, [layer]))) is kind
        assert wait(waits) == 6, "it waited for the step to end"
        one.cut(5, PAGE)
        over(one, step, kind)
        one.check()


@EACH_LAYER
def test_a_lost_context_ends_a_step_at_any_layer(layer: int) -> None:
    with model(ga.ContextOptions(fault_plan=FaultPlan().lose_context(2 + layer))) as one:
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
    """The step ends by itself: what waits for it goes on, whether or not the program aborts it."""
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
    """All layers are done on the device, and the commit waits for a launch before them, which fails."""
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


def test_the_copy_of_a_shared_page_that_fails_takes_the_step_with_it() -> None:
    with model(ga.ContextOptions(fault_plan=FaultPlan().fail(2))) as one:
        fork = wait(one.cache.fork(one.seqs[0]))
        step = one.step(0)
        assert isinstance(error_of(lambda: one.attend(step, range(LAYERS))), ga.LaunchError)
        wait(one.cache.free(fork))
        over(one, step, ga.LaunchError)
        one.check()


# The cache, the context and the actor


@pytest.mark.parametrize(("rows", "full"), [(1 + 8 * PAGE, True), (6 * PAGE, True), (3 * PAGE, False)])
def test_a_step_without_room_takes_nothing(rows: int, full: bool) -> None:
    with model() as one:
        result = outcome(one.begin(rows=rows))
        assert isinstance(result, ga.CacheFull) == full
        if not full:
            assert one.cache.stats().free_blocks == 0
            wait(result.abort())
        one.check()


@pytest.mark.parametrize("layer", [0, 2, LAYERS])
def test_a_cache_that_is_closed_ends_its_steps(layer: int) -> None:
    with ga.open_context("mock") as ctx:
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


@pytest.mark.parametrize("layer", [0, 2, LAYERS])
def test_a_context_that_is_closed_ends_its_steps(layer: int) -> None:
    with model(ga.ContextOptions(drain_timeout=0.1)) as one:
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


def test_a_full_mailbox_refuses_a_step_and_takes_its_end() -> None:
    with model(ga.ContextOptions(mailbox_capacity=2)) as one:
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


def test_two_steps_at_once_on_different_sequences() -> None:
    with model() as one:
        first, second = one.step(0), one.step(1)
        for layer in range(LAYERS):
            one.attend(first, [layer])
            one.attend(second, [LAYERS - 1 - layer])
        wait(second.abort())
        assert wait(first.commit()) == [6]
        one.cut(5, PAGE)
        one.check()


def test_a_second_step_on_a_sequence_waits_for_the_first() -> None:
    with model() as one:
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
    """Too many launches are in flight, and requests that share none wait for their turn."""
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


def test_each_reader_of_a_reply_gets_the_same_step() -> None:
    with model() as one:
        reply = one.begin()
        first, second = wait(reply), wait(reply)
        assert first is second
        del second
        one.attend(first, range(LAYERS))
        assert wait(first.commit()) == [6, PAGE + 1]


def test_a_known_step_without_new_rows_is_planned_for_the_table_that_there_is() -> None:
    with model() as one:
        for _ in range(2 * PAGE):
            step = one.step(0, append=False, rows=PAGE)
            q = one.rows.q(1, PAGE)
            out = step.attend(1, q)
            wait(step.commit())
            assert out.tobytes() == wait(one.cache.attend(q, [one.seqs[0]], layer=1)).out.tobytes()
            wait(one.append(0))


def test_the_others_do_not_wait_for_a_step() -> None:
    with model() as one:
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


# Refusals

ROPE = ga.Rope(dim=16, table_rows=4)
SHORT = {"rope": ROPE, "rope_cos": np.ones((4, 8), np.float32), "rope_sin": np.zeros((4, 8), np.float32)}
WIDE = np.zeros((2, 1, HEADS_Q, 16), np.float32)


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"heads_q": 0}, "heads_q", 0),
        ({"heads_q": "4"}, "heads_q", "4"),
        ({"rows": 0}, "rows", 0),
        ({"rows": True}, "rows", True),
        ({"rows": [1]}, "rows", [1]),
        ({"rows": [1, -1]}, "rows[1]", -1),
        ({"append": 1}, "append", 1),
        ({"dtype": "int8"}, "dtype", "int8"),
        ({"like": 5}, "like", "5"),
        ({"like": ["q"]}, "like", "['q']"),
        ({"like": {"lse": WIDE}}, "like", "lse"),
        ({"like": {"q": 5}}, "q", "int"),
        ({"like": {"k": WIDE}}, "k", "float32[2, 1, 4, 16]"),
        ({"like": {"out": WIDE[:1]}}, "out", "float32[1, 1, 4, 16]"),
        ({"layer_options": 5}, "layer_options", 5),
        ({"layer_options": {LAYERS: {}}}, "layer_options", LAYERS),
        ({"layer_options": {True: {}}}, "layer_options", True),
        ({"layer_options": {1: 5}}, "layer_options[1]", "5"),
        ({"layer_options": {1: {"sink": 2}}}, "layer_options[1]", "sink"),
        ({"layer_options": {1: {"q": WIDE}}}, "layer_options[1]", "q"),
        ({"layer_options": {1: {"layer": 2}}}, "layer_options[1]", "layer"),
        ({"layer_options": {1: {"seqs": []}}}, "layer_options[1]", "seqs"),
        ({"layer_options": {1: {"tokens": [[1], [1]]}}}, "layer_options[1]", "tokens"),
        ({"layer_options": {1: {"expect_length": [9, 9]}}}, "layer_options[1]", "expect_length"),
        ({"layer_options": {1: {"return_lse": True}}}, "layer_options[1]", "return_lse"),
        ({"layer_options": {1: {"window_size": (-5, 0)}}}, "window_size", (-5, 0)),
        ({"layer_options": {1: SHORT}}, "rope.table_rows", 4),
        ({"layer_options": {0: SHORT}}, "rope.table_rows", 4),
        ({"layer_options": {3: {"bias": np.zeros((1, 1, 1, 6), np.float32)}}}, "bias", "float32[1, 1, 1, 6]"),
        (SHORT, "rope.table_rows", 4),
        ({"window_size": []}, "window_size", []),
        ({"window_size": None}, "window_size", None),
        ({"softmax_scale": []}, "softmax_scale", []),
        ({"softcap": -1.0}, "softcap", -1.0),
        ({"causal": 1}, "causal", 1),
        ({"expect_length": [5, 5]}, "expect_length", [5, 5]),
        ({"expect_length": 5}, "expect_length", 5),
        ({"tokens": [1, 2, 3]}, "tokens", "[1, 2, 3]"),
        ({"append": False, "rope": ROPE}, "rope", ROPE),
    ],
)
def test_what_a_step_cannot_be_is_refused_by_name(options: dict[str, Any], field: str, value: Any) -> None:
    with model() as one:
        refusal = outcome(one.cache.step(one.seqs, **{"heads_q": HEADS_Q, **options}))
        assert isinstance(refusal, ga.InvalidRequest | ga.Unsupported)
        assert (refusal.field, refusal.value) == (field, value)
        one.check()


def test_sequences_that_cannot_step_are_refused_by_name() -> None:
    with model() as one, one.ctx.kv_cache(**spec()) as other:
        foreign, freed = wait(other.create(), one.cache.create())
        wait(one.cache.free(freed))
        first = one.seqs[0]
        for seqs, field in (
            (first, "seqs"),
            (5, "seqs"),
            ([5], "seqs[0]"),
            ([first, foreign], "seqs[1]"),
            ([first, freed], "seqs[1]"),
            ([first, first], "seqs"),
        ):
            refusal = outcome(one.cache.step(seqs, heads_q=HEADS_Q))  # type: ignore[arg-type]
            assert isinstance(refusal, ga.InvalidRequest)
            assert refusal.field == field
        one.check()


def test_arrays_that_the_step_was_not_begun_for_are_refused_and_the_step_goes_on() -> None:
    with model() as one:
        step = one.step()
        q, (k, v) = one.rows.q(2, 1), one.rows.new(2, 1)
        pool = one.cache._find().k_pool
        for arguments, options, field in (
            ((LAYERS, q, k, v), {}, "layer"),
            ((-1, q, k, v), {}, "layer"),
            ((True, q, k, v), {}, "layer"),
            (("0", q, k, v), {}, "layer"),
            ((0, None, k, v), {}, "q"),
            ((0, q), {}, "k"),
            ((0, q, k), {}, "v"),
            ((0, q[:1], k, v), {}, "q"),
            ((0, q.astype(np.float64), k, v), {}, "q"),
            ((0, q[..., ::-1], k, v), {}, "q"),
            ((0, q, k, v[:, :, :1]), {}, "v"),
            ((0, 5, k, v), {}, "q"),
            ((0, q, k, v), {"out": q}, "out"),
            ((0, q, k, v), {"out": k}, "out"),
            ((0, q, k, v), {"out": pool.reshape(-1)[: q.size].reshape(q.shape)}, "out"),
            ((0, q, k, v), {"c_kv": k}, "c_kv"),
            ((0, q, k, v), {"stream": "x"}, "stream"),
            ((0, q, k, v), {"stream": True}, "stream"),
        ):
            refusal = error_of(lambda arguments=arguments, options=options: step.attend(*arguments, **options))
            assert isinstance(refusal, ga.InvalidRequest)
            assert refusal.field == field
        step.attend(np.int64(0), q, k, v)
        one.attend(step, range(1, LAYERS))
        assert wait(step.commit()) == [6, PAGE + 1]
        one.cut(5, PAGE)
        one.check()
