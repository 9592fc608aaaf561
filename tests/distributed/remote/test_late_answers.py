"""Channels that hold records back: a worker frees what it made for a request that was given up."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from inside.isolation import Received
from support.service import eventually

import gpu_actors as ga
from gpu_actors.distributed.remote.direct import DirectChannel, Inbox, ThreadConnection
from gpu_actors.remote import InProcess, Order, RemoteContext, open_remote

SPEC: dict[str, Any] = {"num_blocks": 16, "page_size": 8, "kv_heads": 2, "head_dim": 16, "dtype": "float32"}
ROWS = np.zeros((20, 2, 16), np.float32)


class Holding(InProcess):
    """A worker in a thread whose answers wait while they are held back."""

    def __init__(self) -> None:
        self.there: _Held | None = None
        self.back: _Held | None = None

    def start(self, order: Order, received: Received) -> ThreadConnection:
        def make(inbox: Inbox) -> _Held:
            self.there, self.back = self.back, _Held(inbox)  # the one to the worker is made first
            return self.back

        return ThreadConnection(order, received, make)

    def hold(self) -> None:
        assert self.back is not None
        self.back.held = True

    def let_go(self) -> None:
        assert self.back is not None
        self.back.let_go()


class _Held(DirectChannel):
    def __init__(self, inbox: Inbox) -> None:
        super().__init__(inbox)
        self.held = False
        self._kept: list[tuple[int, Any]] = []
        self._order = threading.Lock()

    def post(self, sequence: int, parcel: Any) -> None:
        with self._order:
            if self.held:
                self._kept.append((sequence, parcel))
                return
            super().post(sequence, parcel)

    @property
    def waiting(self) -> int:
        return len(self._kept)

    def let_go(self) -> None:
        with self._order:
            self.held = False
            for sequence, parcel in self._kept:
                super().post(sequence, parcel)
            self._kept = []


@pytest.fixture
def workplace() -> Holding:
    return Holding()


@pytest.fixture
def ctx(workplace: Holding) -> Iterator[RemoteContext]:
    with open_remote("mock", ga.ContextOptions(hang_timeout=60.0), workplace=workplace) as opened:
        yield opened


def _caches(ctx: RemoteContext) -> list[Any]:
    """The caches as the worker has them."""
    found: list[Any] = ctx._children.cells["kv_cache"].shared.look()
    return found


Ask = Callable[[ga.KvCache, Any, Any], ga.Reply[Any]]
ASKS: dict[str, Ask] = {
    "create": lambda cache, seq, pages: cache.create(timeout=0.2),
    "fork": lambda cache, seq, pages: cache.fork(seq, timeout=0.2),
    "export": lambda cache, seq, pages: cache.export_pages(seq, timeout=0.2),
    "import": lambda cache, seq, pages: cache.import_pages(pages, timeout=0.2),
}


@pytest.mark.parametrize("ask", ASKS)
def test_a_sequence_or_a_lease_that_is_answered_too_late_is_freed(
    ctx: RemoteContext, workplace: Holding, ask: str
) -> None:
    with ctx.kv_cache(**SPEC) as cache:
        seq = cache.create().result(30.0)
        cache.append(seq, ROWS, ROWS).result(30.0)
        pages = cache.export_pages(seq).result(30.0)
        workplace.hold()
        with pytest.raises(ga.DeadlineExceeded):
            ASKS[ask](cache, seq, pages).result(30.0)
        workplace.let_go()
        eventually(lambda: (cache.stats().sequences, cache.stats().free_blocks) == (2, 13))
        assert cache.length(seq) == 20


def test_a_cache_that_opens_too_late_is_closed(workplace: Holding) -> None:
    options = ga.ContextOptions(hang_timeout=60.0, default_timeout=0.3)
    with open_remote("mock", options, workplace=workplace) as ctx:
        workplace.hold()
        with pytest.raises(ga.DeadlineExceeded), ctx.kv_cache(**SPEC):
            pass
        workplace.let_go()
        eventually(lambda: ctx.probe(30.0).result() is None and not _caches(ctx))


def test_a_kernel_that_is_compiled_too_late_is_forgotten(ctx: RemoteContext, workplace: Holding) -> None:
    connection = ctx._generations.connection
    assert isinstance(connection, ThreadConnection)
    kernels = connection._worker._kept
    workplace.hold()
    reply = ctx.kernel('extern "C" __global__ void f(int* x) { *x = 1; }', "f")
    eventually(lambda: bool(kernels))
    reply._call.fail(ga.DeadlineExceeded("as a timer says it"))
    workplace.let_go()
    eventually(lambda: not kernels)


def test_a_step_that_begins_too_late_is_aborted_and_forgotten(ctx: RemoteContext, workplace: Holding) -> None:
    connection = ctx._generations.connection
    assert isinstance(connection, ThreadConnection)
    steps = connection._worker._kept
    with ctx.kv_cache(**SPEC) as cache:
        seq = cache.create().result(30.0)
        workplace.hold()
        reply = cache.step([seq], heads_q=2)
        eventually(lambda: bool(steps))
        reply._call.fail(ga.DeadlineExceeded("as a timer says it"))
        waits = cache.append(seq, ROWS, ROWS)
        workplace.let_go()
        assert waits.result(30.0) == 20
        eventually(lambda: not steps)


@pytest.mark.parametrize("ends", ["commit", "abort", "drop"])
def test_a_step_that_has_ended_is_forgotten(ctx: RemoteContext, ends: str) -> None:
    connection = ctx._generations.connection
    assert isinstance(connection, ThreadConnection)
    with ctx.kv_cache(**SPEC) as cache:
        step = cache.step([cache.create().result(30.0)], heads_q=2, append=False).result(30.0)
        assert len(connection._worker._kept) == 1
        if ends != "drop":
            getattr(step, ends)().result(30.0)
        del step
        eventually(lambda: gc.collect() >= 0 and not connection._worker._kept)


def test_a_full_channel_takes_what_frees_memory(workplace: Holding) -> None:
    options = ga.ContextOptions(hang_timeout=60.0, mailbox_capacity=4)
    with open_remote("mock", options, workplace=workplace) as ctx, ctx.kv_cache(**SPEC) as cache:
        seqs = [cache.create().result(30.0) for _ in range(2)]
        assert workplace.there is not None
        workplace.there.held = True
        q = ROWS[None]
        asked = [ctx.flash_attn.forward(q, q, q) for _ in range(4)]
        with pytest.raises(ga.Overloaded):
            ctx.flash_attn.forward(q, q, q).result(30.0)
        freeing = [cache.free(seq) for seq in seqs]
        workplace.there.let_go()
        replies: list[ga.Reply[Any]] = [*asked, *freeing]
        for reply in replies:
            reply.result(30.0)
        assert cache.stats().sequences == 0
