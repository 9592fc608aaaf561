"""Where faults of asm statements are seeded: in a function of kernels_cu/ptx, or in a macro's text."""

from __future__ import annotations

import re

from mutation.forward_mutants import Mutant
from support.service import KERNELS_CU

__all__ = ["NOT_VOLATILE", "NO_CLOBBER", "faults_in", "faults_of"]


def _function(file: str, name: str, nth: int) -> str:
    """The text of the nth function of this name that holds asm."""
    text = (KERNELS_CU / "ptx" / file).read_text()
    pattern = rf"^WRAPPER [\w:<>* ]*\b{name}\([^{{]*\) \{{(?: [^\n]*\}}$|.*?^\}}$)"
    found = [match[0] for match in re.finditer(pattern, text, re.M | re.S)]
    return [body for body in found if "asm" in body][nth]


def faults_in(
    file: str, function: str, *faults: tuple[str, str, str], probes: tuple[str, ...], nth: int = 0
) -> list[Mutant]:
    """faults: what is wrong, the text within the function, and what stands there instead."""
    body = _function(file, function, nth)
    mutants = []
    for fault, old, new in faults:
        if old not in body:
            raise LookupError(f"{function}: no {old!r}")
        rank = f" of {nth + 1} coordinates" if function.startswith("tma") and nth else ""
        name = f"{function}{rank}: {fault}"
        mutants.append(Mutant(name, file.removesuffix(".cuh"), f"ptx/{file}", body, body.replace(old, new), probes))
    return mutants


def faults_of(file: str, probes: tuple[str, ...], *faults: tuple[str, str, str]) -> list[Mutant]:
    """The same for text outside functions, such as a macro's."""
    return [Mutant(name, file.removesuffix(".cuh"), f"ptx/{file}", old, new, probes) for name, old, new in faults]


NOT_VOLATILE = ("not volatile", "asm volatile(", "asm(")
NO_CLOBBER = ("no memory clobber", ': "memory")', ")")
