"""A text cut at its Markdown headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Section", "sections_of"]

_LINE = re.compile(r"^(?:[^\S\n]*(?P<fence>```|~~~)|#{1,6}[^\S\n]+(?P<title>\S[^\n]*))", re.M)


class Section(NamedTuple):
    """Characters [start, stop) of a text, from the line of a heading on.

    heading: the section's title, "" before the first heading.
    """

    start: int
    stop: int
    heading: str


def sections_of(text: str) -> Iterator[Section]:
    """The sections of a text, in order and without gaps. A line of a code block is not a heading."""
    start, heading, fence = 0, "", ""
    for line in _LINE.finditer(text):
        marker = line["fence"]
        if marker:
            fence = marker if not fence else "" if marker == fence else fence
        elif not fence:
            yield Section(start, line.start(), heading)
            start, heading = line.start(), line["title"].rstrip().rstrip("#").rstrip()
    yield Section(start, len(text), heading)
