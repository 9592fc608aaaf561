"""Which instructions compute what exponentials are taken of, in machine code. For tests."""

from __future__ import annotations

import collections
import re

__all__ = ["exponent_sources", "fused_corrections"]

_WRITES = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z]\w+)\S*\s+(R\d+)\b")
_EXPONENTIAL = re.compile(r"\bMUFU\.EX2\s+R\d+,\s*(R\d+)")
_STORES = ("ST", "STG", "STS", "STL", "RED")


def exponent_sources(text: str) -> collections.Counter[str]:
    """Of each MUFU.EX2, the opcode of the last instruction before it that writes its operand. text: a disassembly."""
    found: collections.Counter[str] = collections.Counter()
    writer: dict[str, str] = {}
    for line in text.splitlines():
        if exponential := _EXPONENTIAL.search(line):
            found[writer.get(exponential[1], "nothing")] += 1
        if (written := _WRITES.search(line)) and written[1] not in _STORES:
            writer[written[2]] = written[1]
    return found


def fused_corrections(text: str, weights: int, corrections: int) -> list[str]:
    """What is wrong with the softmax's exponentials.

    weights: how many are of a score times a factor less the base, which is one fused operation. corrections: how many
    are of a difference of two bases, at the least. These are rounded numbers, and a correction is 1 where they are the
    same: of a fused product, it would be 2^(what rounding took off).
    """
    sources = exponent_sources(text)
    checks = {
        f"exponentials of {sources['FFMA']} fused products instead of {weights}": sources["FFMA"] != weights,
        f"exponentials of {sources['FADD']} differences, fewer than {corrections}": sources["FADD"] < corrections,
    }
    return [name for name, wrong in checks.items() if wrong]
