"""The GPU's tests without a GPU: they are collected and rehearsed, and reach every kernel."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cases.gpu_candidates import CANDIDATES, REPEATABLE, Candidate
from inside.kernels import FAMILIES
from support.modules import module_at

import gpu_actors as ga

ROOT = Path(__file__).resolve().parents[2]
# One of each kind of check, also of the sum of shared gradients; the others are further cases of these.
SAMPLED = (
    *("forward float16 64 full", "forward float8_e4m3fn 64", "backward bfloat16 64 causal"),
    *("backward of one k and v for a batch", "decode several rows", "decode of arrays", "decode of a latent cache"),
)
SAMPLE = [
    pytest.param(candidate, marks=() if candidate.name in SAMPLED else pytest.mark.sweep, id=candidate.name)
    for candidate in CANDIDATES
]


@pytest.fixture(scope="module")
def mock() -> Any:
    with ga.open_context("mock", ga.ContextOptions(arch="sm_90a")) as context:
        yield context


@pytest.mark.timeout(180)  # starts a process that collects tests
def test_tests_for_a_gpu_are_collected_without_one_and_without_xdist(tmp_path: Path) -> None:
    """With the command of tests/gpu/run.py and the plugins of a machine without pytest-xdist."""
    run = module_at(ROOT / "tests" / "gpu" / "run.py")
    step = run.Step("all", "tests", ("tests/gpu", "tests/emulation/test_conformance_warp.py"), 60.0)
    plugins = [option for name in ("pytest_asyncio", "pytest_timeout", "anyio") for option in ("-p", name)]
    command = [*run.real_command(step, tmp_path, 60.0), *plugins, "--collect-only"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=170, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    files = [line.split("::")[0] for line in done.stdout.splitlines() if "::" in line]
    written = set((ROOT / "tests" / "gpu").glob("test_*.py"))
    if importlib.util.find_spec("torch") is None:  # files that need torch are left out
        written = {path for path in written if "\ntorch = pytest.importorskip" not in path.read_text()}
    assert {path.name for path in written} <= {Path(name).name for name in files}
    assert any("conformance" in name for name in files)


@pytest.mark.parametrize("candidate", SAMPLE)
def test_the_oracle_passes_every_candidates_check(mock: Any, candidate: Candidate) -> None:
    asked = candidate.make()
    result = mock.flash_attn.submit(asked.request).result(60)
    asked.check(result, "reference")
    out = result[0]
    spoilt = out.astype("float32")
    spoilt.flat[out.size // 2] += 1.0
    with pytest.raises(AssertionError):
        asked.check(result._replace(**{result._fields[0]: spoilt.astype(out.dtype)}), "reference")


def test_every_kernel_of_the_dispatch_table_has_a_candidate_and_most_are_repeated(mock: Any) -> None:
    """Only gradients that need not be deterministic are not repeated."""
    requests = {candidate: candidate.make().request for candidate in CANDIDATES}
    assert tuple(one for one, request in requests.items() if getattr(request, "deterministic", True)) == REPEATABLE
    reached = {mock.flash_attn.inspect_key(request).kernel for request in requests.values()}
    assert {family.name for family in FAMILIES} <= reached
