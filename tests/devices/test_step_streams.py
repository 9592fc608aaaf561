"""Steps on a caller's stream are right in every order that CUDA allows. Bugs of the order make answers wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from emulated.caller_streams import DIM, HEADS, HEADS_Q, LAYERS, ORDERS, CallerDevice, Graphs, Program, program
from emulated.memory import host_view
from inside.cuda import CudaFailure, NullApi, Operation, WorkFailed
from inside.handles import start_context
from support.service import eventually

import gpu_actors as ga
from gpu_actors.devices.cuda import stream
from gpu_actors.devices.cuda.errors import CAPTURE_IMPLICIT
from gpu_actors.devices.cuda.host_api import HostOrder

PLACES: dict[str, Callable[[Program, int], int | None]] = {
    "a caller's stream": lambda made, layer: made.streams[0],
    "streams in turn": lambda made, layer: made.streams[layer % 2],
    "the cache's own stream": lambda made, layer: None,
}


def right(order: HostOrder, seed: int, place: str) -> bool:
    """Whether steps, later work on the caller's streams, and later requests all give the right rows."""
    with program(order, seed) as made:
        kept: list[Any] = []
        answers = []
        for number in range(5):
            reply, outs, wanted = made.step(kept, lambda layer: PLACES[place](made, layer))
            lengths = reply.result(20)
            answers.append((outs, wanted))
            if lengths != [7 + 2 * number] * 2 or not made.same():
                return False
            if number == 2:  # pages of an aborted step go to others, whose rows its kernels must not overwrite
                aborted = made.cache.step(made.seqs, heads_q=HEADS_Q, rows=9).result(20)
                wide = made.rng.standard_normal((2, 9, HEADS_Q, DIM)).astype(np.float16)
                new = made.rows(9)
                handle = PLACES[place](made, 0)
                arrays = [made.produced(one, handle) for one in (wide, new[0], new[1])]
                if handle is not None:
                    made.delay(handle)
                aborted.attend(0, *arrays, stream=handle)
                kept += arrays
                aborted.abort().result(20)
                other, twin = made.cache.create().result(20), made.plain.create().result(20)
                made.seqs.append(other)
                made.twins.append(twin)
                more = made.rng.standard_normal((2, LAYERS, 11, HEADS, DIM)).astype(np.float16)
                for cache, seq in ((made.cache, other), (made.plain, twin)):
                    cache.append(seq, *more).result(20)
                made.seqs, made.twins = made.seqs[:2], made.twins[:2]
                q = made.rng.standard_normal((1, 1, HEADS_Q, DIM)).astype(np.float16)
                both = made.attended(made.cache, [other], 0, q), made.attended(made.plain, [twin], 0, q)
                if not np.array_equal(*both):
                    return False
        made.finish()
        return all(
            np.array_equal(host_view(out), want)
            for outs, wanted in answers
            for out, want in zip(outs, wanted, strict=True)
        )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", ORDERS)
def test_steps_are_right_in_every_order_of_streams(order: HostOrder, place: str) -> None:
    assert right(order, 1, place)


