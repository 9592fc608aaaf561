"""A KvCache whose launches fail: requests take effect wholly and in order, or not at all.

If the launch of a request fails, the requests in flight that build on its rows fail too, and no others.

The mock clock decides when launches end, and the plan decides which of them fail, so that events come in the order
that a test needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.kv_cache import (
    LATER,
    Rows,
    attention,
    holds,
    in_flight,
    opened,
    outcome,
    slow,
    taken,
    wait,
)
from support.service import eventually

import gpu_actors as ga
from gpu_actors import ServiceActor
from gpu_actors.actors.kv_cache import _KvCoalescer
from gpu_actors.actors.kv_store import OpenedCache
from gpu_actors.testing import FaultPlan, MockClock


@pytest.mark.parametrize("error", [ga.LaunchError, ga.OutOfDeviceMemory])
def test_what_was_launched_on_top_of_a_failed_append_fails_with_it(error: Any) -> None:
    rows = Rows(3)
    clock, options = slow(FaultPlan().fail(2, error), 2)
    with opened(options) as (ctx, cache):
        seq, other = wait(cache.create(), cache.create())
        k, v = rows.new(5)
        wait(cache.append(seq, k, v))
        before = cache.stats()
        (k_new, v_new), q, elsewhere = rows.new(1, 2), rows.q(1, 2), rows.new(3)
        asked = []
        for ask in (
            lambda: cache.append(seq, *rows.new(9)),
            lambda: cache.append(seq, *rows.new(3)),
            lambda: cache.attend(q, seq, k=k_new, v=v_new),
            lambda: cache.attend(q[:, :1], seq),
            lambda: cache.append(other, *elsewhere),
        ):
            asked.append(ask())
            in_flight(ctx, len(asked))
        assert cache.length(seq) == 19
        clock.advance(LATER)
        *failed, untouched = (outcome(reply) for reply in asked)
        assert type(failed[0]) is error
        assert all(one is failed[0] for one in failed)
        assert untouched == 3
        assert (cache.length(seq), cache.stats().free_blocks) == (5, before.free_blocks - 1)
        assert holds(cache, seq, k, v)
        assert holds(cache, other, *elsewhere)
        assert wait(cache.append(seq, *rows.new(2))) == 7
        stats = ctx.stats()["kv_cache"]
        assert (stats.launched, stats.failed) == (7, 4), "nothing is launched twice"


def test_a_fork_whose_page_was_copied_by_a_failed_launch_is_untouched() -> None:
    """Both copies of a shared page are in flight. The one that fails frees its page, and the other one succeeds."""
    rows = Rows(21)
    clock, options = slow(FaultPlan().fail(2), 2)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        k, v = rows.new(5)
        wait(cache.append(seq, k, v))
        fork = wait(cache.fork(seq))
        own = rows.new(2)
        lost = cache.append(seq, *rows.new(2))
        in_flight(ctx, 1)
        kept = cache.append(fork, *own)
        in_flight(ctx, 2)
        clock.advance(LATER)
        assert isinstance(outcome(lost), ga.LaunchError)
        assert wait(kept) == 7
        assert holds(cache, seq, k, v)
        assert holds(cache, fork, *(np.concatenate(pair) for pair in zip((k, v), own, strict=True)))
        assert (cache.stats().free_blocks, cache.stats().shared_blocks) == (6, 0)
        more = rows.new(1)
        assert wait(cache.append(seq, *more)) == 6
        assert holds(cache, seq, *(np.concatenate(pair) for pair in zip((k, v), more, strict=True)))


def test_what_comes_later_waits_for_a_launch_and_sees_the_sequence_without_what_failed() -> None:
    rows = Rows(4)
    clock, options = slow(FaultPlan().fail(1), 1, 2)
    with opened(options) as (ctx, cache):
        seq, other = wait(cache.create()), wait(cache.create())
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        k, v = rows.new(3)
        behind = cache.append(seq, k, v)
        in_flight(ctx, 2)
        fork = cache.fork(seq)
        later = cache.append(seq, k, v)
        elsewhere = cache.append(other, k, v)
        freed = cache.free(other)
        taken(ctx)
        clock.advance(LATER / 2)
        assert not any(reply.done() for reply in (lost, behind, fork, later, elsewhere, freed))
        clock.advance(LATER)
        error = outcome(lost)
        assert isinstance(error, ga.LaunchError)
        assert outcome(behind) is error
        assert wait(fork).cached == 0
        assert wait(later) == 3
        assert holds(cache, seq, k, v)
        assert wait(elsewhere) == 3
        wait(freed)
        with pytest.raises(ga.InvalidRequest, match="or was freed"):
            cache.length(other)


def test_a_request_made_while_a_failed_one_is_still_in_flight_follows_the_last_success() -> None:
    """It takes pages of the failed launches, one of which the device has not finished."""
    rows = Rows(12)
    clock, options = slow(FaultPlan().fail(1).delay(LATER, 2), 1, 2)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        behind = cache.append(seq, *rows.new(3))
        in_flight(ctx, 2)
        clock.advance(LATER)
        error = outcome(lost)
        assert isinstance(error, ga.LaunchError)
        assert outcome(behind) is error, "at once, though its own launch has not ended"
        in_flight(ctx, 1)
        new = rows.new(2)
        last = cache.append(seq, *new)
        cut = cache.truncate(seq, 1)
        in_flight(ctx, 2)
        assert not cut.done()
        clock.advance(LATER)
        assert wait(last) == 2
        wait(cut)
        assert holds(cache, seq, *(side[:1] for side in new))


@pytest.mark.parametrize("when", ["before it takes its pages", "before it is launched"])
def test_a_failure_that_shows_while_a_launch_is_made(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has its pages already fails with the one it builds on. One without pages takes them afterwards."""
    rows = Rows(13)
    clock, options = slow(FaultPlan().fail(1).delay(LATER, 2), 1, 2)
    owner: Any = OpenedCache if when == "before it takes its pages" else _KvCoalescer
    name = "begin" if when == "before it takes its pages" else "assemble"
    original, made = getattr(owner, name), []

    def interrupted(self: Any, *arguments: Any) -> Any:
        made.append(arguments)
        if len(made) == 3:
            clock.advance(LATER)
            eventually(lost.done)
        return original(self, *arguments)

    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        monkeypatch.setattr(owner, name, interrupted)
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        behind = cache.append(seq, *rows.new(3))
        in_flight(ctx, 2)
        new = rows.new(2)
        last = cache.append(seq, *new)
        error = outcome(lost)
        assert isinstance(error, ga.LaunchError)
        assert outcome(behind) is error
        clock.advance(LATER)
        if when == "before it takes its pages":
            assert wait(last) == 2
        else:
            assert outcome(last) is error
            in_flight(ctx, 0)
            assert (cache.length(seq), cache.stats().free_blocks) == (0, 8)
            assert wait(cache.append(seq, *new)) == 2
        assert holds(cache, seq, *new)


