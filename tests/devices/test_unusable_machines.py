"""Machines whose CUDA is not usable: open_context and the doctor end in one typed sentence, which says what to do."""

from __future__ import annotations

import ctypes
import fnmatch
import glob
import importlib.util
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest
from cupy.cuda import runtime
from fakes.cuda import FakeCuda
from inside.cuda import CudaDevice
from support.cli import Run

import gpu_actors as ga
from gpu_actors.devices.cuda import cupy_api

PLACES = ("/.dockerenv", "/run/.containerenv")


@dataclass(frozen=True)
class Machine:
    """What CUDA answers on a machine, and what its user is told.

    listing, opening: statuses of getDeviceCount and of setDevice. denied: files that the user may not open.
    """

    told: tuple[str, ...]
    listing: int = 0
    opening: int = 0
    count: int = 1
    has_cupy: bool = True
    has_library: bool = True
    container: bool = False
    release: str = "6.8.0-generic"
    denied: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


MACHINES = {
    "no CuPy": Machine(("CuPy is not installed", "pip install"), has_cupy=False),
    "no driver": Machine(("there is no NVIDIA driver", "install the one for this machine's GPU"), has_library=False),
    "WSL": Machine(("NVIDIA's driver on Windows",), has_library=False, release="5.15.1-microsoft-standard-WSL2"),
    "a container": Machine(("--gpus all", "NVIDIA Container Toolkit"), has_library=False, container=True),
    "no GPU": Machine(("cudaErrorNoDevice", "see whether nvidia-smi shows a GPU"), listing=100),
    "no GPU, counted": Machine(("the driver shows 0", "see whether nvidia-smi shows a GPU"), count=0),
    "no GPU in a container": Machine(("cudaErrorNoDevice", "--gpus all"), listing=100, container=True),
    "hidden GPUs": Machine(
        ("cudaErrorNoDevice", "CUDA_VISIBLE_DEVICES is '-1'"), listing=100, environment={"CUDA_VISIBLE_DEVICES": "-1"}
    ),
    "no permission": Machine(("may not open /dev/nvidia0", "group"), listing=100, denied=("/dev/nvidia0",)),
    "no permission, as the system says": Machine(
        ("cudaErrorOperatingSystem", "may not open /dev/nvidiactl"), listing=304, denied=("/dev/nvidiactl",)
    ),
    "a failing system": Machine(("cudaErrorOperatingSystem", "dmesg"), listing=304),
    "an old driver": Machine(
        ("cudaErrorInsufficientDriver", "install a newer driver, or uninstall CuPy and pip install"), listing=35
    ),
    "a stub": Machine(("cudaErrorStubLibrary", "LD_LIBRARY_PATH"), listing=34),
    "half of an update": Machine(("cudaErrorSystemDriverMismatch", "restart the machine"), listing=803),
    "cuda-compat": Machine(("cudaErrorCompatNotSupportedOnDevice", "take it out"), listing=804),
    "no Fabric Manager": Machine(("cudaErrorSystemNotReady", "systemctl start nvidia-fabricmanager"), opening=802),
    "a GPU in exclusive mode": Machine(("cudaErrorDevicesUnavailable", "nvidia-smi -c DEFAULT"), opening=46),
    "a MIG slice without memory": Machine(("cudaErrorMemoryAllocation", "a larger GPU or MIG slice"), opening=2),
    "a driver that has failed": Machine(("cudaErrorUnknown", "restart the machine"), opening=999),
}


