"""docs/kernel_guide.md step by step: its files go into a copy of the package, where its kernel answers requests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.docs import examples, run_example
from support.service import REPOSITORY

PAGE = REPOSITORY / "docs" / "kernel_guide.md"
ALONE, LAUNCH, DISPATCH, CHECK = examples(PAGE)


def test_the_kernel_without_a_place_in_the_package_runs() -> None:
    run_example(ALONE, {}, PAGE.name)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the guide's files."""
    home = tmp_path_factory.mktemp("guide")
    for folder in ("gpu_actors", "kernels_cu"):
        shutil.copytree(REPOSITORY / folder, home / folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = PAGE.read_text(encoding="utf-8")
    kernel = re.findall(r"^```cuda\n(.*?)^```", text, re.M | re.S)
    assert len(kernel) == 1
    files = {"kernels_cu/rows/forward_rows.cu": kernel[0], "gpu_actors/kernels/rows.py": LAUNCH}
    for name, content in files.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(content, encoding="utf-8")
    imported, families = DISPATCH.strip().split("\n\n")
    dispatch = home / "gpu_actors/kernels/dispatch.py"
    before = dispatch.read_text(encoding="utf-8")
    (found,) = re.findall(r"^FAMILIES = \([^)]*\)$", before, re.M)
    assert families == found.replace("(", "(\n    FORWARD_ROWS,", 1), "the page shows FAMILIES as it is, with one more"
    dispatch.write_text(before.replace(found, f"{imported}\n\n{families}"), encoding="utf-8")
    return home


def checked(package: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(package)}
    return subprocess.run(
        [sys.executable, "-c", CHECK], cwd=package, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_guides_kernel_answers_in_a_copy_of_the_package(package: Path) -> None:
    done = checked(package)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "forward_rows agrees with the oracle" in done.stdout


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("o = o * scale + p", "o = o + p"),
        ("sum = sum * scale + p", "sum = sum + p"),
        ("int lanes = 16", "int lanes = 8"),
        ("lse = most +", "lse = 0 *"),
        ("% params.heads_q;", "% params.heads_kv;"),
        ("exp_of(before - most)", "exp_of(most - before)"),
        ("v[key * params.v_strides.row", "v[key * params.k_strides.head"),
    ],
)
def test_the_guides_check_catches_a_bug(package: Path, right: str, wrong: str) -> None:
    file = package / "kernels_cu/rows/forward_rows.cu"
    sound = file.read_text(encoding="utf-8")
    assert right in sound
    file.write_text(sound.replace(right, wrong, 1), encoding="utf-8")
    try:
        assert checked(package).returncode != 0
    finally:
        file.write_text(sound, encoding="utf-8")
