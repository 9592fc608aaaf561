"""Seeds faults into the host code of cascades, one at a time, and says which test on CPU devices catches each.

scripts/mutants cascade             every mutant, two to ten seconds each; writes docs/reports/mutation_cascade.md
scripts/mutants cascade NAME...     only these, and writes nothing
"""

from __future__ import annotations

import sys

from mutation.cascade_mutants import MUTANTS, PROBES
from mutation.run import kernel_and_name, run_mutants
from mutation.workers import ROOT, checks_of

__all__ = ["main"]

REPORT = ROOT / "docs" / "reports" / "mutation_cascade.md"


def main(names: list[str]) -> int:
    return run_mutants(MUTANTS, names, *checks_of(PROBES), kernel_and_name, REPORT, _REPORT, str)


_REPORT = """# Mutation run of cascades

`scripts/mutants cascade` seeds each of these faults into the host code that reads a shared prefix of a KvCache once. It
runs the tests of its probes on the mock and the emulated device. The last column names the test that fails.
{caught}.

| module | fault | probes | caught by |
|---|---|---|---|
{rows}
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
