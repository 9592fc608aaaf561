"""Captures the inline-asm statements of a preprocessed kernel, and makes each a call that a CPU can run.

Host compilers know neither a statement's instructions nor its constraints, so it becomes a call of
``emulation::execute`` (kernels_cu/emulation/assembly) with the addresses of its operands. ``__asm__`` is left alone: it
is how host code spells asm of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

__all__ = ["AsmOperand", "AsmStatement", "UnknownAsm", "captured", "scattered", "statements"]

# Each way begins with a character of its own, so that a search skips to the next of these five.
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
    """An asm statement of a form that the emulated device does not know. The text begins with its file and line."""


@dataclass(frozen=True)
class AsmOperand:
    """One operand: its constraint, such as "=r", and the C++ expression in parentheses."""

    constraint: str
    expression: str


@dataclass(frozen=True)
class AsmStatement:
    """One asm statement. literal: the template as C++ string literals. file, line: where it begins."""

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
        """Of the outputs and then the inputs, with a comma between."""
        return ",".join(operand.constraint for operand in (*self.outputs, *self.inputs))

    def call(self) -> str:
        """A C++ expression that executes the statement."""
        addresses = [_address(operand) for operand in (*self.outputs, *self.inputs)]
        if not self.template.strip():  # holds registers in place, and executes nothing
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


def captured(text: str) -> str:
    """Preprocessed C++ with each asm statement replaced by its call, on the lines where it stood.

    Raises UnknownAsm for a statement of a form that is not known: asm goto, operands by name, constraints other than
    CUDA's, or one with more than four parts.
    """
    parts, done = [], 0
    for statement, start, end in _found(text):
        lines = text.count("\n", start, end)
        parts += [text[done:start], statement.call(), "\n" * lines]
        done = end
    return "".join([*parts, text[done:]])


def scattered(text: str, seed: int) -> str:
    """Preprocessed C++ in which products are not fused in about half of the blocks, which the seed picks.

    Of the kernel and the headers that it was given: those of the system have absolute paths.
    """
    random = Random(seed)
    parts, done, own = [], 0, True
    for match in _BLOCK.finditer(text):
        if match["file"] is not None:
            own = not match["file"].startswith("/")
        elif own:
            parts += [text[done : match.end()], random.choice(_FUSE_OR_NOT)]
            done = match.end()
    return "".join([*parts, text[done:]])


def statements(text: str) -> tuple[AsmStatement, ...]:
    """The asm statements of preprocessed C++, in order. Raises UnknownAsm as `captured` does."""
    return tuple(statement for statement, _, _ in _found(text))


def _found(text: str) -> Iterator[tuple[AsmStatement, int, int]]:
    """Each statement with where it begins and where its closing parenthesis ends."""
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
    """The statement whose ``asm`` ends at ``at``, and where it ends."""
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
    """The colon-separated parts of a statement, each a list by commas, and where the statement ends."""
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


def _operand(text: str, known: re.Pattern[str], file: str, line: int) -> AsmOperand:
    match = _OPERAND.fullmatch(text)
    if match is None or not known.fullmatch(match[1][1:-1]):
        raise _unknown(file, line, f"operand {text!r}")
    return AsmOperand(match[1][1:-1], match[2].strip())


def _address(operand: AsmOperand) -> str:
    """A C++ expression: where the operand's value lies."""
    letter = operand.constraint[-1]
    if letter == "n":
        return f"emulation::immediate<({operand.expression})>()"
    role = "output" if operand.constraint[0] in "=+" else "input"
    return f"emulation::{role}<'{letter}'>({operand.expression})"


def _text(literals: str) -> str:
    """What adjacent C++ string literals stand for. Their escapes here are those of JSON, too.

    Python 3.11 cannot parse its own literals in two threads at a time: one of them gets a SystemError.
    """
    if _LITERAL.sub("", literals).strip():
        raise ValueError(literals)
    return "".join(json.loads(literal) for literal in _LITERAL.findall(literals))


def _unknown(file: str, line: int, what: str) -> UnknownAsm:
    return UnknownAsm(f"{file}:{line}: an asm statement that the emulated device does not know: {what}")
