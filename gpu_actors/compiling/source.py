"""KernelSource, the input of a compile, and Cubin, its output.

Both are frozen and contain no path, so that equal sources are the same variant on every machine.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple, TypeAlias, TypeVar

from gpu_actors.compiling.headers import leaves_closure
from gpu_actors.errors import InvalidRequest, Unsupported

__all__ = [
    "FIRST_CAPABILITY",
    "Cubin",
    "FrozenMap",
    "KernelResources",
    "KernelSource",
    "MacroValue",
    "check_arch",
    "exact_arch",
    "parse_resources",
]

Value = TypeVar("Value")
MacroValue: TypeAlias = str | int | float

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ARCH = re.compile(r"sm_([1-9]\d{1,2})[af]?", re.ASCII)

# Options that NVRTC passes to ptxas, which has reserved options of its own.
_PASSED_ON = re.compile(r"(?:-Xptxas|--ptxas-options)=")

# Options that would read or write files, contradict other fields, or yield something other than a cubin.
_RESERVED_OPTIONS = {
    ("-arch", "--gpu-architecture"): "the architecture is the arch argument",
    ("-D", "--define-macro", "-U", "--undefine-macro"): "macros belong in macros=",
    (
        "-I",
        "--include-path",
        "-include",
        "--pre-include",
        "--use-bundled-headers",
    ): "headers belong in headers=",
    (
        "-pch",
        "--pch",
        "-create-pch",
        "--create-pch",
        "-use-pch",
        "--use-pch",
    ): "precompiled headers are files",
    ("-time", "--time", "-fdevice-time-trace", "--fdevice-time-trace", "-o=", "--output-file"): "it writes a file",
    ("-optf", "--options-file"): "it reads a file",
    ("-ias", "--input-as-string"): "the kernel's text is the source argument",
    ("-dlto", "--dlink-time-opt", "-optix-ir", "--optix-ir"): "it yields no cubin",
}


class FrozenMap(Mapping[str, Value]):
    """A mapping that cannot change, hashes by its items and iterates in the order of its keys."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Value] | Iterable[tuple[str, Value]] = ()) -> None:
        self._items = dict(sorted(dict(items).items(), key=lambda item: item[0]))

    def __getitem__(self, key: str) -> Value:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        # Mapping's own comparison copies both, and variants are compared at every launch.
        return self._items == other._items if isinstance(other, FrozenMap) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


FIRST_CAPABILITY = 80
"""The oldest compute capability that the package's own kernels support, times ten."""


def exact_arch(capability: int) -> str:
    """The architecture to compile for on a device of this compute capability: 80 (8.0) -> sm_80, 90 (9.0) -> sm_90a.

    From 9.0 on it has the architecture-specific suffix: wgmma, setmaxnreg and tcgen05 do not exist without the suffix.
    """
    return f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"


def check_arch(arch: str) -> str:
    """Return ``arch`` if it names an exact architecture, such as sm_80, sm_90a or sm_100a.

    Raises InvalidRequest if it is no architecture, Unsupported if a suffix is missing (sm_90) or too many.
    """
    match = _ARCH.fullmatch(arch) if isinstance(arch, str) else None
    if match is None:
        raise InvalidRequest("arch", arch, "give an architecture such as 'sm_80', 'sm_90a' or 'sm_100a'")
    exact = exact_arch(int(match[1]))
    if arch != exact:
        raise Unsupported("arch", arch, "kernels are compiled for one exact architecture", nearest=exact)
    return arch


