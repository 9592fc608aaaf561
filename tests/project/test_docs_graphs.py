"""Every example of docs/graphs.md runs, one after the other, as a reader would type them."""

from __future__ import annotations

from typing import Any

import pytest
from support.docs import examples, run_example
from support.service import REPOSITORY

PAGE = REPOSITORY / "docs" / "graphs.md"
EXAMPLES = examples(PAGE)


def test_the_examples_of_the_graphs_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}  # an example uses what those before it have made
    for number, example in enumerate(EXAMPLES):
        run_example(example, names, f"{PAGE.name}, example {number + 1}")
        if number == 1:
            assert "struct ScoreMod" in capsys.readouterr().out


def test_the_graphs_page_has_all_its_examples() -> None:
    assert len(EXAMPLES) >= 6
