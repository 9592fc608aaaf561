"""Every example of docs/graphs.md runs, one after the other, as a reader would type them."""

from __future__ import annotations

from typing import Any

import pytest
from support.docs import examples, run_example
from support.service import REPOSITORY

PAGE = REPOSITORY / "docs" / "graphs.md"


def test_the_examples_of_the_graphs_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}  # an example uses what those before it have made
    for number, example in enumerate(examples(PAGE)):
        run_example(example, names, f"{PAGE.name}, example {number + 1}")
        if number == 1:
            assert "struct ScoreMod" in capsys.readouterr().out
