"""The files of the page, and the one file of a report.

The page has no build step and loads nothing from other servers. Its Content-Security-Policy allows its own style and
script alone, so a text that holds HTML cannot run, and Trusted Types keep the script from making HTML out of texts.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from gpu_actors.errors import InvalidRequest

__all__ = ["POLICY", "page_file", "report"]

_COMMON = "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    f"frame-ancestors 'none'; {_COMMON}"
)
"""The Content-Security-Policy of the page."""

_STYLE = '<link rel="stylesheet" href="status/page.css">'
_SCRIPT = '<script type="module" src="status/page.mjs"></script>'


@functools.cache
def page_file(name: str) -> str:
    """The text of index.html, page.css or page.mjs."""
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def report(snapshot: Mapping[str, Any]) -> str:
    """The page as one HTML file that shows a snapshot, from /status.json or `StatusBoard.snapshot`.

    It needs no server and loads nothing. Raises `InvalidRequest` for a mapping that is not a snapshot.
    """
    parts = ("verdict", "time", "workers") if "workers" in snapshot else ("verdict", "actors", "history", "time")
    absent = [name for name in parts if name not in snapshot]
    if absent:
        raise InvalidRequest("snapshot", ", ".join(map(str, snapshot))[:80], f"must have {', '.join(absent)}")
    style, script = page_file("page.css"), page_file("page.mjs")
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; {_COMMON}"
    # Only "<" could end the script element, and a block of JSON is not run.
    data = json.dumps(dict(snapshot), separators=(",", ":")).replace("<", "\\u003c")
    page = page_file("index.html")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    page = page.replace(_STYLE, head)
    return page.replace(
        _SCRIPT,
        f'<script type="application/json" id="snapshot">{data}</script>\n<script type="module">{script}</script>',
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
