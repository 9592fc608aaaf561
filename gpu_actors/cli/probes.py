"""The probes of ``gpu-actors doctor``. A probe may raise anything: the error becomes a line of the report.

A library is imported only when its probe runs, so that one broken installation hides no other.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gpu_actors.extras import cuda_hint, install_hint, version_of

__all__ = ["PROBES", "Check", "DeviceVerdict", "device_verdicts", "run_probes"]

State = Literal["ok", "missing", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. state: "missing" if something optional is absent, "problem" if something is wrong.

    hint: what to do about it, if anything can be done.
    """

    name: str
    state: State
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """What ``open_context(device)`` would do here, and why."""

    device: str
    usable: bool
    runs: str
    why: str


Outcome = tuple[State, str] | tuple[State, str, str]
"""The state, the detail and the hint of a check."""

Probe = Callable[[], Outcome]
PROBES: dict[str, Probe] = {}


def _probe(name: str) -> Callable[[Probe], Probe]:
    def register(probe: Probe) -> Probe:
        PROBES[name] = probe
        return probe

    return register


def run_probes() -> Iterator[Check]:
    """Run every probe in order. Never raises."""
    for name, probe in PROBES.items():
        try:
            yield Check(name, *probe())
        except Exception as error:
            yield Check(name, "problem", f"{type(error).__name__}: {error}")


def device_verdicts() -> list[DeviceVerdict]:
    """What each device name would run, and why. Never raises."""
    obstacle = _obstacle(_cuda_obstacle)
    compiler = _obstacle(_emulation_obstacle)
    kernels = "the project's kernels, on the GPU"
    oracle = "the NumPy oracle, on the CPU"
    return [
        DeviceVerdict("auto", True, oracle if obstacle else kernels, obstacle or "CUDA is usable"),
        DeviceVerdict("cuda", not obstacle, "nothing" if obstacle else kernels, obstacle or "CUDA is usable"),
        DeviceVerdict(
            "emulated",
            not compiler,
            "nothing" if compiler else "the project's kernels, compiled for this CPU (slow, exact)",
            compiler or "a C++ compiler and the kernels are here",
        ),
        DeviceVerdict("mock", True, oracle, "it needs NumPy alone"),
    ]


def _obstacle(find: Callable[[], str | None]) -> str | None:
    try:
        return find()
    except Exception as error:
        return str(error) or type(error).__name__


def _cuda_obstacle() -> str | None:
    from gpu_actors.devices.cuda import attention_obstacle

    return attention_obstacle()


def _emulation_obstacle() -> str | None:
    from gpu_actors.compiling.assets import asset_root
    from gpu_actors.devices.emulation.toolchain import Toolchain

    asset_root()
    Toolchain.find()
    return None


def _cupy() -> Any:
    from gpu_actors.compiling.toolchain import import_cupy

    return import_cupy()


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


@_probe("python")
def _python() -> Outcome:
    detail = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    return "ok" if sys.version_info >= (3, 11) else "problem", detail


@_probe("platform")
def _platform() -> Outcome:
    return "ok", f"{platform.platform()}, {os.cpu_count()} CPUs"


@_probe("gpu_actors")
def _package() -> Outcome:
    from gpu_actors._version import __version__

    spec = importlib.util.find_spec("gpu_actors")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return "ok", f"{__version__}, {', '.join(places)}"


@_probe("libraries")
def _libraries() -> Outcome:
    versions = {name: version_of(name) for name in ("numpy", "ml_dtypes", "pykka", "anyio", "platformdirs")}
    absent = [name for name, version in versions.items() if version is None]
    detail = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if absent:
        return "problem", detail, f"pip install {' '.join(absent)}"
    return "ok", detail


@_probe("cupy")
def _cupy_check() -> Outcome:
    wheels = [f"cupy-cuda{major}x" for major in (12, 13) if version_of(f"cupy-cuda{major}x")]
    if importlib.util.find_spec("cupy") is None:
        return "missing", "not installed: no CUDA device and no NVRTC", cuda_hint()
    if len(wheels) > 1:
        both = f"{' and '.join(wheels)} are both installed"
        return "problem", both, f"pip uninstall {wheels[0]}"
    return "ok", f"{_cupy().__version__} ({', '.join(wheels) or 'not from a wheel'})"


@_probe("driver")
def _driver() -> Outcome:
    if importlib.util.find_spec("cupy") is None:
        return "missing", "cannot be asked without CuPy", cuda_hint()
    try:
        version = int(_cupy().cuda.runtime.driverGetVersion())
    except Exception as error:
        return "missing", f"no CUDA driver answers: {error}"
    if version == 0:
        return "missing", "no CUDA driver is installed"
    return "ok", f"supports CUDA {version // 1000}.{version % 1000 // 10}"


@_probe("devices")
def _devices() -> Outcome:
    if importlib.util.find_spec("cupy") is None:
        return "missing", "cannot be listed without CuPy", cuda_hint()
    runtime = _cupy().cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except Exception as error:
        return "missing", f"no CUDA device: {error}"
    found = []
    for index in range(count):
        properties = runtime.getDeviceProperties(index)
        name = properties["name"].decode()
        capability = f"{properties['major']}.{properties['minor']}"
        memory = _mib(properties["totalGlobalMem"])
        found.append(f"cuda:{index} {name}, compute capability {capability}, {memory}")
    return "ok" if found else "missing", "; ".join(found) or "no CUDA device"


