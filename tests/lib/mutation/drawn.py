"""Operators that seed bugs into CUDA sources as they are, and a draw from all places where they can be seeded.

An operator reads one line of code, so no bug depends on the rest of the source.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["ASM_OPERATORS", "OPERATORS", "Bug", "changes", "draw"]

Operator = Callable[[str], Iterator[str]]

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


def _replaced(pattern: str, new: str | Callable[[re.Match[str]], str]) -> Operator:
    """The line with each match in turn replaced."""
    compiled = re.compile(pattern)

    def change(line: str) -> Iterator[str]:
        for match in compiled.finditer(line):
            text = new(match) if callable(new) else match.expand(new)
            yield line[: match.start()] + text + line[match.end() :]

    return change


OPERATORS: dict[str, Operator] = {
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

ASM_OPERATORS: dict[str, Operator] = {
    "a qualifier of an instruction is dropped": _replaced(r'(?<=\w)\.(?!reg\b|\d)[A-Za-z]\w*(?:::\w+)?(?=[^"]*;)', ""),
    "an operand is another": _replaced(r"%(\d+)", lambda match: f"%{int(match[1]) ^ 1}"),
    "an address is 4 bytes further": _replaced(r"\[%(\d+)\]", r"[%\1 + 4]"),
    "memory is not clobbered": _replaced(r' *: "memory"', ""),
    "an asm statement may move": _replaced(r"\basm volatile\b", "asm"),
    "an instruction is dropped": _replaced(r'(?:(?<=")|(?<=\\n))[^\\"]+?;(?=\\n|")', ""),
    "a number is one more": OPERATORS["a number is one more"],
}


class Bug(NamedTuple):
    """number: of the changed line of ``file``, from 0. new: what it becomes."""

    operator: str
    file: str
    number: int
    new: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.file}:{self.number + 1}: `{self.new.strip()}`".replace("|", "\\|")

    def seeded(self, text: str) -> str:
        """The text of the file with the bug."""
        lines = text.split("\n")
        lines[self.number] = self.new
        return "\n".join(lines)


def _code(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of code without comments, directives, assertions and heads of declarations."""
    for number, line in enumerate(text.split("\n")):
        code = line.split("//")[0].rstrip()
        if code.strip() and not re.match(r"\s*(#|static_assert|template|struct|namespace|using|enum|class)", code):
            yield number, code


def changes(text: str, operators: Mapping[str, Operator] = OPERATORS) -> list[tuple[str, int, str]]:
    """Every operator at every place: its name, the line's number from 0, and the line that it makes."""
    return [
        (name, number, new)
        for number, line in _code(text)
        for name, operator in operators.items()
        for new in operator(line)
        if new != line
    ]


def draw(files: Mapping[str, str], operators: Mapping[str, Operator], count: int, seed: int) -> list[Bug]:
    """Different bugs, fewer where there are fewer places. files: texts by name.

    An operator is drawn first, then a place, so that frequent operators do not crowd out the others.
    """
    rng = random.Random(seed)
    places: dict[str, list[Bug]] = {name: [] for name in operators}
    for file, text in files.items():
        for name, number, new in changes(text, operators):
            places[name].append(Bug(name, file, number, new))
    drawn = []
    while len(drawn) < count and (names := [name for name, found in places.items() if found]):
        found = places[rng.choice(names)]
        drawn.append(found.pop(rng.randrange(len(found))))
    return drawn
