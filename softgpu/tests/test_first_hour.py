"""``gpu-actors doctor --launch`` with real CuPy: its findings for a healthy device, and for each fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMINED = """
import json, sys
import gpu_actors as ga
from gpu_actors.bench import ceilings, timing
from gpu_actors.cli import first_hour
from gpu_actors.testing import FaultPlan
# The cases of a GPU would take hours here. Kernels run in a process that has no page-locked memory of this one, so
# nothing holds the stream while a turn is enqueued.
small = first_hour.first_cases(small=True)
first_hour.first_cases = lambda small=True, cases=small: cases
ceilings._COPY = 1 << 20
timing._HOLD = 'extern "C" __global__ void hold(ulonglong2 unused) {}'
def examined(**options):
    hour = first_hour.examine("cuda", ga.ContextOptions(cache_dir=FOLDER, **options))
    for finding in hour.findings:
        print(json.dumps([finding.verdict, finding.name, finding.found, finding.advice]))
"""


Examine = Callable[..., list[list[str]]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def examine(built: Path, tmp_path: Path, in_a_process: Any) -> Examine:
    """Runs a program and returns the findings: verdict, name, what was found, what to do. settings: of the driver."""

    def run(body: str, **settings: str) -> list[list[str]]:
        if not list(built.iterdir()):
            in_a_process(f"FOLDER = {str(built)!r}\n" + EXAMINED + "examined()")
        folder = shutil.copytree(built, tmp_path / "cache")
        ended = in_a_process(f"FOLDER = {str(folder)!r}\n" + EXAMINED + body, **settings)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("[")]
        assert lines, ended.stdout + ended.stderr
        return [json.loads(line) for line in lines]

    return run


def test_healthy(examine: Examine) -> None:
    found = examine("examined()")
    assert not {verdict for verdict, *_ in found} & {"wrong", "failed", "not run"}, found
    assert {"append", "forward_sm90", "backward_sm90", "decode_mma"} <= {name for _, name, *_ in found}


def test_a_wrong_kernel(examine: Examine) -> None:
    found = examine("examined(fault_plan=FaultPlan().wrong('forward_sm90'))")
    wrong = [entry for entry in found if entry[0] == "wrong"]
    assert {name for _, name, *_ in wrong} == {"forward_sm90"}
    assert "forward_mma" in {name for verdict, name, *_ in found if verdict == "works"}
    assert "quarantined: out is wrong in" in wrong[0][2]
    assert [name.split()[0] for verdict, name, *_ in found if verdict in ("works", "slow")][-5:] == [
        "forward",
        "forward",
        "decode",
        "decode",
        "backward",
    ]


def test_a_hanging_kernel(examine: Examine) -> None:
    plan = "FaultPlan().hang(kernel='decode_mma')"
    found = examine(f"examined(fault_plan={plan}, hang_timeout=10.0)")
    hanging = [entry for entry in found if entry[0] == "wrong"]
    assert {name for _, name, *_ in hanging} == {"decode_mma"}
    assert "has not ended within 10 s" in hanging[0][2]
    assert hanging[0][3]


@pytest.mark.parametrize("number", [1, 40])
def test_a_lost_device(examine: Examine, number: int) -> None:
    found = examine(f"control.fail_launch(700, {number}); examined()")
    lost = next(entry for entry in found if entry[0] in ("failed", "wrong"))
    assert "ContextLost" in lost[2] or "cudaErrorIllegalAddress" in lost[2], lost
    assert lost[3]
    assert found[-1][:2] == ["not run", "the rest"]


@pytest.mark.parametrize("mebibytes", [1, 4])
def test_no_memory(examine: Examine, mebibytes: int) -> None:
    found = examine("examined()", SOFTGPU_MEMORY_MIB=str(mebibytes))
    lacking = [entry for entry in found if "OutOfDeviceMemory" in entry[2] or "Out of memory" in entry[2]]
    assert "copy" in {name for _, name, *_ in lacking}, found
    assert all("use a larger GPU" in advice for *_, advice in lacking)
