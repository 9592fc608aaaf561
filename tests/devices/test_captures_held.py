"""What a step, a capture and a prepared request hold, and what waits for them."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

import numpy as np
import pytest
from emulated.caller_streams import DIM, HEADS_Q, ORDERS, Graphs, Program, program
from emulated.memory import host_view
from inside.cuda import Operation

import gpu_actors as ga
from gpu_actors.devices.cuda.host_api import HostOrder
from gpu_actors.devices.cuda.stream import CudaSeries

LONGEST = 40


def others_of(made: Program) -> tuple[list[Any], list[Any]]:
    """Two more sequences in each of both caches."""
    rows = made.rows(3), made.rows(3)
    both = [[one.create().result(20) for _ in range(2)] for one in (made.cache, made.plain)]
    for one, seqs in zip((made.cache, made.plain), both, strict=True):
        one.append(seqs, *rows).result(20)
    return both[0], both[1]


def test_the_step_that_captured_has_its_capture_until_it_ends() -> None:
    with program("eager", 1) as made:
        graphs = Graphs(made)
        others, _ = others_of(made)
        graphs.write(made.streams[0])
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, max_length=LONGEST).result(20)
        graphs.attend(step, made.streams[0])
        captured = graphs.record(step, made.streams[1])
        waiting = captured.step(others)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        step.commit().result(20)
        waiting.result(20).abort().result(20)


@pytest.mark.parametrize("order", ORDERS)
def test_layers_that_were_not_captured_have_the_tables_of_their_step(order: HostOrder) -> None:
    """Layers with options of their own are another group of launches."""
    with program(order, 2) as made:
        graphs, handle = Graphs(made), made.streams[0]
        graphs.write(handle)
        options: Any = {"max_length": LONGEST, "layer_options": {2: {"softcap": 5.0}}}
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, **options).result(20)
        graphs.attend(step, handle)
        captured = graphs.record(step, made.streams[1], (0, 1))
        step.abort().result(20)
        q, k, v, out = graphs.arrays[2]
        for _ in range(4):
            values = graphs.write(handle)
            step = captured.step(made.seqs).result(20)
            step.replay(lambda: made.api.launch_graph(graphs.graph, handle), stream=handle)
            with pytest.raises(ga.InvalidRequest, match=r"layers=\[2\]"):
                step.commit().result(20)
            step.attend(2, q, k, v, out=out, stream=handle)
            given = made.consumed(out, handle)
            step.commit().result(20)
            made.plain.append(made.twins, *values[1:]).result(20)
            wanted = made.plain.attend(values[0][2], made.twins, layer=2, softcap=5.0).result(20).out
            made.finish()
            assert np.array_equal(host_view(given), wanted)
            assert made.same()


def test_a_replay_says_which_layers_its_graph_has() -> None:
    with program("eager", 1) as made:
        graphs, handle = Graphs(made), made.streams[0]
        graphs.write(handle)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
        graphs.attend(step, handle)
        graphs.record(step, made.streams[1], (0, 1))
        first = graphs.graph
        captured = graphs.record(step, made.streams[1], (2,))
        step.abort().result(20)
        step = captured.step(made.seqs).result(20)
        step.replay(lambda: made.api.launch_graph(first, handle), layers=(0, 1), stream=handle)
        with pytest.raises(ga.InvalidRequest, match=r"layers=\[2\]: have no new rows"):
            step.commit().result(20)
        for wrong in ((3,), 2, [[2]], "2", (layer for layer in (2,))):
            with pytest.raises(ga.InvalidRequest, match=r"layers=.*must be a list of the captured ones, \[0, 1, 2\]"):
                step.replay(lambda: None, layers=wrong, stream=handle)  # type: ignore[arg-type]
        step.replay(lambda: made.api.launch_graph(graphs.graph, handle), layers=(2,), stream=handle)
        assert step.commit().result(20) == [6, 6]
        with pytest.raises(ga.InvalidRequest, match=r"run=.*callable"):
            step.replay(None)  # type: ignore[arg-type]


def test_code_that_replays_keeps_no_other_cache_waiting() -> None:
    """The deadline of the step passes meanwhile, and its end waits for the replay."""
    with program("eager", 1) as made:
        graphs = Graphs(made)
        captured, *_ = graphs.capture()
        step = captured.step(made.seqs, timeout=0.2).result(20)
        going, answered = threading.Event(), threading.Event()

        def run() -> None:
            going.wait(20)
            assert made.plain.create().result(20)  # from within, too
            with pytest.raises(ga.InvalidRequest, match="must not be attended to by what replays"):
                graphs.attend(step, made.streams[0])
            answered.set()

        thread = threading.Thread(target=lambda: step.replay(run, stream=made.streams[0]))
        thread.start()
        threading.Event().wait(0.3)
        assert made.plain.create().result(20)
        going.set()
        thread.join(20)
        assert answered.is_set()
        with pytest.raises(ga.DeadlineExceeded):
            step.commit().result(20)
        assert captured.step(made.seqs).result(20).lengths == [7, 7]


@pytest.mark.parametrize("order", ORDERS)
def test_a_replay_is_on_the_stream_of_q_by_default(order: HostOrder) -> None:
    with program(order, 6) as made:
        graphs, handle = Graphs(made), made.streams[0]
        graphs.arrays = [[dataclasses.replace(one, stream=handle, owner=one) for one in own] for own in graphs.arrays]
        answers = []
        values = graphs.write(handle)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, max_length=LONGEST).result(20)

        def attend() -> None:
            for layer, (q, k, v, out) in enumerate(graphs.arrays):
                step.attend(layer, q, k, v, out=out)

        attend()
        answers.append([made.consumed(own[3], handle) for own in graphs.arrays])
        made.api.begin_capture(handle)
        attend()
        graph = made.api.end_capture(handle)
        step.commit().result(20)
        wanted = [graphs.wanted(made.twins, values)]
        captured = step.captured
        assert captured is not None
        for _ in range(3):
            values = graphs.write(handle)
            graphs.delay_the_cache()
            step = captured.step(made.seqs).result(20)
            step.replay(lambda: made.api.launch_graph(graph, handle))
            answers.append([made.consumed(own[3], handle) for own in graphs.arrays])
            step.commit().result(20)
            wanted.append(graphs.wanted(made.twins, values))
        made.finish()
        for outs, right in zip(answers, wanted, strict=True):
            for out, want in zip(outs, right, strict=True):
                assert np.array_equal(host_view(out), want)


@pytest.mark.parametrize("order", ORDERS)
def test_a_commit_in_flight_has_its_tables_until_it_is_over(order: HostOrder) -> None:
    """The next step of the capture is over other sequences, for which it need not wait."""
    with program(order, 5) as made:
        graphs, handle = Graphs(made), made.streams[0]
        captured, *_ = graphs.capture(max_length=LONGEST)
        others, twins = others_of(made)
        for _ in range(3):
            found = []
            begun = captured.step(made.seqs)
            for seqs in (made.seqs, others):
                values = graphs.write(handle)
                step = begun.result(20)
                graphs.delay_the_cache()
                step.replay(lambda: made.api.launch_graph(graphs.graph, handle), stream=handle)
                outs = [made.consumed(array[3], handle) for array in graphs.arrays]
                committed = step.commit()
                begun = captured.step(others)
                found.append((committed, values, outs))
                if seqs is others:
                    begun.result(20).abort().result(20)
            for (committed, values, outs), of in zip(found, (made.twins, twins), strict=True):
                committed.result(20)
                made.finish()
                for out, want in zip(outs, graphs.wanted(of, values), strict=True):
                    assert np.array_equal(host_view(out), want)
            assert made.same()


@pytest.mark.parametrize("how", ["commit", "abort", "deadline", "close"])
def test_a_step_that_is_over_replays_nothing(how: str) -> None:
    """Its pages may belong to other sequences by then."""
    with program("eager", 1) as made:
        graphs, handle = Graphs(made), made.streams[0]
        captured, *_ = graphs.capture()
        step = captured.step(made.seqs, timeout=0.05 if how == "deadline" else None).result(20)
        if how == "commit":
            step.replay(lambda: made.api.launch_graph(graphs.graph, handle), stream=handle)
            step.commit().result(20)
        elif how == "abort":
            step.abort().result(20)
        elif how == "deadline":
            threading.Event().wait(0.1)
        else:
            made.cache.__exit__(None, None, None)
        replayed: list[int] = []
        with pytest.raises(ga.DeadlineExceeded if how == "deadline" else ga.StaleBuffer):
            step.replay(lambda: replayed.append(1), stream=handle)
        assert not replayed


@pytest.mark.timeout(30)
def test_code_that_replays_is_refused_what_would_wait_for_itself() -> None:
    with program("eager", 1) as made:
        graphs, handle = Graphs(made), made.streams[0]
        captured, *_ = graphs.capture()
        step = captured.step(made.seqs).result(20)

        def run() -> None:
            with pytest.raises(ga.InvalidRequest, match="must not be replayed by what replays"):
                step.replay(lambda: None, stream=handle)
            for end in (step.commit, step.abort):
                with pytest.raises(ga.InvalidRequest, match="must not be ended by what replays it"):
                    end().result(20)
            made.api.launch_graph(graphs.graph, handle)

        step.replay(run, stream=handle)
        assert step.commit().result(20) == [7, 7]
        assert captured.step(made.seqs).result(20).lengths == [8, 8]


@pytest.mark.parametrize("end", ["abort", "drop", "commit"])
def test_a_capture_goes_on_after_a_replay_that_failed_on_the_device(end: str) -> None:
    with program("eager", 1) as made:
        graphs, handle = Graphs(made), made.streams[0]
        captured, *_ = graphs.capture()
        step: ga.KvStep | None = captured.step(made.seqs).result(20)
        assert step is not None
        step.replay(lambda: made.api.launch_graph(graphs.graph, handle), stream=handle)

        def fail() -> None:
            raise ga.LaunchError("kernel failed")

        with made.api._lock:
            made.api._enqueue(handle, Operation(fail))
        if end == "commit":
            with pytest.raises(ga.LaunchError):
                step.commit().result(20)
        elif end == "abort":
            step.abort().result(20)
        step = None
        gc.collect()
        assert captured.step(made.seqs).result(20).lengths == [7, 7]


@pytest.mark.parametrize("commits", [True, False])
def test_a_capture_whose_step_cannot_be_ended_begins_no_other(commits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an event, the end of its kernels' reads from their tables is unknown."""
    with program("eager", 1) as made:
        graphs, handle = Graphs(made), made.streams[0]
        captured, *_ = graphs.capture()
        step = captured.step(made.seqs).result(20)
        step.replay(lambda: made.api.launch_graph(graphs.graph, handle), stream=handle)
        with monkeypatch.context() as patch:

            def fail(series: Any) -> Any:
                raise ga.LaunchError("no event")

            patch.setattr(CudaSeries, "mark", fail)
            with pytest.raises(ga.LaunchError, match="no event"):
                (step.commit() if commits else step.abort()).result(20)
        with pytest.raises(ga.StaleBuffer, match="capture another"):
            captured.step(made.seqs).result(20)
        made.finish()
        assert [made.cache.length(seq) for seq in made.seqs] == [6, 6]
        again, outs, wanted = Graphs(made).capture()
        assert again.step(made.seqs).result(20).lengths == [8, 8]
        made.finish()
        assert all(np.array_equal(host_view(out), want) for out, want in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("kind", ["latent", "option on the device"])
def test_a_layer_may_be_attended_again_with_out(kind: str) -> None:
    """A capture needs this. Its launch has other arrays than the call, or more."""
    with program("eager", 1) as made:
        empty = made.device.memory.empty
        sizes: dict[str, Any] = {"num_blocks": 8, "page_size": 4, "kv_heads": 1, "dtype": "float16", "layers": 2}
        options: dict[str, Any] = {"softmax_scale": 0.1}
        if kind == "latent":
            sizes |= {"head_dim": 96, "latent_dim": 64}
            arrays: dict[str, Any] = {"c_kv": empty((1, 1, 1, 64), "float16"), "k_pe": empty((1, 1, 1, 32), "float16")}
            q, out = empty((1, 1, 2, 96), "float16"), empty((1, 1, 2, 64), "float16")
        else:
            sizes |= {"head_dim": 64}
            arrays = {name: empty((1, 1, 1, 64), "float16") for name in ("k", "v")}
            q, out = empty((1, 1, 2, 64), "float16"), empty((1, 1, 2, 64), "float16")
            slopes = empty((2,), "float32")
            host_view(slopes)[...] = 0.5
            options |= {"alibi_slopes": slopes}
        for array in (q, *arrays.values()):
            host_view(array)[...] = 1
        with made.context.kv_cache(**sizes) as cache:
            seqs = [cache.create().result(20)]
            step = cache.step(seqs, heads_q=2, **options).result(20)
            for _ in range(2):
                for layer in range(2):
                    step.attend(layer, q, **arrays, out=out, stream=made.streams[0])
            assert step.commit().result(20) == [1]
        made.finish()
        assert np.array_equal(host_view(out), np.ones_like(host_view(out)))


@pytest.mark.parametrize("order", ORDERS)
def test_a_prepared_request_of_few_rows_runs_in_the_order_of_its_stream(order: HostOrder) -> None:
    """Its kernels read addresses that the host writes, so each launch copies them."""
    with program(order, 3) as made:
        rng, handle, empty = made.rng, made.streams[0], made.device.memory.empty
        q, out = empty((2, 1, 4, DIM), "float16"), empty((2, 1, 4, DIM), "float16")
        k, v = (empty((2, 333, 2, DIM), "float16") for _ in "kv")
        for array in (q, k, v):
            host_view(array)[...] = rng.standard_normal(array.shape)
        plan = made.flash_attn.prepare(ga.FlashForward(q, k, v)).result(30)
        for _ in range(4):
            value = rng.standard_normal(q.shape).astype(np.float16)
            written = made.produced(value, handle)
            made.api.copy_on_device(q.address, written.address, written.nbytes, handle)
            plan.run(q, out=out, stream=handle)
            read = made.consumed(out, handle)
            made.kept += [written, read]
            made.finish()
            wanted = made.flash_attn.forward(value, host_view(k).copy(), host_view(v).copy()).result(30).out
            assert np.allclose(host_view(read), wanted, atol=2e-3)
        made.api.begin_capture(handle)
        with pytest.raises(ga.InvalidRequest, match="pack_gqa=False"):
            plan.run(q, out=out, stream=handle)
        made.api.destroy_graph(made.api.end_capture(handle))


def test_runs_and_steps_keep_nothing_that_is_over() -> None:
    with program("eager", 1) as made:
        empty, handle = made.device.memory.empty, made.streams[0]
        q = empty((1, 64, 2, DIM), "float16")
        host_view(q)[...] = 1
        plan = made.flash_attn.prepare(ga.FlashForward(q, q, q)).result(30)
        for _ in range(600):
            plan.run(q, out=empty(q.shape, "float16"), stream=handle)
            made.finish()
        series: Any = plan._launches.series
        assert len(series.held) < 300
        stream = made.cache._handle._cell.stream
        for _ in range(8):
            with made.cache.step(made.seqs, heads_q=HEADS_Q).result(20) as step:
                graphs = Graphs(made)
                graphs.attend(step, handle)
            made.cache.step(made.seqs, heads_q=HEADS_Q).result(20).abort().result(20)
        assert len(stream._flights) <= 3


def test_a_stream_that_is_destroyed_fails_no_other_request() -> None:
    with program("eager", 1) as made:
        q = made.device.memory.empty((1, 64, 2, DIM), "float16")
        host_view(q)[...] = 1
        plan = made.flash_attn.prepare(ga.FlashForward(q, q, q)).result(30)
        handle = made.api.create_stream()
        out = made.device.memory.empty(q.shape, "float16")
        plan.run(q, out=out, stream=handle)
        event = made.api.create_event()
        made.api.record_event(event, handle)
        made.api.synchronize_event(event)
        made.api.destroy_stream(handle)
        del plan
        gc.collect()
        value = np.ones((1, 64, 2, DIM), np.float16)
        assert made.flash_attn.forward(value, value, value).result(30).out.shape == value.shape


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kept", ["a prepared request", "a capture", "a step"])
def test_a_context_releases_its_memory_though_what_ran_on_a_callers_stream_is_kept(order: HostOrder, kept: str) -> None:
    with program(order, 1) as made:
        handle, alive = made.streams[0], list[Any]()
        if kept == "a capture":
            alive += Graphs(made).capture()
        elif kept == "a step":
            alive.append(made.cache.step(made.seqs, heads_q=HEADS_Q).result(20))
            Graphs(made).attend(alive[0], handle)
        else:
            q, out = (made.device.memory.empty((1, 64, 2, DIM), "float16") for _ in range(2))
            alive.append(made.flash_attn.prepare(ga.FlashForward(q, q, q)).result(30))
            alive[0].run(q, out=out, stream=handle)
        made.finish()
        made.context.close()
        assert not made.device.driver.abandoned


def test_two_threads_end_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two are the caller's thread, which launches a first layer, and the actor's."""
    with program("eager", 1) as made:
        q = made.device.memory.empty((1, 64, 2, DIM), "float16")
        plans = [made.flash_attn.prepare(ga.FlashForward(q, q, q)).result(30) for _ in range(2)]
        for plan in plans:
            plan.run(q, out=made.device.memory.empty(q.shape, "float16"), stream=made.streams[0])
        series: Any = plan._launches.series
        stream = series._cuda
        capturing = type(series).capturing

        def slow(self: Any) -> int | None:
            other = threading.Thread(target=stream._end_dropped)
            other.start()
            other.join(20)
            return capturing(self)

        monkeypatch.setattr(type(series), "capturing", slow)
        del plan, plans, series
        gc.collect()
        value = np.ones((1, 64, 2, DIM), np.float16)
        assert made.flash_attn.forward(value, value, value).result(30).out.shape == value.shape
        assert not stream._open
        made.finish()


def test_packed_rows_of_one_step_after_the_other() -> None:
    sizes: dict[str, Any] = {"num_blocks": 16, "page_size": 4, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    with ga.open_context("mock") as ctx, ctx.kv_cache(**sizes, layers=2) as cache:
        seqs = [cache.create().result(20) for _ in range(2)]
        rows = np.ones((3, 1, 8), np.float32)
        for number in range(1, 4):
            with cache.step(seqs, heads_q=1, rows=[1, 2]).result(20) as step:
                for layer in range(2):
                    assert np.array_equal(step.attend(layer, rows, rows, rows), rows)
            assert [cache.length(seq) for seq in seqs] == [number, 2 * number]
