"""Every example of docs/graphs.md runs, one after the other, as a reader would type them."""

from __future__ import annotations

from typing import Any

import pytest
from support.docs import examples, run_example
from support.service import REPOSITORY

PAGE = REPOSITORY / "docs" / "graphs.md"
EXAMPLES = examples(PAGE)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_each_example_of_the_graphs_page_runs(
    number: int, names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_example(EXAMPLES[number], names, f"{PAGE.name}, example {number + 1}")
    if number == 1:
        assert "struct ScoreMod" in capsys.readouterr().out


def test_the_graphs_page_has_all_its_examples() -> None:
    assert len(EXAMPLES) >= 6
