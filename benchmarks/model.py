"""Estimates a GPU suite from counts of machine code. The figures are a model's and contain no measurement of ours.

python -m benchmarks.model forward [--arch sm_80] [--quick] [--out FILE]     likewise backward, decode

Each part of a case gets the time that it would take alone on the machine:

    products    multiply-adds of the tiles / the dense rate of the tensor cores
    exponent    special functions / 16 a clock and multiprocessor
    issue       instructions of the warps that multiply / 4 a clock and multiprocessor
    shared      bytes into and out of shared memory / 128 a clock and multiprocessor
    memory      bytes of the operands, each once, and of passes before and after / the memory's bandwidth

The first four are those of the multiprocessor with the most work, for tiles without a mask. A tile goes to the next
free multiprocessor, in the order in which the kernel's blocks start (`order.ranked`; the longest first for other
libraries' kernels). Rates are data sheets', at the clock of their peak rates.

On sm_90a the estimate of a kernel of `_FITTED` is a weighted sum of `terms`, and at least the longest part. The weights
are those that fit other libraries' published figures on Hopper best (`FITS`; docs/reports/model.md). Its error is that
of figures that are left out of the fit. For other kernels and GPUs the estimate is the longest part, an upper bound of
the speed, and has no error.
"""

from __future__ import annotations

import argparse
import functools
import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.counts import Counts, count_case, key_of
from benchmarks.order import ranked, section_size
from benchmarks.sass import find_disassembler
from gpu_actors.bench import environment, in_rows
from gpu_actors.bench.cases import Case, Kind, backward_cases, decode_cases, forward_cases
from gpu_actors.cli.output import write_table
from gpu_actors.context import open_context
from gpu_actors.devices.select import DEFAULT_ARCH
from gpu_actors.errors import GpuActorsError, Unsupported
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.kernels.forward_sm90 import section_heads
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.options import ContextOptions

__all__ = [
    "COLUMNS",
    "EDGE",
    "FITS",
    "MACHINES",
    "Fit",
    "Machine",
    "busiest",
    "dealt",
    "estimate",
    "estimate_suite",
    "main",
    "table",
    "terms",
]

COLUMNS = (
    *("case", "kernel", "products ms", "exponent ms", "issue ms", "shared ms", "memory ms"),
    *("bound by", "model", "error, worst"),
)

_CASES = {"forward": forward_cases, "backward": backward_cases, "decode": decode_cases}
_EXPONENTIALS = 16  # a clock and multiprocessor: CUDA C++ Programming Guide, "Arithmetic Instructions"
_SCHEDULERS = 4
_SHARED_BYTES = 128
_L2_BYTES = 50e6  # H100's and H200's
EDGE = 1.5  # steps that a tile's beginning and end count as, where tiles are dealt out
_ON_CUDA_CORES = ("forward_simple",)
_FLOAT8 = "float8"


@dataclass(frozen=True, slots=True)
class Fit:
    """Weights of `terms`. error, worst: the mean and largest error of points left out of the fit one by one, relative.

    series: the mean where all lengths of a head dim and mask are left out at once. points: how many were fitted.
    """

    weights: dict[str, float]
    error: float
    worst: float
    series: float
    points: int


