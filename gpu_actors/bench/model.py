"""A roofline estimate of a GPU suite, from counts alone. It is a model: it contains no measurement.

The time of a case is the longest of the times of its parts, each with the machine to itself:

    products    FLOPs / the dense rate of the tensor cores, or of the CUDA cores for a kernel that uses those
    exponent    one exp2 a pair / 16 a clock and multiprocessor
    issue       warp instructions of the kernel's main loop, counted in its machine code / 4 a clock and multiprocessor
    memory      bytes of the operands, each once / the memory's bandwidth

Rates are the vendor's data sheets', at their boost clock. Waits, poor overlap and the ends of a grid are not in
it, so it is an upper bound of the speed. mma.sync is taken to reach the full tensor rate, which on some
architectures it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_actors.bench.cases import Case, Kind, backward_cases, decode_cases, forward_cases
from gpu_actors.bench.counts import count_case, key_of
from gpu_actors.bench.sass import find_disassembler
from gpu_actors.context import GpuContext, open_context
from gpu_actors.devices.select import DEFAULT_ARCH
from gpu_actors.errors import GpuActorsError, Unsupported
from gpu_actors.options import ContextOptions

__all__ = ["COLUMNS", "MACHINES", "Machine", "estimate", "estimate_suite", "table"]

COLUMNS = ("case", "kernel", "products ms", "exponent ms", "issue ms", "memory ms", "bound by", "at most")

_CASES = {"forward": forward_cases, "backward": backward_cases, "decode": decode_cases}
_EXPONENTIALS = 16  # a clock and multiprocessor: CUDA C++ Programming Guide, "Arithmetic Instructions"
_SCHEDULERS = 4
_ON_CUDA_CORES = ("forward_simple",)


@dataclass(frozen=True, slots=True)
class Machine:
    """A product's data sheet.

    clock: boost, Hz. flops: dense 16-bit ones of the tensor cores, a clock and multiprocessor; fp8: how many times as
    many there are for 8 bits; fp32: those of the CUDA cores. bandwidth: bytes a second.
    """

    name: str
    multiprocessors: int
    clock: float
    flops: int
    bandwidth: float
    fp8: int = 1
    fp32: int = 256


MACHINES = {
    "sm_80": Machine("NVIDIA A100 SXM 80 GB", 108, 1.41e9, 2048, 2.039e12, fp32=128),
    "sm_89": Machine("NVIDIA L40S", 142, 2.52e9, 1024, 0.864e12, 2),
    "sm_90a": Machine("NVIDIA H200 SXM", 132, 1.83e9, 4096, 4.8e12, 2),
}


def estimate_suite(kind: Kind, arch: str | None = None, quick: bool = False) -> dict[str, Any]:
    """Estimates of every case of a suite for the machine known for ``arch``. Needs NVRTC and no GPU.

    Raises Unsupported for an architecture of which no data sheet is kept here.
    """
    arch = arch or DEFAULT_ARCH
    machine = MACHINES.get(arch)
    if machine is None:
        raise Unsupported("arch", arch, f"data sheets are kept for {', '.join(MACHINES)}", DEFAULT_ARCH)
    with open_context("mock", ContextOptions(arch=arch)) as context:
        rows = [estimate(case, machine, *_counted(case, context)) for case in _CASES[kind](quick)]
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
    case: Case,
    machine: Machine,
    kernel: str | None = None,
    instructions: float | None = None,
    reason: str | None = None,
) -> dict[str, Any]:
    """One case. instructions: the main loop's, of all warps, a pair of row and key; None where not counted."""
    rate = machine.multiprocessors * machine.clock
    pairs = case.pairs * case.heads
    flops = machine.flops * (machine.fp8 if case.dtype.startswith("float8") else 1)
    if kernel in _ON_CUDA_CORES:
        flops = machine.fp32
    parts: dict[str, float | None] = {
        "products": case.flops / flops / rate,
        "exponent": pairs / _EXPONENTIALS / rate,
        "issue": None if instructions is None else pairs * instructions / _SCHEDULERS / rate,
        "memory": case.bytes / machine.bandwidth,
    }
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    bound = max(known, key=lambda name: known[name])
    seconds = known[bound]
    return {
        "case": case.record(),
        "kernel": kernel,
        "reason": reason,
        "instructions_a_pair": instructions,
        "parts_ms": {name: None if part is None else part * 1e3 for name, part in parts.items()},
        "bound": bound,
        "model_ms": seconds * 1e3,
        "model_tflops": case.flops / seconds / 1e12,
        "model_gbs": case.bytes / seconds / 1e9,
    }


def table(found: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Rows for `COLUMNS`, from what `estimate_suite` gave."""
    for row in found["rows"]:
        parts = ["-" if part is None else f"{part:.4f}" for part in row["parts_ms"].values()]
        decode = row["case"]["kind"] == "decode"
        most = f"{row['model_gbs']:.0f} GB/s" if decode else f"{row['model_tflops']:.0f} TFLOP/s"
        yield (row["case"]["name"], row["kernel"] or f"none: {row['reason']}", *parts, row["bound"], most)


def _counted(case: Case, context: GpuContext) -> tuple[str | None, float | None, str | None]:
    """(kernel, instructions a pair, why there is no kernel)."""
    try:
        key = key_of(case, context)
    except GpuActorsError as error:
        return None, None, str(error)
    if find_disassembler() is None or case.kind != "forward":
        return key.kernel, None, None
    counts = count_case(key, case.kind)
    return key.kernel, None if counts is None else counts.a_thousand / 1000, None
