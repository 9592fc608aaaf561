"""The wheel holds what an installation needs: the kernels are found in it and compile from it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from service_support import REPOSITORY

BUDGET = 1_000_000

_COMPILE = """
from gpu_actors.kernels.assets import asset_root
from gpu_actors.kernels.compiler import Compiler
from gpu_actors.kernels.variants import kernel_source, standard_variants

key = standard_variants("sm_80")[0]
cubin = Compiler().compile(kernel_source(key), "sm_80")
print(asset_root(), cubin.arch, len(cubin.data) > 1000)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_is_within_its_budget(wheel: Path) -> None:
    assert wheel.stat().st_size < BUDGET


def test_the_wheel_holds_every_source_and_header_and_the_typing_marker(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    kernels = REPOSITORY / "kernels_cu"
    sources = {f"gpu_actors/kernels_cu/{path.relative_to(kernels)}" for path in kernels.rglob("*.cu*")}
    assert sources <= names
    assert "gpu_actors/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "examples/"))]


def test_a_kernel_compiles_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / "gpu_actors" / "kernels_cu"), "sm_80", "True"]