# The output of `python -m benchmarks.fit`. A test compares them.
_FORWARD = {"products": 1.066, "issue": 1.005, "output": 0.1353, "edge": 2965.0}
FITS = {
    "forward": Fit(_FORWARD, error=0.027, worst=0.083, series=0.034, points=25),
    "float8": Fit(_FORWARD, error=0.121, worst=0.295, series=0.121, points=0),
    "backward": Fit({"products": 1.228, "issue": 1.307, "tiles": 6097.0}, 0.015, 0.033, 0.151, 10),
    "decode": Fit({"launch": 6350.0, "cold": 0.5776, "memory": 1.087}, 0.054, 0.394, 0.0, 12),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A product's data sheet.

    clock: boost, Hz. flops: dense 16-bit ones of the tensor cores, for each clock and multiprocessor; fp8: the factor
    for 8 bits; fp32: flops of the CUDA cores. bandwidth: bytes a second. fitted: whether `FITS` are of such GPUs.
    """

    name: str
    multiprocessors: int
    clock: float
    flops: int
    bandwidth: float
    fp8: int = 1
    fp32: int = 256
    fitted: bool = False


MACHINES = {
    "sm_80": Machine("NVIDIA A100 SXM 80 GB", 108, 1.41e9, 2048, 2.039e12, fp32=128),
    "sm_89": Machine("NVIDIA L40S", 142, 2.52e9, 1024, 0.864e12, 2),
    "sm_90a": Machine("NVIDIA H200 SXM", 132, 1.83e9, 4096, 4.8e12, 2, fitted=True),
}


def estimate_suite(kind: Kind, arch: str | None = None, quick: bool = False) -> dict[str, Any]:
    """Estimates of every case of a suite on the machine that is known for ``arch``. Needs NVRTC and no GPU.

    Raises Unsupported if no data sheet of the architecture is kept here.
    """
    arch = arch or DEFAULT_ARCH
    machine = MACHINES.get(arch)
    if machine is None:
        raise Unsupported("arch", arch, f"data sheets are kept for {', '.join(MACHINES)}", DEFAULT_ARCH)
    with open_context("mock", ContextOptions(arch=arch)) as context:
        count = functools.cache(functools.partial(count_case, kind=kind))
        rows = [estimate(case, machine, *_counted(case, context, count)) for case in _CASES[kind](quick)]
    return {
        "suite": kind,
        "kind": "model",
        "note": "an estimate from counts and data sheets: nothing was measured",
        "machine": {
            "name": machine.name,
            "arch": arch,
            **{f: getattr(machine, f) for f in machine.__slots__ if f != "name"},
        },
        "disassembler": find_disassembler() is not None,
        "rows": rows,
    }


def estimate(
    case: Case, machine: Machine, kernel: str | None = None, counts: Counts | None = None, reason: str | None = None
) -> dict[str, Any]:
    """Estimate one case. counts: of the kernel's machine code. If None, nothing is fitted."""
    flops = machine.flops * (machine.fp8 if case.dtype.startswith(_FLOAT8) else 1)
    if kernel in _ON_CUDA_CORES:
        flops = machine.fp32
    rate = machine.multiprocessors * machine.clock
    parts: dict[str, float | None] = {
        "products": case.flops / flops / rate,
        "exponent": case.pairs * case.heads / _EXPONENTIALS / rate,
        "issue": None,
        "shared": None,
        "memory": case.bytes / machine.bandwidth,
    }
    clocks = None if counts is None else terms(case, counts, machine)
    if clocks is not None:
        parts = {name: clocks[name] / machine.clock for name in parts}
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    bound = max(known, key=lambda name: known[name])
    seconds = known[bound]
    fit = FITS[_fit_of(case)] if clocks is not None and machine.fitted and kernel in _FITTED else None
    if fit is not None and clocks is not None:
        seconds = max(seconds, _fitted(fit, clocks) / machine.clock)
    return {
        "case": case.record(),
        "kernel": kernel,
        "reason": reason,
        "parts_ms": {name: None if part is None else part * 1e3 for name, part in parts.items()},
        "bound": bound,
        "model_ms": seconds * 1e3,
        "model_tflops": case.flops / seconds / 1e12,
        "model_gbs": case.bytes / seconds / 1e9,
        "error": None if fit is None else fit.error,
        "worst_error": None if fit is None else fit.worst,
    }


_FITTED = ("forward_sm90", "backward_sm90", "decode_mma", "decode_sm90")


def _fit_of(case: Case) -> str:
    return "float8" if case.kind == "forward" and case.dtype.startswith(_FLOAT8) else case.kind


def _fitted(fit: Fit, clocks: Mapping[str, float]) -> float:
    return sum(weight * clocks[name] for name, weight in fit.weights.items()) + clocks["passes"]


def terms(case: Case, counts: Counts, machine: Machine) -> dict[str, float]:
    """Clocks of the parts of a case, and the other terms that a fit may weigh.

    tiles: of rows (of keys in a backward pass), on the multiprocessor with the most work; output: their elements; edge:
    those that a mask cuts; launch: 1; cold: memory's clocks up to the bytes that the L2 cache holds; passes: memory's
    clocks before and after the kernel.
    """
    flops = machine.flops * (machine.fp8 if case.dtype.startswith(_FLOAT8) else 1)
    if case.kind == "decode":
        tiles, steps = 1.0, _decode_steps(case, counts, machine)
    else:
        tiles, steps = busiest(dealt(case, counts), machine.multiprocessors)
    to_clocks = machine.clock / machine.bandwidth
    passes = _passes(case) * to_clocks
    held = counts.keys if case.kind == "backward" else counts.rows
    return {
        "products": steps * counts.products / (flops / 2),
        "exponent": steps * counts.warps * counts.special * 32 / _EXPONENTIALS,
        "issue": steps * counts.warps * counts.instructions / _SCHEDULERS,
        "shared": steps * (counts.warps * counts.shared + counts.loaded) / _SHARED_BYTES,
        "memory": case.bytes * to_clocks + passes,
        "tiles": tiles,
        "output": tiles * held * case.head_dim,
        "edge": tiles * (case.causal or case.window is not None),
        "launch": 1.0,
        "cold": min(case.bytes, _L2_BYTES) * to_clocks,
        "passes": passes,
    }


def busiest(work: Iterable[int], processors: int) -> tuple[float, float]:
    """(tiles, steps) of the processor that finishes last. Each tile in turn goes to the next free processor.

    work: steps of each tile.
    """
    heap = [(0.0, 0, 0)] * processors
    for each in work:
        time, tiles, done = heap[0]
        heapq.heapreplace(heap, (time + each + EDGE, tiles + 1, done + each))
    return max(heap)[1:]


def dealt(case: Case, counts: Counts, section: int | None = None) -> Iterator[int]:
    """Steps of the tiles of all heads and sequences, in the order in which the blocks of ``counts.kernel`` start.

    section: heads of a section, in place of the kernel's own. A block of our backward kernels multiplies its keys with
    every query head of a group, one after another. Tiles of other libraries' kernels come longest first.
    """
    steps, uneven = _steps(case, counts), case.causal or case.window is not None
    heads, ranks, group = case.batch * case.heads, len(steps), case.heads // case.kv_heads
    if not counts.kernel.startswith(("forward_", "backward_")):
        yield from sorted(steps * heads, reverse=True)
        return
    if case.kind == "backward":
        steps, heads, group = [each * group for each in steps], case.batch * case.kv_heads, 1
    elif uneven:
        steps.reverse()  # later rows see more keys
    hopper = counts.kernel == "forward_sm90"
    if hopper:
        own = section_heads(heads, group, case.keys * 2 * case.head_dim * ELEMENTS[case.dtype].itemsize)
    else:
        own = section_size(ranks, group) if uneven else 1
    for _, rank in ranked(heads, ranks, section or own, shortened=hopper):
        yield steps[rank]


def _steps(case: Case, counts: Counts) -> list[int]:
    """For each tile of one head and sequence: how many tiles of the other operand it sees at least partly."""
    past = case.keys - case.rows
    left = case.keys if case.window is None else case.window
    found = []
    if case.kind == "backward":
        for start in range(0, case.keys, counts.keys):
            first = max(0, start - past) if case.causal else 0
            found.append(-(-(case.rows - first) // counts.rows))
        return found
    for start in range(0, case.rows, counts.rows):
        end = min(case.rows, start + counts.rows)
        last = min(case.keys, end + past) if case.causal or case.window is not None else case.keys
        first = max(0, start + past - left)
        found.append(max(1, -(-last // counts.keys) - first // counts.keys))
    return found


def _decode_steps(case: Case, counts: Counts, machine: Machine) -> float:
    packed = -(-case.rows * case.heads // case.kv_heads // counts.rows)
    return case.batch * case.kv_heads * packed * -(-case.keys // counts.keys) / machine.multiprocessors


def _passes(case: Case) -> float:
    """Bytes that other kernels of the launch move: in a backward pass, for delta and the float dQ."""
    elements = case.batch * case.heads * case.rows * case.head_dim
    # o and dout are read, dq is cleared, read as floats and written
    return 14.0 * elements if case.kind == "backward" else 0.0


def table(found: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Rows for `COLUMNS`, from what `estimate_suite` gave."""
    for row in found["rows"]:
        parts = ["-" if part is None else f"{part:.4f}" for part in row["parts_ms"].values()]
        decode = row["case"]["kind"] == "decode"
        speed = f"{row['model_gbs']:.0f} GB/s" if decode else f"{row['model_tflops']:.0f} TFLOP/s"
        known = row["error"] is not None
        error = f"{row['error']:.1%}, {row['worst_error']:.0%}" if known else "not fitted"
        kernel = row["kernel"] or f"none: {row['reason']}"
        yield (row["case"]["name"], kernel, *parts, row["bound"], speed if known else f"at most {speed}", error)


def _counted(case: Case, context: GpuContext, count: Any) -> tuple[str | None, Counts | None, str | None]:
    """(kernel, its counts, why there is no kernel)."""
    try:
        key = key_of(case, context)
    except GpuActorsError as error:
        return None, None, str(error)
    return key.kernel, None if find_disassembler() is None else count(key), None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=_CASES)
    parser.add_argument("--arch", help=f"{', '.join(MACHINES)}; default: {DEFAULT_ARCH}")
    parser.add_argument("--quick", action="store_true", help="only the most telling cases")
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    given = parser.parse_args(arguments)
    found = {"environment": environment()} | estimate_suite(given.suite, given.arch, given.quick)
    if given.out is not None:
        given.out.write_text(in_rows(found), encoding="utf-8")
    write_table(COLUMNS, table(found), title=f"MODEL of {given.suite} on {found['machine']['name']}: {found['note']}")


if __name__ == "__main__":
    main()
