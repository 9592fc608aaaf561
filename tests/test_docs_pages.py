"""The pages of the documentation: links lead somewhere, every page is found from README, lines are wrapped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_support import PAGES
from service_support import REPOSITORY

WIDTH = 130


def links(page: Path) -> list[Path]:
    """The files of this repository that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


def test_every_link_leads_to_a_file() -> None:
    found = [(page, target) for page in PAGES for target in links(page)]
    assert len(found) > 20
    assert [(str(page), str(target)) for page, target in found if not target.exists()] == []


def test_every_page_is_reached_from_readme() -> None:
    reached: set[Path] = set()
    ahead = [REPOSITORY / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            ahead += [target for target in links(page) if target.suffix == ".md" and target.is_file()]
    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_lines_are_wrapped(page: Path) -> None:
    """All but rows of tables and what is meant to be copied."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert [line for line in text.splitlines() if len(line) > WIDTH and not line.startswith("|")] == []
