"""Draws bugs from the sources of a kernel family, and runs its rows of `matrix` on each.

    scripts/mutants forward --drawn 40 --seed 7    about ten seconds each; writes build/reports/drawn_forward_7.md
    scripts/mutants forward --drawn 40 --proofs    by the proofs that a context runs first, instead of the rows

``asm`` draws from the wrappers in kernels_cu/ptx and runs the tests that compare them with the second reading of the
PTX ISA. It works on a clone of the last commit. Some drawn bugs change no result, so a person reads what survives.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inside.compiling import asset_headers, asset_text, asset_texts, kernel_file
from matrix.table import FAMILIES
from mutation.drawn import ASM_OPERATORS, OPERATORS, Bug, draw
from support.logs import write_log

__all__ = ["NAMES", "files_of", "main"]

NAMES = (*FAMILIES, "asm")
_ROOT = Path(__file__).resolve().parents[3]
_CONFORMANCE = ("test_asm_statements.py", *(f"test_conformance_{what}.py" for what in (
    "compiles", "convert", "copies", "pipelines", "tensors", "warp", "wgmma"
)))  # fmt: skip
_LIMIT_SECONDS = 900.0


def files_of(family: str) -> dict[str, str]:
    """The text of each file that a bug is drawn from, by its name in kernels_cu."""
    if family == "asm":
        return {name: text for name, text in asset_texts().items() if name.startswith("ptx/")}
    found = {}
    for kernel in FAMILIES[family].KERNELS:
        source = asset_text(kernel_file(kernel))
        found |= {kernel_file(kernel): source, **asset_headers(source)}
    return {name: text for name, text in found.items() if not name.startswith(("ptx/", "emulation/"))}


def main(family: str, arguments: Sequence[str]) -> int:
    """Returns the exit code: 1 if a bug survived."""
    parser = argparse.ArgumentParser(prog=f"scripts/mutants {family}")
    parser.add_argument("--drawn", type=int, default=30, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", action="store_true", help="run the rows of the sweep, too")
    parser.add_argument("--proofs", type=int, default=0, metavar="VARIANTS", nargs="?", const=24,
                        help="prove so many variants, as a context does, instead of the rows")  # fmt: skip
    given = parser.parse_args(arguments)
    operators = ASM_OPERATORS if family == "asm" else OPERATORS
    bugs = draw(files_of(family), operators, given.drawn, given.seed)
    with tempfile.TemporaryDirectory(prefix="gpu-actors-mutants-") as folder:
        clone = Path(folder, "clone")
        subprocess.run(["git", "clone", "-q", str(_ROOT), str(clone)], check=True)
        tests = _Proofs(clone, family, given.proofs) if given.proofs else _Tests(clone, family, given.sweep)
        if (found := tests.run()) != _SURVIVED:
            raise RuntimeError(f"the tests fail without a bug: {found}")
        verdicts = [_tried(bug, clone / "kernels_cu" / bug.file, tests) for bug in bugs]
    survivors, refused = verdicts.count(_SURVIVED), verdicts.count(_REFUSED)
    tried = len(bugs) - refused
    said = f"{tried - survivors} of {tried} caught, {refused} do not compile"
    rows = [f"| {bug} | {verdict} |" for bug, verdict in zip(bugs, verdicts, strict=True)]
    write_log(f"{'proved' if given.proofs else 'drawn'}_{family}_{given.seed}", said, ("bug", "caught by"), rows)
    sys.stdout.write(said + "\n")
    return 1 if survivors else 0


_SURVIVED, _REFUSED = "survived", "does not compile"


def _environment(clone: Path) -> dict[str, str]:
    """The environment of processes in a clone. Both caches are removed with the clone."""
    return os.environ | {
        "PYTHONPATH": str(clone),
        "GPU_ACTORS_TEST_CACHE_DIR": str(clone.parent / "cubins"),
        "XDG_CACHE_HOME": str(clone.parent / "cache"),
    }


class _Proofs:
    """The proofs of a family's variants in a clone."""

    def __init__(self, clone: Path, family: str, count: int) -> None:
        self._command = [sys.executable, "-m", "mutation.proofs", family, str(count)]
        self._folder = clone / "tests" / "lib"
        self._environment = _environment(clone)

    def run(self) -> str:
        """What failed first, _SURVIVED or _REFUSED."""
        given: dict[str, Any] = {"cwd": self._folder, "env": self._environment, "text": True, "capture_output": True}
        try:
            run = subprocess.run(self._command, timeout=_LIMIT_SECONDS, check=False, **given)
        except subprocess.TimeoutExpired:
            return "hangs"
        if run.returncode in (0, 3):
            return _REFUSED if run.returncode else _SURVIVED
        return run.stdout.strip() or f"the process ended with {run.returncode}: {run.stderr[-200:]}"


class _Tests:
    """The tests of a family in a clone."""

    def __init__(self, clone: Path, family: str, sweep: bool) -> None:
        self._clone = clone
        tests = ["tests/kernels/test_matrix.py", "-k", f"[{family}-"]
        if family == "asm":
            tests = [f"tests/emulation/{name}" for name in _CONFORMANCE]
        marks = "not gpu" if sweep else "not gpu and not sweep"
        self._command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        self._command += ["-p", "no:randomly", "--tb=short", "-m", marks, *tests]
        self._environment = _environment(clone)

    def run(self) -> str:
        """What failed first, _SURVIVED or _REFUSED."""
        try:
            run = subprocess.run(
                self._command,
                cwd=self._clone,
                env=self._environment,
                text=True,
                capture_output=True,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "hangs"
        if run.returncode == 0:
            return _SURVIVED
        if re.search(r"^E +(?:\S+\.)?CompileError", run.stdout, re.M):
            return _REFUSED
        failed = re.search(r"^(?:FAILED|ERROR) \S+?::(.+?)(?: - |$)", run.stdout, re.M)
        if failed is None:
            raise RuntimeError(f"pytest ended with {run.returncode}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
        fault = re.search(r"^E +(?:\S+\.)?EmulationFault: (.{,80})", run.stdout, re.M)
        return failed[1] + (f": {fault[1]}" if fault else "")


def _tried(bug: Bug, path: Path, tests: _Tests | _Proofs) -> str:
    text = path.read_text("utf-8")
    path.write_text(bug.seeded(text), "utf-8")
    try:
        verdict = tests.run()
    finally:
        path.write_text(text, "utf-8")
    sys.stdout.write(f"{bug}: {verdict}\n")
    sys.stdout.flush()
    return verdict