def test_what_is_launched_before_a_failure_is_dealt_with_fails_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(14)
    clock, options = slow(FaultPlan().fail(1), 1)
    failed, slipping = OpenedCache.failed, []

    def late(self: OpenedCache, group: Any) -> Any:
        if not slipping:
            slipping.append(cache.append(seq, *rows.new(3)))
            eventually(lambda: len(self._in_flight) == 3)
        return failed(self, group)

    monkeypatch.setattr(OpenedCache, "failed", late)
    with opened(options) as (ctx, cache):
        seq = wait(cache.create())
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        behind = cache.append(seq, *rows.new(3))
        in_flight(ctx, 2)
        clock.advance(LATER)
        error = outcome(lost)
        assert isinstance(error, ga.LaunchError)
        assert [outcome(reply) for reply in (behind, *slipping)] == [error, error]
        in_flight(ctx, 0)
        assert (cache.length(seq), cache.stats().free_blocks) == (0, 8)


def test_a_late_request_on_top_of_a_failed_one_takes_its_rows_and_its_followers_with_it() -> None:
    """It has been answered `DeadlineExceeded`. A request that builds on its rows still fails with the launch."""
    rows = Rows(22)
    clock, options = slow(FaultPlan().fail(1), 1)
    with opened(options) as (ctx, cache):
        seq, other = wait(cache.create(), cache.create())
        lost = cache.append(seq, *rows.new(9))
        in_flight(ctx, 1)
        late = cache.append([seq, other], *rows.new(2, 1), timeout=LATER / 2)
        in_flight(ctx, 2)
        follower = cache.append(other, *rows.new(1))
        in_flight(ctx, 3)
        clock.advance(LATER * 0.6)
        assert isinstance(outcome(late), ga.DeadlineExceeded)
        clock.advance(LATER)
        error = outcome(lost)
        assert isinstance(error, ga.LaunchError)
        assert outcome(follower) is error
        in_flight(ctx, 0)
        assert (cache.length(seq), cache.length(other), cache.stats().free_blocks) == (0, 0, 8)