@_probe("mps")
def _mps() -> Outcome:
    # The folder of the MPS daemon's pipes; the second one is NVIDIA's default.
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    if not os.path.exists(os.path.join(folder, "control")):
        return "ok", "no MPS daemon: a fault of one process ends no other; they share a GPU's memory"
    detail = f"an MPS daemon at {folder}: a fault of one process ends every process on its GPU"
    return "missing", detail, 'for isolation="process" and several workers a GPU, end the daemon'


@_probe("nvrtc")
def _nvrtc() -> Outcome:
    from gpu_actors.compiling.toolchain import find_toolchain, mismatch, supported_archs
    from gpu_actors.errors import CompileError

    if find_toolchain() is None:
        return "missing", "no NVRTC: kernels come from caches alone", cuda_hint()
    try:
        archs, toolchain = supported_archs(), find_toolchain(load=True)
    except CompileError as error:
        return "problem", str(error)
    assert toolchain is not None
    why = mismatch()
    adopted = "" if why is None else f"; {why}"
    return "ok", f"{toolchain.version}, compiles for {', '.join(archs)}{adopted}"


@_probe("cuda headers")
def _headers() -> Outcome:
    from gpu_actors.compiling.toolchain import find_toolchain

    toolchain = find_toolchain()
    folders = toolchain.include_dirs if toolchain is not None else ()
    wanted = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")
    absent = [name for name in wanted if not any((folder / name).is_file() for folder in folders)]
    if absent:
        return "missing", f"not found: {', '.join(absent)}", cuda_hint()
    return "ok", ", ".join(map(str, folders))


@_probe("kernels")
def _kernels() -> Outcome:
    from gpu_actors.compiling.assets import asset_root, asset_texts

    names = asset_texts()
    sources = sum(name.endswith(".cu") for name in names)
    shown = f"{asset_root()}: {sources} .cu, {len(names) - sources} .cuh"
    return "ok" if sources else "problem", shown


@_probe("cubin cache")
def _cache() -> Outcome:
    from gpu_actors.compiling.cubin_cache import default_cache_dir
    from gpu_actors.compiling.cubin_folder import CacheFolder
    from gpu_actors.errors import InvalidRequest

    path = default_cache_dir()
    try:
        folder = CacheFolder(path, writable=True)
        folder.check()
    except InvalidRequest as error:
        return "problem", f"{path} is not used: {error.reason}"
    if not path.exists():
        parent = next(place for place in path.parents if place.exists())
        if os.access(parent, os.W_OK):
            return "ok", f"{path}: will be made by the first compile"
        return "problem", f"{path} cannot be made: {parent} is not writable", _cache_hint()
    entries, size = folder.usage()
    detail = f"{path}: {entries} entries, {_mib(size)}, mode {path.stat().st_mode & 0o777:04o}"
    if os.access(path, os.W_OK):
        return "ok", f"{detail}, writable"
    return "problem", f"{detail}, not writable", _cache_hint()


def _cache_hint() -> str:
    return "set GPU_ACTORS_CACHE_DIR, or ContextOptions(cache_dir=...), to a folder of your own"


@_probe("c++ compiler")
def _compiler() -> Outcome:
    from gpu_actors.devices.emulation.toolchain import Toolchain
    from gpu_actors.errors import GpuActorsError

    try:
        found = Toolchain.find()
    except GpuActorsError as error:
        return "missing", str(error), install_hint("emulation")
    return "ok", f"{found.name}: {found.version}"


def _optional(name: str, distributions: tuple[str, ...], purpose: str, hint: Callable[[], str]) -> None:
    def probe() -> Outcome:
        versions = {distribution: version_of(distribution) for distribution in distributions}
        if all(versions.values()):
            return "ok", ", ".join(f"{key} {value}" for key, value in versions.items())
        absent = ", ".join(key for key, value in versions.items() if value is None)
        return "missing", f"{absent} not installed: no {purpose}", hint()

    PROBES[name] = probe


_optional("uvloop", ("uvloop",), "faster event loop", lambda: "pip install uvloop")
_optional("opentelemetry", ("opentelemetry-api",), "spans", lambda: install_hint("otel"))
_optional("prometheus", ("prometheus-client",), "metrics", lambda: install_hint("metrics"))
_optional("embedding", ("safetensors", "tokenizers"), "gpu-actors embed", lambda: install_hint("demo"))
_optional("generation", ("gguf", "tokenizers", "jinja2"), "gpu-actors chat and serve", lambda: install_hint("serve"))


@_probe("MiniLM weights")
def _minilm() -> Outcome:
    from gpu_actors.embedding.weights import DISTRIBUTION, WEIGHTS_HINT, find_weights

    absent = "no model for gpu-actors embed, unless --model names a folder"
    return _weights(DISTRIBUTION, absent, WEIGHTS_HINT, find_weights)


@_probe("SmolLM2 weights")
def _smollm2() -> Outcome:
    from gpu_actors.generation.loading import DISTRIBUTION, SMOLLM2_HINT, installed

    absent = "gpu-actors chat and serve have a tiny model of random weights, unless --model names another"
    return _weights(DISTRIBUTION, absent, SMOLLM2_HINT, installed)


def _weights(distribution: str, absent: str, hint: str, find: Callable[[], object]) -> Outcome:
    from gpu_actors.errors import InvalidRequest

    if version_of(distribution) is None:
        return "missing", f"{distribution} not installed: {absent}", hint
    try:
        find()
    except InvalidRequest as error:
        return "problem", f"{error.value} {error.reason}", hint
    return "ok", f"{distribution} {version_of(distribution)}, sha256 as expected"


_optional("server", ("starlette", "uvicorn"), "examples/inference_server.py", lambda: install_hint("demo"))
