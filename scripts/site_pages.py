"""A hook of mkdocs for the site's pages from outside docs/, and for links between them and the others.

README, CONTRIBUTING and similar files stay where a reader of the repository looks for them. A link to a file that is
not on the site becomes the file's name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

# Paths of the repository's files in the site, relative to docs/.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "kernels_cu/emulation/README.md": "emulation.md",
}
_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in MOVED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links between pages."""
    shown_at = page.file.src_uri
    source = next((source for source, moved in MOVED.items() if moved == shown_at), f"docs/{shown_at}")

    def link(match: re.Match[str]) -> str:
        text, path, anchor = match.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = MOVED.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(target) is None:
            return text if text.strip("`") == path else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(shown_at) or '.')}{anchor or ''})"

    return _LINK.sub(link, markdown)
