"""KvOrder: no call overtakes one of its cache that waits for a kernel or a launch, and none waits forever."""

from __future__ import annotations

import pytest
from inside.kv import CloseCache, CreateSequence, ForkSequence, FreeSequence, TruncateSequence
from support.order import Cell

from gpu_actors import AppendRows, KvSequence
from gpu_actors.actors.kv_order import KvOrder


@pytest.fixture
def cell() -> Cell:
    return Cell()


@pytest.fixture
def order(cell: Cell) -> KvOrder:
    return KvOrder(cell)  # type: ignore[arg-type]


def test_a_call_passes_where_nothing_is_in_its_way(cell: Cell, order: KvOrder) -> None:
    assert all(order.admits(cell.call()) for _ in range(3))
    order.release()
    assert cell.taken() == []


def test_later_calls_wait_behind_one_that_waits_for_its_kernel(cell: Cell, order: KvOrder) -> None:
    blocked, later = cell.call(), cell.call()
    order.block(blocked)
    assert not order.admits(later)
    order.release()
    assert cell.taken() == [], "nothing has ended"
    order.look_again()
    order.release()
    assert cell.taken() == [later]
    assert not order.admits(later), "its kernel is still missing"
    assert order.admits(blocked)
    order.release()
    assert cell.taken() == [later]
    assert order.admits(later)


def test_calls_on_other_sequences_pass_and_those_on_the_same_or_on_all_wait(cell: Cell, order: KvOrder) -> None:
    one, two, three = (KvSequence(1, number, 1) for number in (1, 2, 3))
    order.block(cell.call(message=AppendRows(cache=1, seqs=[one, two])))
    passing = FreeSequence(1, three), AppendRows(cache=1, seqs=three), CreateSequence(1), ForkSequence(2, one)
    waiting = FreeSequence(1, two), AppendRows(cache=1, seqs=(three, one)), TruncateSequence(1, one, 0), CloseCache(1)
    assert all(order.admits(cell.call(message=message)) for message in passing)
    assert not any(order.admits(cell.call(message=message)) for message in waiting)


def test_a_call_that_is_answered_while_it_waits_for_its_kernel_lets_later_calls_go_on(
    cell: Cell, order: KvOrder
) -> None:
    blocked, later = cell.call(), cell.call()
    order.block(blocked)
    assert not order.admits(later)
    blocked.cancel()
    assert cell.flush_requested()
    order.release()
    assert cell.taken() == [later]
    assert order.admits(later)


def test_later_calls_go_behind_those_that_wait_for_a_call_that_has_come_back(cell: Cell, order: KvOrder) -> None:
    """The actor takes the blocked call together with the last one, before the call between them is queued again."""
    blocked, between, last = cell.call(), cell.call(), cell.call()
    order.block(blocked)
    assert not order.admits(between)
    assert order.admits(blocked)
    assert not order.admits(last)
    order.release()
    assert cell.taken() == [between, last]
    assert order.admits(between)
    assert order.admits(last)


def test_a_call_that_waits_twice_for_kernels_keeps_its_place(cell: Cell, order: KvOrder) -> None:
    blocked, later = cell.call(), cell.call()
    order.block(blocked)
    assert not order.admits(later)
    assert order.admits(blocked)
    order.block(blocked)
    order.release()
    assert cell.taken() == [later]
    assert not order.admits(later)


def test_calls_behind_a_held_one_come_back_with_it_when_a_launch_has_ended(cell: Cell, order: KvOrder) -> None:
    held, later = cell.call(), cell.call()
    assert order.admits(held)
    order.hold(held)
    assert not order.admits(later)
    order.release()
    assert cell.taken() == []
    assert not cell.flush_requested()
    order.look_again()
    assert cell.flush_requested()
    order.release()
    assert cell.taken() == [held, later]
    assert order.admits(held)
    assert order.admits(later)
    assert cell.mailbox._parked == 0


def test_a_launch_that_ends_while_a_call_is_about_to_wait_for_it_is_not_missed(cell: Cell, order: KvOrder) -> None:
    held = cell.call()
    order.look_again()
    order.hold(held)
    order.release()
    assert cell.taken() == [held]


def test_a_held_call_that_is_answered_lets_later_calls_pass(cell: Cell, order: KvOrder) -> None:
    held, later = cell.call(), cell.call()
    order.hold(held)
    held.cancel()
    assert order.admits(later)


def test_calls_of_other_caches_and_more_urgent_ones_pass(cell: Cell, order: KvOrder) -> None:
    held, other, urgent = cell.call(), cell.call(cache=2), cell.call(priority=1)
    order.hold(held)
    assert order.admits(other)
    assert order.admits(urgent)
