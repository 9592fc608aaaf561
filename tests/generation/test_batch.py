"""Which texts share a step, and with how many rows each."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_actors.generation.batch import Batcher, Text


def text(length: int, pages: int = 1) -> Text:
    return Text(list(range(length)), pages)


def step(batcher: Batcher) -> dict[int, int]:
    """The rows of each text by the text's id. The step then counts as done."""
    rows = batcher.next_rows()
    assert rows is not None
    for one, count in zip(rows.texts, rows.counts, strict=True):
        one.computed += count
    return {id(one): count for one, count in zip(rows.texts, rows.counts, strict=True)}


def test_a_prompt_is_cut_to_the_rows_that_a_step_has():
    batcher, one = Batcher(rows=4, pages=9), text(10)
    batcher.add(one)
    assert batcher.admit() == [one]
    seen = []
    while one.computed < 10:
        rows = batcher.next_rows()
        seen.append(rows.tokens.tolist())
        assert rows.finished == ([0] if one.computed + rows.counts[0] == 10 else [])
        one.computed += rows.counts[0]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_texts_that_are_up_to_date_go_on_beside_a_long_prompt():
    batcher, short, long = Batcher(rows=4, pages=9), text(1), text(10)
    batcher.add(short)
    batcher.admit()
    step(batcher)
    batcher.add(long)
    batcher.admit()
    for _ in range(3):
        short.tokens.append(0)
        assert step(batcher) == {id(short): 1, id(long): 3}
    short.tokens.append(0)
    assert step(batcher) == {id(short): 1, id(long): 1}


def test_texts_wait_for_pages_and_what_would_delay_the_first_does_not_pass_it():
    batcher = Batcher(rows=8, pages=5)
    first, large, small = text(1, 3), text(1, 4), text(1, 1)
    lasting, wide = Text([0], 2, new=9), Text([0], 3)
    for one in (first, large, lasting, wide):
        batcher.add(one)
    assert batcher.admit() == [first], "one that lasts would take pages of the large one, and the wide one has no room"
    batcher.add(small)
    assert batcher.admit() == [small], "it takes none of its pages"
    batcher.remove([first, small])
    assert batcher.admit() == [large]
    assert len(batcher) == 3


def test_a_text_that_ends_before_the_first_could_begin_passes_it():
    batcher = Batcher(rows=8, pages=5)
    running, large, short, long = Text([0], 3, new=9), Text([0], 5), Text([0], 2, new=8), Text([0], 2, new=12)
    for one in (running, large, long, short):
        batcher.add(one)
    assert batcher.admit() == [running, short]


def test_short_texts_that_come_for_ever_do_not_starve_a_large_one():
    batcher = Batcher(rows=64, pages=8)
    texts = [Text([0], 4, new=10), Text([0], 4, new=30)]
    large = Text([0], 8, new=2)
    for one in (*texts, large):
        batcher.add(one)
    begun, passed = {id(one): 0 for one in batcher.admit()}, 0
    running = list(texts)
    for now in range(1, 100):
        batcher.add(Text([0], 1, new=4))
        for one in list(running):
            one.tokens.append(0)
            one.computed += 1
            if len(one.tokens) > one.new:
                running.remove(one)
                batcher.remove([one])
        for one in batcher.admit():
            begun[id(one)] = now
            running.append(one)
            passed += one is not large
        if id(large) in begun:
            break
    assert begun[id(large)] == 30, "as soon as the last of those before it has ended"
    assert passed >= 20, "others ran meanwhile"


def test_short_prompts_do_not_wait_for_a_long_one_which_goes_on():
    batcher, long, short = Batcher(rows=18, pages=9), text(100), text(10)
    batcher.add(long)
    batcher.admit()
    assert step(batcher) == {id(long): 18}
    batcher.add(short)
    batcher.admit()
    assert step(batcher) == {id(short): 10, id(long): 8}
    others = [text(30) for _ in range(4)]
    for one in others:
        batcher.add(one)
    batcher.remove([short])
    batcher.admit()
    taken = step(batcher)
    assert taken[id(others[0])] == 11
    assert taken[id(long)] == 4, "a share is for those that came first"


def test_no_more_texts_run_than_a_step_has_rows():
    batcher = Batcher(rows=2, pages=9)
    for _ in range(3):
        batcher.add(text(5))
    assert len(batcher.admit()) == 2
    assert list(step(batcher).values()) == [1, 1]


def test_cancelled_texts_leave_from_wherever_they_are():
    batcher, running, waiting = Batcher(rows=1, pages=1), text(1), text(1)
    batcher.add(running)
    batcher.admit()
    batcher.add(waiting)
    running.cancelled = waiting.cancelled = True
    assert batcher.cancelled() == [running, waiting]
    batcher.remove(batcher.cancelled())
    assert batcher.cancelled() == []
    assert batcher.next_rows() is None
    assert len(batcher) == 0
    batcher.add(text(1))
    assert len(batcher.admit()) == 1


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 12),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=8),
)
def test_every_text_is_computed_once_and_in_order(rows, lengths):
    """``lengths``: length, new tokens and step of arrival of each text."""
    batcher, texts, done = Batcher(rows, pages=2), [], []
    arrivals = {id(one := text(length)): (one, length + new, step) for length, new, step in lengths}
    texts = [arrival[0] for arrival in arrivals.values()]
    seen: dict[int, list[int]] = {id(one): [] for one in texts}
    now = 0
    while len(done) < len(texts):
        for one, _, arrival in arrivals.values():
            if arrival == now:
                batcher.add(one)
        batcher.admit()
        now += 1
        assert now < 1000, "it makes progress"
        batch = batcher.next_rows()
        if batch is None:
            continue
        assert len(batch.tokens) == sum(batch.counts) <= rows
        np.testing.assert_array_equal(batch.ends, np.cumsum([0, *batch.counts]))
        finished = batch.finished
        for index, (one, count) in enumerate(zip(batch.texts, batch.counts, strict=True)):
            part = batch.tokens[batch.ends[index] : batch.ends[index + 1]].tolist()
            seen[id(one)] += part
            one.computed += count
            if index in finished:
                if len(one.tokens) + 1 == arrivals[id(one)][1]:
                    done.append(one)
                    batcher.remove([one])
                else:
                    one.tokens.append(1000 + len(one.tokens))
    for one in texts:
        assert seen[id(one)] == one.tokens
