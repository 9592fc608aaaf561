"""Sequences that move between caches whose layers differ: each layer answers as if they had stayed."""

from __future__ import annotations

import base64
import dataclasses
import gc
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside.kv import first_page
from support.kv_cache import LATER, in_flight, outcome, slow, wait
from support.layer_rows import FP8, HEADS_Q, LATENT, OPTIONS, WIDE, LayerRows
from support.service import eventually

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

PAGE = 4
NARROW = ga.KvLayer(kv_heads=1, head_dim=32, head_dim_v=8)
LOCAL = dataclasses.replace(WIDE, window=5, slack=2)
LAYERS = [WIDE, LOCAL, NARROW, LOCAL, FP8]
"""Four groups: the second one has two layers, and a window."""


class Moves(LayerRows):
    """Two caches of the same layers."""

    def __init__(self, source: ga.KvCache, target: ga.KvCache, layers: list[ga.KvLayer], dtype: str) -> None:
        super().__init__(layers, dtype)
        self.source, self.target = source, target

    def create(self, *parts: int, tokens: Any = None) -> ga.KvSequence:
        """A sequence of the source, appended to in parts of these numbers of rows."""
        seq: ga.KvSequence = wait(self.source.create())
        for count in parts:
            ids = None if tokens is None else [tokens[self.source.length(seq) :][:count]]
            wait(self.source.append([seq], **self.of_all(1, count), tokens=ids))
        return seq

    def export(self, seq: ga.KvSequence) -> ga.SequencePages:
        """The exported pages of a sequence, pickled and loaded again."""
        pages = wait(self.source.export_pages(seq))
        wait(self.source.release(pages))
        arrived: ga.SequencePages = pickle.loads(pickle.dumps(pages))
        return arrived

    def move(self, seq: ga.KvSequence) -> ga.KvSequence:
        moved: ga.KvSequence = wait(self.target.import_pages(self.export(seq)))
        return moved

    def both(self, ask: Callable[[ga.KvCache, ga.KvSequence], Any], seq: ga.KvSequence, moved: ga.KvSequence) -> Any:
        """Ask both caches the same. Answers and refusals must be equal."""
        here, there = outcome(ask(self.source, seq)), outcome(ask(self.target, moved))
        assert type(here) is type(there)
        if isinstance(here, ga.GpuActorsError):
            assert str(here) == str(there)
        elif isinstance(here, ga.AttentionOutput):
            assert here.out.tobytes() == there.out.tobytes()
        elif not isinstance(here, ga.KvSequence):
            assert here == there
        return here, there

    def compare(self, seq: ga.KvSequence, moved: ga.KvSequence) -> None:
        """Each layer must have the same bits for the last 1, 2 and 4 rows."""
        assert self.source.length(seq) == self.target.length(moved)
        for layer in range(len(self.layers)):
            for rows in (1, 2, 4) if self.source.length(seq) else ():
                q = self.q(layer, 1, rows)
                self.both(lambda cache, one, q=q, n=layer: cache.attend(q, [one], layer=n, **OPTIONS), seq, moved)

    def append(self, seq: ga.KvSequence, moved: ga.KvSequence, count: int) -> None:
        new = self.of_all(1, count)
        self.both(lambda cache, one: cache.append([one], **new), seq, moved)
        self.compare(seq, moved)

    def step(self, seq: ga.KvSequence, moved: ga.KvSequence) -> None:
        one = self.source.step([seq], heads_q=HEADS_Q, dtype=self.dtype, **OPTIONS)
        other = self.target.step([moved], heads_q=HEADS_Q, dtype=self.dtype, **OPTIONS)
        with wait(one) as here, wait(other) as there:
            for layer in range(len(self.layers)):
                q, new = self.q(layer, 1, 1), self.new(layer, 1, 1)
                assert here.attend(layer, q, **new).tobytes() == there.attend(layer, q, **new).tobytes()
        self.compare(seq, moved)

    def cut(self, seq: ga.KvSequence, moved: ga.KvSequence, length: int) -> None:
        """Truncate forks of both, and append to them."""
        forks = self.both(lambda cache, one: cache.fork(one), seq, moved)
        self.both(lambda cache, one: cache.truncate(one, length), *forks)
        self.append(*forks, 3)
        self.both(lambda cache, one: cache.free(one), *forks)

    def all_free(self, cache: ga.KvCache) -> bool:
        return all(each.free_blocks == each.blocks and not each.sequences for each in cache.group_stats())


