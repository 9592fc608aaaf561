"""The pages of the documentation: the names in them exist, and every page is reached from README."""

from __future__ import annotations

import re
from pathlib import Path

from support.docs import PAGES
from support.service import REPOSITORY

from gpu_actors import errors
from gpu_actors.bench import SUITES


def links(page: Path) -> list[Path]:
    """The files of this repository that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return [(page.parent / target).resolve() for target in targets if "://" not in target]


def test_every_link_leads_to_a_file() -> None:
    found = [(page, target) for page in PAGES for target in links(page)]
    assert found
    assert [(str(page), str(target)) for page, target in found if not target.exists()] == []


def test_every_file_that_a_page_names_is_there() -> None:
    pattern = r"\b(?:tests|examples|docs|kernels_cu|gpu_actors)/[\w*/.-]*\.(?:py|cuh?|md|json)\b"
    named = {(page, name) for page in PAGES for name in re.findall(pattern, page.read_text(encoding="utf-8"))}
    assert named
    assert [(page.name, name) for page, name in sorted(named) if not any(REPOSITORY.glob(name))] == []


def homes(page: Path, name: str) -> list[Path]:
    """The files that a page's path may name: relative to the repository, the package, the kernels or the page."""
    folders = [REPOSITORY, REPOSITORY / "gpu_actors", REPOSITORY / "kernels_cu", page.parent]
    return [path for folder in folders for path in folder.glob(name)]


def test_every_source_that_a_page_names_without_its_home_is_there() -> None:
    named = {
        (page, name)
        for page in PAGES
        for name in re.findall(r"`([\w*]+/[\w*/]*\.(?:py|cuh?))`", page.read_text(encoding="utf-8"))
    }
    assert named
    assert [(page.name, name) for page, name in sorted(named) if not homes(page, name)] == []


def test_every_name_that_a_page_places_in_a_file_is_there() -> None:
    pattern = r"`([\w.:]+)`\s+in\s+`([\w/]+\.(?:py|cuh?))`"
    placed = [
        (page, name, file)
        for page in PAGES
        for name, file in re.findall(pattern, page.read_text(encoding="utf-8"))
        if page.name != "CHANGELOG.md"
    ]
    assert placed

    def stands(page: Path, name: str, file: str) -> bool:
        words = re.split(r"\W+", name)
        texts = [path.read_text(encoding="utf-8") for path in homes(page, file)]
        return any(all(re.search(rf"\b{word}\b", text) for word in words) for text in texts)

    assert [(page.name, name, file) for page, name, file in placed if not stands(page, name, file)] == []


def test_every_command_that_a_page_shows_is_one() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"(?:^|[`/])gpu-actors ([a-z]+)", text, re.M)) == {
        "bench",
        "chat",
        "embed",
        "report",
        "serve",
        "warm",
        "doctor",
    }
    suites = set(re.findall(r"gpu-actors bench ([a-z]+)", text))
    assert suites
    assert suites <= set(SUITES)


def test_every_page_is_reached_from_readme() -> None:
    reached: set[Path] = set()
    ahead = [REPOSITORY / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            ahead += [target for target in links(page) if target.suffix == ".md" and target.is_file()]
    assert set(PAGES) <= reached


def test_every_error_is_told_with_what_to_do() -> None:
    """Each public error has a row of the table, and each row has all three columns."""
    rows = [line.split("|") for line in (REPOSITORY / "docs/errors.md").read_text().splitlines() if line[:3] == "| `"]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row[1].partition("(")[0])}
    assert all(row[2].strip() and row[3].strip() for row in rows)
    assert told == set(errors.__all__) - {"GpuActorsError", "RequestError"}
