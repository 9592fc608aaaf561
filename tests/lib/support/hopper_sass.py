"""Reads the machine code of sm_90a kernels: main loops, and the instructions of their parts. For tests."""

from __future__ import annotations

import collections
import re
from typing import NamedTuple

__all__ = ["Loop", "instructions_of", "main_loops", "opcodes", "step_of"]

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
# Conditional branches: ends of loops, and skips. Waits that spin lie behind the loops and jump back into them without a
# condition.
_BRANCH = re.compile(r"^@!?U?P\w+\s+BRA\b.*?(0x[0-9a-f]+)")
_FIRST_WAIT, _LAST_WAIT = "DEPBAR.LE gsb0, 0x1", "DEPBAR.LE gsb0, 0x0"


class Loop(NamedTuple):
    """Instructions of a main loop, counted by opcode without suffixes.

    before: ahead of the first wait, for S. overlap: between it and the wait for O, while the tensor cores multiply.
    after: behind both. mask: the part of the overlap that a branch skips if a tile needs no mask.
    alone: the loop waits for all of its products before the softmax, which runs beside other consumers' products only.
    Instructions behind the last wait then count as overlap.
    """

    before: collections.Counter[str]
    overlap: collections.Counter[str]
    after: collections.Counter[str]
    mask: collections.Counter[str]
    alone: bool = False

    @property
    def instructions(self) -> int:
        """The number in an iteration without a mask."""
        return sum((self.before + self.overlap + self.after).values()) - self.masking

    @property
    def masking(self) -> int:
        return sum(self.mask.values())

    def count(self, opcode: str) -> int:
        """The number in the whole loop, its mask included."""
        return self.before[opcode] + self.overlap[opcode] + self.after[opcode]


def instructions_of(text: str) -> list[tuple[int, str]]:
    """(address, instruction) of a disassembly of one kernel, in order. Branch targets are addresses."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    code: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\w+):", line):
            waiting.append(label[1])
        elif match := _INSTRUCTION.search(line):
            address = int(match[1], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting = []
            code.append((address, match[2].strip()))
    named = re.compile(r"`\((\.L_x_\w+)\)")
    return [(address, named.sub(lambda m: hex(labels.get(m[1], 0)), text)) for address, text in code]


def opcodes(code: list[str]) -> collections.Counter[str]:
    return collections.Counter(_PREDICATE.sub("", text).split()[0].split(".")[0] for text in code)


def main_loops(code: list[tuple[int, str]], products: int) -> list[Loop]:
    """The loops with so many products (HGMMA, QGMMA) and at most one wait for S, in the order of their code."""
    spans = []
    for address, text in code:
        branch = _BRANCH.search(text)
        if branch and int(branch[1], 16) < address:
            spans.append((int(branch[1], 16), address))
    bodies = {span: [line for line in code if span[0] <= line[0] <= span[1]] for span in spans}
    loops = [
        span
        for span, body in bodies.items()
        if sum("GMMA" in text for _, text in body) == products and sum(_FIRST_WAIT in text for _, text in body) <= 1
    ]
    return [_split(bodies[span]) for span in sorted(loops)]


def _split(body: list[tuple[int, str]]) -> Loop:
    parts: list[list[tuple[int, str]]] = [[], [], []]
    part = 0
    waits = [n for n, (_, text) in enumerate(body) if _LAST_WAIT in text]
    if not any(_FIRST_WAIT in text for _, text in body):
        before, overlap = body[: waits[-1]], body[waits[-1] + 1 :]
        counted = [opcodes([text for _, text in lines]) for lines in (before, overlap)]
        return Loop(*counted, collections.Counter(), opcodes(_mask(overlap)), alone=True)
    for address, text in body:
        if _FIRST_WAIT in text:
            part = 1
        elif _LAST_WAIT in text:
            part = 2
        else:
            parts[part].append((address, text))
    before, overlap, after = ([text for _, text in lines] for lines in parts)
    return Loop(opcodes(before), opcodes(overlap), opcodes(after), opcodes(_mask(parts[1])))


def _mask(overlap: list[tuple[int, str]]) -> list[str]:
    """The largest part without special functions that a branch skips; the wait for keys has only four instructions."""
    parts: list[list[str]] = [[]]
    for address, text in overlap:
        if branch := _BRANCH.search(text):
            passed = [other for at, other in overlap if address < at < int(branch[1], 16)]
            if int(branch[1], 16) <= overlap[-1][0] and not any("MUFU" in other for other in passed):
                parts.append(passed)
    return max(parts, key=len)


def step_of(code: list[tuple[int, str]]) -> tuple[list[str], int]:
    """The instructions of the main loop of backward_sm90 or decode_sm90 that no forward branch skips, and how many
    others it has.

    The loop is the shortest one with products and exponentials. Branches skip masks and code for nonfinite numbers.
    """
    loops = []
    for address, text in code:
        branch = _BRANCH.search(text)
        if branch and int(branch[1], 16) < address:
            body = [line for line in code if int(branch[1], 16) <= line[0] <= address]
            if all(any(name in text for _, text in body) for name in ("GMMA", "MUFU.EX2")):
                loops.append(body)
    body = min(loops, key=len)
    step, until = [], 0
    for address, text in body:
        if address < until:
            continue
        step.append(text)
        branch = _BRANCH.search(text)
        if branch and address < int(branch[1], 16) <= body[-1][0]:
            until = int(branch[1], 16)
    return step, len(body) - len(step)