@pytest.mark.parametrize("order", ORDERS)
def test_steps_that_read_shared_pages_once_are_right_in_every_order_of_streams(order: HostOrder) -> None:
    events: list[Any] = []
    options = ga.ContextOptions(on_event=events.append)
    with program(order, 3, options, cascade=True) as made:
        for name, one in (("seqs", made.cache), ("twins", made.plain)):
            first = getattr(made, name)[0]
            setattr(made, name, [first, one.fork(first).result(20)])
        kept: list[Any] = []
        answers = []
        for number in range(3):
            q, k, v = (
                made.rng.standard_normal((LAYERS, 2, 1, HEADS_Q, DIM)).astype(np.float16),
                made.rows(1),
                made.rows(1),
            )
            step = made.cache.step(made.seqs, heads_q=HEADS_Q, return_lse=True).result(20)
            outs = []
            for layer in range(LAYERS):
                handle = made.streams[(layer + number) % 2]
                arrays = [made.produced(one[layer], handle) for one in (q, k, v)]
                result = step.attend(layer, *arrays, stream=handle)
                kept += [result, *arrays]
                outs.append([made.consumed(array, handle) for array in (result.out, result.lse)])
            assert step.commit().result(20) == [6 + number] * 2
            made.plain.append(made.twins, k, v).result(20)
            wanted = [
                made.plain.attend(q[layer], made.twins, layer=layer, return_lse=True).result(20)
                for layer in range(LAYERS)
            ]
            answers.append((outs, wanted))
        made.finish()
        for outs, wanted in answers:
            for (out, lse), want in zip(outs, wanted, strict=True):
                np.testing.assert_array_equal(host_view(out), want.out)
                np.testing.assert_array_equal(host_view(lse), want.lse)
        decided = [event.fields["taken"] for event in events if event.name == "launch.cascade"]
        assert decided == [True] * 3 * (1 + LAYERS)


def test_a_layer_at_the_same_addresses_gives_its_lse_again() -> None:
    with program("eager", 5) as made:
        value = made.rng.standard_normal((2, 1, HEADS_Q, DIM)).astype(np.float16)
        q, out = made.produced(value, None), made.device.memory.empty(value.shape, "float16")
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, append=False, return_lse=True).result(20)
        found = [step.attend(0, q, out=out) for _ in range(3)]
        step.commit().result(20)
        wanted = made.cache.attend(value, made.seqs, layer=0, return_lse=True).result(20)
        for answer in found:
            np.testing.assert_array_equal(host_view(answer.lse), wanted.lse)


def test_layers_beside_a_cascade_are_captured_and_the_others_attended_to() -> None:
    with program("eager", 6, cascade=True) as made:
        first = made.seqs[0]
        made.seqs = [first, made.cache.fork(first).result(20)]
        made.twins = [made.twins[0], made.plain.fork(made.twins[0]).result(20)]
        graphs, (warm, recorded) = Graphs(made), made.streams
        values = graphs.write(warm)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, layer_options={1: {"num_splits": 1}}).result(20)
        graphs.attend(step, warm)
        q, k, v, out = graphs.arrays[1]
        made.api.begin_capture(recorded)
        step.attend(1, q, k, v, out=out, stream=recorded)
        graphs.graph = made.api.end_capture(recorded)
        step.commit().result(20)
        graphs.wanted(made.twins, values)
        captured = step.captured
        assert captured is not None
        for _ in range(2):
            values = graphs.write(warm)
            step = captured.step(made.seqs).result(20)
            step.replay(lambda: made.api.launch_graph(graphs.graph, warm), stream=warm)
            for layer in (0, 2):
                q, k, v, out = graphs.arrays[layer]
                step.attend(layer, q, k, v, out=out, stream=warm)
            step.commit().result(20)
            made.finish()
            made.plain.append(made.twins, *values[1:]).result(20)
            for layer, options in enumerate(({}, {"num_splits": 1}, {})):
                q = values[0][layer]
                wanted = made.plain.attend(q, made.twins, layer=layer, **options).result(20).out
                if layer == 1:
                    np.testing.assert_array_equal(host_view(graphs.arrays[layer][3]), wanted)
                np.testing.assert_allclose(host_view(graphs.arrays[layer][3]), wanted, atol=4e-3)


def test_a_step_that_reads_shared_pages_once_is_not_captured() -> None:
    with program("eager", 4, cascade=True) as made:
        first = made.seqs[0]
        made.seqs = [first, made.cache.fork(first).result(20)]
        graphs = Graphs(made)
        recorded = made.streams[1]
        graphs.write(made.streams[0])
        step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
        graphs.attend(step, made.streams[0])
        made.api.begin_capture(recorded)
        with pytest.raises(ga.InvalidRequest, match="a step with max_length, which is no cascade"):
            graphs.attend(step, recorded)
        made.api.end_capture(recorded)
        assert step.commit().result(20) == [6, 6]  # the refused layer has launched nothing
        assert step.captured is None
        captured, *_ = graphs.capture(max_length=40)
        assert captured is not None
        made.finish()


