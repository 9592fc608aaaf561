"""The software driver is for tests: the package neither mentions nor finds it, and it imitates nothing undocumented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpu_actors.devices.select import choose_device

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for kind in ("*.cpp", "*.h") for path in sorted((ROOT / "softgpu").rglob(kind))]


@pytest.mark.parametrize("folder", ["gpu_actors", "kernels_cu", "examples"])
def test_nothing_that_is_shipped_mentions_the_software_driver(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".md")]
    assert len(files) > 2
    assert [path for path in files if "softgpu" in path.read_text().lower()] == []


def test_auto_does_not_see_it() -> None:
    """This process has not been started with it, so that whatever is built and cached on this machine is not found."""
    assert "softgpu" not in Path("/proc/self/maps").read_text()
    choose_device("auto")
    assert "softgpu" not in Path("/proc/self/maps").read_text()


def test_it_has_none_of_the_drivers_undocumented_functions() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    assert len(SOURCES) > 15
    assert not re.search(r"ExportTable|GetProcAddress", text)
