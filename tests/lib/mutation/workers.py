"""Seeds faults into what several workers share, one at a time, and says which test on mock devices catches each.

scripts/mutants workers             every mutant, two to ten seconds each; writes build/reports/mutation_workers.md
scripts/mutants workers NAME...     only these, and writes nothing
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mutation.forward_mutants import Mutant
from mutation.run import probes_of, run_mutants
from mutation.workers_mutants import MUTANTS, PROBES

__all__ = ["checks_of", "main", "run_tests"]

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 60  # of a test, before it counts as hung


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "lib")}
    command = [sys.executable, "-m", "mutation.host_runs"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def run_tests(nodes: Sequence[str], mutant: Mutant | None = None, limit: float = 5 * SECONDS) -> None:
    """Raises AssertionError with the test that caught the mutant."""
    run = {"file": "none", "old": "", "new": ""} if mutant is None else mutant._asdict()
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    run |= {"nodes": list(dict.fromkeys(nodes)), "marks": "not sweep", "seconds": SECONDS, "limit": limit}
    server.stdin.write(json.dumps(run) + "\n")
    server.stdin.flush()
    code, said = json.loads(server.stdout.readline())
    if code is None:
        raise AssertionError("hangs")
    if "LookupError" in said or code not in (0, 1):
        raise RuntimeError(said[-3000:])
    if code:
        found = re.search(r"^(?:FAILED|ERROR) \S+::(\w+)", said, re.M)
        raise AssertionError(found[1].removeprefix("test_").replace("_", " ") if found else "a test fails")


def checks_of(
    table: Mapping[str, tuple[str, ...]],
) -> tuple[Callable[[Sequence[Mutant], Path], None], Callable[[Mutant, Path], None]]:
    """The ``check_clean`` and ``run_probes`` of `run_mutants`. table: the tests of each probe."""

    def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
        try:
            run_tests([node for probe in probes_of(chosen) for node in table[probe]], limit=900.0)
        except AssertionError as error:
            raise RuntimeError("the probes do not pass without a fault") from error

    def run_probes(mutant: Mutant, cache: Path) -> None:
        run_tests([node for probe in mutant.probes for node in table[probe]], mutant)

    return check_clean, run_probes


def main(names: list[str]) -> int:
    return run_mutants("workers", MUTANTS, names, *checks_of(PROBES), str)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
