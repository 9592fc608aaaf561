"""What every mutation run does: seeds its bugs one by one, says what caught each, and writes a page of all."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mutation.forward_mutants import Mutant

__all__ = ["kernel_and_name", "probes_of", "run_mutants"]


def run_mutants(
    mutants: Sequence[Mutant],
    names: Sequence[str],
    check_clean: Callable[[Sequence[Mutant], Path], None],
    verdict: Callable[[Mutant, Path], str],
    cells: Callable[[Mutant], tuple[str, ...]],
    page: Path,
    text: str,
) -> int:
    """The exit code. names: the mutants to run, none for all, which alone writes the page.

    check_clean: raises unless their probes pass without a bug. verdict: what caught a mutant, or "survived". cells:
    what stands in a row of the page before probes and verdict. text: the page, with places for {caught} and {rows}.
    """
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        sys.stderr.write(f"no such mutant: {', '.join(sorted(unknown))}\n")
        return 2
    chosen = [mutant for mutant in mutants if not names or mutant.name in names]
    lines, survivors, start = [], 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        check_clean(chosen, Path(folder))
        for mutant in chosen:
            found = verdict(mutant, Path(folder))
            sys.stdout.write(f"{mutant.kernel}  {mutant.name}: {found}\n")
            sys.stdout.flush()
            lines.append(f"| {' | '.join((*cells(mutant), ', '.join(mutant.probes), found))} |")
            survivors += found == "survived"
    caught = f"{len(chosen) - survivors} of {len(chosen)} caught in {time.monotonic() - start:.0f} s"
    sys.stdout.write(caught + "\n")
    if not names:
        page.write_text(text.format(caught=caught, rows="\n".join(lines)), encoding="utf-8")
    return 1 if survivors else 0


def probes_of(mutants: Sequence[Mutant]) -> tuple[str, ...]:
    """All probes of some mutants, each once."""
    return tuple(dict.fromkeys(probe for mutant in mutants for probe in mutant.probes))


def kernel_and_name(mutant: Mutant) -> tuple[str, ...]:
    return mutant.kernel, mutant.name
