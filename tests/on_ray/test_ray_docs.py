"""The examples of docs/ray.md run unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from support.docs import examples, run_example, wants_torch
from support.service import REPOSITORY

pytest.importorskip("ray")


def test_the_examples_of_the_page_run(cluster: Any) -> None:
    names: dict[str, Any] = {}
    sources = examples(REPOSITORY / "docs/ray.md")
    assert sources
    assert all(map(wants_torch, sources))
    for number, source in enumerate(sources, 1):
        run_example(source, names, f"docs/ray.md, example {number}")
    assert names["reply"].out.shape == (1, 16, 2, 64)
