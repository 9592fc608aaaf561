"""Seeds faults into the host code of cascades, one at a time, and says which test on CPU devices catches each.

scripts/mutants cascade             every mutant, two to ten seconds each; writes build/reports/mutation_cascade.md
scripts/mutants cascade NAME...     only these, and writes nothing
"""

from __future__ import annotations

import sys

from mutation.cascade_mutants import MUTANTS, PROBES
from mutation.run import run_mutants
from mutation.workers import checks_of

__all__ = ["main"]


def main(names: list[str]) -> int:
    return run_mutants("cascade", MUTANTS, names, *checks_of(PROBES), str)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
