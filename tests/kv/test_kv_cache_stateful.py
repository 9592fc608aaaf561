"""Random operations on a KvCache against a plain dictionary of arrays, on contexts whose launches sometimes fail.

Operations are made in bursts without waiting for answers, so that they share launches and overtake each other where
they may. Then each is checked in order: one that failed must leave no trace, one that succeeded must do what the
dictionary does. One fails only with its own launch, or with one that it builds on. After every burst the pages must add
up: no page leaks or is in two places, and every row is right.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from inside.actors import OpenedCache, _KvCoalescer
from support.service import eventually

import gpu_actors as ga
from gpu_actors import ServiceActor
from gpu_actors.reference import attention_forward
from gpu_actors.testing import FaultPlan

HEADS, DIM = 2, 4
PAGES = (1, 3, 8)  # keys a page
GROUP = 2  # query heads a KV head

operations = Counter[str]()
outcomes = Counter[str]()
own_failures: set[Any] = set()
"""Calls whose own launch is refused or fails."""
refusing = random.Random()
refused_share = 0.0
"""The share of launches that the device refuses immediately."""


def failing_launches(seed: int) -> FaultPlan:
    dice = random.Random(seed)
    plan = FaultPlan()
    if dice.random() < 0.2:
        return plan
    for launch in range(1, 400):
        if dice.random() < 0.25:
            plan = plan.fail(launch, dice.choice([ga.LaunchError, ga.OutOfDeviceMemory]))
        if dice.random() < 0.4:  # so that others are launched meanwhile
            plan = plan.delay(0.002, launch)
    return plan


@dataclass
class Asked:
    """An operation of a burst. then: applies it to the dictionary. refused: whether `InvalidRequest` is right."""

    reply: ga.Reply[Any]
    then: Callable[[Any], Any]
    refused: Callable[[], bool]
    seqs: set[ga.KvSequence]
    writes: bool


class Rows:
    """A sequence of the dictionary."""

    def __init__(self, k: np.ndarray, v: np.ndarray, prompt: np.ndarray | None = None) -> None:
        self.k, self.v, self.prompt = k, v, prompt

    def __len__(self) -> int:
        return len(self.k)

    def more(self, k: np.ndarray, v: np.ndarray) -> None:
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])


class Caching(RuleBasedStateMachine):
    """One cache, from opening to closing. `burst` holds the operations that are not checked yet."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        blocks=st.sampled_from([6, 12, 40]),
        page=st.sampled_from(PAGES),
        largest=st.sampled_from([1, 3, 64]),
        flying=st.sampled_from([1, 3, 8]),
    )
    def open(self, seed: int, blocks: int, page: int, largest: int, flying: int) -> None:
        global refused_share
        self.rng, self.page = np.random.default_rng(seed), page
        refusing.seed(seed)
        refused_share = refusing.choice([0.0, 0.0, 0.2])
        plan = failing_launches(seed)
        self.opener = ga.open_context(
            "mock", ga.ContextOptions(fault_plan=plan, coalesce_max=largest, max_in_flight=flying, degraded_after=10**6)
        )
        self.ctx = self.opener.__enter__()
        self.cache = self.ctx.kv_cache(
            num_blocks=blocks * 8 // page, page_size=page, kv_heads=HEADS, head_dim=DIM, dtype="float32"
        ).__enter__()
        self.rows: dict[ga.KvSequence, Rows] = {}
        self.burst: list[Asked] = []
        # The sequences' lengths if nothing fails, only for choosing operations.
        self.lengths: dict[ga.KvSequence, int] = {}

    # Operations of a program

    def ask(
        self,
        what: str,
        reply: ga.Reply[Any],
        seqs: list[ga.KvSequence],
        then: Callable[[Any], Any],
        *,
        writes: bool = False,
        refused: Callable[[], bool] = lambda: False,
    ) -> None:
        operations[what] += 1
        self.burst.append(Asked(reply, then, refused, set(seqs), writes))

    def pick(self, choice: int) -> ga.KvSequence | None:
        known = list(self.lengths)
        return known[choice % len(known)] if known else None

    def draw(self, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = self.rng.standard_normal((2, *shape)).astype(np.float32)
        return k, v

    @rule(length=st.integers(0, 24), shared=st.booleans())
    def create(self, length: int, shared: bool) -> None:
        """Create a sequence with one of a few prompts, whose rows follow from the tokens, or without."""
        self.settle()
        if len(self.rows) >= 12:
            return
        tokens = (np.arange(length) + length % 2) if shared and length else None
        reply = self.cache.create(tokens)
        seq = reply.result(10.0)
        operations["create"] += 1
        outcomes["found a prefix"] += seq.cached > 0
        k, v = prompt_rows(tokens if tokens is not None else np.arange(0))
        assert seq.cached % self.page == 0
        assert seq.cached == 0 or (tokens is not None and seq.cached < len(tokens))
        self.rows[seq] = Rows(k[: seq.cached], v[: seq.cached], tokens)
        self.lengths[seq] = seq.cached
        if tokens is not None:
            self.append_rows([seq], [(k[seq.cached :], v[seq.cached :])], tokens[seq.cached :])

    def append_rows(
        self, seqs: list[ga.KvSequence], new: list[tuple[np.ndarray, np.ndarray]], tokens: Any = None
    ) -> None:
        if len(seqs) == 1:
            reply = self.cache.append(seqs[0], *new[0], tokens=tokens)
        else:
            ends = np.cumsum([0, *(len(k) for k, _ in new)]).astype(np.int32)
            k, v = (np.concatenate([pair[side] for pair in new]) for side in (0, 1))
            reply = self.cache.append(seqs, k, v, cu_seqlens=ends)

        def then(result: Any) -> None:
            for seq, (k, v) in zip(seqs, new, strict=True):
                self.rows[seq].more(k, v)
            lengths = [len(self.rows[seq]) for seq in seqs]
            assert result == (lengths[0] if len(seqs) == 1 else lengths)

        self.ask("append", reply, seqs, then, writes=True)
        for seq, (k, _) in zip(seqs, new, strict=True):
            self.lengths[seq] += len(k)

    @rule(choices=st.lists(st.integers(0, 99), min_size=1, max_size=3), counts=st.lists(st.integers(1, 11), min_size=3))
    def append(self, choices: list[int], counts: list[int]) -> None:
        seqs = list(dict.fromkeys(seq for choice in choices if (seq := self.pick(choice)) is not None))
        if seqs:
            new = [self.draw(count, HEADS, DIM) for count in counts[: len(seqs)]]
            self.append_rows(seqs, new)

    @rule(
        choices=st.lists(st.integers(0, 99), min_size=1, max_size=4),
        rows=st.integers(1, 3),
        appended=st.booleans(),
        causal=st.booleans(),
    )
    def attend(self, choices: list[int], rows: int, appended: bool, causal: bool) -> None:
        seqs = [seq for choice in choices if (seq := self.pick(choice)) is not None]
        if seqs:
            self.ask_attention(list(dict.fromkeys(seqs)) if appended else seqs, rows, appended, causal)

    @rule(steps=st.integers(1, 3))
    def decode(self, steps: int) -> None:
        """A request for each sequence, as tasks that generate text make them."""
        for _ in range(steps):
            for seq in list(self.lengths)[:5]:
                self.ask_attention([seq], 1, True, True)

    def ask_attention(self, seqs: list[ga.KvSequence], rows: int, appended: bool, causal: bool) -> None:
        q = self.rng.standard_normal((len(seqs), rows, HEADS * GROUP, DIM)).astype(np.float32)
        new = self.draw(len(seqs), rows, HEADS, DIM)
        given = dict(zip("kv", new, strict=True)) if appended else {}

        def then(result: ga.AttentionOutput) -> None:
            for index, seq in enumerate(seqs):
                if appended:
                    self.rows[seq].more(new[0][index], new[1][index])
                self.check_attention(self.rows[seq], q[index], causal, result.out[index], result.lse[index])

        reply = self.cache.attend(q, seqs, causal=causal, return_lse=True, **given)
        self.ask("attend and append" if appended else "attend", reply, seqs, then, writes=appended)
        for seq in seqs if appended else ():
            self.lengths[seq] += rows

    @rule(choice=st.integers(0, 99))
    def fork(self, choice: int) -> None:
        """The fork follows the operations in flight and is awaited, because later ones need the child."""
        seq = self.pick(choice)
        if seq is None or len(self.lengths) >= 12:
            return
        operations["fork"] += 1
        reply = self.cache.fork(seq)
        self.settle()
        child = reply.result(10.0)
        outcomes["forked"] += 1
        parent = self.rows[seq]
        self.rows[child] = Rows(parent.k, parent.v)
        self.lengths[child] = len(parent)
        assert child.cached == len(parent)

    @rule(choice=st.integers(0, 99), keep=st.floats(0, 1))
    def truncate(self, choice: int, keep: float) -> None:
        seq = self.pick(choice)
        if seq is None:
            return
        length = int(keep * self.lengths[seq])

        def then(_: None) -> None:
            rows = self.rows[seq]
            assert length <= len(rows)
            rows.k, rows.v = rows.k[:length], rows.v[:length]

        def refused() -> bool:
            """Whether rows that should stay were never written."""
            return length > len(self.rows[seq])

        self.ask("truncate", self.cache.truncate(seq, length), [seq], then, refused=refused)
        self.lengths[seq] = length

    @rule(choice=st.integers(0, 99))
    def free(self, choice: int) -> None:
        seq = self.pick(choice)
        if seq is not None and (choice % 3 == 0 or len(self.lengths) > 8):
            self.ask("free", self.cache.free(seq), [seq], lambda _: self.rows.pop(seq))
            del self.lengths[seq]

    @rule(choice=st.integers(0, 99))
    def cancel(self, choice: int) -> None:
        if self.burst:
            operations["cancel"] += 1
            self.burst[choice % len(self.burst)].reply.cancel()

    @rule()
    def settle(self) -> None:
        """Check every operation in the order of the requests."""
        for index, asked in enumerate(self.burst):
            try:
                result = asked.reply.result(10.0)
            except (ga.CacheFull, ga.RequestCancelled) as error:
                outcomes[type(error).__name__] += 1
            except (ga.LaunchError, ga.OutOfDeviceMemory) as error:
                outcomes[type(error).__name__] += 1
                self.check_cause(index, error)
            except ga.InvalidRequest:
                outcomes["InvalidRequest"] += 1
                if not asked.refused():
                    raise
            else:
                outcomes["done"] += 1
                asked.then(result)
        self.burst.clear()
        own_failures.clear()
        self.lengths = {seq: len(rows) for seq, rows in self.rows.items()}

    # Invariants

    def check_cause(self, index: int, error: Exception) -> None:
        """Check that its own launch failed, or an earlier one that should have written what it reads or writes."""
        asked = self.burst[index]
        if asked.reply._call in own_failures:
            return
        outcomes["failed with another"] += 1
        assert any(
            earlier.reply._call.error is error and earlier.writes and earlier.seqs & asked.seqs
            for earlier in self.burst[:index]
        )

    def check_attention(self, rows: Rows, q: Any, causal: bool, out: Any, lse: Any) -> None:
        if not len(rows):
            assert (out == 0).all()
            assert np.isneginf(lse).all()
            return
        wanted = attention_forward(q[None], rows.k[None], rows.v[None], causal=causal)
        np.testing.assert_allclose(out, wanted.out[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lse, wanted.lse[0], rtol=1e-4, atol=1e-5)

    @property
    def opened(self) -> OpenedCache:
        return self.cache._find()

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "cache") or self.burst:
            return
        # A call that fails with another launch is answered a moment before its own launch counts as ended.
        eventually(lambda: not self.opened._in_flight)
        (group,), tables = self.opened.groups, self.opened.tables
        pool = tables._groups[0].pool
        held = Counter(page for table in tables._tables.values() for page in table.groups[0].pages)
        assert [pool.references(page) for page in range(pool.blocks)] == [held[page] for page in range(pool.blocks)]
        assert sorted([*pool._free, *pool._cached, *held]) == list(range(pool.blocks)), "leaked, or in two places"
        stats = self.cache.stats()
        assert stats.sequences == len(self.rows)
        assert stats.free_blocks == stats.blocks - len(held)
        assert stats.shared_blocks == sum(count > 1 for count in held.values())
        for seq, rows in self.rows.items():
            table = tables.find(seq.number)
            assert (table.length, table.users) == (len(rows), 0)
            assert self.cache.length(seq) == len(rows)
            pages = table.groups[0].pages
            assert len(pages) == -(-len(rows) // self.page)
            for side, wanted in ((group.k_pool, rows.k), (group.v_pool, rows.v)):
                found = side[pages].reshape(-1, HEADS, DIM)[: len(rows)]
                assert np.array_equal(found, wanted)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.settle()
        self.pages_add_up()
        for seq in list(self.rows):
            self.cache.free(seq).result(10.0)
        self.rows.clear()
        stats = self.cache.stats()
        assert (stats.free_blocks, stats.sequences, stats.shared_blocks) == (stats.blocks, 0, 0)
        self.cache.__exit__(None, None, None)
        self.opener.__exit__(None, None, None)


def prompt_rows(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values that follow from a prompt, as a model's do."""
    base = np.arange(len(tokens))[:, None, None] + 100.0 * np.asarray(tokens)[:, None, None]
    k = np.sin(base + np.arange(HEADS * DIM).reshape(HEADS, DIM)).astype(np.float32)
    return k, -k


def run(examples: int, seed: bool) -> None:
    operations.clear()
    outcomes.clear()
    run_state_machine_as_test(
        Caching,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            derandomize=seed,
            database=None,
            phases=[Phase.generate],  # a failure may mean a wait until a timeout, so shrinking would take too long
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def _launches_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse some launches, and note the calls whose own launch fails."""
    launch, answer_failure, failed = ServiceActor.launch, ServiceActor.answer_failure, _KvCoalescer.failed

    def noted(self: Any, group: Any, error: BaseException) -> Any:
        own_failures.update(work.call for work in group)
        return failed(self, group, error)

    def refusal_noted(self: ServiceActor, calls: Any, error: BaseException) -> None:
        calls = list(calls)
        own_failures.update(calls)
        answer_failure(self, calls, error)

    def refused(self: ServiceActor, calls: Any, *arguments: Any) -> None:
        if refusing.random() < refused_share:
            outcomes["refused together" if len(calls) > 1 else "refused alone"] += 1
            raise ga.OutOfDeviceMemory("no room for what this launch needs")
        launch(self, calls, *arguments)

    monkeypatch.setattr(_KvCoalescer, "failed", noted)
    monkeypatch.setattr(ServiceActor, "answer_failure", refusal_noted)
    monkeypatch.setattr(ServiceActor, "launch", refused)


@pytest.mark.timeout(120)  # hundreds of operations, each compared with a dictionary
def test_random_operations_do_what_a_dictionary_does() -> None:
    run(50, True)  # a busy machine performs fewer operations per example
    assert sum(operations.values()) >= 500, operations
    assert len(operations) == 8, operations
    expected = {"done", "CacheFull", "found a prefix", "forked", "refused alone"}
    assert not {name for name in expected if not outcomes[name]}, outcomes


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_20000_random_operations_do_what_a_dictionary_does() -> None:
    run(1000, False)
    print(sum(operations.values()), operations, outcomes)  # noqa: T201
    assert sum(operations.values()) >= 20_000, operations
    expected = {"failed with another", "refused together", "LaunchError"}
    assert not {name for name in expected if not outcomes[name]}, outcomes
