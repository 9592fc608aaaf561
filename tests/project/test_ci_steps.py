"""Every test that needs an optional library runs in a step of .ci/run, which installs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.service import REPOSITORY

# The default run installs none of them.
LIBRARIES = ("torch", "openai", "lm_eval", "jax", "ray", "playwright")
TESTS = REPOSITORY / "tests"
OWN_MACHINE = TESTS / "gpu"  # CI has no GPU
ASKS = re.compile(r"importorskip\(|pytest\.skip\(")
NAMES = re.compile(rf"[\"'](?:{'|'.join(LIBRARIES)})(?:\.\w+)?[\"']")


def waiting_files() -> list[Path]:
    """The test files that skip if one of the libraries is missing."""
    texts = ((path, path.read_text()) for path in sorted(TESTS.rglob("test_*.py")) if OWN_MACHINE not in path.parents)
    return [path for path, text in texts if path != Path(__file__) and ASKS.search(text) and NAMES.search(text)]


def places_in_steps() -> set[Path]:
    """The files and folders that the steps of .ci/run and scripts/browser name."""
    steps = [REPOSITORY / ".ci" / "run", REPOSITORY / "scripts" / "browser"]
    text = "\n".join(step.read_text() for step in steps)
    return {REPOSITORY / found for found in re.findall(r"\btests/[\w/.]+", text)}


@pytest.mark.parametrize("path", waiting_files(), ids=lambda path: str(path.relative_to(TESTS)))
def test_a_file_that_waits_for_a_library_is_a_step_of_its_own(path: Path) -> None:
    assert places_in_steps() & {path, *path.parents}, f"no step of .ci/run names {path.relative_to(REPOSITORY)}"