@dataclass(frozen=True, slots=True)
class KernelSource:
    """CUDA C++ to compile for one exact architecture.

    name: names the source in logs and line information. Only its last path component is used, and no cache key depends
        on it.
    source: the translation unit. A user's snippet is part of it or a header, so the key covers it.
    entry_points: the ``extern "C"`` kernels that the cubin must contain.
    headers: text by the exact name that ``#include`` spells: ``{"ptx/mma.cuh": "..."}``. Only headers that the source
        reaches count. The toolkit's own (cuda_fp16.h, ...) need not be given.
    macros: values by name, defined before the first line. True and False become 1 and 0.
    options: further NVRTC options, in order, in the form ``--name=value``.
    arch: the one architecture that the source is written for, or None for any.

    Raises InvalidRequest naming the field at fault.
    """

    name: str
    source: str = field(repr=False)
    entry_points: tuple[str, ...]
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    macros: Mapping[str, MacroValue] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    arch: str | None = None

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "entry_points", _checked_entry_points(self.entry_points))
        fix(self, "headers", _checked_headers(self.headers))
        macros = _mapping("macros", self.macros, "values by the macro's name")
        fix(self, "macros", FrozenMap({name: _macro(name, value) for name, value in macros.items()}))
        fix(self, "options", _checked_options(self.options))
        _check_text("name", self.name)
        _check_text("source", self.source)
        if self.arch is not None:
            check_arch(self.arch)

    def resolve_arch(self, arch: str | None = None) -> str:
        """The exact architecture to compile for, from the argument or the source itself.

        Raises InvalidRequest if neither names one, or if both do and differ.
        """
        resolved = arch if arch is not None else self.arch
        if resolved is None:
            raise InvalidRequest("arch", None, f"kernel {self.name!r} names no architecture: give one")
        check_arch(resolved)
        if self.arch not in (None, resolved):
            raise InvalidRequest("arch", arch, f"kernel {self.name!r} is written for {self.arch} alone")
        return resolved


