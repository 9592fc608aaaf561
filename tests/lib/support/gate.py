"""What the static gates share: compile a kernel, read what ptxas made of it, judge it, and write the family's log."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from support.logs import write_log

from benchmarks.sass import disassemble, find_disassembler
from gpu_actors import KernelResources, KernelSource
from gpu_actors.compiling.compiler import Compiler, supported_archs
from gpu_actors.kernels.tiles import TILES

__all__ = [
    "ARCHS",
    "MMA_SHAPES",
    "Code",
    "MmaVariant",
    "WgmmaVariant",
    "at_once",
    "code_faults",
    "code_of",
    "failing",
    "register_limit",
    "sample_of",
    "tiles_missed",
    "with_bug",
    "write_page",
    "wrong",
]

V = TypeVar("V")
F = TypeVar("F")

ARCHS = tuple(arch for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a") if arch in supported_archs())
_REGISTERS_PER_THREAD, _REGISTERS_PER_SM = 255, 65536


# (dtype, compute, head_dim, head_dim_v): every row of the tile table, padded rows, unequal dims.
MMA_SHAPES: tuple[tuple[str, str | None, int, int], ...] = (
    ("float16", None, 64, 64),
    ("bfloat16", None, 128, 128),
    ("float16", None, 256, 256),
    ("bfloat16", None, 192, 128),
    ("bfloat16", None, 40, 40),
    ("float16", None, 96, 96),
    ("float32", "tf32", 64, 64),
    ("float32", "bf16", 128, 128),
    ("float32", "tf32", 256, 256),
)


class MmaVariant(NamedTuple):
    """A variant of the kernels that multiply with mma.sync. shape: (dtype, compute, head_dim, head_dim_v)."""

    arch: str
    shape: tuple[str, str | None, int, int]
    option: str

    def __str__(self) -> str:
        dtype, compute, dim, dim_v = self.shape
        dims = str(dim) if dim == dim_v else f"{dim}/{dim_v}"
        return f"{self.arch} {compute or dtype} {dims} {self.option}"


class WgmmaVariant(NamedTuple):
    """A variant of the kernels that multiply with wgmma."""

    dtype: str
    dim: int
    dim_v: int
    option: str

    def __str__(self) -> str:
        dims = str(self.dim) if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        return f"{self.dtype} {dims} {self.option}"


class Code(NamedTuple):
    """What became of a kernel. text: its machine code, None where no disassembler is installed."""

    resources: KernelResources
    notes: tuple[str, ...]
    text: str | None

    def count(self, pattern: str) -> int | None:
        """How many instructions match, None where no disassembler is installed."""
        return None if self.text is None else len(re.findall(pattern, self.text))


def code_of(source: KernelSource, entry: str) -> Code:
    """Compile a source with NVRTC and read the kernel of that name."""
    cubin = Compiler().compile(source)
    text = disassemble(cubin.data) if find_disassembler() is not None else None
    return Code(cubin.resources[entry], cubin.notes, text)


def with_bug(source: KernelSource, file: str, old: str, new: str) -> KernelSource:
    """The same source with a bug in it or in one of its headers: the file must hold the text that is replaced."""
    text = source.source if file == source.name else source.headers[file]
    assert old in text
    if file == source.name:
        return dataclasses.replace(source, source=text.replace(old, new))
    return dataclasses.replace(source, headers={**source.headers, file: text.replace(old, new)})


def register_limit(threads: int, blocks: int = 1) -> int:
    """Registers a thread may have where so many blocks share a multiprocessor."""
    return min(_REGISTERS_PER_THREAD, _REGISTERS_PER_SM // (threads * blocks))


def code_faults(code: Code, registers: int) -> list[str]:
    """What every gate holds against a kernel. registers: the most that a thread may have."""
    resources, local = code.resources, code.count(r"\b(?:LDL|STL)\b")
    return wrong(
        {
            f"{resources.spill_bytes} bytes spilled": resources.spill_bytes != 0,
            f"{resources.stack_bytes} bytes of stack": resources.stack_bytes != 0,
            f"notes {code.notes}": code.notes != (),
            f"{resources.registers} registers of {registers}": not 0 < resources.registers <= registers,
            f"{local} accesses to local memory": local not in (None, 0),
        }
    )


def wrong(checks: dict[str, bool]) -> list[str]:
    """The sentences whose check says that something is wrong."""
    return [text for text, is_wrong in checks.items() if is_wrong]


def at_once(examine: Callable[[V], F], variants: Sequence[V]) -> list[F]:
    """Examine variants on two threads: NVRTC compiles without the interpreter's lock."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(examine, variants))


def failing(examine: Callable[[V], F], faults: Callable[[F], list[str]], variants: Sequence[V]) -> dict[str, list[str]]:
    """The faults of the variants that have any."""
    found = {str(variant): faults(each) for variant, each in zip(variants, at_once(examine, variants), strict=True)}
    return {name: wrongs for name, wrongs in found.items() if wrongs}


def sample_of(variants: Sequence[MmaVariant], arch: str, wanted: Sequence[tuple[str, int, str]]) -> list[MmaVariant]:
    """Of an architecture's variants those of these dtypes, head dims and options, each of which there must be."""
    sample = [v for v in variants if v.arch == arch and (v.shape[0], v.shape[2], v.option) in wanted]
    assert len(sample) == len(wanted)
    return sample


def tiles_missed(kernel: str, sources: Iterable[KernelSource]) -> set[tuple[int, ...]]:
    """The rows of the tile table that no source of the kernel is compiled for."""
    names = ("BLOCK_M", "BLOCK_N", "STAGES", "WARPS")
    reached = {tuple(int(source.macros[name]) for name in names) for source in sources}
    return {tuple(row.tile) for row in TILES if row.kernel == kernel} - reached


def write_page(
    variants: Sequence[V], judge: Callable[[V], tuple[str, list[str]]], family: str, columns: Sequence[str]
) -> int:
    """Judge every variant and write its row into the family's log; 1 if any has a fault, else 0.

    judge: of a variant, the cells of its row between its name and the verdict, and its faults. columns: of these cells.
    """
    rows, failed = [], 0
    with ThreadPoolExecutor(2) as pool:
        for variant, (cells, faults) in zip(variants, pool.map(judge, variants), strict=True):
            verdict = "; ".join(faults) or "passes"
            failed += bool(faults)
            sys.stdout.write(f"{variant}: {verdict}\n")
            sys.stdout.flush()
            rows.append(f"| {variant} | {cells} | {verdict} |")
    summary = f"{len(rows) - failed} of {len(rows)} variants pass"
    write_log(f"gate_{family}", summary, ("variant", *columns, "verdict"), rows)
    sys.stdout.write(summary + "\n")
    return 1 if failed else 0
