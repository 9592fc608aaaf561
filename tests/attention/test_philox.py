"""Philox4x32-10 against Random123's known answers, and the numbering of dropout's bits."""

from __future__ import annotations

import numpy as np
import pytest
from inside.attention import dropout_bits, dropout_keep, dropout_threshold, philox4x32

from gpu_actors.errors import InvalidRequest

# tests/kat_vectors of Random123: counter, key, output.
KNOWN_ANSWERS = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]


def philox_scalar(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten of the paper's rounds, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (right >> 32) ^ c1 ^ k0,
            right & 0xFFFFFFFF,
            (left >> 32) ^ c3 ^ k1,
            left & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@pytest.mark.parametrize("line", KNOWN_ANSWERS)
def test_published_vectors_are_reproduced(line: str) -> None:
    words = [int(word, 16) for word in line.split()]
    drawn = philox4x32((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert drawn.dtype == np.uint32
    assert drawn.tolist() == words[6:]


def test_counters_broadcast_and_each_is_drawn_on_its_own() -> None:
    rows, columns = np.array([[0], [7], [2**32 - 1]]), np.arange(5)
    drawn = philox4x32((columns, rows, 3, 0), (11, 13))
    assert drawn.shape == (3, 5, 4)
    for i, row in enumerate(rows[:, 0].tolist()):
        for j in range(5):
            assert tuple(drawn[i, j].tolist()) == philox_scalar((j, row, 3, 0), (11, 13))


def test_dropout_bits_follow_the_stated_counter_and_lane() -> None:
    seed, heads = 0x9ABCDEF012345678, 3
    sequence_head = np.arange(2 * heads).reshape(2, heads)
    rows = np.array([21, 5, 900])
    bits = dropout_bits(seed, sequence_head, rows, 11)
    assert bits.shape == (2, heads, 3, 11)
    for b, h, r, j in np.ndindex(2, heads, 3, 11):
        counter = (j // 4, int(rows[r]), b * heads + h, 0)
        expected = philox_scalar(counter, (0x12345678, 0x9ABCDEF0))[j % 4]
        assert int(bits[b, h, r, j]) == expected


def test_threshold_is_exact_and_a_draw_at_it_is_kept() -> None:
    assert dropout_threshold(0.0) == 0
    assert dropout_threshold(0.5) == 1 << 31
    assert dropout_threshold(2.0**-32) == 1
    draws = dropout_bits(9, np.array([0]), np.arange(2), 4)
    exactly = int(draws[0, 1, 2]) / 2.0**32
    assert dropout_keep(exactly, 9, np.array([0]), np.arange(2), 4)[0, 1, 2]
    above = (int(draws[0, 1, 2]) + 1) / 2.0**32
    assert not dropout_keep(above, 9, np.array([0]), np.arange(2), 4)[0, 1, 2]


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, float("nan"), 1.0 - 2.0**-40])
def test_a_probability_that_keeps_nothing_is_refused(dropout_p: float) -> None:
    with pytest.raises(InvalidRequest, match="dropout_p"):
        dropout_threshold(dropout_p)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_beyond_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(InvalidRequest, match="dropout_seed"):
        dropout_bits(seed, np.array([0]), np.arange(1), 1)
