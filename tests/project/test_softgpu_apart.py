"""The software driver is for tests: the package does not find it."""

from __future__ import annotations

from pathlib import Path

from inside.devices import choose_device


def test_auto_does_not_see_it() -> None:
    """This process has not been started with it, so that whatever is built and cached on this machine is not found."""
    assert "softgpu" not in Path("/proc/self/maps").read_text()
    choose_device("auto")
    assert "softgpu" not in Path("/proc/self/maps").read_text()
