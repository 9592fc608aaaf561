"""`cuda_usable` names the obstacle and never raises."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gpu_actors as ga
from gpu_actors.devices.cuda import attention_obstacle, cuda_usable


def pretend(
    patch: pytest.MonkeyPatch,
    cupy: bool = True,
    driver: bool = True,
    count: int | Exception = 2,
    capability: tuple[int, int] | Exception = (9, 0),
) -> None:
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

    def get_attribute(attribute: int, index: int) -> int:
        if isinstance(capability, Exception):
            raise capability
        return capability[(75, 76).index(attribute)]  # numbers of cudaDeviceAttr, which CuPy does not name

    runtime = ModuleType("cupy.cuda.runtime")
    runtime.deviceGetAttribute = get_attribute  # type: ignore[attr-defined]
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"capability": (7, 5)}, r"cuda:0 has compute capability 7\.5, and the kernels need 8\.0"),  # T4
        ({"capability": (7, 0)}, r"cuda:0 has compute capability 7\.0"),  # V100
        ({"capability": RuntimeError("no attribute")}, "no attribute"),
        ({"driver": False}, "no NVIDIA driver"),
    ],
)
def test_auto_takes_mock_and_says_why_where_the_gpu_runs_no_kernel(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str
) -> None:
    pretend(monkeypatch, **given)
    with pytest.warns(ga.MockDeviceWarning, match=words), ga.open_context("auto") as ctx:
        assert ctx.info.kind == "mock"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_gpu_that_runs_the_kernels_has_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    pretend(monkeypatch, capability=capability)
    assert attention_obstacle() is None
