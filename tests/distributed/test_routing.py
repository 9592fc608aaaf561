"""Which worker gets a request, and where a new sequence is placed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

import gpu_actors as ga
from gpu_actors.distributed import Directory, Homes, RetryBudget, Ring, less_loaded_of_two, prefix_digests


def digests(prompt: int, pages: int = 4) -> list[bytes]:
    return prefix_digests([prompt] * (8 * pages + 1), 8)


def test_the_busiest_of_several_workers_gets_nothing() -> None:
    dice = random.Random(1)
    loads = {"a": 0.0, "b": 1.0, "c": 9.0}
    result = Counter(less_loaded_of_two(loads, dice) for _ in range(300))
    assert result["c"] == 0
    assert result["a"] > result["b"] > 0
    assert less_loaded_of_two({"only": 5.0}, dice) == "only"


def test_two_choices_keep_the_load_even() -> None:
    dice = random.Random(2)
    loads = dict.fromkeys("abcdefgh", 0.0)
    for _ in range(8000):
        loads[less_loaded_of_two(loads, dice)] += 1
    assert max(loads.values()) - min(loads.values()) < 12  # with random choice about 150


def test_a_ring_moves_few_keys_when_a_worker_comes_or_goes() -> None:
    ring = Ring()
    for name in "abcd":
        ring.add(name)
    keys = [str(number).encode() for number in range(2000)]
    before = {key: next(ring.from_place_of(key)) for key in keys}
    assert all(300 < count < 800 for count in Counter(before.values()).values())
    ring.add("e")
    after = {key: next(ring.from_place_of(key)) for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert 0 < len(moved) < 700
    assert {after[key] for key in moved} == {"e"}
    ring.remove("e")
    assert {key: next(ring.from_place_of(key)) for key in keys} == before
    assert sorted(ring.from_place_of(b"any")) == list("abcd")


def test_two_routers_agree_on_a_new_prefix() -> None:
    homes = [Homes(random.Random(seed)) for seed in (1, 2)]
    for each in homes:
        for name in "abcd":
            each.ring.add(name)
    loads = dict.fromkeys("abcd", 0.0)
    chosen = [[each.choose(digests(prompt), loads) for prompt in range(50)] for each in homes]
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) == 4


def test_a_known_prefix_goes_home_until_that_is_loaded_too_much() -> None:
    homes = Homes(random.Random(0), bound=1.25, slots=8)
    for name in "abc":
        homes.ring.add(name)
    prompt = digests(7)
    home = homes.choose(prompt, dict.fromkeys("abc", 0.0))
    assert homes.choose(prompt[:2], {**dict.fromkeys("abc", 0.0), home: 3.0}) == home  # below slots / 2
    busy = {**dict.fromkeys("abc", 0.0), home: 4.0}
    other = homes.choose(prompt, busy)
    assert other != home
    assert homes.choose(prompt, {**busy, home: 0.0}) == other  # where it was last
    high = dict.fromkeys("abc", 100.0)
    assert homes.choose(prompt, {**high, other: 120.0}) == other  # within the bound of the mean
    assert homes.choose(prompt, {**high, other: 150.0}) != other


def test_the_longest_known_beginning_decides() -> None:
    homes = Homes(random.Random(0))
    prompt = digests(3)
    homes.directory.note(prompt[:1], "a")
    homes.directory.note(prompt[1:3], "b")
    loads = dict.fromkeys("ab", 0.0)
    assert homes.choose(prompt[:1], loads) == "a"
    assert homes.choose(prompt, loads) == "b"
    homes.forget("b")
    assert homes.choose(prompt[:3], {"a": 0.0}) == "a"
    assert homes.choose(prompt, {"c": 100.0, "d": 0.0}) == "d"  # the workers that it knows are gone


def test_a_directory_forgets_what_was_used_longest_ago() -> None:
    directory = Directory(3)
    for number in range(3):
        directory.note([bytes([number])], "w")
    directory.note([b"\0"], "w")
    directory.note([b"x"], "v")
    assert len(directory) == 3
    assert [list(directory.find([bytes([number])])) for number in range(3)] == [["w"], [], ["w"]]


def test_a_budget_is_spent_and_earned() -> None:
    budget = RetryBudget(ratio=0.25, burst=2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.request()
    assert [budget.take() for _ in range(2)] == [True, False]
    for _ in range(100):
        budget.request()
    assert budget.left == 2.0
    for wrong in (-1, float("nan"), "x"):
        with pytest.raises(ga.InvalidRequest):
            RetryBudget(ratio=wrong)  # type: ignore[arg-type]


def test_a_known_prefix_takes_no_walk_round_the_ring() -> None:
    """With a thousand workers the walk takes milliseconds."""
    walked: list[str] = []

    class Walked(Ring):
        def from_place_of(self, key: bytes) -> Iterator[str]:
            for name in super().from_place_of(key):
                walked.append(name)
                yield name

    homes = Homes(random.Random(0))
    homes.ring = Walked()
    names = [f"worker-{number}" for number in range(50)]
    for name in names:
        homes.ring.add(name)
    loads = dict.fromkeys(names, 0.0)
    home = homes.choose(digests(1), loads)
    walked.clear()
    assert homes.choose(digests(1), loads) == home
    assert walked == []
    other = homes.choose(digests(2), loads)
    assert walked == [other]


def test_a_walk_round_the_ring_goes_on_while_a_worker_comes_or_goes() -> None:
    ring = Ring()
    for name in "abc":
        ring.add(name)
    walk = ring.from_place_of(b"any")
    first = next(walk)
    ring.add("d")
    ring.remove(first)
    assert sorted([first, *walk]) == list("abc")
    assert first not in list(ring.from_place_of(b"any"))
