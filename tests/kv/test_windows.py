"""Layers of a KvCache with a window: pages behind it are freed, and rows see the same keys as before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from emulated.memory import host_view
from inside.testing import cast
from support.kv_cache import LATER, attention, outcome, slow, wait
from support.service import eventually

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

HEADS, HEADS_Q, DIM, PAGE, WINDOW = 2, 4, 16, 4, 9
WHOLE = ga.KvLayer(kv_heads=HEADS, head_dim=DIM)
LOCAL = ga.KvLayer(kv_heads=HEADS, head_dim=DIM, window=WINDOW, num_blocks=12)
SLACK = ga.KvLayer(kv_heads=HEADS, head_dim=DIM, window=WINDOW, num_blocks=12, slack=3)
LAYERS = [WHOLE, LOCAL, LOCAL, WHOLE]


class Kept:
    """A cache, and all rows of its sequences. k, v: of each sequence, (layers, rows, heads, dim)."""

    def __init__(self, cache: ga.KvCache, layers: list[ga.KvLayer], dtype: str) -> None:
        self.cache, self.layers, self.dtype = cache, layers, dtype
        self.rng = np.random.default_rng(7)
        self.k: dict[ga.KvSequence, np.ndarray] = {}
        self.v: dict[ga.KvSequence, np.ndarray] = {}

    def draw(self, *shape: int) -> np.ndarray:
        drawn: np.ndarray = cast(self.rng.standard_normal((*shape, DIM)), self.dtype)
        return drawn

    def create(self, rows: int = 0) -> ga.KvSequence:
        seq: ga.KvSequence = wait(self.cache.create())
        self.k[seq] = self.v[seq] = self.draw(len(self.layers), 0, HEADS)
        if rows:
            self.append(seq, rows)
        return seq

    def fork(self, seq: ga.KvSequence) -> ga.KvSequence:
        child: ga.KvSequence = wait(self.cache.fork(seq))
        self.k[child], self.v[child] = self.k[seq], self.v[seq]
        return child

    def truncate(self, seq: ga.KvSequence, length: int) -> None:
        wait(self.cache.truncate(seq, length))
        self.k[seq], self.v[seq] = self.k[seq][:, :length], self.v[seq][:, :length]

    def more(self, seq: ga.KvSequence, k: np.ndarray, v: np.ndarray) -> None:
        self.k[seq], self.v[seq] = (np.concatenate(pair, axis=1) for pair in ((self.k[seq], k), (self.v[seq], v)))

    def append(self, seq: ga.KvSequence, rows: int) -> None:
        k, v = (self.draw(len(self.layers), rows, HEADS) for _ in "kv")
        new = (k, v) if len(self.layers) > 1 else (k[0], v[0])
        assert wait(self.cache.append(seq, *new)) == self.k[seq].shape[1] + rows
        self.more(seq, k, v)

    def step(self, seqs: list[ga.KvSequence], rows: int = 1, **options: Any) -> list[np.ndarray]:
        """Run a step of new rows, and check its outputs layer by layer."""
        k, v = (self.draw(len(self.layers), len(seqs), rows, HEADS) for _ in "kv")
        outs = []
        with wait(self.cache.step(seqs, heads_q=HEADS_Q, rows=rows, **options)) as step:
            for index, seq in enumerate(seqs):
                self.more(seq, k[:, index], v[:, index])
            for layer in range(len(self.layers)):
                q = self.draw(len(seqs), rows, HEADS_Q)
                outs.append(step.attend(layer, q, k[layer], v[layer]))
                self.compare(layer, seqs, q, outs[-1])
        return outs

    def compare(self, layer: int, seqs: list[ga.KvSequence], q: np.ndarray, out: np.ndarray, **options: Any) -> None:
        window = self.layers[layer].window
        seen = {"window_size": (window, 0), **options} if window is not None else options
        for index, seq in enumerate(seqs):
            right = attention(
                *(x.astype(np.float64) for x in (q[index], self.k[seq][layer], self.v[seq][layer])), **seen
            )
            close = {"rtol": 1e-5, "atol": 1e-5} if self.dtype == "float32" else {"rtol": 0.05, "atol": 0.02}
            np.testing.assert_allclose(out[index].astype(np.float64), right, **close, err_msg=f"layer {layer}")

    def check(self) -> None:
        for seq in self.k:
            for layer in range(len(self.layers)):
                q = self.draw(1, 1, HEADS_Q)
                self.compare(layer, [seq], q, wait(self.cache.attend(q, [seq], layer=layer)).out)

    def held(self, seq: ga.KvSequence) -> list[int]:
        """The number of a sequence's pages in each group."""
        return [len(own.pages) for own in self.cache._find().table(seq).groups]


