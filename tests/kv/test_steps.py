"""Random steps over the layers of a KvCache against a dictionary of float64 rows and caches of one layer each.

The layers are equal, or in three groups, of which one has a window and frees pages.

While a step is open, requests on its sequences must wait and succeed afterwards, and others must not wait. However the
step ends, every sequence then equals the dictionary's in all layers, the layers' outputs have the bits of the caches
of one layer, and the pages add up.
"""

from __future__ import annotations

import asyncio
import functools
import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.kv_cache import attention
from support.service import eventually

import gpu_actors as ga

LAYERS, HEADS, HEADS_Q, DIM, PAGE, BLOCKS = 3, 2, 4, 4, 3, 14

ENDS = ("commit", "block", "abort", "drop", "raise", "cancel", "missing", "incomplete")

operations = Counter[str]()


class Rows:
    """A sequence of the dictionary. twins: the same sequence in each cache of one layer."""

    def __init__(self, k: np.ndarray, v: np.ndarray, twins: list[ga.KvSequence]) -> None:
        self.k, self.v, self.twins = k, v, twins

    def __len__(self) -> int:
        return self.k.shape[1]

    def more(self, k: np.ndarray, v: np.ndarray) -> None:
        self.k, self.v = np.concatenate([self.k, k], axis=1), np.concatenate([self.v, v], axis=1)


@dataclass(eq=False)
class Begun:
    """An open step. k, v: its rows in all layers, packed. outs: the layer, rows and output of each attention."""

    step: Any
    seqs: list[ga.KvSequence]
    counts: list[int]
    listed: bool
    append: bool
    k: np.ndarray
    v: np.ndarray
    outs: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)

    def shaped(self, packed: np.ndarray) -> np.ndarray:
        return packed if self.listed else packed.reshape(len(self.seqs), self.counts[0], *packed.shape[1:])

    def parts(self, packed: np.ndarray, axis: int = 0) -> list[np.ndarray]:
        return np.split(packed, np.cumsum(self.counts)[:-1], axis=axis)


@dataclass(eq=False)
class Waiting:
    """A request on a sequence of an open step. then: applies it to the dictionary."""

    seq: ga.KvSequence
    reply: ga.Reply[Any]
    then: Callable[[Any], Any]


