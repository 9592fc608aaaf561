"""Steps and prepared requests in a caller's CUDA graph: replays with other lengths, tables and members are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated.caller_streams import DIM, HEADS, HEADS_Q, LAYERS, ORDERS, Graphs, program
from emulated.memory import host_view
from inside.actors import caller_launch
from inside.arrays import DeviceArray

import gpu_actors as ga
from gpu_actors.devices.cuda import operands, stream
from gpu_actors.devices.cuda.host_api import HostOrder

LONGEST = 40


# One of three layers has a window, and frees pages while the graph is replayed.
WINDOWED = [ga.KvLayer(), ga.KvLayer(window=6, num_blocks=20), ga.KvLayer()]


def right(order: HostOrder, seed: int, layers: Any = LAYERS) -> bool:
    """Whether replays over members of other lengths, with copied pages, on several streams, give the right bits."""
    with program(order, seed, layers=layers) as made:
        graphs = Graphs(made)
        captured, *answer = graphs.capture(max_length=LONGEST)
        answers = [answer]
        long = [one.create().result(20) for one in (made.cache, made.plain)]
        rows = made.rng.standard_normal((2, LAYERS, 19, HEADS, DIM)).astype(np.float16)
        for one, seq in zip((made.cache, made.plain), long, strict=True):
            one.append(seq, *rows).result(20)
        for number in range(4):
            handle = made.streams[number // 2]
            values = graphs.write(handle)
            # A page that the step must copy, and rows that are still in flight.
            forked = made.cache.fork(made.seqs[1])
            graphs.delay_the_cache()
            new = made.rows(1), made.rows(1)
            late = [one.append(to, *new) for one, to in ((made.cache, made.seqs), (made.plain, made.twins))]
            members = (made.seqs[0], long[0]), (made.twins[0], long[1])
            seqs, twins = members if number % 2 else (made.seqs, made.twins)
            answers.append(list(graphs.replay(captured, list(seqs), list(twins), handle, values)))
            # Another step and requests use memory of their own meanwhile.
            reply, outs, wanted = made.step(graphs.kept, lambda layer: made.streams[0])
            reply.result(20)
            answers.append([outs, wanted])
            made.cache.free(forked.result(20)).result(20)
            for appended in late:
                appended.result(20)
            if not made.same():
                return False
        made.finish()
        return all(
            np.array_equal(host_view(out), want)
            for outs, wanted in answers
            for out, want in zip(outs, wanted, strict=True)
        )


@pytest.mark.parametrize("layers", [LAYERS, WINDOWED], ids=["equal layers", "a window"])
@pytest.mark.parametrize("order", ORDERS)
def test_replays_have_the_bits_of_requests_in_every_order_of_streams(order: HostOrder, layers: Any) -> None:
    assert right(order, 3, layers)


def test_a_window_does_not_bound_the_lengths_of_a_capture() -> None:
    """The window's table is narrower than those of the other layers, and serves all lengths."""
    with program(ORDERS[0], 3, layers=WINDOWED) as made:
        made.append(made.rows(30), made.rows(30))
        graphs = Graphs(made)
        captured, *answer = graphs.capture()
        answers = [answer, list(graphs.replay(captured, made.seqs, made.twins, made.streams[0]))]
        made.finish()
        for outs, wanted in answers:
            for out, want in zip(outs, wanted, strict=True):
                np.testing.assert_array_equal(host_view(out), want)


@pytest.mark.parametrize("order", ORDERS)
def test_layers_may_have_their_arrays_at_the_same_addresses(order: HostOrder) -> None:
    """A model may keep one buffer for all layers. The graph copies each layer's arrays there and back."""
    with program(order, 4) as made:
        graphs, (warm, recorded) = Graphs(made), made.streams
        shared = [made.device.memory.empty(array.shape, "float16") for array in graphs.arrays[0]]

        def attend(step: ga.KvStep, handle: int) -> None:
            for layer, fixed in enumerate(graphs.arrays):
                for array, source in zip(shared[:3], fixed, strict=False):
                    made.api.copy_on_device(array.address, source.address, source.nbytes, handle)
                q, k, v, out = shared
                step.attend(layer, q, k, v, out=out, stream=handle)
                made.api.copy_on_device(fixed[3].address, out.address, out.nbytes, handle)

        answers = []
        for _ in range(2):  # the second one at the addresses of the first
            values = graphs.write(warm)
            step = made.cache.step(made.seqs, heads_q=HEADS_Q, max_length=LONGEST).result(20)
            for _ in range(2):
                attend(step, warm)
            outs = [made.consumed(array[3], warm) for array in graphs.arrays]
            made.api.begin_capture(recorded)
            attend(step, recorded)
            graphs.graph = made.api.end_capture(recorded)
            step.commit().result(20)
            answers.append((outs, graphs.wanted(made.twins, values)))
        assert step.captured is not None
        for _ in range(3):
            answers.append(graphs.replay(step.captured, made.seqs, made.twins, warm))
            assert made.same()
        made.finish()
        for outs, wanted in answers:
            for out, want in zip(outs, wanted, strict=True):
                np.testing.assert_array_equal(host_view(out), want)


