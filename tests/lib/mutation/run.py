"""What every mutation run does: seeds its bugs one by one, says what caught each, and writes a log of all."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mutation.forward_mutants import Mutant
from support.logs import write_log

from gpu_actors.devices.emulation import EmulationFault

__all__ = ["probes_of", "run_mutants"]


def run_mutants(
    family: str,
    mutants: Sequence[Mutant],
    names: Sequence[str],
    check_clean: Callable[[Sequence[Mutant], Path], None],
    run_probes: Callable[[Mutant, Path], None],
    told: Callable[[str], str] = lambda message: f"{message.split(' ', 1)[0]} differs",
) -> int:
    """The exit code. names: the mutants to run, none for all, which alone writes the log.

    check_clean: raises unless their probes pass without a bug. run_probes: runs those of a mutant, and raises
    EmulationFault or AssertionError where they catch it. told: what an assertion's message says of that.
    """
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        sys.stderr.write(f"no such mutant: {', '.join(sorted(unknown))}\n")
        return 2
    chosen = [mutant for mutant in mutants if not names or mutant.name in names]
    lines, survivors, start = [], 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        check_clean(chosen, Path(folder))
        for mutant in chosen:
            found = _verdict(mutant, Path(folder), run_probes, told)
            sys.stdout.write(f"{mutant.kernel}  {mutant.name}: {found}\n")
            sys.stdout.flush()
            lines.append(f"| {mutant.kernel} | {mutant.name} | {', '.join(mutant.probes)} | {found} |")
            survivors += found == "survived"
    caught = f"{len(chosen) - survivors} of {len(chosen)} caught in {time.monotonic() - start:.0f} s"
    sys.stdout.write(caught + "\n")
    if not names:
        write_log(f"mutation_{family}", caught, ("kernel or module", "bug", "probes", "caught by"), lines)
    return 1 if survivors else 0


def _verdict(
    mutant: Mutant, cache: Path, run_probes: Callable[[Mutant, Path], None], told: Callable[[str], str]
) -> str:
    """How the mutant was caught, or "survived"."""
    try:
        run_probes(mutant, cache)
    except EmulationFault as fault:
        return f"emulation: {fault.kind}"
    except AssertionError as error:
        return told(str(error))
    return "survived"


def probes_of(mutants: Sequence[Mutant]) -> tuple[str, ...]:
    """All probes of some mutants, each once."""
    return tuple(dict.fromkeys(probe for mutant in mutants for probe in mutant.probes))