@contextmanager
def caches(
    ctx: ga.GpuContext, layers: list[ga.KvLayer] = LAYERS, dtype: str = "bfloat16", blocks: int = 64, **changes: Any
) -> Iterator[Moves]:
    spec: dict[str, Any] = {"num_blocks": 64, "page_size": PAGE, "dtype": dtype, "layers": layers, **changes}
    with ctx.kv_cache(**spec) as source, ctx.kv_cache(**{**spec, "num_blocks": blocks}) as target:
        for group in target._find().tables._groups[1::2]:
            group.pool._free.reverse()  # otherwise a sequence has pages of the same numbers in all groups and caches
        yield Moves(source, target, layers, dtype)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[ga.KvLayer], int, list[int], int]:
    """Layers, rows a page, rows of each append, and the number of rows that are truncated."""
    page = draw(st.sampled_from([1, 3, 4]))
    windows = st.tuples(st.sampled_from([None, None, 0, 2, 3, 4, 7, 8]), st.sampled_from([0, 0, 1, 3]))
    layers = list[ga.KvLayer]()
    for kind in draw(st.lists(st.sampled_from([WIDE, NARROW, LATENT, FP8]), min_size=1, max_size=4)):
        window, slack = draw(windows)
        slack = 0 if window is None else slack
        layers.append(dataclasses.replace(kind, num_blocks=None, window=window, slack=slack))
    ends = {page, 2 * page, *(1 + (layer.window or 0) + layer.slack for layer in layers)}
    ends |= {end + page for end in ends}
    around = st.sampled_from(sorted(ends)).flatmap(lambda end: st.integers(max(1, end - 1), end + 1))
    return layers, page, draw(st.lists(around, max_size=3)), draw(st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(plan=plans(), known=st.booleans())
def test_a_sequence_goes_on_elsewhere_as_where_it_was(
    mock: ga.GpuContext, plan: tuple[list[ga.KvLayer], int, list[int], int], known: bool
) -> None:
    layers, page, parts, less = plan
    with caches(mock, layers, page_size=page) as one:
        wait(one.target.append([wait(one.target.create())], **one.of_all(1, 2 * page + 1)))  # takes its own pages
        tokens = list(range(sum(parts)))
        seq = one.create(*parts, tokens=tokens if known else None)
        outcome(one.source.truncate(seq, max(0, sum(parts) - less)))
        moved = one.move(seq)
        one.compare(seq, moved)
        length, firsts = one.target.length(moved), [own.first for own in one.target._find().table(moved).groups]
        begun = wait(one.target.create([*tokens[:length], *[-1] * page]))
        groups = one.target._find().groups
        counts = [
            count
            for count in range(length // page + 1 if known else 1)
            if all(
                first_page(count * page, page, group.window, group.slack) >= first
                for group, first in zip(groups, firsts, strict=True)
            )
        ]
        assert begun.cached == max(counts, default=0) * page
        for lengths in (range(max(0, length - 9), length + 1), [0]):
            for cut in lengths:
                one.cut(seq, moved, cut)
        one.append(seq, moved, 1)
        one.step(seq, moved)
        one.append(seq, moved, page + 3)
        here, there = wait(one.source.export_pages(seq)), wait(one.target.export_pages(moved))
        assert [(each.first, each.checks) for each in here.groups] == [
            (each.first, each.checks) for each in there.groups
        ]
        assert (here.checks, here.digests, here.tail) == (there.checks, there.digests, there.tail)


def test_kernels_copy_the_pages_of_each_group() -> None:
    with ga.open_context("emulated") as ctx, caches(ctx, [*LAYERS, LATENT]) as one:
        seq = one.create(13, 1, 8)
        moved = one.move(seq)
        assert [len(own.pages) for own in one.target._find().table(moved).groups] == [6, 3, 6, 6, 6]
        one.compare(seq, moved)
        one.append(seq, moved, 2)
        one.step(seq, moved)


def test_an_exported_sequence_has_the_pages_that_each_group_still_holds(mock: ga.GpuContext) -> None:
    with caches(mock) as one:
        seq = one.create(22)
        pages = wait(one.source.export_pages(seq))
        assert (pages.length, pages.page_size, pages.layers) == (22, PAGE, 5)
        assert (pages.k, pages.v, pages.pages, pages.checks, pages.kv_heads) == (None, None, (), (), 0)
        shapes = [(each.layers, each.window, each.slack, each.first, each.k.shape) for each in pages.groups]
        assert shapes == [
            ((0,), None, 0, 0, (6, PAGE, 2, 16)),
            ((1, 3), 5, 2, 3, (2, 3, PAGE, 2, 16)),
            ((2,), None, 0, 0, (6, PAGE, 1, 32)),
            ((4,), None, 0, 0, (6, PAGE, 2, 16)),
        ]
        assert [(each.dtype, each.v_descale is None) for each in pages.groups[2:]] == [
            ("bfloat16", True),
            ("float8_e4m3fn", False),
        ]
        for each in pages.groups:
            assert len(each.pages) == len(each.checks) == 6 - each.first
            for side in (each.k, each.v):
                rows = np.moveaxis(side, 1, 0)[-1][:, 2:] if len(each.layers) > 1 else side[-1, 2:]
                assert not np.ascontiguousarray(rows).view(np.uint8).any(), "rows of another leave"
        # The lease keeps the exported rows, whatever happens to the sequence.
        held = one.source.group_stats()[1].free_blocks
        wait(one.source.append([seq], **one.of_all(1, 30)))
        wait(one.source.free(seq))
        assert one.source.group_stats()[1].free_blocks == held
        wait(one.source.release(pages))
        assert one.all_free(one.source)


def test_prefixes_move_along_and_are_shared(mock: ga.GpuContext) -> None:
    tokens = list(range(26))
    with caches(mock) as one:
        seq = one.create(26, tokens=tokens)
        pages = one.export(seq)
        first = wait(one.target.import_pages(pages))
        # Page 6 is partly filled, and the window keeps pages from (26 - 1 - 5 - 2) // 4 = 4 on.
        assert [(first.cached, each.first) for each in pages.groups] == [(0, 0), (0, 4), (0, 0), (0, 0)]
        second = wait(one.target.import_pages(pages))
        assert second.cached == 24
        assert [each.shared_blocks for each in one.target.group_stats()] == [6, 2, 6, 6]
        wait(one.target.free(first))
        one.compare(seq, second)
        wait(one.target.append([second], **one.of_all(1, 2), tokens=[[26, 27]]))
        assert wait(one.target.create([*tokens, 26, 27, 0])).cached == 28
        wait(one.target.free(second))
        third = wait(one.target.import_pages(pages))
        one.compare(seq, third)
        assert third.cached == 24


def test_a_prefix_that_ends_before_the_window_is_shared_where_rows_are_kept(mock: ga.GpuContext) -> None:
    """The target's prefix of the prompt ends before the window, so all pages of the windowed group are written."""
    tokens = list(range(40))
    with caches(mock, [WIDE, LOCAL]) as one:
        short = one.create(8, tokens=tokens)
        there = one.move(short)
        seq = wait(one.source.create(tokens))
        assert seq.cached == 8
        wait(one.source.append([seq], **one.of_all(1, 32), tokens=[tokens[8:]]))
        before = [each.free_blocks for each in one.target.group_stats()]
        moved = one.move(seq)
        assert moved.cached == 8
        assert [each.free_blocks for each in one.target.group_stats()] == [before[0] - 8, before[1] - 2]
        one.compare(seq, moved)
        one.compare(short, there)
        for each in (there, moved):
            wait(one.target.free(each))
        assert one.all_free(one.target)


# Mismatches


def flipped(array: Any) -> Any:
    """The array with a flipped bit in its middle."""
    copy = array.copy()
    middle = copy.reshape(-1).view(np.uint8)
    middle[middle.size // 2] ^= 1
    return copy


def test_pages_that_have_changed_are_refused_and_leave_no_trace(mock: ga.GpuContext) -> None:
    with caches(mock) as one:
        pages = one.export(one.create(22))

        def changed(index: int, **changes: Any) -> ga.SequencePages:
            groups = list(pages.groups)
            groups[index] = dataclasses.replace(groups[index], **changes)
            return dataclasses.replace(pages, groups=tuple(groups))

        wrong: list[tuple[str, str, ga.SequencePages]] = []
        for index, each in enumerate(pages.groups):
            middle = len(each.checks) // 2
            checks = (*each.checks[:middle], bytes(16), *each.checks[middle + 1 :])
            wrong += [
                (f"groups[{index}].checks[", "changed on its way", changed(index, k=flipped(each.k))),
                (f"groups[{index}].checks[", "changed on its way", changed(index, v=flipped(each.v))),
                (f"groups[{index}].checks[{middle}]", "changed on its way", changed(index, checks=checks)),
                (f"groups[{index}].checks", f", {len(each.checks)}", changed(index, checks=each.checks[1:])),
                (f"groups[{index}].k", "must be", changed(index, k=each.k[..., :-1])),
                (f"groups[{index}].v", "must be", changed(index, v=None)),
            ]
        first, window, *others = pages.groups
        of_layers = "of layers [(0,), (1, 3), (2,), (4,)]"
        wrong += [
            ("groups[0].layers", "(0,)", dataclasses.replace(pages, groups=(window, first, *others))),
            ("groups", of_layers, dataclasses.replace(pages, groups=(first, window))),
            ("groups", of_layers, dataclasses.replace(pages, groups=(*pages.groups, first))),
            ("groups", "LayerPages", dataclasses.replace(pages, groups=(first, 2, *others))),
            ("groups", "LayerPages", dataclasses.replace(pages, groups=list(pages.groups))),
            ("groups[1].window", "cache, 5", changed(1, window=6)),
            ("groups[1].window", "cache, 5", changed(1, window=None)),
            ("groups[0].window", "cache, None", changed(0, window=5)),
            ("groups[1].slack", "cache, 2", changed(1, slack=0)),
            ("groups[1].first", "from 3 to 4", changed(1, first=2)),
            ("groups[1].first", "from 3 to 4", changed(1, first=5)),
            ("groups[1].first", "from 3 to 4", changed(1, first=3.0)),
            ("groups[1].k", "must be", changed(1, first=4)),
            ("groups[0].first", "from 0 to 0", changed(0, first=1)),
            ("groups[3].v_descale", "cache", changed(3, v_descale=FP8.k_descale)),
            ("groups[3].dtype", "float8_e4m3fn", changed(3, dtype="bfloat16")),
            ("groups[2].head_dim_v", "cache, 8", changed(2, head_dim_v=32)),
            ("page_size", "cache, 4", dataclasses.replace(pages, page_size=8)),
            ("groups[1].first", "from 4 to 4", dataclasses.replace(pages, length=24)),
            ("groups[0].k", "must be", dataclasses.replace(pages, length=18)),
            ("length", "number of rows", dataclasses.replace(pages, length=-1)),
            ("digests", "of which there are 5", dataclasses.replace(pages, digests=(b"",) * 6)),
        ]
        for field, words, each in wrong:
            refusal = outcome(one.target.import_pages(each))
            assert isinstance(refusal, ga.InvalidRequest), field
            assert refusal.field.startswith(field), (field, refusal)
            assert words in str(refusal)
            assert one.all_free(one.target)
        assert wait(one.target.import_pages(pages))


def test_caches_of_other_layers_are_refused(mock: ga.GpuContext) -> None:
    other_window, more = dataclasses.replace(LOCAL, window=6), dataclasses.replace(WIDE, num_blocks=9)
    lists: dict[str, Any] = {
        "one": [WIDE],
        "number": 2,
        "local": [LOCAL],
        "two": [WIDE, LOCAL],
        "swapped": [LOCAL, WIDE],
        "window": [WIDE, other_window],
        "whole": [WIDE, NARROW],
        "apart": [WIDE, more],
        "equal": [WIDE, WIDE],
    }
    refused = {
        ("one", "local"): ("window", "None"),
        ("local", "one"): ("groups[0].window", "5"),
        ("one", "two"): ("layers", "1"),
        ("number", "two"): ("groups", 1),
        ("two", "number"): ("groups", 2),
        ("two", "swapped"): ("groups[0].window", "None"),
        ("two", "window"): ("groups[1].window", "5"),
        ("two", "whole"): ("groups[1].kv_heads", "2"),
        ("apart", "two"): ("groups[1].window", "None"),
        ("apart", "equal"): ("groups", 2),
        ("equal", "number"): None,
        ("number", "equal"): None,
    }
    spec: dict[str, Any] = {"num_blocks": 16, "page_size": PAGE, "kv_heads": 2, "head_dim": 16}
    for (source, target), wanted in refused.items():
        with (
            mock.kv_cache(**spec, layers=lists[source]) as one,
            mock.kv_cache(**spec, layers=lists[target]) as other,
        ):
            pages = wait(one.export_pages(wait(one.create())))
            refusal = outcome(other.import_pages(pages))
            if wanted is None:
                assert isinstance(refusal, ga.KvSequence)
                continue
            assert isinstance(refusal, ga.InvalidRequest), (source, target)
            assert (refusal.field, refusal.value) == wanted, (source, target)
            assert all(each.sequences == 0 for each in other.group_stats())


def test_pools_may_have_other_sizes(mock: ga.GpuContext) -> None:
    with caches(mock, blocks=20) as one:
        seq = one.create(22)
        one.compare(seq, one.move(seq))


# Failures on the way


def test_a_group_without_room_takes_nothing_from_the_others(mock: ga.GpuContext) -> None:
    layers = [WIDE, LOCAL, NARROW]
    tokens = list(range(20))
    with caches(mock, layers, blocks=7) as one:
        seq = one.create(20, tokens=tokens)
        moved = one.move(seq)
        wait(one.target.truncate(moved, 18))
        shorter = one.export(one.create(20, tokens=tokens[:4] + [0] * 16))
        before = one.target.group_stats()
        refusal = outcome(one.target.import_pages(shorter))
        assert isinstance(refusal, ga.CacheFull)
        assert "group 0" in str(refusal)
        assert one.target.group_stats() == before
        one.cut(seq, moved, 18)
        wait(one.target.free(moved))
        assert one.all_free(one.target)
        wait(one.target.import_pages(shorter))


@pytest.mark.parametrize("way", ["failure", "cancel", "deadline", "unread"])
@pytest.mark.parametrize("step", ["export", "import"])
def test_a_move_that_ends_early_leaves_every_page_free(step: str, way: str) -> None:
    number = {"export": 2, "import": 3}[step]
    plan = FaultPlan().fail(number) if way == "failure" else FaultPlan()
    clock, options = slow(plan, *() if way == "failure" else (number,))
    with ga.open_context("mock", options) as ctx, caches(ctx) as one:
        seq = one.create(22)
        pages = None if step == "export" else one.export(seq)
        before = [cache.group_stats() for cache in (one.source, one.target)]
        timeout = LATER / 2 if way == "deadline" else None
        reply: ga.Reply[Any] = (
            one.source.export_pages(seq, timeout=timeout)
            if pages is None
            else one.target.import_pages(pages, timeout=timeout)
        )
        if way != "failure":
            in_flight(ctx, 1)
        if way == "cancel":
            reply.cancel()
        elif way == "deadline":
            clock.advance(LATER / 2)
            assert isinstance(outcome(reply), ga.DeadlineExceeded)
        clock.advance(LATER)
        if way == "failure":
            assert isinstance(outcome(reply), ga.LaunchError)
        eventually(reply.done)
        del reply
        gc.collect()
        eventually(lambda: [cache.group_stats() for cache in (one.source, one.target)] == before)
        one.compare(seq, one.move(seq))


# Exports of earlier releases

OLD = """
    eNpt0EFrE0EUB/DJJiG1KAaRthbBCArxshTbQw9CW1Y8dCUERQVRk812krRNN9vZ2UJu66FtCqMW+tRehD1JL0L1VC+anBTxoAcPXqTgSew36K
    H+k6Ue2jz2NwNv38y8mSDxPNRYN9RAxfULli3rwtPnl3QpLMcrc0Hq1G2+6HPH5nmrwj3aoCuP6SFljy4QnSpPeqT6zaXDJf+rzZipQdzom/97
    7imN/ygQL5lxpNgKdX8lzIRKlWt1S45eJTXg+AtuQy/YdcH1Bb8mZy0hrAapkwXB7brjSeHbEturZLeSVMqZiUo2yGTLZMRKtEq3Oidnsb8WnS
    GpmlbJGdlwO60prTxGa82oLK5i1yiXy00fILqDySSV1owgeqBgAsMkPggghBbsAptiLA0ZGJlix2ISuTwUwYUAmrAOmxDCFmzDzrH1hDaqp6tn
    Oteqnu15qfNRmxB8xNzCkRBACC3YBdZGm5CBkXaPNpHLQxFcCKAJ67AJIWzBNuy0e7VppN+Ir0/GF7+N1X4OXd8LLh2Qkb4/8WW1di/55/3+3d
    /84s23tIJ3NjIXssO51Iv94uvhzzce/er7MPrp2eD3wXdDlx/svay8ujNHy2SeAGZqvKT/A/Kx0CQ=
"""
"""Pickled before there were groups: two layers, three rows, of which two fill a page. v is -k."""


def test_a_sequence_that_an_earlier_release_exported_is_taken_in(mock: ga.GpuContext) -> None:
    pages: ga.SequencePages = pickle.loads(zlib.decompress(base64.b64decode(OLD)))
    assert (pages.length, pages.layers, pages.tail, pages.groups) == (3, 2, (9,), ())
    spec: dict[str, Any] = {"num_blocks": 4, "page_size": 2, "kv_heads": 1, "head_dim": 4, "dtype": "float32"}
    for layers in (2, [ga.KvLayer()] * 2):
        with mock.kv_cache(**spec, layers=layers) as cache:
            seq = wait(cache.import_pages(pages))
            again = wait(cache.export_pages(seq))
            rows = np.arange(24, dtype=np.float32).reshape(2, 3, 1, 4)
            for side, wanted in ((again.k, rows), (again.v, -rows)):
                np.testing.assert_array_equal(side.reshape(2, 4, 1, 4)[:, :3], wanted)
            assert (again.checks, wait(cache.create([7, 8, 9])).cached) == (pages.checks, 2)