def test_a_shared_read_that_fails_takes_no_append_with_it() -> None:
    """The append behind it was launched already, and a read changes nothing that an append builds on."""
    rows = Rows(5)
    clock, options = slow(FaultPlan().fail(2), 2, coalesce_delay_us=1e5)
    with opened(options) as (ctx, cache):

        def launched(launches: int) -> None:
            """Let the actor take the requests, and time pass until they are launched."""
            taken(ctx)
            eventually(lambda: clock.advance(0.11) or ctx.stats()["kv_cache"].launched == launches)

        seqs = wait(cache.create(), cache.create())
        kept = [rows.new(6), rows.new(6)]
        appended = cache.append(seqs, *(np.stack(side) for side in zip(*kept, strict=True)))
        launched(1)
        wait(appended)
        q = rows.q(2, 1)
        reads = [cache.attend(q[index : index + 1], seq) for index, seq in enumerate(seqs)]
        launched(2)
        appended = cache.append(seqs[0], *rows.new(3))
        launched(3)
        clock.advance(LATER)
        assert all(isinstance(outcome(read), ga.LaunchError) for read in reads)
        assert wait(appended) == 9
        again = cache.attend(q[1:], seqs[1])
        launched(4)
        np.testing.assert_allclose(wait(again).out[0], attention(q[1], *kept[1]), rtol=1e-5, atol=1e-6)


def shared_appends(ctx: ga.GpuContext, cache: ga.KvCache, clock: MockClock, rows: Rows) -> list[Any]:
    """Sequence, rows and reply of three appends that waited together behind a launch, which has ended."""
    seqs = [wait(cache.create()) for _ in range(4)]
    first = cache.append(seqs[3], *rows.new(1))
    in_flight(ctx, 1)
    asked = [(seq, new, cache.append(seq, *new)) for seq in seqs[:3] for new in [rows.new(2)]]
    clock.advance(LATER)
    wait(first)
    return asked


def refusing(monkeypatch: pytest.MonkeyPatch, refuses: Callable[[int, int], bool]) -> list[int]:
    """Refuse launches by how many calls they have and by their number, from 1. Returns the count of calls of each."""
    launch, made = ServiceActor.launch, []

    def launching(self: ServiceActor, calls: Any, *arguments: Any) -> None:
        made.append(len(calls))
        if refuses(len(calls), len(made)):
            raise ga.OutOfDeviceMemory("no memory for scratch")
        launch(self, calls, *arguments)

    monkeypatch.setattr(ServiceActor, "launch", launching)
    return made


def test_a_shared_launch_that_is_refused_is_made_for_each_alone_and_only_the_bad_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that has no memory for a launch refuses it at once, so nothing can have been launched behind it."""
    rows = Rows(23)
    clock, options = slow(FaultPlan(), 1, max_in_flight=1)
    made = refusing(monkeypatch, lambda calls, number: calls > 1 or number == 4)
    with opened(options) as (ctx, cache):
        asked = shared_appends(ctx, cache, clock, rows)
        behind = cache.append(asked[0][0], *rows.new(1))
        assert [type(outcome(reply)) for _, _, reply in asked] == [int, ga.OutOfDeviceMemory, int]
        assert wait(behind) == 3
        assert made[:5] == [1, 3, 1, 1, 1]
        for index, (seq, new, _) in enumerate(asked):
            assert cache.length(seq) == (3, 0, 2)[index]
            assert index != 2 or holds(cache, seq, *new)
        assert cache.stats().free_blocks == 8 - 3


def test_a_request_that_is_launched_again_attends_to_the_pages_that_it_has_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = Rows(29)
    clock, options = slow(FaultPlan(), 1, max_in_flight=1)
    # The shared launch, and the first request alone, whose page the next one takes.
    made = refusing(monkeypatch, lambda calls, number: number in (3, 4))
    with opened(options, num_blocks=16) as (ctx, cache):
        seqs = [wait(cache.create()) for _ in range(4)]
        first = cache.append(seqs[3], *rows.new(1))
        in_flight(ctx, 1)
        kept = [rows.new(8) for _ in range(3)]
        new = [rows.new(1, 1) for _ in range(3)]
        q = rows.q(3, 1)
        appended = [cache.append(seq, *some) for seq, some in zip(seqs, kept, strict=False)]
        # Planned while the sequences are empty: they have more pages by the time of the launch.
        asked = [cache.attend(q[n : n + 1], [seqs[n]], k=new[n][0], v=new[n][1]) for n in (2, 0, 1)]
        clock.advance(LATER)
        wait(first, *appended)
        assert isinstance(outcome(asked[0]), ga.OutOfDeviceMemory)
        for n, reply in zip((0, 1), asked[1:], strict=True):
            k, v = (np.concatenate([old, more[0]]) for old, more in zip(kept[n], new[n], strict=True))
            np.testing.assert_allclose(wait(reply).out[0], attention(q[n], k, v), rtol=1e-5, atol=1e-6)
            assert holds(cache, seqs[n], k, v)
        assert made == [1, 3, 3, 1, 1, 1]