class Runtime:
    """CuPy's module of this name, on the machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(runtime, name)

    def getDeviceCount(self) -> int:
        return self._answer(self._machine.listing, self._machine.count)

    def setDevice(self, index: int) -> None:
        self._answer(self._machine.opening, 0)

    def deviceGetAttribute(self, attribute: int, index: int) -> int:
        return {75: 9, 76: 0}[attribute]  # cudaDevAttrComputeCapabilityMajor and -Minor

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"name": b"NVIDIA H100", "major": 9, "minor": 0, "totalGlobalMem": 80 << 30}

    def driverGetVersion(self) -> int:
        return 13000

    @staticmethod
    def _answer(status: int, value: int) -> int:
        if status:
            raise runtime.CUDARuntimeError(status)
        return value


@pytest.fixture(params=list(MACHINES))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This process sees one of the machines, from the driver's library up."""
    given = MACHINES[request.param]
    find, load, listed = importlib.util.find_spec, ctypes.CDLL, glob.glob
    exists, access = os.path.exists, os.access

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name == "cupy" and not given.has_cupy else find(name, *rest)

    def library(name: Any, *rest: Any, **named: Any) -> Any:
        if name != "libcuda.so.1":
            return load(name, *rest, **named)
        if not given.has_library:
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
        return SimpleNamespace(cuInit=lambda flags: 0)

    def files(pattern: str, **named: Any) -> list[str]:
        if not pattern.startswith("/dev/nvidia"):
            return listed(pattern, **named)
        return [file for file in given.denied if fnmatch.fnmatch(file, pattern)]

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(cupy_api, "make_primary_context", lambda index: None)
    for module in (cupy.cuda, cupy_api):
        monkeypatch.setattr(module, "runtime", Runtime(given))
    monkeypatch.setattr(platform, "release", lambda: given.release)
    monkeypatch.setattr(os.path, "exists", lambda path: given.container if path in PLACES else exists(path))
    monkeypatch.setattr(os, "access", lambda path, *mode: path not in given.denied and access(path, *mode))
    monkeypatch.setattr(glob, "glob", files)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in given.environment.items():
        monkeypatch.setenv(name, value)
    return given


def says(machine: Machine, text: str) -> bool:
    words = " ".join(text.split())
    return all(told in words for told in machine.told)


def test_opening_raises_one_typed_error(machine: Machine) -> None:
    with pytest.raises(ga.GpuActorsError) as caught, ga.open_context("cuda"):
        pass
    assert says(machine, str(caught.value)), caught.value


def test_the_doctor_says_what_to_do(machine: Machine, run: Run) -> None:
    code, out, err = run("doctor", "--json", "--device", "cuda")
    report = json.loads(out)
    assert (code, report["usable"], err) == (1, False, "")
    trial = report["checks"][-1]
    assert trial["state"] == "problem"
    assert says(machine, trial["detail"]), trial
    code, out, err = run("doctor", "--device", "cuda")
    assert (code, err) == (1, "")
    shown = " ".join(" ".join(line.strip("│ ").split("│")) for line in out.splitlines())
    assert machine.told[0] in " ".join(shown.split())


def test_the_first_hour_says_what_to_do(machine: Machine, run: Run, tmp_path: Path) -> None:
    bundle = tmp_path / "report.zip"
    code, out, err = run("doctor", "--launch", "--json", "--device", "cuda", "--bundle", bundle)
    record = json.loads(out)
    assert (code, record["works"]) == (1, False)
    (failed,) = [finding for finding in record["findings"] if finding["verdict"] == "failed"]
    assert says(machine, failed["found"]), failed
    assert failed["advice"]
    assert "Traceback" not in err
    code, out, _ = run("doctor", "--launch", "--device", "cuda")
    assert code == 1
    assert "does not work" in out


# What only a request shows


ROWS = np.ones((1, 16, 2, 64), np.float16)


def test_a_gpu_before_ampere_runs_no_attention_and_says_so(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("gpu_actors.devices.cuda.cuda_usable", lambda *_: None)
    monkeypatch.setattr("gpu_actors.devices.cuda.device.caller_streams", lambda index: None)
    monkeypatch.setattr(cupy_api, "CupyApi", lambda index: FakeCuda(capability=75))
    with ga.open_context("cuda") as ctx, pytest.raises(ga.Unsupported, match=r"8\.0 \(Ampere\) and newer"):
        ctx.flash_attn.forward(ROWS, ROWS, ROWS).result()
    code, out, _ = run("doctor", "--json", "--device", "cuda")
    assert code == 1
    assert "8.0 (Ampere) and newer" in json.loads(out)["checks"][-1]["detail"]


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (200, "install a newer driver"),
        (209, r"leave out ContextOptions\(arch=\.\.\.\)"),
        (222, "the driver is older than NVRTC: install a newer driver"),
    ],
)
def test_a_cubin_that_the_driver_refuses_is_an_error_of_the_launch(status: int, told: str) -> None:
    api = FakeCuda()
    device = CudaDevice(0, ga.ContextOptions(), api)
    api.fail("load_module", status)
    with pytest.raises(ga.LaunchError, match=told):
        device.load(SimpleNamespace(data=b"cubin"), "f")  # type: ignore[arg-type]
    device.close()
