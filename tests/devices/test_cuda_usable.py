"""cuda_usable names the obstacle, and does not raise over any."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpu_actors.devices.cuda import cuda_usable


def pretend(patch: pytest.MonkeyPatch, cupy: bool = True, driver: bool = True, count: int | Exception = 2) -> None:
    real_find, real_load = importlib.util.find_spec, ctypes.CDLL

    def find(name: str, *args: Any) -> Any:
        return (object() if cupy else None) if name == "cupy" else real_find(name, *args)

    def load(name: Any, *args: Any, **kwargs: Any) -> Any:
        if name != "libcuda.so.1":
            return real_load(name, *args, **kwargs)
        if not driver:
            raise OSError("libcuda.so.1: no such file")
        return SimpleNamespace(cuInit=lambda flags: 0)

    def get_device_count() -> int:
        if isinstance(count, Exception):
            raise count
        return count

    runtime = ModuleType("cupy.cuda.runtime")
    runtime.getDeviceCount = get_device_count  # type: ignore[attr-defined]
    cuda = ModuleType("cupy.cuda")
    cuda.runtime = runtime  # type: ignore[attr-defined]
    patch.setattr(importlib.util, "find_spec", find)
    patch.setattr(ctypes, "CDLL", load)
    patch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    patch.setitem(sys.modules, "cupy.cuda", cuda)


def test_a_machine_with_cupy_driver_and_device_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert cuda_usable() is None
    assert cuda_usable(1) is None


@pytest.mark.parametrize(
    ("missing", "index", "words"),
    [
        ({"cupy": False}, 0, r"CuPy is not installed: pip install"),
        ({"driver": False}, 0, "no NVIDIA driver"),
        ({"count": RuntimeError("insufficient driver")}, 0, "insufficient driver"),
        ({"count": 0}, 0, r"no cuda:0: the driver shows 0"),
        ({"count": 2}, 2, r"no cuda:2: the driver shows 2"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: dict[str, Any], index: int, words: str
) -> None:
    pretend(monkeypatch, **missing)
    obstacle = cuda_usable(index)
    assert obstacle is not None
    assert re.search(words, obstacle)