def wrong(order: HostOrder, seed: int) -> bool:
    try:
        return not right(order, seed)
    except (ga.GpuActorsError, AssertionError):
        return True


def tables_of_the_captured_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operands.Operands, "restage", lambda self, launch: None)


def tables_are_not_uploaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream.CudaSeries, "upload", lambda self, target=None: None)


def upload_behind_the_replay(patch: pytest.MonkeyPatch) -> None:
    replay = caller_launch.CallerLaunches.replay

    def late(self: Any, run: Any, q: Any, target: Any) -> None:
        run()
        replay(self, lambda: None, q, target)

    patch.setattr(caller_launch.CallerLaunches, "replay", late)


def no_wait_for_the_cache(patch: pytest.MonkeyPatch) -> None:
    renew = stream.CudaSeries.renew

    def hasty(self: Any, steps: Any, launch: Any) -> None:
        last = self.last
        renew(self, steps, launch)
        self.last = last

    patch.setattr(stream.CudaSeries, "renew", hasty)


def memory_given_back_with_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream.CudaSeries, "mark", stream.CudaSeries.end)


def committed_before_the_replay_is_over(patch: pytest.MonkeyPatch) -> None:
    mark = stream.CudaSeries.mark

    def early(self: Any) -> Any:
        self.last = None
        return mark(self)

    patch.setattr(stream.CudaSeries, "mark", early)


def upload_goes_into_the_graph(patch: pytest.MonkeyPatch) -> None:
    def capture(self: Any, launched: Any, arrays: Any, target: int) -> None:
        launched.upload(self._driver.api, target)
        launched.launch(self._driver.api, target)
        launched._staging_in.bytes[:] = 0

    patch.setattr(stream.CudaStream, "capture", capture)


