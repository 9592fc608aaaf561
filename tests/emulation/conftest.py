from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from kernel_runs import ORDERS, Runner, cuda_runner, emulated_runner

from gpu_actors.devices.emulation.module_cache import ModuleCache


@pytest.fixture(scope="session")
def module_cache() -> Path:
    """The cache of all emulated modules, so that the executor, and zig's own parts, are built once for all tests."""
    folder = Path(platformdirs.user_cache_dir("gpu-actors")).absolute() / "emulated"
    ModuleCache(folder)  # makes it
    return folder


@pytest.fixture(scope="session", params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def runner(request: pytest.FixtureRequest, module_cache: Path) -> Runner:
    """Runs conformance kernels: on the CPU in several orders, and on a GPU if `-m gpu` asks for it."""
    if request.param == "emulated":
        return emulated_runner(module_cache)
    return cuda_runner()


@pytest.fixture(scope="session", params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def quick_runner(request: pytest.FixtureRequest, module_cache: Path) -> Runner:
    """As `runner`, in a single order: for kernels whose numbers do not depend on the order, on many operands."""
    if request.param == "emulated":
        return emulated_runner(module_cache, orders=ORDERS[:1])
    return cuda_runner()
