"""Proves variants of a kernel family, as a context does before it answers, in a process of its own.

    python -m mutation.proofs FAMILY COUNT    in tests/lib; prints the first failure, and exits with 1

With a bug in the sources, this shows whether a context would notice it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cases.proofs import covering, prove, variants_of_family
from inside.qualification import ProofFailed

from gpu_actors.errors import CompileError, LaunchError

__all__ = ["main"]

REFUSED = 3
"""The exit code if a kernel does not compile."""


def main(arguments: Sequence[str]) -> int:
    family, count = arguments[0], int(arguments[1])
    for variant in covering(variants_of_family(family), count):
        try:
            prove(variant)
        except CompileError:
            sys.stdout.write("does not compile\n")
            return REFUSED
        except (ProofFailed, LaunchError, AssertionError) as error:
            sys.stdout.write(f"{variant.kernel}: {type(error).__name__}: {str(error).splitlines()[0][:100]}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