def test_a_message_may_say_that_arrays_lie_on_the_host() -> None:
    """A program in another process sends such messages, for steps that are planned and for those with a known plan."""
    with program(ORDERS[0], 1) as made:
        handle = made.cache._handle
        for length in (6, 7, 8):
            message = ga.BeginStep(cache=made.cache._number, seqs=made.seqs, heads_q=HEADS_Q, on_host=True)
            step = ga.KvStep(made.cache, handle.submit(message).result(20))
            k, v, q = made.rows(1), made.rows(1), made.rng.standard_normal((LAYERS, 2, 1, HEADS_Q, DIM))
            q = q.astype(np.float16)
            outs = []
            for layer in range(LAYERS):
                out = np.zeros_like(q[layer])
                assert step.attend(layer, q[layer], k[layer], v[layer], out=out) is out
                assert step.attend(layer, q[layer], k[layer], v[layer]).tobytes() == out.tobytes()
                outs.append(out)
            assert step.commit().result(20) == [length] * 2
            made.plain.append(made.twins, k, v).result(20)
            for layer, out in enumerate(outs):
                assert np.array_equal(out, made.attended(made.plain, made.twins, layer, q[layer]))
            assert made.same()
        with pytest.raises(ga.InvalidRequest, match="on cuda:0"):  # without on_host
            made.cache.step(made.seqs, heads_q=HEADS_Q).result(20).attend(0, q[0], k[0], v[0])


@pytest.mark.parametrize("moved", [False, True])
def test_a_layer_that_fails_fails_the_commit_though_later_layers_run_on_another_stream(moved: bool) -> None:
    with program("eager", 2) as made:
        graphs, (first, second) = Graphs(made), made.streams
        graphs.write(first)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
        for layer, (q, k, v, out) in enumerate(graphs.arrays):
            step.attend(layer, q, k, v, out=out, stream=second if moved and layer else first)
            if layer == 0:

                def fail() -> None:
                    raise ga.LaunchError("kernel failed")

                with made.api._lock:
                    made.api._enqueue(first, Operation(fail))
        with pytest.raises(ga.LaunchError, match="kernel failed"):
            step.commit().result(20)
        if moved:  # a wait for the first stream's work raises the error, too
            with pytest.raises(WorkFailed, match="kernel failed"):
                made.finish()
        made.finish()
        assert made.same()
        graphs.write(second)
        with made.cache.step(made.seqs, heads_q=HEADS_Q).result(20) as step:
            graphs.attend(step, second)
        made.finish()


def test_a_step_ends_once_a_capture_of_its_stream_has_ended() -> None:
    """An event that is recorded there meanwhile would become part of the graph."""
    with program("eager", 3) as made:
        graphs, handle = Graphs(made), made.streams[0]
        graphs.write(handle)
        step: ga.KvStep | None = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
        assert step is not None
        graphs.attend(step, handle)
        made.api.begin_capture(handle)
        with pytest.raises(ga.InvalidRequest, match="commit the step once the capture has ended"):
            step.commit().result(20)
        made.api.destroy_graph(made.api.end_capture(handle))
        assert step.commit().result(20) == [6, 6]
        for end in ("abort", "drop"):
            graphs.write(handle)
            step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
            graphs.attend(step, handle)
            made.api.begin_capture(handle)
            aborted = step.abort() if end == "abort" else None
            step = None
            gc.collect()
            behind = made.cache.step(made.seqs, heads_q=HEADS_Q)
            with pytest.raises(TimeoutError):
                behind.result(0.05)
            assert aborted is None or not aborted.done()
            made.api.destroy_graph(made.api.end_capture(handle))
            assert behind.result(20).lengths == [7, 7]
            behind.result(20).abort().result(20)
        made.finish()


