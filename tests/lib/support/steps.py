"""A cache of four layers and its contents, for tests of steps that do not end with a normal commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pytest
from inside.isolation import IsolatedContext
from support.kv_cache import PAGE, Rows, attention, opened, outcome, wait
from support.service import eventually

import gpu_actors as ga

LAYERS, HEADS_Q = 4, 4

Isolation = Literal["process"] | None
EACH_PLACE = pytest.mark.parametrize("isolation", [None, "process"], ids=["here", "process"])
"""Runs a test with the context in this process and in a child process."""


class Model:
    """A cache of four layers with two sequences of five and of eight rows, and their contents."""

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
        """The cache is as it was in the beginning, and a step over both sequences is right."""
        cache = self.cache
        if not isinstance(self.ctx, IsolatedContext):
            state = cache._find()
            eventually(lambda: not state._in_flight and not state.stepping)
        eventually(lambda: cache.stats().free_blocks == 6)
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
        for index, seq in enumerate(self.seqs):
            pages = wait(self.cache.export_pages(seq))
            for side, held in zip((pages.k, pages.v), self.held, strict=True):
                rows = side.reshape(LAYERS, -1, *side.shape[3:])[:, : pages.length]
                np.testing.assert_array_equal(rows, held[index])
                assert rows.shape[1] == (5, PAGE)[index] + more
            wait(self.cache.release(pages))


@contextmanager
def model(options: ga.ContextOptions | None = None, isolation: Isolation = None, **changes: Any) -> Iterator[Model]:
    with opened(options, isolation, **{"layers": LAYERS, **changes}) as (ctx, cache):
        yield Model(ctx, cache)


def error_of(ask: Callable[[], Any]) -> Any:
    with pytest.raises(ga.GpuActorsError) as caught:
        ask()
    return caught.value


def over(model: Model, step: Any, kind: type[ga.GpuActorsError]) -> None:
    """Every call of an ended step raises ``kind``, except abort."""
    assert isinstance(error_of(lambda: model.attend(step, [0])), kind)
    assert isinstance(outcome(step.commit()), kind)
    assert wait(step.abort()) is None