def _check_text(field_name: str, text: object) -> str:
    # NVRTC reads C strings: it would compile less than the key covers.
    if not isinstance(text, str):
        raise InvalidRequest(field_name, type(text).__name__, "must be a str")
    if "\0" in text:
        raise InvalidRequest(field_name, text[:40], "must not contain a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field_name, text[:40], f"must be text that UTF-8 can hold: {error}") from None
    return text


def _sequence(field_name: str, values: object, of: str) -> tuple[object, ...]:
    if not isinstance(values, tuple | list):
        raise InvalidRequest(field_name, values, f"must be a tuple or list of {of}")
    return tuple(values)


def _mapping(field_name: str, values: object, of: str) -> Mapping[str, object]:
    if not isinstance(values, Mapping):
        raise InvalidRequest(field_name, values, f"must be a mapping of {of}")
    for name in values:
        if not isinstance(name, str):
            raise InvalidRequest(field_name, name, f"must be a mapping of {of}: every name is a str")
    return values


def _checked_entry_points(names: object) -> tuple[str, ...]:
    values = _sequence("entry_points", names, "names")
    checked = tuple(name for name in values if isinstance(name, str) and _IDENTIFIER.fullmatch(name))
    if not checked or checked != values:
        raise InvalidRequest("entry_points", values, 'must name at least one extern "C" kernel by its C identifier')
    if len(set(checked)) != len(checked):
        raise InvalidRequest("entry_points", values, "must name each kernel once")
    return checked


def _checked_headers(headers: object) -> FrozenMap[str]:
    checked: dict[str, str] = {}
    for name, text in _mapping("headers", headers, "text by the name that #include spells").items():
        # Each text has one name: "./a.h" and "a.h" would be two headers in memory, but one on a disk.
        if leaves_closure(name) or posixpath.normpath(name) != name or re.search(r'[\0\n"<>\\]', name):
            reason = "must be named as #include spells it, by a relative path without '.' and '..'"
            raise InvalidRequest("headers", name, reason)
        _check_text("headers", name)
        checked[name] = _check_text(f"headers[{name!r}]", text)
    for name in checked:
        for folder in PurePosixPath(name).parents:
            if str(folder) in checked:
                raise InvalidRequest("headers", str(folder), f"cannot be a header and a folder of {name!r} at once")
    return FrozenMap(checked)


def _macro(name: str, value: object) -> str:
    if not _IDENTIFIER.fullmatch(name):
        raise InvalidRequest("macros", name, "a macro's name must be a C identifier")
    field_name = f"macros[{name!r}]"
    if isinstance(value, bool):
        return "1" if value else "0"
    # Spelled by the base type: NumPy's floats and enum members are subclasses that print otherwise.
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(field_name, value, "a float must be finite: C++ has no literal for it")
        return float.__repr__(value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            raise InvalidRequest(field_name, value, "an int must fit 64 bits: C++ has no literal for it")
        return int.__repr__(value)
    if not isinstance(value, str):
        raise InvalidRequest(field_name, value, "must be a str, int, float or bool")
    if re.search(r"[\0\n\r]", value):
        raise InvalidRequest(field_name, value, "must be one line: NVRTC drops the rest")
    return _check_text(field_name, value)


def _checked_options(options: object) -> tuple[str, ...]:
    checked = []
    for option in _sequence("options", options, "options"):
        if not isinstance(option, str) or not option.startswith("-"):
            raise InvalidRequest("options", option, "give each option in one string, as --name=value")
        passed_on = _PASSED_ON.sub("", option)
        for prefixes, reason in _RESERVED_OPTIONS.items():
            if option.startswith(prefixes) or passed_on.startswith(prefixes):
                raise InvalidRequest("options", option, f"not accepted here: {reason}")
        checked.append(_check_text("options", option))
    return tuple(checked)


class KernelResources(NamedTuple):
    """The resources of one kernel of a cubin, as ptxas reports them.

    registers: registers of a thread.
    spill_bytes: bytes of spill stores plus spill loads. It counts instructions, not memory.
    stack_bytes: bytes of local memory of a thread, callees included.
    shared_bytes: bytes of static shared memory of a block.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel source.

    data: the ELF image for the driver.
    arch: the exact architecture that it runs on.
    entry_points: the kernels that the source names.
    log: the compiler's whole log, with the report of ptxas -v.
    resources: KernelResources of every kernel in the cubin, by name.
    """

    data: bytes = field(repr=False)
    arch: str
    entry_points: tuple[str, ...]
    log: str = field(repr=False)
    resources: Mapping[str, KernelResources]

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry_points", tuple(self.entry_points))
        object.__setattr__(self, "resources", FrozenMap(self.resources))

    @property
    def notes(self) -> tuple[str, ...]:
        """ptxas's C75xx notes in order, without their prefix.

        To ptxas they are only information, but each means that wgmma was serialised or setmaxnreg ignored.
        """
        lines = (line for line in self.log.splitlines() if re.search(r"\bC75\d\d\b", line))
        return tuple(re.sub(r"^ptxas\s+\w+\s*:\s*", "", line).strip() for line in lines)


_FUNCTION = re.compile(r"(Compiling entry function|Function properties for) '?([\w$.]+)'?")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str) -> dict[str, KernelResources]:
    """KernelResources by kernel, from a log of ``--ptxas-options=-v``.

    Spills of functions that are called rather than inlined count for every kernel: ptxas does not say which kernel
    calls them, and a kernel that spills must never seem to have no spills.
    """
    resources: dict[str, KernelResources] = {}
    called_spills = 0
    entry = function = ""
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            function = match[2]
            if match[1].startswith("Compiling"):
                entry = function
                resources[entry] = KernelResources(0, 0, 0, 0)
        elif match := _FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            if function == entry:
                resources[entry] = resources[entry]._replace(spill_bytes=stores + loads, stack_bytes=stack)
            else:
                called_spills += stores + loads
        elif entry and (match := _REGISTERS.search(line)):
            stack = int(cumulative[1]) if (cumulative := _STACK.search(line)) else 0
            shared = int(static[1]) if (static := _SHARED.search(line)) else 0
            resources[entry] = resources[entry]._replace(
                registers=int(match[1]),
                stack_bytes=max(stack, resources[entry].stack_bytes),
                shared_bytes=shared,
            )
    if called_spills:
        resources = {name: r._replace(spill_bytes=r.spill_bytes + called_spills) for name, r in resources.items()}
    return resources