@pytest.mark.parametrize("waits_for", ["the layer before", "an array"])
def test_a_layer_does_not_wait_for_a_stream_that_is_captured(waits_for: str) -> None:
    """Its own stream would become part of the capture."""
    with program("eager", 3) as made:
        graphs, (first, second) = Graphs(made), made.streams
        values = graphs.write(first)
        made.finish()
        step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
        (q, *others, out), *_ = graphs.arrays
        step.attend(0, q, *others, out=out, stream=first if waits_for == "the layer before" else second)
        made.api.begin_capture(first)
        if waits_for == "an array":
            q = dataclasses.replace(q, stream=first)
        with pytest.raises(ga.InvalidRequest, match=f"stream={first}: is being captured"):
            step.attend(0, q, *others, out=out, stream=second)
        assert not made.api._streams[first].captured
        made.api.destroy_graph(made.api.end_capture(first))
        graphs.attend(step, second)
        assert step.commit().result(20) == [6, 6]
        made.finish()
        for (*_, out), wanted in zip(graphs.arrays, graphs.wanted(made.twins, values), strict=True):
            np.testing.assert_array_equal(host_view(out), wanted)


@pytest.mark.parametrize("order", ORDERS)
def test_each_layer_waits_for_the_stream_of_its_options(order: HostOrder) -> None:
    """A model may write the options of each layer to the same memory."""
    with program(order, 3) as made:
        graphs, (first, second) = Graphs(made), made.streams
        slopes = made.produced(np.zeros(HEADS_Q, np.float32), second)
        values, written = graphs.write(first), made.rng.random((LAYERS, HEADS_Q), np.float32)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, alibi_slopes=slopes).result(20)
        outs = []
        for layer in range(LAYERS):
            made.kept.append(made.produced(written[layer], second))
            made.delay(second)
            made.api.copy_on_device(slopes.address, made.kept[-1].address, slopes.nbytes, second)
            graphs.attend(step, first, [layer])
            outs.append(made.consumed(graphs.arrays[layer][3], first))
            made.finish()
        step.commit().result(20)
        made.plain.append(made.twins, *values[1:]).result(20)
        for layer, out in enumerate(outs):
            one: Any = {"layer": layer, "alibi_slopes": written[layer]}
            wanted = made.plain.attend(values[0][layer], made.twins, **one).result(20).out
            np.testing.assert_array_equal(host_view(out), wanted)


@pytest.mark.parametrize("kind", ["forward", "append", "attend", "out"])
def test_a_request_does_not_wait_for_a_stream_that_is_captured(kind: str) -> None:
    """The service's own stream would become part of the capture, with the requests of other programs."""
    with program("eager", 3) as made:
        captured, cache = made.streams[0], made.cache

        def there(*shape: int) -> Any:
            array = made.produced(np.ones((*shape, DIM), np.float16), None)
            return dataclasses.replace(array, stream=captured, owner=array)

        q, k = (made.produced(np.ones((2, 1, heads, DIM), np.float16), None) for heads in (HEADS_Q, HEADS))
        asked: dict[str, Callable[[], ga.Reply[Any]]] = {
            "forward": lambda: made.flash_attn.forward(q, there(2, 1, HEADS), k, timeout=20),
            "append": lambda: cache.append(made.seqs, *[there(LAYERS, 2, 1, HEADS)] * 2, timeout=20),
            "attend": lambda: cache.attend(there(2, 1, HEADS_Q), made.seqs, timeout=20),
            "out": lambda: cache.attend(q, made.seqs, out=there(2, 1, HEADS_Q), timeout=20),
        }
        made.api.begin_capture(captured)
        with pytest.raises(ga.InvalidRequest, match=f"stream={captured}: is being captured"):
            asked[kind]().result(20)
        assert not made.api._streams[captured].captured
        assert cache.attend(q, made.seqs, timeout=20).result(20).out.shape == q.shape
        made.api.destroy_graph(made.api.end_capture(captured))
        asked[kind]().result(20)
        made.finish()


