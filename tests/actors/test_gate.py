"""Gate: what was asked for later waits for what has to come again, and nothing waits for ever."""

from __future__ import annotations

import pytest
from support.order import Cell

from gpu_actors.actors.kv_order import Gate


@pytest.fixture
def cell() -> Cell:
    return Cell()


@pytest.fixture
def gate(cell: Cell) -> Gate:
    return Gate(cell)  # type: ignore[arg-type]


def test_a_call_passes_where_nothing_is_in_its_way(cell: Cell, gate: Gate) -> None:
    assert all(gate.admits(cell.call()) for _ in range(3))
    assert cell.taken() == []


def test_later_calls_wait_behind_one_that_is_blocked_until_it_comes_again(cell: Cell, gate: Gate) -> None:
    blocked, later = cell.call(), cell.call()
    gate.block(blocked)
    assert not gate.admits(later)
    assert cell.taken() == []
    gate.settle()
    assert cell.taken() == [later], "it looked again"
    assert not gate.admits(later)
    assert gate.admits(blocked)
    assert cell.taken() == [later]
    assert gate.admits(later)


def test_a_blocked_call_that_is_answered_blocks_nobody(cell: Cell, gate: Gate) -> None:
    blocked, later = cell.call(), cell.call()
    gate.block(blocked)
    assert not gate.admits(later)
    blocked.cancel()
    assert cell.taken() == [later]
    assert gate.admits(later)


def test_later_calls_wait_for_what_is_expected_and_go_behind_what_returns(cell: Cell, gate: Gate) -> None:
    first, second, third = cell.call(), cell.call(), cell.call()
    gate.expect([first])
    assert not gate.admits(third)
    gate.returned([first])
    gate.settle([first])
    cell.mailbox.give_back([first])
    assert not gate.admits(second), "it was taken before the first came back"
    assert cell.taken() == [first, second, third]
    assert gate.admits(first)
    assert gate.admits(second)
    assert gate.admits(third)


def test_what_is_expected_and_answered_is_waited_for_no_longer(cell: Cell, gate: Gate) -> None:
    first, later = cell.call(), cell.call()
    gate.expect([first])
    assert not gate.admits(later)
    first.resolve(None)
    gate.settle([first])
    assert cell.taken() == [later]
    assert gate.admits(later)


def test_a_held_call_holds_those_behind_it(cell: Cell, gate: Gate) -> None:
    held, later = cell.call(), cell.call()
    assert gate.admits(held)
    gate.hold(held)
    assert not gate.admits(later)
    gate.settle()
    assert cell.taken() == [held, later]
    assert gate.admits(held)
    assert gate.admits(later)


def test_a_more_urgent_call_need_not_wait(cell: Cell, gate: Gate) -> None:
    first, urgent = cell.call(), cell.call(priority=1)
    gate.expect([first])
    assert gate.admits(urgent)
