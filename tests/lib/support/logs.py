"""Writes the results of commands with many checks: tables in build/reports, which git ignores."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["write_log"]

_FOLDER = Path(__file__).resolve().parents[3] / "build" / "reports"


def write_log(name: str, summary: str, columns: Sequence[str], rows: Iterable[str]) -> None:
    """Write a Markdown page with the day, a sentence and a table. rows: lines of the table as they are."""
    table = "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])
    _FOLDER.mkdir(parents=True, exist_ok=True)
    (_FOLDER / f"{name}.md").write_text(f"# {name}\n\n{time.strftime('%Y-%m-%d')}: {summary}.\n\n{table}\n", "utf-8")