def test_the_default_stream_is_not_used_while_a_blocking_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA answers the question whether it is captured with an error, and the use of it with the end of the capture."""
    with program("eager", 3) as made:
        default, failure = made.streams[0], CudaFailure(CAPTURE_IMPLICIT, "is_capturing")
        graphs, used = Graphs(made), list[int]()
        values = graphs.write(default)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
        graphs.attend(step, default)
        made.finish()
        with monkeypatch.context() as patch:

            def ask(stream: int) -> bool:
                if stream == default:
                    raise failure
                return False

            patch.setattr(made.api, "is_capturing", ask)
            record = made.api.record_event

            def note(event: int, stream: int) -> None:
                used.append(stream)
                record(event, stream)

            patch.setattr(made.api, "record_event", note)
            refused = f"stream={default}: is the default stream"
            for waits_for in (default, made.streams[1]):  # the second waits for the first layers
                with pytest.raises(ga.InvalidRequest, match=refused):
                    graphs.attend(step, waits_for)
            q, k, v, _ = (dataclasses.replace(one, stream=default, owner=one) for one in graphs.arrays[0])
            with pytest.raises(ga.InvalidRequest, match=refused):
                made.flash_attn.forward(q, k, v, timeout=20).result(20)
            with pytest.raises(ga.InvalidRequest, match=f"stream={default}: is being captured, or waits for one"):
                step.commit().result(20)
            assert default not in used
        assert step.commit().result(20) == [6, 6]
        made.finish()
        for (*_, out), wanted in zip(graphs.arrays, graphs.wanted(made.twins, values), strict=True):
            np.testing.assert_array_equal(host_view(out), wanted)


def test_arrays_of_the_host_do_not_make_the_device_current_on_a_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with program("eager", 3) as made:
        launch, threads = made.api.launch_kernel, list[int]()

        def note(*given: Any) -> None:
            threads.append(threading.get_ident())
            launch(*given)

        q, k = np.ones((2, 1, HEADS_Q, DIM), np.float16), np.ones((2, 1, HEADS, DIM), np.float16)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, like={"q": q, "k": k, "v": k}).result(20)
        monkeypatch.setattr(made.api, "launch_kernel", note)
        for current in (True, False):
            monkeypatch.setattr(made.api, "is_current", lambda current=current: current)
            threads.clear()
            for layer in range(LAYERS):
                step.attend(layer, q, k, k)
            assert [thread == threading.get_ident() for thread in threads] == [current] * len(threads)
            assert threads
        assert step.commit().result(20) == [6, 6]


def test_a_context_that_is_closed_leaves_a_capture_alone() -> None:
    with program("eager", 3) as made:
        graphs, handle = Graphs(made), made.streams[0]
        step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
        graphs.attend(step, handle)
        made.api.begin_capture(handle)
        made.context.close()
        assert not made.api._streams[handle].captured
        assert made.device.driver.abandoned  # no event tells when the layers are over


@pytest.mark.parametrize("waits", ["a thread", "a task"])
def test_a_block_that_ends_while_its_stream_is_captured_does_not_wait_for_the_capture(waits: str) -> None:
    """The capture may end only after the block."""
    with program("eager", 3) as made:
        graphs, handle = Graphs(made), made.streams[0]
        graphs.write(handle)

        def block(step: ga.KvStep) -> None:
            graphs.attend(step, handle)
            made.api.begin_capture(handle)

        def in_a_thread() -> None:
            with made.cache.step(made.seqs, heads_q=HEADS_Q).result(20) as step:
                block(step)

        async def in_a_task() -> None:
            async with await made.cache.step(made.seqs, heads_q=HEADS_Q) as step:
                block(step)

        ended = ThreadPoolExecutor(1)
        ending = ended.submit(in_a_thread) if waits == "a thread" else ended.submit(asyncio.run, in_a_task())
        try:
            with pytest.raises(ga.InvalidRequest, match="commit the step once the capture has ended"):
                ending.result(20)
        finally:
            made.api.destroy_graph(made.api.end_capture(handle))
            ended.shutdown()
        made.append(made.rows(1), made.rows(1))
        assert made.same()


@pytest.mark.parametrize("end", ["commit", "abort", "drop"])
def test_a_step_whose_stream_was_destroyed_ends(end: str) -> None:
    with program("eager", 3) as made:
        graphs, handle = Graphs(made), made.api.create_stream()
        step: ga.KvStep | None = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
        assert step is not None
        graphs.attend(step, handle)
        event = made.api.create_event()
        made.api.record_event(event, handle)
        made.api.synchronize_event(event)
        made.api.destroy_stream(handle)
        if end != "drop":
            with pytest.raises(ga.LaunchError, match="handle"):
                (step.commit() if end == "commit" else step.abort()).result(20)
        step = None
        gc.collect()
        made.append(made.rows(1), made.rows(1))
        assert made.same()


def test_a_step_that_is_late_while_its_stream_is_captured_keeps_no_other_request_waiting() -> None:
    with program("eager", 6) as made:
        graphs, handle = Graphs(made), made.streams[0]
        graphs.write(handle)
        made.cache.step(made.seqs, heads_q=HEADS_Q).result(20).abort().result(20)  # which builds the kernels
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, timeout=1).result(20)
        graphs.attend(step, handle)
        made.api.begin_capture(handle)
        eventually(lambda: not step._step.open)
        with pytest.raises(ga.DeadlineExceeded):
            step.commit().result(5)
        assert made.cache.length(made.cache.create().result(5)) == 0
        made.api.destroy_graph(made.api.end_capture(handle))
        assert made.cache.step(made.seqs, heads_q=HEADS_Q).result(20).lengths == [6, 6]
        made.finish()


def test_a_prepared_request_that_is_dropped_as_its_stream_is_captured_leaves_the_capture_alone() -> None:
    with program("eager", 4) as made:
        handle = made.streams[0]
        q = made.device.memory.empty((1, 64, 2, DIM), "float16")
        host_view(q)[...] = 1
        plan = made.flash_attn.prepare(ga.FlashForward(q, q, q)).result(30)
        plan.run(q, out=made.device.memory.empty(q.shape, "float16"), stream=handle)
        series: Any = plan._launches.series
        stream = series._cuda
        del series
        made.finish()
        made.api.begin_capture(handle)
        del plan
        gc.collect()
        value = np.ones((1, 64, 2, DIM), np.float16)
        for _ in range(2):
            assert made.flash_attn.forward(value, value, value).result(30).out.shape == value.shape
        assert not made.api._streams[handle].captured
        assert stream._open
        made.api.destroy_graph(made.api.end_capture(handle))
        made.flash_attn.forward(value, value, value).result(30)
        assert not stream._open


@pytest.mark.parametrize("stream", ["the caller's", "the cache's"])
def test_a_step_makes_two_driver_calls_beside_its_kernels_and_one_query(stream: str) -> None:
    api, options = NullApi(), ga.ContextOptions(qualify="off")  # nothing computes there
    with closing(start_context(lambda: CallerDevice(0, options, api), options)) as ctx:
        device: Any = ctx._children.device
        empty = functools.partial(device.memory.empty, dtype="float16")
        with ctx.kv_cache(num_blocks=8, page_size=16, kv_heads=1, head_dim=64, dtype="float16", layers=32) as cache:
            seqs = [cache.create().result(20)]
            arrays = [empty((1, 1, heads, 64)) for heads in (2, 1, 1, 2)]
            handle = api.create_stream() if stream == "the caller's" else None
            for number in range(3):
                api.calls.clear()
                with cache.step(seqs, heads_q=2).result(20) as step:
                    for layer in range(32):
                        q, k, v, out = arrays
                        step.attend(layer, q, k, v, out=out, stream=handle)
                if number:
                    asked = api.calls.pop("event_done", 0) + api.calls.pop("synchronize_event", 0)
                    assert 1 <= asked <= 2
                    assert api.calls.pop("is_capturing", 0) == (33 if handle else 0)
                    kernels = api.calls.pop("launch_kernel")
                    assert kernels % 32 == 0
                    assert api.calls == {"copy_to_device": 1, "record_event": 1}


def wrong(order: HostOrder, seed: int, place: str) -> bool:
    try:
        return not right(order, seed, place)
    except (ga.ContextLost, ga.LaunchError, AssertionError):  # memory that was freed is used
        return True


def no_wait_for_the_cache(patch: pytest.MonkeyPatch) -> None:
    """Layers do not wait for the launches before the step."""
    enqueue = stream.CudaStream.enqueue

    def hasty(self: Any, series: Any, operands: Any, arrays: Any, target: int | None) -> None:
        series.last = target if series.last is None else series.last
        enqueue(self, series, operands, arrays, target)

    patch.setattr(stream.CudaStream, "enqueue", hasty)


def always_idle(patch: pytest.MonkeyPatch) -> None:
    """A step is not ordered behind launches of the cache that are in flight."""
    patch.setattr(stream.CudaStream, "_is_idle", lambda self: True)


def requests_do_not_follow_steps(patch: pytest.MonkeyPatch) -> None:
    """The cache's stream does not wait for an aborted step, whose pages others have."""
    patch.setattr(stream.CudaStream, "_follow", lambda self: None)


