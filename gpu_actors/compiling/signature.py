"""The parameters of a kernel, as its ``extern "C" __global__`` declaration spells them.

Names, C types and the pointers that may be written through come from the text. The size of a struct or a typedef comes
from the compiled kernel (`gpu_actors.compiling.elf`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpu_actors.errors import InvalidRequest

__all__ = ["KernelParameter", "kernel_signature"]

_BLANKED = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")
_QUALIFIERS = re.compile(
    r"\b(?:const|volatile|__restrict__|__restrict|restrict|__grid_constant__|register|struct|class|enum|union|typename)\b"
    r"|\balignas\s*\([^)]*\)|\[\[.*?\]\]"
)
_FUNDAMENTAL = frozenset("bool char short int long float double signed unsigned".split())  # noqa: SIM905
_DTYPES = {
    "bool": "bool", "float": "float32", "double": "float64",
    "char": "int8", "signed char": "int8", "unsigned char": "uint8",
    "short": "int16", "unsigned short": "uint16", "int": "int32", "unsigned int": "uint32",
    "long": "int64", "unsigned long": "uint64", "long long": "int64", "unsigned long long": "uint64",
    **{f"{name}_t": name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    "size_t": "uint64", "ptrdiff_t": "int64", "half": "float16", "__half": "float16",
    "nv_bfloat16": "bfloat16", "__nv_bfloat16": "bfloat16",
    "__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """A parameter of a kernel.

    name: its name in the source, "" if it has none.
    type: its C type without qualifiers; for a pointer, the type that it points to.
    dtype: the NumPy or ml_dtypes name of that type, None if the text does not tell it (structs, typedefs, void).
    pointer: whether it takes an array.
    written: whether the kernel may write through it.
    """

    name: str
    type: str
    dtype: str | None
    pointer: bool = False
    written: bool = False

    @property
    def spelled(self) -> str:
        """The parameter as C++ would declare it: "const float* x"."""
        constant = "const " if self.pointer and not self.written else ""
        return f"{constant}{self.type}{'*' * self.pointer} {self.name}".strip()


def kernel_signature(source: str, entry: str) -> tuple[KernelParameter, ...]:
    """The parameters of the kernel ``entry``, in order.

    Raises InvalidRequest if the source does not declare it in its own text, declares it in two ways, or has a parameter
    that is neither a value nor a pointer.
    """
    text = _BLANKED.sub(lambda match: '""' if match[0].startswith('"') else " ", re.sub(r"\\\r?\n", "", source))
    signatures = {tuple(_parameter(part, entry) for part in parts) for parts in _declarations(text, entry)}
    if not signatures:
        reason = f'must declare extern "C" __global__ void {entry}(...) in its own text, by no macro'
        raise InvalidRequest("source", f"{len(source)} characters", reason)
    if len({tuple((p.type, p.pointer, p.written) for p in parameters) for parameters in signatures}) > 1:
        raise InvalidRequest("source", f"{len(source)} characters", f"declares {entry} in more than one way")
    # A forward declaration may omit names.
    return max(signatures, key=lambda parameters: sum(bool(parameter.name) for parameter in parameters))


def _declarations(text: str, entry: str) -> Iterator[list[str]]:
    for match in re.finditer(r"\b__global__\b", text):
        at = match.end()
        while at < len(text) and text[at] not in "{};=":
            word = _WORD.match(text, at)
            if word is None:
                at = _closing(text, at) if text[at] in "([" else at + 1
                continue
            at = word.end()
            if word[0] == "__global__":
                break  # the next iteration parses it
            opening = re.compile(r"\s*\(").match(text, at)
            if word[0] == entry and opening is not None:
                yield _split(text[opening.end() : _closing(text, opening.end() - 1) - 1])
                break


def _closing(text: str, opening: int) -> int:
    """The index after the bracket that closes the bracket at ``opening``."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at + 1
    return len(text)


def _split(text: str) -> list[str]:
    """The texts between those commas that are outside of all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    parts = [" ".join(part.split()) for part in parts]
    return [] if parts in ([""], ["void"]) else parts


def _parameter(text: str, entry: str) -> KernelParameter:
    # Template arguments may contain commas and stars.
    plain, templates = re.compile(r"<.*>").subn("", text)
    if re.search(r"[&(=]|\.\.\.", re.sub(r"\balignas\s*\([^)]*\)", "", plain)):
        reason = f"the parameter {text!r} of {entry} is neither a value nor a pointer"
        raise InvalidRequest("source", text, reason)
    plain, arrays = re.compile(r"\[(?!\[)[^\[\]]*\](?!\])").subn("", plain)
    pointee, star, declarator = plain.rpartition("*")
    if star:
        name = next(iter(_WORD.findall(_QUALIFIERS.sub("", declarator))), "")
        spelled, _ = _type_and_name(pointee.replace("*", " "), unnamed=True)
        written = not re.search(r"\bconst\b", pointee.rpartition("*")[2])
        dtype = None if "*" in pointee or arrays or templates else _DTYPES.get(spelled)
        return KernelParameter(name, spelled + "*" * pointee.count("*"), dtype, True, written)
    spelled, name = _type_and_name(plain)
    dtype = None if templates else _DTYPES.get(spelled)
    if arrays:
        written = not re.search(r"\bconst\b", plain)
        return KernelParameter(name, spelled, dtype if arrays == 1 else None, True, written)
    return KernelParameter(name, spelled, dtype)


def _type_and_name(text: str, unnamed: bool = False) -> tuple[str, str]:
    words = re.findall(r"[A-Za-z_][\w:]*", _QUALIFIERS.sub(" ", text))
    basic = [word for word in words if word in _FUNDAMENTAL]
    others = [word for word in words if word not in _FUNDAMENTAL]
    if basic:
        return _canonical(basic), others[-1] if others and not unnamed else ""
    spelled = words[0].removeprefix("::").removeprefix("std::") if words else ""
    return spelled, words[-1] if len(words) > 1 and not unnamed else ""


def _canonical(words: list[str]) -> str:
    """The usual spelling of a fundamental type: "unsigned long" for "long unsigned int"."""
    unsigned = "unsigned" in words
    core = [word for word in words if word not in ("unsigned", "signed", "int")] or ["int"]
    if "char" in core and "signed" in words:
        return "signed char"
    return " ".join(["unsigned"] * unsigned + sorted(core, reverse=True))
