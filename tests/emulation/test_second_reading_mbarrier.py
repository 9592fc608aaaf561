"""Random sequences of mbarrier steps: the emulated mbarrier against the second reading, after every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isa import mbarrier
from second_reading import (
    ARRIVE,
    ARRIVE_EXPECT,
    BULK,
    COPIES,
    COPIES_NOINC,
    EXPECT,
    TENSOR,
    Step,
    module_of,
    play,
    taken,
)

from gpu_actors.devices.emulation import EmulatedModule

pytestmark = pytest.mark.timeout(300)  # the first test of a process builds the module of all

steps = st.one_of(
    st.tuples(st.just(ARRIVE), st.just(0)),
    st.tuples(st.sampled_from([EXPECT, ARRIVE_EXPECT, BULK]), st.integers(1, 8).map(lambda unit: 16 * unit)),
    st.tuples(st.just(TENSOR), st.integers(-5, 15).map(lambda unit: 4 * unit)),
    st.tuples(st.sampled_from([COPIES, COPIES_NOINC]), st.just(0)),
)


@pytest.fixture(scope="module")
def module(module_cache: Path) -> EmulatedModule:
    return module_of(module_cache)


@settings(max_examples=25, deadline=None)
@given(expected=st.integers(1, 4), wanted=st.lists(steps, max_size=24))
def test_a_barrier_is_in_the_state_of_the_isa_after_every_sequence(
    module: EmulatedModule, expected: int, wanted: list[Step]
) -> None:
    play(module, expected, wanted)


@settings(max_examples=15, deadline=None)
@given(expected=st.integers(1, 3), phases=st.lists(st.permutations(range(5)), min_size=1, max_size=6))
def test_phases_that_our_kernels_have_end_in_any_order_of_their_steps(
    module: EmulatedModule, expected: int, phases: list[list[int]]
) -> None:
    """One thread announces the bytes and arrives, others arrive, copies land, in any order in which threads may run."""
    wanted: list[Step] = []
    for order in phases:
        whole: list[list[Step]] = [
            [(ARRIVE_EXPECT, 64 + 48)],
            [(BULK, 48)],
            [(TENSOR, -8)],
            *([[(ARRIVE, 0)]] * (expected - 1)),
        ]
        wanted += [step for place in order if place < len(whole) for step in whole[place]]
    play(module, expected, wanted)
    barrier = mbarrier.Barrier(expected)
    for step in wanted:
        taken(barrier, step)
    assert barrier.phase == len(phases)


@pytest.mark.sweep
@settings(max_examples=5000, deadline=None)
@given(expected=st.integers(1, 6), wanted=st.lists(steps, max_size=60))
def test_a_barrier_is_in_the_state_of_the_isa_after_many_sequences(
    module: EmulatedModule, expected: int, wanted: list[Step]
) -> None:
    play(module, expected, wanted)
