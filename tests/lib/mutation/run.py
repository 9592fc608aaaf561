"""What every mutation run does: seeds its bugs one by one, says what caught each, and writes a log of all."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inside.emulation import EmulationFault
from mutation.drawn import draw
from mutation.forward_mutants import Mutant
from support.logs import write_log

from gpu_actors import CompileError, InvalidRequest

__all__ = ["probes_of", "run_mutants"]

SURVIVED = "survived"
REFUSED = "does not compile"


def run_mutants(
    family: str,
    mutants: Sequence[Mutant],
    arguments: Sequence[str],
    check_clean: Callable[[Sequence[Mutant], Path], None],
    run_probes: Callable[[Mutant, Path], None],
    told: Callable[[str], str] = lambda message: f"{message.split(' ', 1)[0]} differs",
) -> int:
    """The exit code. arguments: names of the mutants to run, none for all; or how many to draw. Names write no log.

    check_clean: raises unless their probes pass without a bug. run_probes: runs those of a mutant, and raises
    EmulationFault or AssertionError where they catch it. told: what an assertion's message says of that.
    """
    parser = argparse.ArgumentParser(prog=f"scripts/mutants {family}")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--drawn", type=int, metavar="COUNT", help="draw so many bugs instead")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    names, log = given.names, f"mutation_{family}"
    if given.drawn is not None:
        log = f"drawn_{family}_{given.seed}"
        try:
            mutants = draw(mutants, given.drawn, given.seed)
        except InvalidRequest as error:  # its modules are no kernels
            parser.error(f"nothing can be drawn from {family}: {error}")
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        sys.stderr.write(f"no such mutant: {', '.join(sorted(unknown))}\n")
        return 2
    chosen = [mutant for mutant in mutants if not names or mutant.name in names]
    lines, survivors, refused, start = [], 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        check_clean(chosen, Path(folder))
        for mutant in chosen:
            found = _verdict(mutant, Path(folder), run_probes, told)
            sys.stdout.write(f"{mutant.kernel}  {mutant.name}: {found}\n")
            sys.stdout.flush()
            name = mutant.name.replace("|", "\\|")
            lines.append(f"| {mutant.kernel} | {name} | {', '.join(mutant.probes)} | {found} |")
            survivors += found == SURVIVED
            refused += found == REFUSED
    tried = len(chosen) - refused
    caught = f"{tried - survivors} of {tried} caught in {time.monotonic() - start:.0f} s"
    sys.stdout.write(caught + "\n")
    if not names:
        write_log(log, caught, ("kernel or module", "bug", "probes", "caught by"), lines)
    return 1 if survivors or (refused and given.drawn is None) else 0


def _verdict(
    mutant: Mutant, cache: Path, run_probes: Callable[[Mutant, Path], None], told: Callable[[str], str]
) -> str:
    """How the mutant was caught, or SURVIVED or REFUSED."""
    try:
        run_probes(mutant, cache)
    except EmulationFault as fault:
        return f"emulation: {fault.kind}"
    except AssertionError as error:
        return told(str(error))
    except CompileError:
        return REFUSED
    return SURVIVED


def probes_of(mutants: Sequence[Mutant]) -> tuple[str, ...]:
    """All probes of some mutants, each once."""
    return tuple(dict.fromkeys(probe for mutant in mutants for probe in mutant.probes))