BUGS = (
    tables_of_the_captured_step, tables_are_not_uploaded, upload_behind_the_replay, no_wait_for_the_cache,
    memory_given_back_with_the_step, committed_before_the_replay_is_over, upload_goes_into_the_graph,
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__.replace("_", " "))
def test_bugs_of_a_capture_make_answers_wrong(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert any(wrong(order, seed) for seed in range(3) for order in ORDERS)


class TestRefusals:
    """What a capture cannot hold is refused before it is enqueued, and the step goes on."""

    def test_a_layer_is_launched_once_before(self) -> None:
        with program("eager", 1) as made:
            graphs, handle = Graphs(made), made.streams[0]
            step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
            made.api.begin_capture(handle)
            with pytest.raises(ga.InvalidRequest, match=r"stream=.*launch once on arrays of the device before"):
                graphs.attend(step, handle)
            made.api.destroy_graph(made.api.end_capture(handle))
            assert step.captured is None
            graphs.write(handle)
            graphs.attend(step, handle)
            assert step.commit().result(20) == [6, 6]

    def test_out_is_given(self) -> None:
        with program("eager", 1) as made:
            graphs, handle = Graphs(made), made.streams[0]
            step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
            graphs.attend(step, handle)
            made.api.begin_capture(handle)
            with pytest.raises(ga.InvalidRequest, match=r"out=None: must be given"):
                step.attend(0, *graphs.arrays[0][:3], stream=handle)
            made.api.destroy_graph(made.api.end_capture(handle))
            step.abort().result(20)

    def test_arrays_belong_to_the_stream(self) -> None:
        with program("eager", 1) as made:
            graphs, (handle, other) = Graphs(made), made.streams
            step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
            graphs.attend(step, handle)
            q, k, v, out = graphs.arrays[0]
            late = made.produced(host_view(q).copy(), other)
            made.api.begin_capture(handle)
            with pytest.raises(ga.InvalidRequest, match=rf"cannot wait for stream {other}"):
                step.attend(0, late, k, v, out=out, stream=handle)
            made.api.destroy_graph(made.api.end_capture(handle))
            step.abort().result(20)

    def test_captured_layers_have_not_run(self) -> None:
        with program("eager", 1) as made:
            graphs, handle = Graphs(made), made.streams[0]
            step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
            q, k, v, out = graphs.arrays[0]
            step.attend(0, q, k, v, out=out, stream=handle)
            made.api.begin_capture(handle)
            graphs.attend(step, handle)
            graph = made.api.end_capture(handle)
            with pytest.raises(ga.InvalidRequest, match=r"layers=\[1, 2\]: have no new rows"):
                step.commit().result(20)
            made.api.begin_capture(handle)
            with pytest.raises(ga.InvalidRequest, match=r"stream=.*is being captured"):
                step.replay(lambda: None, stream=handle)
            made.api.destroy_graph(made.api.end_capture(handle))
            step.replay(lambda: made.api.launch_graph(graph, handle), stream=handle)
            assert step.commit().result(20) == [6, 6]

    def test_sequences_are_as_many_and_not_longer(self) -> None:
        with program("eager", 1) as made:
            captured, *_ = Graphs(made).capture(max_length=8)
            with pytest.raises(ga.InvalidRequest, match=r"seqs=1: must be 2 sequences"):
                captured.step(made.seqs[:1]).result(20)
            made.append(made.rows(2), made.rows(2))
            with pytest.raises(ga.InvalidRequest, match=r"seqs\[0\]='9 rows': must have at most max_length, 8"):
                captured.step(made.seqs).result(20)
            with pytest.raises(ga.InvalidRequest, match="max_length"):
                made.cache.step(made.seqs, heads_q=HEADS_Q, max_length=7).result(20)
            with pytest.raises(ga.InvalidRequest, match="max_length=0"):
                made.cache.step(made.seqs, heads_q=HEADS_Q, max_length=0).result(20)

    def test_a_step_without_a_capture_replays_nothing(self) -> None:
        with program("eager", 1) as made:
            step = made.cache.step(made.seqs, heads_q=HEADS_Q).result(20)
            with pytest.raises(ga.InvalidRequest, match="run="):
                step.replay(lambda: None)
            step.abort().result(20)


@pytest.mark.parametrize("order", ORDERS)
def test_options_on_the_device_may_belong_to_another_stream_than_the_capture(order: HostOrder) -> None:
    """As with torch, which captures on a stream of its own. The layers before the capture have waited for them."""
    with program(order, 3) as made:
        graphs, (warm, recorded) = Graphs(made), made.streams
        made.delay(warm)
        slopes = made.produced(np.array([0.5, 0.25], np.float32), warm)
        options: Any = {"alibi_slopes": slopes, "max_length": LONGEST}
        graphs.write(warm)
        step = made.cache.step(made.seqs, heads_q=HEADS_Q, **options).result(20)
        graphs.attend(step, warm)
        wanted = [made.consumed(array[3], warm) for array in graphs.arrays]
        made.finish()
        captured = graphs.record(step, recorded)
        step.abort().result(20)
        for _ in range(2):
            step = captured.step(made.seqs).result(20)
            step.replay(lambda: made.api.launch_graph(graphs.graph, recorded), stream=recorded)
            outs = [made.consumed(array[3], recorded) for array in graphs.arrays]
            step.abort().result(20)
            made.finish()
            for out, want in zip(outs, wanted, strict=True):
                assert np.array_equal(host_view(out), host_view(want))


def test_an_error_of_the_replay_aborts_the_step_and_the_capture_goes_on() -> None:
    with program("eager", 1) as made:
        graphs = Graphs(made)
        captured, *_ = graphs.capture()
        step = captured.step(made.seqs).result(20)

        def fail() -> None:
            raise ValueError("no graph")

        with pytest.raises(ga.GpuActorsError, match="no graph"):
            step.replay(fail, stream=made.streams[0])
        with pytest.raises(ga.GpuActorsError):
            step.commit().result(20)
        assert [made.cache.length(seq) for seq in made.seqs] == [6, 6]
        outs, wanted = graphs.replay(captured, made.seqs, made.twins, made.streams[0])
        made.finish()
        assert all(np.array_equal(host_view(out), want) for out, want in zip(outs, wanted, strict=True))


def test_the_next_step_of_a_capture_waits_for_the_end_of_the_one_before() -> None:
    with program("eager", 1) as made:
        graphs = Graphs(made)
        captured, *_ = graphs.capture()
        others = [made.cache.create().result(20) for _ in range(2)]
        made.cache.append(others, made.rows(3), made.rows(3)).result(20)
        step = captured.step(made.seqs).result(20)
        waiting = captured.step(others)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        step.abort().result(20)
        assert waiting.result(20).lengths == [4, 4]


@pytest.mark.parametrize("order", ORDERS)
def test_a_prepared_request_is_captured_with_tables_on_the_device(order: HostOrder) -> None:
    with program(order, 2) as made:
        handle, rng, empty = made.streams[0], made.rng, made.device.memory.empty
        flash_attn = made.flash_attn

        def array(value: Any) -> DeviceArray:
            memory = empty(value.shape, value.dtype.name)
            host_view(memory)[...] = value
            return memory

        pages = [rng.standard_normal((8, 16, HEADS, DIM)).astype(np.float16) for _ in "kv"]
        q = rng.standard_normal((2, 1, HEADS_Q, DIM)).astype(np.float16)
        table, lengths = np.array([[1, 2], [3, 4]], np.int32), np.array([20, 30], np.int32)
        own = {"k_cache": array(pages[0]), "v_cache": array(pages[1])}
        tables = {"block_table": array(table), "cache_seqlens": array(lengths)}
        fixed, out = array(q), empty(q.shape, "float16")
        plan = flash_attn.prepare(ga.PagedForward(q=fixed, **own, **tables)).result(20)
        made.api.begin_capture(handle)
        plan.run(fixed, out=out, stream=handle)
        graph = made.api.end_capture(handle)
        for number in range(3):
            q, lengths = q + np.float16(1), lengths - 3
            table = table[:, ::-1].copy()
            for value, to in ((q, fixed), (table, tables["block_table"]), (lengths, tables["cache_seqlens"])):
                source = made.produced(value, handle)
                made.api.copy_on_device(to.address, source.address, source.nbytes, handle)
                made.kept.append(source)
            if number == 2:
                plan.run(fixed, out=out, stream=handle)
            else:
                made.api.launch_graph(graph, handle)
            made.finish()
            again = {"block_table": array(table), "cache_seqlens": array(lengths)}
            wanted = empty(q.shape, "float16")
            flash_attn.submit(ga.PagedForward(q=array(q), **own, **again, out=wanted)).result(20)
            assert np.array_equal(host_view(out), host_view(wanted))
        made.api.destroy_graph(graph)


class TestOptions:
    """Which options a later step may give, and which are in the graph."""

    def test_tokens_are_of_one_step(self) -> None:
        """The tokens of the captured step do not name the rows of the next one."""
        with program("eager", 1) as made:
            graphs, handle = Graphs(made), made.streams[0]
            seqs = [made.cache.create(np.arange(4)).result(20) for _ in range(2)]
            made.cache.append(seqs, made.rows(3), made.rows(3), tokens=[np.arange(3), np.arange(3)]).result(20)
            tokens = [np.array([3]), np.array([9])]
            step = made.cache.step(seqs, heads_q=HEADS_Q, max_length=LONGEST, tokens=tokens).result(20)
            graphs.attend(step, handle)
            captured = graphs.record(step, handle)
            step.commit().result(20)
            others = [made.cache.create(np.arange(4)).result(20) for _ in range(2)]
            made.cache.append(others, made.rows(3), made.rows(3), tokens=[np.arange(3), np.arange(3)]).result(20)
            given: list[tuple[Any, Any]] = [(seqs, {})] * 4 + [(others, {"tokens": [np.array([7]), np.array([8])]})]
            for members, own in given:
                step = captured.step(members, **own).result(20)
                step.replay(lambda: made.api.launch_graph(graphs.graph, handle), stream=handle)
                step.commit().result(20)
            assert made.cache.create([0, 1, 2, 3, 3, 3, 3, 3, 3]).result(20).cached == 4  # later rows have no tokens
            assert made.cache.create([0, 1, 2, 7, 7]).result(20).cached == 4

    def test_positions_are_read_by_each_step(self) -> None:
        with program("eager", 2) as made:
            graphs, handle = Graphs(made), made.streams[0]
            rope, positions = ga.Rope(dim=DIM), np.array([3, 4], np.int32)
            options: Any = {"rope": rope, "positions": positions, "max_length": LONGEST}
            values = graphs.write(handle)
            step = made.cache.step(made.seqs, heads_q=HEADS_Q, **options).result(20)
            graphs.attend(step, handle)
            captured = graphs.record(step, handle)
            step.abort().result(20)
            for moved in (positions + 5, positions + 9):
                outs = []
                for begin in (
                    lambda moved=moved: captured.step(made.seqs, positions=moved),
                    lambda moved=moved: made.cache.step(made.seqs, heads_q=HEADS_Q, **options | {"positions": moved}),
                ):
                    step = begin().result(20)
                    if outs:
                        graphs.attend(step, handle)
                    else:
                        step.replay(lambda: made.api.launch_graph(graphs.graph, handle), stream=handle)
                    outs.append([made.consumed(array[3], handle) for array in graphs.arrays])
                    step.abort().result(20)
                made.finish()
                for replayed, launched in zip(*outs, strict=True):
                    assert np.array_equal(host_view(replayed), host_view(launched))
            assert values

    def test_a_list_that_is_changed_later_is_not_changed_in_the_capture(self) -> None:
        """The launches of the graph are for the captured rows."""
        with program("eager", 2) as made:
            rows, heads, window = [1, 2], [HEADS_Q] * LAYERS, {"window_size": [3, 0]}
            options: Any = {"rows": rows, "heads_q": heads, "layer_options": {1: window}, "max_length": LONGEST}
            handle, kinds = made.streams[0], (HEADS_Q, HEADS, HEADS, HEADS_Q)
            arrays = [[made.device.memory.empty((3, heads, DIM), "float16") for heads in kinds] for _ in range(LAYERS)]
            for array in (one for layer in arrays for one in layer):
                host_view(array)[...] = made.rng.standard_normal(array.shape)

            def attend(step: ga.KvStep) -> list[Any]:
                for layer, (q, k, v, out) in enumerate(arrays):
                    step.attend(layer, q, k, v, out=out, stream=handle)
                return [made.consumed(layer[3], handle) for layer in arrays]

            step = made.cache.step(made.seqs, **options).result(20)
            wanted = attend(step)
            made.api.begin_capture(handle)
            for layer, (q, k, v, out) in enumerate(arrays):
                step.attend(layer, q, k, v, out=out, stream=handle)
            graph = made.api.end_capture(handle)
            step.abort().result(20)
            captured = step.captured
            assert captured is not None
            rows[:], heads[:], window["window_size"] = [3, 3], [4 * HEADS_Q] * LAYERS, [0, 0]
            step = captured.step(made.seqs).result(20)
            assert step.lengths == [6, 7]
            step.replay(lambda: made.api.launch_graph(graph, handle), stream=handle)
            outs = [made.consumed(layer[3], handle) for layer in arrays]
            assert step.commit().result(20) == [6, 7]
            made.finish()
            for out, want in zip(outs, wanted, strict=True):
                np.testing.assert_array_equal(host_view(out), host_view(want))

    def test_what_is_in_the_graph_is_not_given_anew(self) -> None:
        with program("eager", 1) as made:
            captured, *_ = Graphs(made).capture(softcap=2.0)
            for given in ({"softcap": 3.0}, {"causal": False}, {"positions": np.zeros((2, 1), np.int32)}):
                with pytest.raises(ga.InvalidRequest, match=f"{next(iter(given))}=.*is in the graph"):
                    captured.step(made.seqs, **given)
            with pytest.raises(TypeError, match=r"KvCapture\.step\(\) .* 'token'; the nearest option is 'tokens'"):
                captured.step(made.seqs, token=[np.array([1])] * 2)
            with pytest.raises(TypeError, match=r"KvCapture\.step\(\) .* 'rows'"):
                captured.step(made.seqs, rows=2)
