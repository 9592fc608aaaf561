"""Captured steps over sequences of a pool: each belongs to one home's cache, and is right while that home lives."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from emulated.caller_streams import DIM, HEADS, HEADS_Q, LAYERS, ORDERS, SIZES, Graphs, Program, program
from emulated.memory import host_view
from inside.arrays import DeviceArray
from inside.cuda import ILLEGAL_ADDRESS, CudaDevice, CudaFailure, HostOrder, NullApi, Operation
from inside.handles import start_context

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, PooledKvCache, PooledSequence

LONGEST = 40
WINDOWED = [ga.KvLayer(), ga.KvLayer(window=6, num_blocks=20), ga.KvLayer()]
LOST = (ga.ContextLost, ga.StaleBuffer)


class Beside:
    """A pooled cache on an event loop of another thread. Calls that need no loop are made directly."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cache: PooledKvCache) -> None:
        self._loop, self.cache = loop, cache

    def _soon(self, coroutine: Coroutine[Any, Any, PooledSequence]) -> Future[PooledSequence]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def create(self) -> Future[PooledSequence]:
        return self._soon(self.cache.create())

    def fork(self, seq: PooledSequence) -> Future[PooledSequence]:
        return self._soon(self.cache.fork(seq))

    def move(self, seq: PooledSequence, worker: str) -> Future[PooledSequence]:
        return self._soon(self.cache.move(seq, worker))

    @property
    def _handle(self) -> Any:
        return self.cache._shards["one"].cache._handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class Homes:
    """A pool of two programs, whose caches are the pooled one. Each has two sequences of five rows there."""

    def __init__(self, one: Program, two: Program, pool: ContextPool, cache: Beside) -> None:
        self.one, self.two, self.pool, self.cache = one, two, pool, cache
        for name, made in (("one", one), ("two", two)):
            made.cache = cache  # type: ignore[assignment]
            made.seqs = [self.at(name), self.at(name)]
            made.twins = [made.plain.create().result(20) for _ in range(2)]
            made.append(made.rows(5), made.rows(5))

    def at(self, name: str) -> Any:
        seq = self.cache.create().result(20)
        return seq if seq.worker == name else self.cache.move(seq, name).result(20)


