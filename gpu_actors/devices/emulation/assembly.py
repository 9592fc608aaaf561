"""Replaces the inline-asm statements of a preprocessed kernel by calls that a CPU can run.

Host compilers know neither a statement's instructions nor its constraints. So a statement becomes a call of
``emulation::execute`` (kernels_cu/emulation/assembly) with the addresses of its operands. ``__asm__`` is not replaced,
because host code spells its own asm that way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

__all__ = ["AsmOperand", "AsmStatement", "UnknownAsm", "randomize_contraction", "replace_asm", "statements"]

# Each alternative begins with a character of its own, so that a search skips to the next of these five characters.
_TOKEN = re.compile(
    r"""
      \#(?<![^\n]\#)\ (?P<line>\d+)\ "(?P<file>[^"\n]*)"[^\n]*$   # where the text that follows comes from
    | R"(?P<mark>[^(\s]{0,16})\((?s:.*?)\)(?P=mark)"               # a raw string
    | "(?:\\.|[^"\\\n])*" | '(?<![0-9a-fA-F]')(?:\\.|[^'\\\n])*'
    | a(?<!\wa)sm\b
    """,
    re.VERBOSE | re.MULTILINE,
)
_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'|[()\[\]{}:,]')
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')
_HEAD = re.compile(r"\s*(volatile\b|__volatile__\b)?\s*\(")
_OPERAND = re.compile(r'\s*("(?:[^"\\\n])*")\s*\((.*)\)\s*', re.DOTALL)
_OUTPUT = re.compile(r"[=+]&?[hrlfd]")
_INPUT = re.compile(r"[hrlfdn]")
_BLOCK = re.compile(r'^# \d+ "(?P<file>[^"\n]*)"|\)\s*\{', re.MULTILINE)
_FUSE_OR_NOT = ('_Pragma("clang fp contract(off)")', '_Pragma("clang fp contract(fast)")')
_MARKER = re.compile(r"^# \d+ \"[^\n]*\n?", re.MULTILINE)


class UnknownAsm(Exception):
    """An asm statement of a form that the emulated device does not support. The text begins with its file and line."""


@dataclass(frozen=True)
class AsmOperand:
    """One operand: its constraint, such as "=r", and the C++ expression in parentheses."""

    constraint: str
    expression: str


@dataclass(frozen=True)
class AsmStatement:
    """One asm statement.

    literal: the template as C++ string literals.
    file, line: where it begins.
    """

    literal: str
    volatile: bool
    outputs: tuple[AsmOperand, ...]
    inputs: tuple[AsmOperand, ...]
    clobbers: tuple[str, ...]
    file: str
    line: int

    @property
    def template(self) -> str:
        """The text of the instructions."""
        return _text(self.literal)

    @property
    def constraints(self) -> str:
        """The constraints of the outputs and then the inputs, separated by commas."""
        return ",".join(operand.constraint for operand in (*self.outputs, *self.inputs))

    def call(self) -> str:
        """A C++ expression that executes the statement."""
        addresses = [_address(operand) for operand in (*self.outputs, *self.inputs)]
        if not self.template.strip():  # it keeps registers in place, and executes nothing
            return "(" + "".join(f"(void){address}, " for address in addresses) + "(void)0)"
        fields = (
            self.literal,
            f'"{self.constraints}"',
            f'"{",".join(self.clobbers)}"',
            str(self.volatile).lower(),
            f'"{self.file}"',
            str(self.line),
            "nullptr",
        )
        operands = f"emulation::Operands<{len(addresses)}>{{{{{', '.join(addresses)}}}}}.at" if addresses else "nullptr"
        return (
            f"({{ static emulation::Statement emulated_statement = {{{', '.join(fields)}}}; "
            f"emulation::execute(emulated_statement, {operands}); }})"
        )


def replace_asm(text: str) -> str:
    """Preprocessed C++ with each asm statement replaced by its call, on the same lines.

    Raises UnknownAsm for a statement of a form that is not supported: asm goto, operands by name, constraints other
    than CUDA's, or more than four parts.
    """
    parts, copied = [], 0
    for statement, start, end in _scan(text):
        lines = text.count("\n", start, end)
        parts += [text[copied:start], statement.call(), "\n" * lines]
        copied = end
    return "".join([*parts, text[copied:]])


def randomize_contraction(text: str, seed: int) -> str:
    """Preprocessed C++ in which products are not fused in about half of the blocks, which the seed chooses.

    These are blocks of the kernel and its headers. Headers of the system have absolute paths, and are not changed.
    """
    random = Random(seed)
    parts, copied, in_kernel = [], 0, True
    for match in _BLOCK.finditer(text):
        if match["file"] is not None:
            in_kernel = not match["file"].startswith("/")
        elif in_kernel:
            parts += [text[copied : match.end()], random.choice(_FUSE_OR_NOT)]
            copied = match.end()
    return "".join([*parts, text[copied:]])


def statements(text: str) -> tuple[AsmStatement, ...]:
    """The asm statements of preprocessed C++, in order. Raises UnknownAsm as `replace_asm` does."""
    return tuple(statement for statement, _, _ in _scan(text))


def _scan(text: str) -> Iterator[tuple[AsmStatement, int, int]]:
    """Each statement, with the index where it begins and the index after its closing parenthesis."""
    file, line, counted, at = "", 1, 0, 0
    while (token := _TOKEN.search(text, at)) is not None:
        at = token.end()
        if token["line"] is not None:
            file, line, counted = token["file"], int(token["line"]), min(at + 1, len(text))
        elif token[0] == "asm":
            line += text.count("\n", counted, token.start())
            counted = token.start()
            statement, at = _read(text, token.end(), file, line)
            yield statement, token.start(), at


def _read(text: str, at: int, file: str, line: int) -> tuple[AsmStatement, int]:
    """The statement whose ``asm`` ends at ``at``, and the index where it ends."""
    head = _HEAD.match(text, at)
    if head is None:
        raise _unknown(file, line, f"{text[at : at + 30]!r} follows asm")
    parts, end = _parts(text, head.end(), file, line)
    if len(parts) > 4:
        raise _unknown(file, line, "it has more than four parts")
    template, outputs, inputs, clobbers = (*parts, [], [], [])[:4] if len(parts) < 4 else parts
    literal = " ".join(template)
    try:
        _text(literal)
        clobbered = tuple(_text(clobber) for clobber in clobbers)
    except (SyntaxError, ValueError) as error:
        raise _unknown(file, line, "its template or a clobber is no string") from error
    statement = AsmStatement(
        literal,
        head[1] is not None,
        tuple(_operand(operand, _OUTPUT, file, line) for operand in outputs),
        tuple(_operand(operand, _INPUT, file, line) for operand in inputs),
        clobbered,
        file,
        line,
    )
    return statement, end


def _parts(text: str, start: int, file: str, line: int) -> tuple[list[list[str]], int]:
    """The colon-separated parts of a statement, each split at its commas, and the index where the statement ends."""
    parts: list[list[str]] = [[]]
    depth, begin = 1, start
    for piece in _PIECE.finditer(text, start):
        mark = piece[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        if depth == 0 or (depth == 1 and mark in ":,"):
            item = " ".join(_MARKER.sub("", text[begin : piece.start()]).split("\n")).strip()
            if item:
                parts[-1].append(item)
            begin = piece.end()
            if depth == 0:
                return parts, piece.end()
            if mark == ":":
                parts.append([])
    raise _unknown(file, line, "it does not end")


def _operand(text: str, constraints: re.Pattern[str], file: str, line: int) -> AsmOperand:
    match = _OPERAND.fullmatch(text)
    if match is None or not constraints.fullmatch(match[1][1:-1]):
        raise _unknown(file, line, f"operand {text!r}")
    return AsmOperand(match[1][1:-1], match[2].strip())


def _address(operand: AsmOperand) -> str:
    """A C++ expression for the address of the operand's value."""
    letter = operand.constraint[-1]
    if letter == "n":
        return f"emulation::immediate<({operand.expression})>()"
    role = "output" if operand.constraint[0] in "=+" else "input"
    return f"emulation::{role}<'{letter}'>({operand.expression})"


def _text(literals: str) -> str:
    """The text of adjacent C++ string literals. JSON has the same escapes as those used here.

    Python 3.11 cannot parse its own literals in two threads at the same time: one thread gets a SystemError.
    """
    if _LITERAL.sub("", literals).strip():
        raise ValueError(literals)
    return "".join(json.loads(literal) for literal in _LITERAL.findall(literals))


def _unknown(file: str, line: int, what: str) -> UnknownAsm:
    return UnknownAsm(f"{file}:{line}: an asm statement that the emulated device does not know: {what}")