class Stepping(RuleBasedStateMachine):
    """layers: of the cache. windows: of its layers, by their numbers. blocks: of the pool of each group."""

    layers: Any = LAYERS
    windows: ClassVar[Mapping[int, int]] = {}
    blocks: Sequence[int] = (BLOCKS,)

    def __init__(self) -> None:
        super().__init__()
        self.opener = ga.open_context("mock")
        ctx = self.opener.__enter__()
        spec: dict[str, Any] = {"page_size": PAGE, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
        self.cache = ctx.kv_cache(num_blocks=BLOCKS, layers=self.layers, **spec).__enter__()
        # They have room for rows that an abort leaves there.
        self.ones = [ctx.kv_cache(num_blocks=4 * BLOCKS, **spec).__enter__() for _ in range(LAYERS)]
        self.rows: dict[ga.KvSequence, Rows] = {}
        self.steps: list[Begun] = []
        self.waiting: list[Waiting] = []

    @initialize(seed=st.integers(0, 2**32 - 1))
    def seeded(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        for _ in range(4):
            self.create()

    def draw(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal((*shape, DIM)).astype(np.float32)

    def pick(self, choices: list[int]) -> list[ga.KvSequence]:
        known = list(self.rows)
        return list(dict.fromkeys(known[choice % len(known)] for choice in choices)) if known else []

    def stepping(self, seq: ga.KvSequence) -> bool:
        return any(seq in begun.seqs for begun in self.steps)

    def ask(self, what: str, seq: ga.KvSequence, ask: Callable[[], ga.Reply[Any]], then: Callable[[Any], Any]) -> None:
        """Make a request on one sequence. It must wait if the sequence is in an open step, and only then."""
        if self.waiting and not self.stepping(seq):
            return  # a cache keeps the order of requests, so it would wait with them
        waiting = Waiting(seq, ask(), then)
        if self.stepping(seq):
            operations[f"{what} waits"] += 1
            self.waiting.append(waiting)
        else:
            operations[what] += 1
            self.settle(waiting)

    def settle(self, waiting: Waiting) -> None:
        try:
            result = waiting.reply.result(10.0)
        except ga.CacheFull:
            operations["CacheFull"] += 1
            return
        except ga.InvalidRequest as refusal:
            assert self.windows
            operations[f"{refusal.field} behind the window"] += 1
            return
        waiting.then(result)

    def seen(self, layer: int) -> dict[str, Any]:
        """The option of attention that hides rows that a layer need not keep."""
        return {"window_size": (self.windows[layer], 0)} if layer in self.windows else {}

    def compare_layer(self, layer: int, out: np.ndarray, q: np.ndarray, twins: list[Any], **options: Any) -> None:
        """Compare an output with that of a cache of one layer, which keeps all rows."""
        alone = self.ones[layer].attend(q, twins, **options, **self.seen(layer)).result(10.0).out
        if layer in self.windows:
            np.testing.assert_allclose(out, alone, rtol=1e-4, atol=1e-5)
        else:
            assert out.tobytes() == alone.tobytes(), "the bits differ from those of a cache of one layer"

    @rule(seed=st.integers(0, 2**32 - 1))
    def act(self, seed: int) -> None:
        """One of all operations, chosen by a seed: rules of their own would leave out most of them in one run."""
        rng = np.random.default_rng(seed)
        choice, count, layer = int(rng.integers(100)), int(rng.integers(1, 6)), int(rng.integers(LAYERS))
        actions: list[Callable[[], None]] = [
            self.create,
            lambda: self.append(choice, count),
            lambda: self.attend(choice, layer, 1 + count % 2),
            lambda: self.fork(choice),
            lambda: self.truncate(choice, count % 3),
            lambda: self.free(choice),
            lambda: self.begin(rng.integers(0, 100, count).tolist(), int(rng.integers(1, 4))),
            lambda: self.attend_layers(choice, rng.integers(0, LAYERS, count).tolist()),
            lambda: self.end(choice),
        ]
        actions[rng.integers(len(actions))]()

    # Requests

    def create(self) -> None:
        if len(self.rows) < 7 and not self.waiting:
            seq = self.cache.create().result(10.0)
            none = np.zeros((LAYERS, 0, HEADS, DIM))
            self.rows[seq] = Rows(none, none, [one.create().result(10.0) for one in self.ones])

    def append(self, choice: int, count: int) -> None:
        for seq in self.pick([choice]):
            k, v = self.draw(LAYERS, count, HEADS), self.draw(LAYERS, count, HEADS)

            def then(length: int, seq: ga.KvSequence = seq, k: np.ndarray = k, v: np.ndarray = v) -> None:
                rows = self.rows[seq]
                rows.more(k, v)
                assert length == len(rows)
                for layer, (one, twin) in enumerate(zip(self.ones, rows.twins, strict=True)):
                    one.append(twin, k[layer], v[layer]).result(10.0)

            self.ask("append", seq, lambda seq=seq, k=k, v=v: self.cache.append(seq, k, v), then)

    def attend(self, choice: int, layer: int, count: int) -> None:
        for seq in self.pick([choice]):
            q = self.draw(1, count, HEADS_Q)

            def then(result: ga.AttentionOutput, seq: ga.KvSequence = seq, q: np.ndarray = q) -> None:
                rows = self.rows[seq]
                check_attention(result.out[0], q[0], rows.k[layer], rows.v[layer], **self.seen(layer))
                self.compare_layer(layer, result.out, q, [rows.twins[layer]])

            self.ask("attend", seq, lambda seq=seq, q=q: self.cache.attend(q, [seq], layer=layer), then)

    def fork(self, choice: int) -> None:
        for seq in self.pick([choice]) if len(self.rows) < 7 else ():

            def then(child: ga.KvSequence, seq: ga.KvSequence = seq) -> None:
                rows = self.rows[seq]
                assert child.cached == len(rows)
                twins = [one.fork(twin).result(10.0) for one, twin in zip(self.ones, rows.twins, strict=True)]
                self.rows[child] = Rows(rows.k, rows.v, twins)

            self.ask("fork", seq, lambda seq=seq: self.cache.fork(seq), then)

    def truncate(self, choice: int, cut: int) -> None:
        for seq in self.pick([choice]):
            # Waiting requests may still lack pages, and a step may be undone: the length stays within the present rows.
            length = max(0, len(self.rows[seq]) - cut)
            if any(waiting.seq is seq for waiting in self.waiting):
                continue

            def then(_: None, seq: ga.KvSequence = seq, length: int = length) -> None:
                rows = self.rows[seq]
                rows.k, rows.v = rows.k[:, :length], rows.v[:, :length]
                for one, twin in zip(self.ones, rows.twins, strict=True):
                    one.truncate(twin, length).result(10.0)

            self.ask("truncate", seq, lambda seq=seq, length=length: self.cache.truncate(seq, length), then)

    def free(self, choice: int) -> None:
        for seq in self.pick([choice]):
            if not self.stepping(seq) and (choice % 3 == 0 or len(self.rows) > 5):

                def then(_: None, seq: ga.KvSequence = seq) -> None:
                    for one, twin in zip(self.ones, self.rows.pop(seq).twins, strict=True):
                        one.free(twin).result(10.0)

                self.ask("free", seq, lambda seq=seq: self.cache.free(seq), then)

    # Steps

    def begin(self, choices: list[int], number: int) -> None:
        seqs = self.pick(choices)
        if self.waiting or len(self.steps) == 2:
            return
        free = [seq for seq in seqs if not self.stepping(seq)]
        if not free:
            return
        listed, append = bool(self.rng.random() < 0.5), bool(self.rng.random() < 0.8)
        each = self.rng.integers(0, 9, len(free)).tolist() if listed else [number] * len(free)
        k, v = (self.draw(LAYERS, sum(each), HEADS) for _ in "kv")
        try:
            step = self.cache.step(free, heads_q=HEADS_Q, rows=each if listed else number, append=append).result(10.0)
        except ga.CacheFull:
            operations["CacheFull of a step"] += 1
            return
        except ga.InvalidRequest as refusal:
            assert (bool(self.windows), append) == (True, False)
            operations[f"{refusal.field} of a step behind the window"] += 1
            return
        operations["a step of a list" if listed else "a step of a number"] += 1
        operations["two steps"] += len(self.steps)
        new = each if append else [0] * len(free)
        assert step.lengths == [len(self.rows[seq]) + more for seq, more in zip(free, new, strict=True)]
        self.steps.append(Begun(step, free, each, listed, append, k, v))

    def attend_layers(self, choice: int, layers: list[int]) -> None:
        if self.steps:
            begun = self.steps[choice % len(self.steps)]
            for layer in layers:
                self.attend_layer(begun, layer)

    def attend_layer(self, begun: Begun, layer: int) -> None:
        q = self.draw(sum(begun.counts), HEADS_Q)
        new = (begun.shaped(begun.k[layer]), begun.shaped(begun.v[layer])) if begun.append else ()
        out = np.empty_like(begun.shaped(q)) if self.rng.random() < 0.5 else None
        result = begun.step.attend(layer, begun.shaped(q), *new, out=out)
        assert out is None or result is out
        assert result.shape == begun.shaped(q).shape
        operations["a layer again"] += any(layer == other for other, _, _ in begun.outs)
        begun.outs.append((layer, q, result))
        k, v = begun.parts(begun.k[layer]), begun.parts(begun.v[layer])
        packed = begun.parts(result.reshape(q.shape))
        for index, (seq, of_q) in enumerate(zip(begun.seqs, begun.parts(q), strict=True)):
            rows = self.rows[seq]
            keys, values = rows.k[layer], rows.v[layer]
            if begun.append:
                keys, values = np.concatenate([keys, k[index]]), np.concatenate([values, v[index]])
            check_attention(packed[index], of_q, keys, values, **self.seen(layer))

    def end(self, choice: int) -> None:
        if not self.steps:
            return
        begun = self.steps[choice % len(self.steps)]
        lacks = begun.append and any(begun.counts) and len({layer for layer, _, _ in begun.outs}) < LAYERS
        # The rarest end so far, because the possible ends depend on waiting requests, and so on time.
        self.end_by(choice, min(ENDS if lacks else ENDS[:-2], key=lambda how: (operations[how], self.rng.random())))

    def end_by(self, choice: int, how: str) -> None:
        if not self.steps:
            return
        begun = self.steps[choice % len(self.steps)]
        for waiting in self.waiting[:1]:
            assert not waiting.reply.done(), "it did not wait for the step"
        step, attended = begun.step, {layer for layer, _, _ in begun.outs}
        if how in ("commit", "block"):
            for layer in set(range(LAYERS)) - attended if begun.append else ():
                self.attend_layer(begun, layer)
            if how == "commit":
                assert step.commit().result(10.0) == step.lengths
            else:
                with step:
                    pass
        elif how in ("missing", "incomplete"):
            if not begun.append or not any(begun.counts) or len(attended) == LAYERS:
                return
            commit = step.commit().result if how == "missing" else functools.partial(step.__exit__, None, None, None)
            with pytest.raises(ga.InvalidRequest, match="layers") as caught:
                commit()
            assert caught.value.value == sorted(set(range(LAYERS)) - attended)
            if how == "missing":
                operations[how] += 1
                return  # the step goes on
        else:
            leave(step, how)
        operations[how] += 1
        opened = begun.step._step
        begun.step = step = None
        if how == "drop":
            gc.collect()  # an earlier caught error may refer to the step
        eventually(lambda: not opened.open)
        self.steps.remove(begun)
        self.compare(begun, how in ("commit", "block"))
        while self.waiting and not self.stepping(self.waiting[0].seq):
            self.settle(self.waiting.pop(0))

    def compare(self, begun: Begun, committed: bool) -> None:
        """Apply a step to the dictionary and to the caches of one layer."""
        ends = {"cu_seqlens_q": np.cumsum([0, *begun.counts]).astype(np.int32)} if begun.listed else {}
        appended = set[int]()
        for layer, q, out in begun.outs:
            twins = [self.rows[seq].twins[layer] for seq in begun.seqs]
            new: dict[str, Any] = {}
            if begun.append and layer not in appended:
                new = {"k": begun.shaped(begun.k[layer]), "v": begun.shaped(begun.v[layer])}
            self.compare_layer(layer, out, begun.shaped(q), twins, **new, **ends)
            appended.add(layer)
        for layer in () if committed or not begun.append else appended:
            for seq in begun.seqs:
                self.ones[layer].truncate(self.rows[seq].twins[layer], len(self.rows[seq])).result(10.0)
        if committed and begun.append:
            parts = zip(begun.seqs, begun.parts(begun.k, 1), begun.parts(begun.v, 1), strict=True)
            for seq, k, v in parts:
                self.rows[seq].more(k, v)

    # Invariants

    @invariant()
    def everything_adds_up(self) -> None:
        if self.steps or self.waiting:
            return
        opened = self.cache._find()
        eventually(lambda: not opened._in_flight and not opened.stepping)
        stats, tables = self.cache.group_stats(), opened.tables
        assert {each.sequences for each in stats} == {len(self.rows)}
        for group, blocks in zip(opened.groups, self.blocks, strict=True):
            pool = tables._groups[group.number].pool
            owned = [table.groups[group.number].pages for table in tables._tables.values()]
            held = Counter(page for pages in owned for page in pages)
            assert [pool.references(page) for page in range(blocks)] == [held[page] for page in range(blocks)]
            assert stats[group.number].free_blocks == blocks - len(held)
        for seq, rows in self.rows.items():
            table = tables.find(seq.number)
            assert (table.length, table.users) == (self.cache.length(seq), 0) == (len(rows), 0)
            for group in opened.groups:
                own = table.groups[group.number]
                assert len(own.pages) == -(-len(rows) // PAGE) - own.first
                if group.window is None:
                    assert own.first == 0
                else:
                    operations["pages given back"] += own.first
                    assert len(own.pages) <= -(-(group.window + 1 + group.slack) // PAGE) + 1
                for index, layer in enumerate(group.layers):
                    for side, wanted in ((group.k_pool, rows.k[layer]), (group.v_pool, rows.v[layer])):
                        pool = side[index] if len(group.layers) > 1 else side
                        kept = wanted[own.first * PAGE :]
                        assert np.array_equal(pool[own.pages].reshape(-1, HEADS, DIM)[: len(kept)], kept)

    def teardown(self) -> None:
        while self.steps:
            self.end_by(0, "abort")
        self.everything_adds_up()
        for cache in (self.cache, *self.ones):
            cache.__exit__(None, None, None)
        self.opener.__exit__(None, None, None)


class Grouped(Stepping):
    """Two groups that keep all rows, and one that keeps the last seven."""

    windows: ClassVar[Mapping[int, int]] = {1: 4}
    layers: Any = (ga.KvLayer(), ga.KvLayer(num_blocks=9, window=4, slack=2), ga.KvLayer(num_blocks=16))
    blocks: Sequence[int] = (BLOCKS, 9, 16)

    def __init__(self) -> None:
        super().__init__()
        # Otherwise a sequence has pages of the same numbers in both groups that keep all rows.
        self.cache._find().tables._groups[2].pool._free.reverse()


def leave(step: Any, how: str) -> None:
    """End a step without a commit."""
    if how == "abort":
        step.abort().result(10.0)
    elif how == "raise":
        with pytest.raises(ZeroDivisionError), step:
            raise ZeroDivisionError("on purpose")
    elif how == "cancel":

        async def block() -> None:
            async with step:
                await asyncio.sleep(60.0)

        async def cancelled() -> None:
            task = asyncio.create_task(block())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())


def check_attention(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **seen: Any) -> None:
    if not len(k):
        assert (out == 0).all()
    elif len(q):
        np.testing.assert_allclose(
            out, attention(q, k.astype(q.dtype), v.astype(q.dtype), **seen), rtol=1e-4, atol=1e-5
        )


def run(machine: type[Stepping], examples: int, derandomize: bool) -> None:
    operations.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=derandomize,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.timeout(120)  # hundreds of operations, each compared with a dictionary
@pytest.mark.parametrize("machine", [Stepping, Grouped])
def test_random_steps_do_what_a_dictionary_does(machine: type[Stepping]) -> None:
    run(machine, 25, True)
    waits = {"append waits", "attend waits", "fork waits", "truncate waits"}
    expected = {
        *ENDS,
        *waits,
        "a step of a list",
        "a step of a number",
        "two steps",
        "a layer again",
    }
    if machine.windows:
        expected |= {"pages given back", "rows of a step behind the window"}
    assert not {name for name in expected if not operations[name]}, operations


@pytest.mark.parametrize("device", ["mock", "emulated"])
@pytest.mark.parametrize("counts", [[1, 1], [3, 1]], ids=str)
def test_packed_rows_of_known_counts_are_attended_to_again(device: str, counts: list[int]) -> None:
    """From the second of these steps on, the launch's preparations are remembered."""
    rng = np.random.default_rng(0)
    spec: dict[str, Any] = {"page_size": PAGE, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    with (
        ga.open_context(device) as ctx,
        ctx.kv_cache(num_blocks=BLOCKS, layers=LAYERS, **spec) as cache,
    ):
        seqs = [cache.create().result(10.0) for _ in counts]
        held = [[[np.empty((0, HEADS, DIM), np.float32) for _ in range(2)] for _ in seqs] for _ in range(LAYERS)]
        for _ in range(4):
            with cache.step(seqs, heads_q=HEADS_Q, rows=counts).result(60.0) as step:
                for layer, known in enumerate(held):
                    q = rng.standard_normal((sum(counts), HEADS_Q, DIM)).astype(np.float32)
                    k, v = rng.standard_normal((2, sum(counts), HEADS, DIM)).astype(np.float32)
                    out = step.attend(layer, q, k, v)
                    ends = np.cumsum(counts)[:-1]
                    for seq, rows in enumerate(zip(*(np.split(x, ends) for x in (q, k, v, out)), strict=True)):
                        known[seq] = [np.concatenate(pair) for pair in zip(known[seq], rows[1:3], strict=True)]
                        np.testing.assert_allclose(rows[3], attention(rows[0], *known[seq]), rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [Stepping, Grouped])
def test_500_runs_of_random_steps_do_what_a_dictionary_does(machine: type[Stepping]) -> None:
    run(machine, 500, False)