def no_wait_between_streams(patch: pytest.MonkeyPatch) -> None:
    """A layer does not wait for the one before on another stream."""
    enqueue = stream.CudaStream.enqueue

    def hasty(self: Any, series: Any, operands: Any, arrays: Any, target: int | None) -> None:
        series.last = series.last and target
        enqueue(self, series, operands, arrays, target)

    patch.setattr(stream.CudaStream, "enqueue", hasty)


def committed_before_the_last_layer(patch: pytest.MonkeyPatch) -> None:
    end = stream.CudaStream.end

    def early(self: Any, series: Any) -> Any:
        series.last = None
        return end(self, series)

    patch.setattr(stream.CudaStream, "end", early)


def arrays_not_held(patch: pytest.MonkeyPatch) -> None:
    enqueue = stream.CudaStream.enqueue

    def forgetful(self: Any, series: Any, operands: Any, arrays: Any, target: int | None) -> None:
        enqueue(self, series, operands, arrays, target)
        series.held.clear()
        operands._launch, operands._results = None, dict.fromkeys(operands._results)

    patch.setattr(stream.CudaStream, "enqueue", forgetful)


def memory_given_back_at_the_commit(patch: pytest.MonkeyPatch) -> None:
    end = stream.CudaStream.end

    def early(self: Any, series: Any) -> Any:
        event = end(self, series)
        series.release()
        return event

    patch.setattr(stream.CudaStream, "end", early)


