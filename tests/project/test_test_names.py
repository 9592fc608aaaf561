"""Test files have names of their own: pytest imports them by their last name alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_no_two_test_files_have_the_same_name() -> None:
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert not {name for name, count in names.items() if count > 1}
