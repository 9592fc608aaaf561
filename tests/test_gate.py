"""Gate: what was asked for later waits for what has to come again, and nothing waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_actors.actors.call import Call
from gpu_actors.actors.gate import Gate
from gpu_actors.actors.mailbox import Mailbox


class Post:
    """As much of one as a gate needs."""

    def __init__(self) -> None:
        self.mailbox = Mailbox("test", 100, 8)

    def park(self, call: Call[Any]) -> None:
        self.mailbox.park(call)

    def call(self, priority: int = 0) -> Call[Any]:
        """A call that was taken from the mailbox."""
        call: Call[Any] = Call("message", self.mailbox, priority)
        self.mailbox.put(call)
        assert self.taken() == [call]
        return call

    def taken(self) -> list[Call[Any]]:
        with self.mailbox.lock:
            return self.mailbox._pop(100)


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture
def gate(post: Post) -> Gate:
    return Gate(post)  # type: ignore[arg-type]


def test_a_call_passes_where_nothing_is_in_its_way(post: Post, gate: Gate) -> None:
    assert all(gate.admits(post.call()) for _ in range(3))
    assert post.taken() == []


def test_later_calls_wait_behind_one_that_is_blocked_until_it_comes_again(post: Post, gate: Gate) -> None:
    blocked, later = post.call(), post.call()
    gate.block(blocked)
    assert not gate.admits(later)
    assert post.taken() == []
    gate.settle()
    assert post.taken() == [later], "it looked again"
    assert not gate.admits(later)
    assert gate.admits(blocked)
    assert post.taken() == [later]
    assert gate.admits(later)


def test_a_blocked_call_that_is_answered_blocks_nobody(post: Post, gate: Gate) -> None:
    blocked, later = post.call(), post.call()
    gate.block(blocked)
    assert not gate.admits(later)
    blocked.cancel()
    assert post.taken() == [later]
    assert gate.admits(later)


def test_later_calls_wait_for_what_is_expected_and_go_behind_what_returns(post: Post, gate: Gate) -> None:
    first, second, third = post.call(), post.call(), post.call()
    gate.expect([first])
    assert not gate.admits(third)
    gate.returned([first])
    gate.settle([first])
    post.mailbox.give_back([first])
    assert not gate.admits(second), "it was taken before the first came back"
    assert post.taken() == [first, second, third]
    assert gate.admits(first)
    assert gate.admits(second)
    assert gate.admits(third)


def test_what_is_expected_and_answered_is_waited_for_no_longer(post: Post, gate: Gate) -> None:
    first, later = post.call(), post.call()
    gate.expect([first])
    assert not gate.admits(later)
    first.resolve(None)
    gate.settle([first])
    assert post.taken() == [later]
    assert gate.admits(later)


def test_a_held_call_holds_those_behind_it(post: Post, gate: Gate) -> None:
    held, later = post.call(), post.call()
    assert gate.admits(held)
    gate.hold(held)
    assert not gate.admits(later)
    gate.settle()
    assert post.taken() == [held, later]
    assert gate.admits(held)
    assert gate.admits(later)


def test_a_more_urgent_call_need_not_wait(post: Post, gate: Gate) -> None:
    first, urgent = post.call(), post.call(priority=1)
    gate.expect([first])
    assert gate.admits(urgent)
