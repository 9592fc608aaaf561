"""What a row of the gate table is, and how it is judged.

A row names a variant of a kernel. Its source and limits are computed on demand: collecting the tests must not trace
graphs or pack problems for some thousand rows.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from inside.compiling import Compiler, parse_resources
from inside.kernels import TILES, block_threads
from support.gate import ARCHS, Code, code_faults, kernel_source, register_limit

from benchmarks.sass import disassemble
from gpu_actors import KernelSource

__all__ = [
    "COMPILERS",
    "NVRTC",
    "SHARED",
    "Family",
    "Found",
    "Limit",
    "Plan",
    "Row",
    "at_least",
    "at_most",
    "between",
    "dims_of",
    "exactly",
    "examine",
    "faults",
    "numbers_of",
    "plain_plan",
    "reader",
    "rows_of",
    "tiles_missed",
]


class Variant(Protocol):
    @property
    def arch(self) -> str: ...


V = TypeVar("V", bound=Variant)

NVCC = shutil.which("nvcc")
NVRTC = "NVRTC"
# nvcc has a ptxas of its own. Its cubins never run: it only judges the same sources.
COMPILERS = (NVRTC, "nvcc") if NVCC else (NVRTC,)
SHARED = "bytes of shared memory"


class Limit(NamedTuple):
    """The values that a figure may have: from ``least`` to ``most``, or one of a few."""

    least: float = -math.inf
    most: float = math.inf
    among: frozenset[float] = frozenset()

    def allows(self, figure: float) -> bool:
        return figure in self.among if self.among else self.least <= figure <= self.most

    def __str__(self) -> str:
        if self.among:
            return " or ".join(f"{each:g}" for each in sorted(self.among))
        ends = (f"{word} {end:.10g}" for word, end in (("at least", self.least), ("at most", self.most)))
        return " and ".join(text for text, end in zip(ends, (self.least, self.most), strict=True) if math.isfinite(end))


def exactly(*figures: float) -> Limit:
    return Limit(among=frozenset(figures))


def at_least(figure: float) -> Limit:
    return Limit(least=figure)


def at_most(figure: float) -> Limit:
    return Limit(most=figure)


def between(least: float, most: float) -> Limit:
    return Limit(least, most)


class Plan(NamedTuple):
    """What a row compiles, and its limits.

    registers: the most that a thread may have. limits: of figures, by name. given: the figures that are known before
    the compile. read: finds the other figures in the compiled code, and may find some without a limit.
    """

    source: KernelSource
    entry: str
    registers: int
    limits: dict[str, Limit]
    given: dict[str, float]
    read: Callable[[Code], dict[str, float]]


def plain_plan(key: Any, kernel: str) -> Plan:
    """A plan with the limits of every row alone. The key must be of this kernel."""
    assert key.kernel == kernel, key
    return Plan(kernel_source(key), kernel, register_limit(block_threads(key)), {}, {}, lambda code: {})


class Row(NamedTuple):
    """A variant of a family, on an architecture. sampled: whether the default run checks it, not only the sweep."""

    family: str
    variant: Any
    arch: str
    plan: Callable[[], Plan]
    sampled: bool
    compiler: str = NVRTC

    def __str__(self) -> str:
        return f"{self.family} {self.variant}" + ("" if self.compiler == NVRTC else f" by {self.compiler}")


class Family(NamedTuple):
    """The rows of a family of kernels.

    tiles: the kernel, if any, whose every row in the tile table must be among them. seconds: of processor time that a
    cold compile may take when the family's page is written.
    """

    name: str
    rows: tuple[Row, ...]
    tiles: str | None = None
    seconds: float = math.inf


def rows_of(
    family: str,
    variants: Iterable[V],
    plan: Callable[[V], Plan],
    sample: Sequence[V],
    compiler: str = NVRTC,
) -> tuple[Row, ...]:
    """The rows of these variants. The sample must be among them, if NVRTC has its architectures."""
    found = tuple(
        Row(family, each, each.arch, functools.partial(plan, each), each in sample, compiler) for each in variants
    )
    assert {each for each in sample if each.arch in ARCHS} <= {row.variant for row in found}
    return found


class Found(NamedTuple):
    """A row's compiled code and figures. seconds: of the compile's processor time in this thread."""

    plan: Plan
    code: Code
    figures: dict[str, float]
    seconds: float


def examine(row: Row, change: Callable[[KernelSource], KernelSource] = lambda source: source) -> Found:
    """Compile the row's source, changed by ``change``, and read the result."""
    plan = row.plan()
    source = change(plan.source)
    start = time.thread_time()
    image, log = _compiled(row.compiler, source)
    seconds = time.thread_time() - start
    notes = tuple(re.findall(r"\bC75\w*", log))
    code = Code(parse_resources(log)[plan.entry], notes, disassemble(image))
    return Found(plan, code, plan.given | plan.read(code), seconds)


def faults(found: Found) -> list[str]:
    """What is wrong with a row: the faults of any kernel, and figures outside their limits."""
    figures, limits = found.figures, found.plan.limits
    return code_faults(found.code, found.plan.registers) + [
        f"{name}: {figures.get(name, math.nan):.10g} instead of {limit}"
        for name, limit in limits.items()
        if not limit.allows(figures.get(name, math.nan))
    ]


def _compiled(compiler: str, source: KernelSource) -> tuple[bytes, str]:
    """The cubin, and ptxas's log."""
    if compiler == NVRTC:
        cubin = Compiler().compile(source)
        return cubin.data, cubin.log
    assert NVCC is not None
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in {"kernel.cu": source.source, **source.headers}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        macros = [f"-D{name}={value}" for name, value in source.macros.items()]
        command = [NVCC, "-arch=sm_90a", "-cubin", "-std=c++17", "-Xptxas", "-v", f"-I{root}", *macros]
        done = subprocess.run(
            [*command, "-o", root / "kernel.cubin", root / "kernel.cu"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return (root / "kernel.cubin").read_bytes(), done.stderr


def reader(patterns: Mapping[str, str]) -> Callable[[Code], dict[str, float]]:
    """Counts the instructions that match each pattern."""
    return lambda code: {name: code.count(pattern) for name, pattern in patterns.items()}


def numbers_of(source: KernelSource) -> dict[str, int]:
    """The macros that are numbers."""
    return {name: int(value) for name, value in source.macros.items() if value.isdigit()}


def dims_of(dim: int, dim_v: int) -> str:
    return str(dim) if dim == dim_v else f"{dim}/{dim_v}"


def tiles_missed(kernel: str, rows: Iterable[Row]) -> set[tuple[int, ...]]:
    """The kernel's rows in the tile table that no row of the gate is compiled for."""
    names = ("BLOCK_M", "BLOCK_N", "STAGES", "WARPS")
    plans = (row.plan() for row in rows if row.compiler == NVRTC)
    reached = {tuple(int(plan.source.macros[name]) for name in names) for plan in plans if plan.entry == kernel}
    return {tuple(row.tile) for row in TILES if row.kernel == kernel} - reached