@contextmanager
def kept(
    layers: list[ga.KvLayer] = LAYERS,
    device: str = "mock",
    dtype: str = "float32",
    options: ga.ContextOptions | None = None,
    **changes: Any,
) -> Iterator[Kept]:
    spec = {"num_blocks": 24, "page_size": PAGE, "dtype": dtype, "layers": layers, **changes}
    with ga.open_context(device, options) as ctx, ctx.kv_cache(**spec) as cache:
        yield Kept(cache, layers, dtype)


def test_pages_behind_a_window_are_given_back_and_no_row_sees_it() -> None:
    with kept() as one:
        first, second = one.create(3), one.create(30)
        assert (one.held(first), one.held(second)) == ([1, 1], [8, 3])
        for rows in (1, 2, 5, 1, 1, 1):
            one.step([first, second], rows)
            one.check()
        assert one.held(second)[1] == -(-(41 - (41 - 1 - WINDOW) // PAGE * PAGE) // PAGE)
        fork = one.fork(second)
        one.step([fork], 2)
        one.step([second], 1)
        one.check()
        for seq in (first, second, fork):
            wait(one.cache.free(seq))
        assert all(each.free_blocks == each.blocks for each in one.cache.group_stats())


def test_a_cache_of_one_layer_with_a_window_appends_with_attend() -> None:
    with kept([LOCAL]) as one:
        seq = wait(one.cache.create())
        k, v = one.draw(0, HEADS), one.draw(0, HEADS)
        for rows in (11, 1, 3, 1, 8, 1, 1):
            new = one.draw(1, rows, HEADS), one.draw(1, rows, HEADS)
            k, v = np.concatenate([k, new[0][0]]), np.concatenate([v, new[1][0]])
            q = one.draw(1, rows + 1 if rows < 3 and len(k) > rows else rows, HEADS_Q)
            out = wait(one.cache.attend(q, [seq], k=new[0], v=new[1])).out[0]
            right = attention(q[0], k, v, window_size=(WINDOW, 0))
            np.testing.assert_allclose(out, right, rtol=1e-5, atol=1e-5)
            narrow = wait(one.cache.attend(q[:, -1:], [seq], window_size=(3, -1))).out[0]
            np.testing.assert_allclose(narrow, attention(q[0, -1:], k, v, window_size=(3, 0)), rtol=1e-5, atol=1e-5)
        assert one.cache.length(seq) == len(k)
        assert one.cache.stats().free_blocks >= LOCAL.num_blocks - 4  # type: ignore[operator]


def test_bits_do_not_depend_on_which_pages_have_been_given_back() -> None:
    """One sequence is appended to row by row, the other at once."""
    with kept([LOCAL]) as one:
        k, v = one.draw(29, HEADS), one.draw(29, HEADS)
        slow, fast = wait(one.cache.create(), one.cache.create())
        for row in range(29):
            wait(one.cache.append(slow, k[row : row + 1], v[row : row + 1]))
        fork = wait(one.cache.fork(fast))
        assert wait(one.cache.append(fast, k, v)) == 29
        q = one.draw(1, 1, HEADS_Q)
        outs = [wait(one.cache.attend(q, [seq])).out.tobytes() for seq in (slow, fast)]
        wait(one.cache.free(slow), one.cache.free(fast))
        # The append is not committed when it is read, so no page has been freed.
        appended, read = one.cache.append(fork, k, v), one.cache.attend(q, [fork])
        assert wait(appended) == 29
        assert [*outs, wait(read).out.tobytes()] == [outs[0]] * 3


@pytest.mark.parametrize("kinds", [[LOCAL], [WHOLE, LOCAL, SLACK]], ids=["alone", "three groups"])
def test_no_output_of_the_kernels_changes_where_given_back_pages_hold_nan(kinds: list[ga.KvLayer]) -> None:
    with kept(kinds, "emulated", "bfloat16") as one:
        seqs = [one.create(13), one.create(22)]
        one.step(seqs, 2)
        for _ in range(6):
            opened = one.cache._find()
            for group in opened.groups:
                free = opened.tables._groups[group.number].pool._free
                assert group.window is None or len(free) >= 12 - 2 * 4 - 1
                for pool in (group.k_pool, group.v_pool):
                    host_view(pool)[free] = np.nan
            outs = one.step(seqs)
            assert all(np.isfinite(out.astype(np.float32)).all() for out in outs)
            one.check()


def test_a_long_run_through_a_window_takes_12_pages_for_10000_rows() -> None:
    """Steps have 16 rows. The block table keeps its width, and after a step only the window's pages are held."""
    layer = ga.KvLayer(kv_heads=1, head_dim=DIM, window=64, num_blocks=12)
    spec = {"num_blocks": 12, "page_size": 8, "dtype": "float32", "layers": [layer]}
    with ga.open_context("mock") as ctx, ctx.kv_cache(**spec) as cache:
        seq = wait(cache.create())
        rng = np.random.default_rng(3)
        k, v = rng.standard_normal((2, 0, 1, DIM)).astype(np.float32)
        widths, held = set[int](), set[int]()
        for count in range(625):
            q, new_k, new_v = rng.standard_normal((3, 1, 16, 1, DIM)).astype(np.float32)
            with wait(cache.step([seq], heads_q=1, rows=16)) as step:
                out = step.attend(0, q, new_k, new_v)
                widths.add(step._step.work.table.shape[1])
            k, v = np.concatenate([k, new_k[0]])[-80:], np.concatenate([v, new_v[0]])[-80:]
            if count % 25 == 0 or count > 620:
                right = attention(q[0], k, v, window_size=(64, 0))
                np.testing.assert_allclose(out[0], right, rtol=1e-5, atol=1e-5)
            held.add(cache.stats().blocks - cache.stats().free_blocks)
        assert (cache.length(seq), len(widths)) == (10000, 1)
        assert max(held) <= math.ceil((64 + 1) / 8) + 1


def test_groups_that_keep_all_rows_read_shared_pages_once() -> None:
    events: list[ga.TraceEvent] = []
    layers = [WHOLE, LOCAL, ga.KvLayer(kv_heads=HEADS, head_dim=DIM, num_blocks=30)]
    options = ga.ContextOptions(on_event=events.append)
    with kept(layers, dtype="float16", options=options, cascade=True) as one:
        seqs = [one.create(21)]
        seqs += [one.fork(seqs[0]) for _ in range(3)]
        for _ in range(2):
            one.step(seqs)
        taken = [event.fields["taken"] for event in events if event.name == "launch.cascade"]
        assert taken == [True, False, True] * 2


# Truncated rows


def test_slack_keeps_the_rows_that_drafts_take_back() -> None:
    with kept([WHOLE, SLACK]) as one:
        seq = one.create(40)
        for _ in range(10):
            one.step([seq], 4)
            one.truncate(seq, one.cache.length(seq) - 3)
            one.check()
        one.truncate(seq, 50)
        assert (one.cache.length(seq), one.k[seq].shape[1]) == (50, 50)
        one.step([seq], 1)


def test_a_truncation_into_rows_that_were_given_back_is_refused() -> None:
    with kept([WHOLE, LOCAL]) as one:
        seq = one.create(40)
        # Rows from 28 on are kept: (40 - 1 - 9) // 4 * 4.
        for length in (0, 37):
            refusal = outcome(one.cache.truncate(seq, length))
            assert isinstance(refusal, ga.InvalidRequest)
            assert (refusal.field, refusal.value) == ("length", length)
            assert "at least 38" in str(refusal)
        one.truncate(seq, 38)
        one.check()
        short = one.create(WINDOW)
        one.truncate(short, 0)
        one.step([short], 3)


def test_more_rows_of_q_than_a_window_keeps_are_refused() -> None:
    with kept([WHOLE, SLACK]) as one:
        seq = one.create(40)
        q = one.draw(1, 8, HEADS_Q)
        one.compare(0, [seq], q, wait(one.cache.attend(q, [seq], layer=0)).out)
        one.compare(1, [seq], q[:, :7], wait(one.cache.attend(q[:, :7], [seq], layer=1)).out)
        # Rows from 24 on are kept: (40 - 1 - 9 - 3) // 4 * 4.
        refusal = outcome(one.cache.attend(q, [seq], layer=1))
        assert isinstance(refusal, ga.InvalidRequest)
        assert (refusal.field, refusal.value) == ("q", f"float32[1, 8, {HEADS_Q}, {DIM}]")
        assert "at most 7" in str(refusal)
        for rows in (5, [5]):
            refusal = outcome(one.cache.step([seq], heads_q=HEADS_Q, rows=rows, append=False))
            assert isinstance(refusal, ga.InvalidRequest)
            assert (refusal.field, refusal.value) == ("rows", rows)
        with wait(one.cache.step([seq], heads_q=HEADS_Q, rows=4, append=False)) as step:
            for layer in range(2):
                one.compare(layer, [seq], q[:, :4], step.attend(layer, q[:, :4]))


@pytest.mark.parametrize("layers", [[WHOLE, SLACK], [SLACK, WHOLE]], ids=["behind another", "first"])
def test_a_step_behind_a_truncation_reads_no_page_that_was_given_back(layers: list[ga.KvLayer]) -> None:
    with kept(layers) as one:
        seq = one.create(41)
        one.truncate(seq, 38)
        # Rows from 28 on are kept: (41 - 1 - 9 - 3) // 4 * 4.
        refusal = outcome(one.cache.step([seq], heads_q=HEADS_Q, rows=4, append=False))
        assert isinstance(refusal, ga.InvalidRequest)
        assert (refusal.field, refusal.value) == ("q", f"float32[1, 4, {HEADS_Q}, {DIM}]")
        assert "at most 1 rows" in str(refusal)
        q = one.draw(1, 1, HEADS_Q)
        with wait(one.cache.step([seq], heads_q=HEADS_Q, append=False)) as step:
            for layer in range(2):
                one.compare(layer, [seq], q, step.attend(layer, q))
        one.step([seq], 4)
        one.check()


def test_rows_of_an_append_in_flight_may_be_read_as_far_back_as_those_of_one_that_is_over() -> None:
    clock, options = slow(FaultPlan(), 1)
    with kept([WHOLE, LOCAL], options=options) as one:
        seq = one.create()
        k = one.draw(2, 40, HEADS)
        appended = one.cache.append(seq, k, k)
        q = one.draw(1, 8, HEADS_Q)
        early = one.cache.attend(q, [seq], layer=1)
        refusal = outcome(early)
        clock.advance(LATER)
        wait(appended)
        late = outcome(one.cache.attend(q, [seq], layer=1))
        assert isinstance(refusal, ga.InvalidRequest)
        assert (str(refusal), refusal.field) == (str(late), "q")


@pytest.mark.parametrize("window", [1 << 26, (1 << 31) - 1])
def test_a_wide_window_takes_a_table_of_the_pages_that_there_are(window: int) -> None:
    with kept([WHOLE, ga.KvLayer(kv_heads=HEADS, head_dim=DIM, window=window)], page_size=1) as one:
        seq = one.create(3)
        one.step([seq], 2)
        step = wait(one.cache.step([seq], heads_q=HEADS_Q))
        assert [unit.work.table.shape for unit in dict.fromkeys(step._step._layers)] == [(1, 8), (1, 24)]
        wait(step.abort())
        one.check()


def test_a_step_that_is_aborted_keeps_the_window_whole() -> None:
    with kept() as one:
        seq = one.create(21)
        before = one.held(seq)
        step = wait(one.cache.step([seq], heads_q=HEADS_Q, rows=9))
        q, k = one.draw(1, 9, HEADS_Q), one.draw(1, 9, HEADS)
        for layer in range(3):
            step.attend(layer, q, k, k)
        wait(step.abort())
        assert one.held(seq) == before
        one.check()
        one.step([seq], 9)
        one.check()


# Faults


@pytest.mark.parametrize("layer", range(4))
def test_a_step_that_fails_at_any_layer_leaves_both_groups_as_before(layer: int) -> None:
    options = ga.ContextOptions(fault_plan=FaultPlan().fail(launch=2 + layer))
    with kept(options=options) as one:
        seq = one.create(21)
        before, stats = one.held(seq), one.cache.group_stats()
        step = wait(one.cache.step([seq], heads_q=HEADS_Q))
        q, k = one.draw(1, 1, HEADS_Q), one.draw(1, 1, HEADS)
        for each in range(layer):
            step.attend(each, q, k, k)
        with pytest.raises(ga.LaunchError):
            step.attend(layer, q, k, k)
        eventually(lambda: not one.cache._find().stepping)
        assert (one.held(seq), one.cache.group_stats(), one.cache.length(seq)) == (before, stats, 21)
        one.step([seq])
        one.check()


def test_a_write_that_fails_gives_back_no_page() -> None:
    """The write would have freed pages, as would the next write, which fails with it."""
    clock, options = slow(FaultPlan().fail(launch=2), 2)
    with kept([WHOLE, LOCAL], options=options) as one:
        seq = one.create(14)
        before, stats = one.held(seq), one.cache.group_stats()
        k = one.draw(2, 6, HEADS)
        replies = [one.cache.append(seq, k, k) for _ in range(2)]
        eventually(lambda: one.cache.length(seq) == 26)
        clock.advance(LATER)
        assert all(isinstance(outcome(reply), ga.LaunchError) for reply in replies)
        eventually(lambda: not one.cache._find()._in_flight)
        assert (one.held(seq), one.cache.group_stats(), one.cache.length(seq)) == (before, stats, 14)
        one.check()
        one.append(seq, 6)
        one.check()


def test_a_write_that_is_undone_behind_one_that_succeeds_finds_its_window() -> None:
    """The first write's commit frees pages that no later row needs, while the second write is in flight."""
    clock, options = slow(FaultPlan().fail(launch=3), 3)
    with kept([WHOLE, LOCAL], options=options) as one:
        seq = one.create(7)
        k, v = one.draw(2, 13, HEADS), one.draw(2, 13, HEADS)
        first = one.cache.append(seq, k, v)
        second = one.cache.append(seq, k, v)
        assert wait(first) == 20
        one.more(seq, k, v)
        eventually(lambda: one.cache.length(seq) == 33)
        assert one.held(seq)[1] == 9 - (20 - 1 - WINDOW) // PAGE
        fork_waits = one.cache.fork(seq)
        clock.advance(LATER)
        assert isinstance(outcome(second), ga.LaunchError)
        assert one.cache.length(seq) == 20
        wait(one.cache.free(wait(fork_waits)))
        one.check()
        one.step([seq], 2)
        one.check()


def test_copies_of_shared_pages_are_made_and_undone_in_each_group() -> None:
    with kept() as one:
        seq = one.create(21)
        fork = one.fork(seq)
        stats = one.cache.group_stats()
        step = wait(one.cache.step([fork], heads_q=HEADS_Q))
        assert [each.free_blocks for each in one.cache.group_stats()] == [each.free_blocks - 1 for each in stats]
        wait(step.abort())
        assert one.cache.group_stats() == stats
        one.step([fork, seq])
        one.check()


# Refusals


OPTIONS: dict[str, tuple[dict[str, Any], type[ga.InvalidRequest | ga.Unsupported], str]] = {
    "a wider window": ({"window_size": (WINDOW + 1, 0)}, ga.InvalidRequest, "window_size"),
    "an unbounded window": ({"window_size": (-1, 0)}, ga.InvalidRequest, "window_size"),
    "sink tokens": ({"sink_tokens": 1}, ga.Unsupported, "sink_tokens"),
    "chunks": ({"attention_chunk": 4}, ga.Unsupported, "attention_chunk"),
    "a bias": ({"bias": np.zeros((1, 1, 1, 64), np.float32)}, ga.Unsupported, "bias"),
    "positions of q": ({"q_positions": np.zeros(1, np.int32)}, ga.Unsupported, "q_positions"),
    "positions of keys": ({"k_positions": np.zeros(1, np.int32)}, ga.Unsupported, "k_positions"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_about_the_whole_sequence_are_refused_in_a_layer_with_a_window(option: str) -> None:
    options, kind, field = OPTIONS[option]
    with kept([WHOLE, LOCAL]) as one:
        seq = one.create(14)
        q = one.draw(1, 1, HEADS_Q)
        wait(one.cache.attend(q, [seq], layer=0, **options))
        for reply, named in (
            (one.cache.attend(q, [seq], layer=1, **options), field),
            (one.cache.step([seq], heads_q=HEADS_Q, **options), field),
            (one.cache.step([seq], heads_q=HEADS_Q, layer_options={1: options}), f"layer_options[1].{field}"),
        ):
            refusal = outcome(reply)
            assert isinstance(refusal, kind)
            assert refusal.field == named
        assert one.cache.length(seq) == 14


@pytest.mark.parametrize("device", ["mock", "emulated"])
def test_prompts_begin_with_the_pages_that_their_windows_need(device: str) -> None:
    with kept(device=device, dtype="float32" if device == "mock" else "bfloat16") as one:
        tokens = list(range(38))
        first = wait(one.cache.create(tokens))
        k, v = one.draw(4, 38, HEADS), one.draw(4, 38, HEADS)
        wait(one.cache.append(first, k, v, tokens=tokens))
        one.k[first], one.v[first] = k, v
        for count, cached in ((38, 36), (37, 36), (36, 32), (21, 20), (5, 4), (4, 0)):
            seq = wait(one.cache.create(tokens[:count]))
            assert (seq.cached, one.cache.length(seq)) == (cached, cached)
            assert one.held(seq) == [cached // PAGE, cached // PAGE - max(0, cached - 1 - WINDOW) // PAGE]
            one.k[seq], one.v[seq] = k[:, :cached], v[:, :cached]
            one.step([seq], 2)
            one.check()
            del one.k[seq]
            wait(one.cache.free(seq))
        one.step([first])
        one.check()


def test_a_prompt_whose_window_is_gone_begins_where_an_earlier_one_is_left() -> None:
    with kept([WHOLE, LOCAL]) as one:
        tokens = list(range(36))
        first = wait(one.cache.create(tokens))
        k = one.draw(2, 36, HEADS)
        for start in (0, 18):
            rows = slice(start, start + 18)
            wait(one.cache.append(first, k[:, rows], k[:, rows], tokens=tokens[rows]))
        # Rows from 24 on are kept; six pages before them are cached, and 3 of the 12 are unused so far.
        assert one.cache.group_stats()[1].prefix_blocks == 6
        other = one.create(16)
        assert one.cache.group_stats()[1].evicted == 1, "the first page, which longer prompts do not need"
        cached = [wait(one.cache.create(tokens[:count])).cached for count in (37, 36, 21, 13)]
        assert cached == [32, 32, 20, 0]
        wait(one.cache.free(other))


def test_the_pages_of_a_freed_prompt_are_evicted_from_its_beginning() -> None:
    with kept([WHOLE, LOCAL]) as one:
        tokens = list(range(36))
        first = wait(one.cache.create(tokens))
        k = one.draw(2, 36, HEADS)
        wait(one.cache.append(first, k, k, tokens=tokens))
        wait(one.cache.free(first))
        other = one.create(36)  # six of the nine pages of the prompt are evicted in the group with a window
        assert one.cache.group_stats()[1].evicted == 6
        assert wait(one.cache.create([*tokens, 0])).cached == 36
        one.step([other])
        one.check()


def test_a_rope_needs_positions_where_rows_do_not_know_their_places() -> None:
    rope = ga.Rope(dim=8)
    places = {"rope": rope, "positions": np.arange(21, 23, dtype=np.int32)}
    with kept([WHOLE, LOCAL]) as one, kept([WHOLE] * 2) as whole:
        rows = one.draw(2, 21, HEADS)
        before = {"rope": rope, "positions": np.arange(21, dtype=np.int32)}
        seqs = [wait(each.cache.create()) for each in (one, whole)]
        for seq, each in zip(seqs, (one, whole), strict=True):
            wait(each.cache.append(seq, rows, rows, **before))
        for reply in (
            one.cache.append(seqs[0], rows, rows, rope=rope),
            one.cache.step([seqs[0]], heads_q=HEADS_Q, rows=2, rope=rope),
        ):
            refusal = outcome(reply)
            assert isinstance(refusal, ga.InvalidRequest)
            assert refusal.field == "positions"
        q, k = one.draw(1, 2, HEADS_Q), one.draw(1, 2, HEADS)
        with (
            wait(one.cache.step([seqs[0]], heads_q=HEADS_Q, rows=2, **places)) as step,
            wait(whole.cache.step([seqs[1]], heads_q=HEADS_Q, rows=2, rope=rope, window_size=(WINDOW, 0))) as other,
        ):
            outs = [each.attend(1, q, k, k) for each in (step, other)]
            np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-5)
            for each in (step, other):
                each.attend(0, q, k, k)


@pytest.mark.parametrize(
    ("layer", "field"),
    [
        (ga.KvLayer(window=-1), "layers[1].window"),
        (ga.KvLayer(window=True), "layers[1].window"),
        (ga.KvLayer(window=2.0), "layers[1].window"),  # type: ignore[arg-type]
        (ga.KvLayer(window=2, slack=-1), "layers[1].slack"),
        (ga.KvLayer(slack=1), "layers[1].slack"),
    ],
)
def test_a_window_that_is_none_is_refused(mock: ga.GpuContext, layer: ga.KvLayer, field: str) -> None:
    spec: dict[str, Any] = {"num_blocks": 4, "page_size": PAGE, "kv_heads": 1, "head_dim": DIM, "dtype": "float32"}
    with pytest.raises(ga.InvalidRequest) as refused, mock.kv_cache(**spec, layers=[WHOLE, layer]):
        pass
    assert refused.value.field == field


def test_an_invariant_context_refuses_a_window() -> None:
    """Tables of launches begin where their windows begin, and so do tiles."""
    spec = {"num_blocks": 4, "page_size": PAGE, "dtype": "float32", "layers": [WHOLE, LOCAL]}
    with (
        ga.open_context("mock", ga.ContextOptions(invariant=True)) as ctx,
        pytest.raises(ga.Unsupported) as refused,
        ctx.kv_cache(**spec),
    ):
        pass
    assert (refused.value.field, refused.value.value) == ("layers[1].window", WINDOW)
