"""Seeds faults into the host code of a launch, one at a time, and says which test on the software driver catches each.

scripts/mutants host             every mutant, five to twenty seconds each; writes build/reports/mutation_host.md
scripts/mutants host NAME...     only these, and writes nothing
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mutation.forward_mutants import Mutant
from mutation.host_mutants import MUTANTS, PROBES
from mutation.run import probes_of, run_mutants

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 60  # of a test, before it counts as hung


@functools.cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "softgpu", "-m", "mutation.host_runs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "lib")}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def run_tests(probes: Sequence[str], mutant: Mutant | None = None, limit: float = 3 * SECONDS) -> None:
    """Raises AssertionError with what caught the mutant."""
    nodes = [node for probe in probes for node in PROBES[probe]]
    run = {"file": "none", "old": "", "new": ""} if mutant is None else mutant._asdict()
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps({**run, "nodes": nodes, "marks": "gpu", "seconds": SECONDS, "limit": limit}) + "\n")
    server.stdin.flush()
    code, said = json.loads(server.stdout.readline())
    if code is None:
        raise AssertionError("hangs")
    if "LookupError" in said or (code and not re.search(r"^(FAILED|ERROR) |Fatal Python", said, re.M)):
        raise RuntimeError(said[-3000:])
    if code:
        raise AssertionError(caught_by(said))


_LEFT = "something is left behind"
# What the driver or a test says, in the order in which it is looked for.
_SIGNS = (
    (r"race: ", "finding: race"),
    (r"freed too early", "finding: freed too early"),
    (r"out_of_bounds", "finding: out of bounds"),
    (r"softgpu: (\w+) in \w+, block", "finding: {}"),
    (r"reaches memory that is not allocated", "finding: copy out of bounds"),
    (r"Differing items", _LEFT),
    (r"Failed: Timeout|\+ Timeout", "hangs"),
    (r"Segmentation fault", "segmentation fault"),
    (r"^E\s+(?:\w+\.)*(\w+(?:Error|Lost|Unsupported|Request|Memory|Failure|Stopped))\b", "{}"),
)


def caught_by(said: str) -> str:
    signs = _SIGNS if not re.search(r"^FAILED ", said, re.M) else [sign for sign in _SIGNS if sign[1] != _LEFT]
    for sign, words in signs:
        if found := re.search(sign, said, re.M):
            name = found[1] if found.groups() else ""
            return "numbers differ" if name == "AssertionError" else words.format(name)
    return "a test fails"


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    try:
        run_tests(probes_of(chosen), limit=900.0)
    except AssertionError as error:
        raise RuntimeError("the probes do not pass without a fault") from error


def run_probes(mutant: Mutant, cache: Path) -> None:
    run_tests(mutant.probes, mutant)


def main(names: list[str]) -> int:
    return run_mutants("host", MUTANTS, names, check_clean, run_probes, str)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
