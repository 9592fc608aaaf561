"""Build hooks: the README and links for an index page, and the kernels' sources for a wheel.

GPU_ACTORS_HOME: at build time, the address of the published repository, such as https://example.org/owner/gpu_actors.
With it, links lead there. Without it, no address is known, and links become the names of files.
"""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["IndexPage", "Kernels", "for_index_page", "project_urls"]

_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")


class IndexPage(MetadataHookInterface):
    """Sets the metadata that depend on where the project is published."""

    def update(self, metadata: dict[str, Any]) -> None:
        home = os.environ.get("GPU_ACTORS_HOME", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index_page(text, home)}
        if home:
            metadata["urls"] = project_urls(home)


class Kernels(BuildHookInterface[Any]):
    """Puts the kernels' sources into the package of a wheel, but not the pages beside them.

    They are in one archive that does not compress. The wheel then compresses them as one text, to two thirds of the
    size of separately compressed files.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sources = Path(self.root) / "kernels_cu"
        self._folder = tempfile.TemporaryDirectory()
        archive = Path(self._folder.name) / "kernels_cu.zip"
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as written:
            for path in sorted(sources.rglob("*.cu*")):
                # The entry has no date, so that the same sources make the same wheel.
                entry = zipfile.ZipInfo(path.relative_to(sources).as_posix())
                written.writestr(entry, path.read_bytes())
        build_data["force_include"][str(archive)] = f"gpu_actors/{archive.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()


def for_index_page(text: str, home: str) -> str:
    """Markdown whose links to files beside it are absolute, or plain text if there is no home."""

    def link(match: re.Match[str]) -> str:
        shown, path = match.groups()
        if home:
            return f"[{shown}]({home}/blob/HEAD/{path})"
        return shown if shown == path else f"{shown} ({path})"

    return _RELATIVE_LINK.sub(link, text)


def project_urls(home: str) -> dict[str, str]:
    """The links that an index page shows."""
    return {
        "Homepage": home,
        "Documentation": f"{home}/blob/HEAD/README.md#documentation",
        "Changelog": f"{home}/blob/HEAD/CHANGELOG.md",
    }
