"""Finds in machine code which instructions compute the operands of the softmax's exponentials."""

from __future__ import annotations

import collections
import re

from gates.rows import Limit, at_least, exactly

__all__ = ["exponential_limits", "exponentials"]

_WRITES = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z]\w+)\S*\s+(R\d+)\b")
_EXPONENTIAL = re.compile(r"\bMUFU\.EX2\s+R\d+,\s*(R\d+)")
_STORES = ("ST", "STG", "STS", "STL", "RED")
_FUSED, _DIFFERENCES = "exponentials of fused products", "exponentials of differences"


def exponential_limits(weights: int, corrections: int) -> dict[str, Limit]:
    """weights: the exponentials of a score times a factor minus the base, one fused operation.

    corrections: the fewest exponentials of a difference of two bases. Bases are rounded, so a correction is 1 if they
    are equal. With a fused product it would be 2^(the rounding error).
    """
    return {_FUSED: exactly(weights), _DIFFERENCES: at_least(corrections)}


def exponentials(text: str) -> dict[str, float]:
    """The figures of these limits. text: a disassembly."""
    sources = _exponent_sources(text)
    return {_FUSED: sources["FFMA"], _DIFFERENCES: sources["FADD"]}


def _exponent_sources(text: str) -> collections.Counter[str]:
    """Of each MUFU.EX2, the opcode of the last instruction before it that writes its operand."""
    found: collections.Counter[str] = collections.Counter()
    writer: dict[str, str] = {}
    for line in text.splitlines():
        if exponential := _EXPONENTIAL.search(line):
            found[writer.get(exponential[1], "nothing")] += 1
        if (written := _WRITES.search(line)) and written[1] not in _STORES:
            writer[written[2]] = written[1]
    return found
