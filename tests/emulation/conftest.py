from __future__ import annotations

from pathlib import Path

import pytest
from kernel_runs import ORDERS, Runner, cuda_runner, emulated_runner


@pytest.fixture(scope="session")
def module_cache(shared_folder: Path) -> Path:
    """A cold cache of emulated modules, shared by all processes of a run."""
    folder = shared_folder / "emulated-modules"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="session", params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def runner(request: pytest.FixtureRequest, module_cache: Path) -> Runner:
    """Runs conformance kernels: on the CPU in several orders, and on a GPU where `-m gpu` asks for it."""
    if request.param == "emulated":
        return emulated_runner(module_cache)
    return cuda_runner()


@pytest.fixture(scope="session", params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def quick_runner(request: pytest.FixtureRequest, module_cache: Path) -> Runner:
    """As `runner`, in one order alone: for kernels whose numbers no order changes, on many operands."""
    if request.param == "emulated":
        return emulated_runner(module_cache, orders=ORDERS[:1])
    return cuda_runner()
