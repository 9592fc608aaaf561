"""The site has every page and every public name; scripts/docs builds it."""

from __future__ import annotations

import re
from collections import Counter

from support.docs import PAGES
from support.service import REPOSITORY

import gpu_actors as ga
from gpu_actors import asgi, serving, testing

DOCS = REPOSITORY / "docs"


def test_every_public_name_stands_on_one_page_of_the_reference() -> None:
    public = [f"gpu_actors.{name}" for name in ga.__all__ if name != "__version__"]
    public += [f"gpu_actors.testing.{name}" for name in testing.__all__ if name != "reference"]
    public += [f"gpu_actors.serving.{name}" for name in serving.__all__]
    public += [f"gpu_actors.asgi.{name}" for name in asgi.__all__ if name not in serving.__all__]
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    shown = Counter(re.findall(r"^::: ([\w.]+)$", text, re.M))
    assert [name for name in public if shown[name] != 1] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = set(
        re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    )
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)}
    assert pages <= named
