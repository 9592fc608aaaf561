"""Random programs of requests, steps and replays give the bits of a cache that only gets requests."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from emulated.caller_streams import DIM, HEADS_Q, LAYERS, ORDERS, Graphs, program
from emulated.memory import host_view
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import gpu_actors as ga

MOST = 30
INDEX = st.integers(0, 99)


class Captures(RuleBasedStateMachine):
    """Each sequence has a twin in a plain cache. Outputs of steps are compared when the streams have finished."""

    @initialize(order=st.sampled_from(ORDERS), seed=st.integers(0, 3))
    def begin(self, order: Any, seed: int) -> None:
        self.stack = ExitStack()
        self.made = self.stack.enter_context(program(order, seed))
        self.pairs = list(zip(self.made.seqs, self.made.twins, strict=True))
        self.graphs: list[tuple[Graphs, ga.KvCapture]] = []
        self.answers: list[tuple[Any, Any]] = []
        self.kept: list[Any] = []
        self.capture(0, 0)

    def pair(self, index: int) -> tuple[Any, Any]:
        return self.pairs[index % len(self.pairs)]

    def two(self, first: int, second: int) -> bool:
        """Choose two pairs for the program. False if they, or the pool, have no room."""
        pairs = [self.pair(first), self.pair(first + 1 + second % (len(self.pairs) - 1))]
        lengths = [self.made.cache.length(seq) for seq, _ in pairs]
        if max(lengths) >= MOST - 4 or sum(map(self.made.cache.length, dict(self.pairs))) > 80:
            return False
        self.made.seqs, self.made.twins = [one for one, _ in pairs], [twin for _, twin in pairs]
        return True

    @rule(first=INDEX, second=INDEX, count=st.integers(1, 4))
    def append(self, first: int, second: int, count: int) -> None:
        if self.two(first, second):
            self.made.append(self.made.rows(count), self.made.rows(count))

    @precondition(lambda self: len(self.pairs) < 5)
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        seq, twin = self.pair(index)
        self.pairs.append((self.made.cache.fork(seq).result(20), self.made.plain.fork(twin).result(20)))

    @precondition(lambda self: len(self.pairs) > 2)
    @rule(index=INDEX)
    def free(self, index: int) -> None:
        seq, twin = self.pairs.pop(index % len(self.pairs))
        self.made.cache.free(seq).result(20)
        self.made.plain.free(twin).result(20)

    @rule(index=INDEX, left=st.integers(1, 6))
    def truncate(self, index: int, left: int) -> None:
        seq, twin = self.pair(index)
        left = min(left, self.made.cache.length(seq))
        self.made.cache.truncate(seq, left).result(20)
        self.made.plain.truncate(twin, left).result(20)

    @rule(first=INDEX, second=INDEX, stream=st.sampled_from([0, 1, None]))
    def step(self, first: int, second: int, stream: int | None) -> None:
        if self.two(first, second):
            handle = None if stream is None else self.made.streams[stream]
            reply, outs, wanted = self.made.step(self.kept, lambda layer: handle)
            reply.result(20)
            self.answers.append((outs, wanted))

    @precondition(lambda self: len(self.graphs) < 2)
    @rule(first=INDEX, second=INDEX)
    def capture(self, first: int, second: int) -> None:
        if self.two(first, second):
            graphs = Graphs(self.made)
            captured, outs, wanted = graphs.capture(max_length=MOST + 2)
            self.graphs.append((graphs, captured))
            self.answers.append((outs, wanted))

    @precondition(lambda self: self.graphs)
    @rule(first=INDEX, second=INDEX, which=INDEX, stream=st.integers(0, 1))
    def replay(self, first: int, second: int, which: int, stream: int) -> None:
        if self.two(first, second):
            graphs, captured = self.graphs[which % len(self.graphs)]
            self.answers.append(graphs.replay(captured, self.made.seqs, self.made.twins, self.made.streams[stream]))

    @precondition(lambda self: self.graphs)
    @rule(first=INDEX, second=INDEX, replayed=st.booleans())
    def abort(self, first: int, second: int, replayed: bool) -> None:
        if self.two(first, second):
            graphs, captured = self.graphs[0]
            step = captured.step(self.made.seqs).result(20)
            if replayed:
                handle = self.made.streams[0]
                step.replay(lambda: graphs.api.launch_graph(graphs.graph, handle), stream=handle)
            step.abort().result(20)

    @invariant()
    def lengths_agree(self) -> None:
        if hasattr(self, "pairs"):
            for seq, twin in self.pairs:
                assert self.made.cache.length(seq) == self.made.plain.length(twin)

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        with self.stack:
            self.made.finish()
            for outs, wanted in self.answers:
                for out, want in zip(outs, wanted, strict=True):
                    assert np.array_equal(host_view(out), want)
            q = self.made.rng.standard_normal((1, 1, HEADS_Q, DIM)).astype(np.float16)
            for seq, twin in self.pairs:
                for layer in range(LAYERS):
                    both = [
                        self.made.attended(one, [of], layer, q)
                        for one, of in ((self.made.cache, seq), (self.made.plain, twin))
                    ]
                    assert np.array_equal(*both)
            assert self.made.cache.stats().sequences == len(self.pairs)


# Threads decide the order of the work, so a smaller program may pass. Therefore nothing is shrunk.
TestCaptures = Captures.TestCase
TestCaptures.settings = settings(max_examples=10, stateful_step_count=15, deadline=None, phases=[Phase.generate])