def table_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    upload = stream.Operands.upload
    seen: set[Any] = set()

    def stale(self: Any, api: Any, handle: int) -> None:
        if self._placement not in seen:
            upload(self, api, handle)
        if self._placement.stays:
            seen.add(self._placement)

    patch.setattr(stream.Operands, "upload", stale)


def addresses_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    repeat = stream.CudaSeries.repeat

    def mixed(self: Any, launch: Any, kept: Any, arrays: Any, target: int | None = None) -> bool:
        return repeat(self, launch, kept, arrays, target) or bool(self._shared)

    patch.setattr(stream.CudaSeries, "repeat", mixed)


BUGS = {
    no_wait_for_the_cache: "a caller's stream",
    always_idle: "a caller's stream",
    requests_do_not_follow_steps: "a caller's stream",
    no_wait_between_streams: "streams in turn",
    committed_before_the_last_layer: "a caller's stream",
    arrays_not_held: "the cache's own stream",
    memory_given_back_at_the_commit: "the cache's own stream",
    table_of_the_step_before: "a caller's stream",
    addresses_of_another_layer: "a caller's stream",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__.replace("_", " "))
def test_bugs_of_a_step_make_answers_wrong(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert any(wrong(order, seed, BUGS[bug]) for seed in range(4) for order in ORDERS)
