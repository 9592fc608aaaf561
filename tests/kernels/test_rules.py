"""Published rules give the numbers of their authors' code."""

from __future__ import annotations

import pytest

from gpu_actors.kernels.rules import should_pack, split_count


@pytest.mark.parametrize(
    ("tiles", "key_tiles", "multiprocessors", "splits"),
    [
        # The example in FlashAttention's source: two splits of 48 tiles fill 0.89 of 108 multiprocessors, three 0.67.
        (48, 64, 108, 2),
        # 0.8 * 108 = 86.4 tiles are not split. Two to four splits of 86 tiles fill 0.796, five 0.995.
        (86, 64, 108, 5),
        (87, 64, 108, 1),
        (1000, 64, 108, 1),
        # Up to four tiles of keys are not split.
        (1, 4, 132, 1),
        (1, 5, 132, 5),
        # Two splits of 64 tiles fill 128 of 132.
        (64, 32, 132, 2),
        # One tile: efficiency rises up to a split for each of the 64 tiles of keys; 85% of 64 is 54.4.
        (1, 64, 132, 55),
        # At most 128 splits; 109 have 85% of their efficiency.
        (1, 1000, 132, 109),
    ],
)
def test_splits_are_those_of_flash_attention(tiles: int, key_tiles: int, multiprocessors: int, splits: int) -> None:
    assert split_count(tiles, key_tiles, multiprocessors) == splits


@pytest.mark.parametrize(
    ("rows", "heads", "tile", "packed"),
    [
        (1, 8, 128, True),
        (1, 1, 128, False),
        (128, 4, 128, False),
        (64, 4, 128, True),
        (63, 2, 64, False),
        # 100 of 128 rows are 78.1%, 800 of 896 are 89.3%.
        (100, 8, 128, True),
        # 100 of 128 and 200 of 256 are equal.
        (100, 2, 128, False),
    ],
)
def test_rows_are_packed_as_by_flash_attention(rows: int, heads: int, tile: int, packed: bool) -> None:
    assert should_pack(rows, heads, tile) is packed
