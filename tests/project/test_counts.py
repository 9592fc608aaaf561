"""In how many files an option is spelled, and how long five rooms are, as scripts/counts.py counts them.

A number that grows says that an option has come into one more file: see "How to add an option" in CONTRIBUTING.md.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.modules import ROOT, module_at

counts: Any = module_at(ROOT / "scripts" / "counts.py")

MOST = {"sink_tokens": 11, "softcap": 23, "alibi_slopes": 18}

# A new capability may raise it, and docs/reports/house.md with it.
MOST_LINES = 16068


@pytest.mark.parametrize("option", counts.OPTIONS)
def test_an_option_is_spelled_in_few_files(option: str) -> None:
    found = counts.spelled_in(option)
    assert len(found) <= MOST[option], found


def test_counts_see_python_and_cuda_and_upper_case() -> None:
    found = counts.spelled_in("sink_tokens")
    assert "gpu_actors/key_mask.py" in found
    assert "kernels_cu/common/defaults.cuh" in found  # which has the macro alone


def test_the_five_rooms_are_as_short_as_the_report_says() -> None:
    rooms = {room: counts.lines_of(room) for room in counts.ROOMS}
    assert all(rooms.values()), "a room that is not found has no lines"
    assert sum(rooms.values()) <= MOST_LINES, rooms
