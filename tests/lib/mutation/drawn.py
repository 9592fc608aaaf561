"""Draws bugs to seed from the kernels' sources as they are, by operators in place of a list.

    scripts/mutants FAMILY --drawn 40 --seed 7    writes build/reports/drawn_FAMILY.md

An operator reads one line of code. A bug is drawn from every line of a family's kernels and of the headers that they
include, so that none depends on how a line is spelled. Some drawn bugs are equivalent: survivors are read by a person.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence

from inside.compiling import asset_headers, asset_text, kernel_file
from mutation.forward_mutants import Mutant

__all__ = ["OPERATORS", "changes", "draw"]

# What the instructions are is checked by the conformance tests and by the list of `mutation.asm`.
_APART = ("ptx/", "emulation/")
_CONDITION = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_SYNC = r"(?:__syncwarp|__syncthreads|__threadfence|sync_\w+)|ptx::\w*(?:fence|wait|commit|sync|arrive|release)\w*"
_NO_STATEMENT = r"(?!return|const|break|continue|auto|int|float)"
_OTHER = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "*": "+",
    "%": "/",
    "<<": ">>",
}


def _replaced(pattern: str, new: str | Callable[[re.Match[str]], str]) -> Callable[[str], Iterator[str]]:
    """The line with each match in turn replaced."""
    compiled = re.compile(pattern)

    def change(line: str) -> Iterator[str]:
        for match in compiled.finditer(line):
            text = new(match) if callable(new) else match.expand(new)
            yield line[: match.start()] + text + line[match.end() :]

    return change


OPERATORS: dict[str, Callable[[str], Iterator[str]]] = {
    "a barrier, fence or wait is dropped": _replaced(rf"(?:{_SYNC})\([^;{{}}]*\);", ";"),
    "an index is one too high": _replaced(r"\[(?!&\])([^\[\]]+)\]", r"[(\1) + 1]"),
    "a comparison takes or leaves its edge": _replaced(
        r" (<=|>=|==|!=|<|>) ", lambda match: f" {_OTHER[match[1]]} "
    ),
    "and is or": _replaced(r" (&&|\|\|) ", lambda match: f" {_OTHER[match[1]]} "),
    "an operator is another": _replaced(r" ([-+*%]|<<) (?=[\w(])", lambda match: f" {_OTHER[match[1]]} "),
    "a term is dropped": _replaced(r" [-+] [\w.]+(?:\([^()]*\))?(?=[;,)\]])", ""),
    "a factor is dropped": _replaced(r" \* [\w.]+(?:\([^()]*\))?(?=[;,)\]])", ""),
    "a number is one more": _replaced(r"(?<![\w.])(\d+)(?![\w.])", lambda match: str(int(match[1]) + 1)),
    "a guard always holds": _replaced(rf"\bif {_CONDITION}", "if (true)"),
    "a guard never holds": _replaced(rf"\bif {_CONDITION}", "if (false)"),
    "a condition is turned": _replaced(r"(?<=[ (])([A-Za-z_]\w*(?:\.\w+)*) \? ", r"!(\1) ? "),
    "a number is cut to 32 bits": _replaced(r"\b(u?)int64_t(?=>?\(| \w+ = )", r"\1int32_t"),
    "a stage or parity is the other": _replaced(r"\b((?:\w+\.)?(?:parity|stage))\b(?= *[,)])", r"(\1 ^ 1)"),
    "an accumulation overwrites": _replaced(r" [-+*|^]= ", " = "),
    "a statement is dropped": _replaced(rf"^( *){_NO_STATEMENT}[\w.\[\]]+(?: [-+*|^]?= |\().*;$", r"\1;"),
}  # fmt: skip


def _code(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without comments: no directives, no assertions, no heads of declarations."""
    for number, line in enumerate(text.split("\n")):
        code = line.split("//")[0].rstrip()
        if code.strip() and not re.match(r"\s*(#|static_assert|template|struct|namespace|using|enum|class)", code):
            yield number, code


def changes(text: str) -> list[tuple[str, int, str]]:
    """Every operator at every place: its name, the line's number from 0, and the line that it makes."""
    return [
        (name, number, new)
        for number, line in _code(text)
        for name, operator in OPERATORS.items()
        for new in operator(line)
    ]


def draw(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Bugs of the kernels that a list names, each with every probe that the list has for its kernel.

    An operator is drawn first, then a place, so that frequent operators do not crowd out the others.
    """
    rng = random.Random(seed)
    probes: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        probes.setdefault(mutant.kernel, {}).update(dict.fromkeys(mutant.probes))
    places: dict[str, list[tuple[str, str, int, str]]] = {name: [] for name in OPERATORS}
    for kernel in probes:
        source = asset_text(kernel_file(kernel))
        for file, text in {kernel_file(kernel): source, **asset_headers(source)}.items():
            if not file.startswith(_APART):
                for name, number, new in changes(text):
                    places[name].append((kernel, file, number, new))
    drawn = []
    for _ in range(count):
        name = rng.choice([name for name, found in places.items() if found])
        kernel, file, number, new = places[name].pop(rng.randrange(len(places[name])))
        lines = asset_text(file).split("\n")
        drawn.append(
            Mutant(
                f"{name}: {file}:{number + 1}: `{new.strip()}`",
                kernel,
                file,
                *_anchored(lines, number, new),
                tuple(probes[kernel]),
            )
        )
    return drawn


def _anchored(lines: list[str], number: int, new: str) -> tuple[str, str]:
    """Old and new text, with as many lines around as make the old one stand once."""
    text, first, last = "\n".join(lines), number, number + 1
    while text.count("\n".join(lines[first:last])) > 1:
        first, last = max(0, first - 1), last + 1
    around = [*lines[first:number], new, *lines[number + 1 : last]]
    return "\n".join(lines[first:last]), "\n".join(around)