@contextmanager
def homes(order: HostOrder, seed: int = 1, **changes: Any) -> Iterator[Homes]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    try:
        with program(order, seed, **changes) as one, program(order, seed + 1, **changes) as two:
            pool = ContextPool({"one": one.context, "two": two.context}, seed=0)
            cache = pool.kv_cache(**{**SIZES, **changes})
            on_loop(cache.__aenter__())
            try:
                yield Homes(one, two, pool, Beside(loop, cache))
            finally:
                on_loop(cache.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


def handles(seqs: list[Any]) -> list[ga.KvSequence]:
    return [seq.handle for seq in seqs]


def check(made: Program, *answers: tuple[Any, Any]) -> None:
    made.finish()
    for outs, wanted in answers:
        for out, want in zip(outs, wanted, strict=True):
            np.testing.assert_array_equal(host_view(out), want)


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["equal layers", "a window"])
@pytest.mark.parametrize("order", ORDERS)
def test_replays_have_the_bits_of_steps_that_are_not_captured(order: HostOrder, layers: Any) -> None:
    """With other lengths, tables and members, while the other home replays a capture of its own."""
    with homes(order, layers=layers) as both:
        one, two = both.one, both.two
        graphs, others = Graphs(one), Graphs(two)
        captured, *answer = graphs.capture(max_length=LONGEST)
        elsewhere, *other_answer = others.capture(max_length=LONGEST)
        answers, other_answers = [answer], [other_answer]
        long = [both.at("one"), one.plain.create().result(20)]
        rows = one.rng.standard_normal((2, LAYERS, 19, HEADS, DIM)).astype(np.float16)
        for cache, seq in zip((one.cache, one.plain), long, strict=True):
            cache.append(seq, *rows).result(20)
        for number in range(4):
            handle = one.streams[number // 2]
            members = (one.seqs[0], long[0]), (one.twins[0], long[1])
            seqs, twins = members if number % 2 else (one.seqs, one.twins)
            # Copies of the sequences with other pages, in a step that is not captured.
            copies = [one.cache.fork(seq).result(20) for seq in seqs]
            values = graphs.write(handle)
            graphs.delay_the_cache()
            answers.append(list(graphs.replay(captured, handles(list(seqs)), list(twins), handle, values)))
            step = one.cache.step(copies, heads_q=HEADS_Q, max_length=LONGEST).result(20)
            graphs.attend(step, handle)
            answers.append(([one.consumed(array[3], handle) for array in graphs.arrays], answers[-1][1]))
            step.commit().result(20)
            for copy in copies:
                one.cache.free(copy).result(20)
            other_answers.append(list(others.replay(elsewhere, handles(two.seqs), two.twins, two.streams[0])))
            one.cache.truncate(one.seqs[1], 5).result(20)
            one.plain.truncate(one.twins[1], 5).result(20)
            assert one.same()
        check(one, *answers)
        check(two, *other_answers)


def test_a_sequence_that_has_moved_is_refused_by_name_and_replayed_where_it_is() -> None:
    with homes("eager") as both:
        one, two = both.one, both.two
        graphs, others = Graphs(one), Graphs(two)
        captured, *answer = graphs.capture(max_length=LONGEST)
        elsewhere, *other_answer = others.capture(max_length=LONGEST)
        answers = [answer]
        members: list[Any] = one.seqs
        stayed, left = members
        moved = both.cache.move(left, "two").result(20)
        for member in (moved, left):
            with pytest.raises(ga.InvalidRequest, match=r"seqs\[1\]="):
                captured.step([stayed.handle, member.handle]).result(20)
        with pytest.raises(ga.InvalidRequest, match="one home"):
            one.cache.step([stayed, moved], heads_q=HEADS_Q).result(20)
        with pytest.raises(ga.InvalidRequest, match=r"seqs\[0\]=.*its handle"):
            captured.step(one.seqs).result(20)
        # Its twin stays beside the first home, and gets the same rows.
        values = others.write(two.streams[0])
        step = elsewhere.step(handles([moved, two.seqs[0]])).result(20)
        step.replay(lambda: two.api.launch_graph(others.graph, two.streams[0]), stream=two.streams[0])
        outs = [two.consumed(array[3], two.streams[0]) for array in others.arrays]
        assert step.commit().result(20) == [7, 7]
        two.finish()
        twin = one.twins[1:]
        one.plain.append(twin, *[value[:, :1] for value in values[1:]]).result(20)
        for layer, out in enumerate(outs):
            want = one.attended(one.plain, twin, layer, values[0][layer][:1])
            np.testing.assert_array_equal(host_view(out)[:1], want)
        one.seqs = [stayed, both.cache.move(moved, "one").result(20)]
        answers.append(list(graphs.replay(captured, handles(one.seqs), one.twins, one.streams[0])))
        assert one.same()
        check(one, *answers)
        check(two, other_answer)


def test_a_context_that_is_lost_between_a_capture_and_its_replay_replays_nothing() -> None:
    """The graph has addresses of memory that is lost."""
    with homes("eager") as both:
        one, two = both.one, both.two
        captured, *_ = Graphs(one).capture(max_length=LONGEST)
        others = Graphs(two)
        elsewhere, *answer = others.capture(max_length=LONGEST)
        step = captured.step(handles(one.seqs)).result(20)
        replayed: list[int] = []
        other = both.at("one")

        def fail() -> None:
            raise CudaFailure(ILLEGAL_ADDRESS, "kernel")

        with one.api._lock:
            one.api._enqueue(one.cache._handle._cell.stream.handle, Operation(fail))
        row = one.rows(1)[:, 0]
        with pytest.raises(LOST):
            one.cache.append(other, row, row).result(20)
        with pytest.raises(LOST):
            step.replay(lambda: replayed.append(1), stream=one.streams[0])
        with pytest.raises(LOST):
            step.commit().result(20)
        for begin in (
            lambda: captured.step(handles(one.seqs)).result(20),
            lambda: one.cache.step(one.seqs, heads_q=HEADS_Q).result(20),
        ):
            with pytest.raises(LOST):
                begin()
        assert not replayed
        # The other home still works.
        check(two, answer, others.replay(elsewhere, handles(two.seqs), two.twins, two.streams[0]))


def test_a_captured_step_counts_as_the_requests_that_it_is() -> None:
    with homes("eager") as both:
        one = both.one
        captured, *_ = Graphs(one).capture(max_length=LONGEST)

        def counts() -> tuple[int, int]:
            worker = both.pool.stats().workers["one"]
            return worker.outstanding, worker.requests

        before = counts()[1]
        step = captured.step(handles(one.seqs)).result(20)
        assert counts() == (0, before + 1)
        waiting = captured.step(handles(one.seqs))
        assert counts() == (1, before + 2)
        step.abort().result(20)
        waiting.result(20).abort().result(20)
        assert counts() == (0, before + 4)


class NullDevice(CudaDevice):
    def note_caller(self) -> None:
        """Note no stream: CuPy would call the real driver, which may be missing."""


class Null:
    """A context on the null driver, which computes nothing. Its arrays have only addresses."""

    def __init__(self) -> None:
        options, self.api = ga.ContextOptions(qualify="off"), NullApi()
        self.context = start_context(lambda: NullDevice(0, options, self.api), options)
        self.stream = self.api.create_stream()
        addresses = itertools.count(1 << 30, 1 << 20)

        def array(heads: int) -> DeviceArray:
            strides = (heads * DIM * 2, heads * DIM * 2, DIM * 2, 2)
            return DeviceArray(next(addresses), (2, 1, heads, DIM), strides, np.dtype(np.float16), 0)

        self.arrays = [[array(heads) for heads in (HEADS_Q, HEADS, HEADS, HEADS_Q)] for _ in range(LAYERS)]

    async def capture(self, cache: Any, seqs: list[Any]) -> tuple[ga.KvStep, int]:
        """A step, and a graph of its layers."""
        step: ga.KvStep = await cache.step(seqs, heads_q=HEADS_Q, max_length=LONGEST)
        for capturing in (False, True):
            if capturing:
                self.api.begin_capture(self.stream)
            for layer, (q, k, v, out) in enumerate(self.arrays):
                step.attend(layer, q, k, v, out=out, stream=self.stream)
        graph = self.api.end_capture(self.stream)
        await step.commit()
        return step, graph


async def test_a_pooled_replay_makes_the_driver_calls_of_one_in_a_cache() -> None:
    """Tables and lengths are copied, and no kernel is launched."""
    null = Null()
    api, context, stream = null.api, null.context, null.stream

    async def calls(cache: Any, of_home: Callable[[Any], ga.KvSequence]) -> list[dict[str, int]]:
        seqs = [await cache.create() for _ in range(4)]
        step, graph = await null.capture(cache, seqs[:2])
        counted = []
        for members in (seqs[:2], seqs[2:], seqs[1:3]):
            api.calls.clear()
            assert step.captured is not None
            step = await step.captured.step([of_home(seq) for seq in members])
            step.replay(lambda: api.launch_graph(graph, stream), stream=stream)
            await step.commit()
            counted.append(dict(api.calls))
        return counted

    try:
        pool = ContextPool({"one": context}, seed=0)
        async with pool.kv_cache(**SIZES) as pooled, context.kv_cache(**SIZES) as own:
            found, wanted = await calls(pooled, lambda seq: seq.handle), await calls(own, lambda seq: seq)
    finally:
        await asyncio.to_thread(context.close)
    for each, other in zip(found, wanted, strict=True):
        assert (each["launch_graph"], each["copy_to_device"], each.get("launch_kernel", 0)) == (1, 1, 0)
        assert [each.get(name) for name in ("copy_to_device", "fill", "record_event", "wait_event")] == [
            other.get(name) for name in ("copy_to_device", "fill", "record_event", "wait_event")
        ]


async def test_captures_that_are_dropped_leave_their_memory_to_the_next() -> None:
    null = Null()
    try:
        async with null.context.kv_cache(**SIZES) as cache:
            seqs = [await cache.create() for _ in range(2)]
            for number in range(12):
                if number == 4:
                    null.api.calls.clear()
                await null.capture(cache, seqs)
                gc.collect()
            assert (null.api.calls["allocate"], null.api.calls["allocate_pinned"]) == (0, 0)
    finally:
        await asyncio.to_thread(null.context.close)
