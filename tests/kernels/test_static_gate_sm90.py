"""What ptxas makes of forward_sm90, which needs no GPU: spills, notes, products, and what overlaps with them.

scripts/gate hopper         every variant below, by NVRTC and by nvcc; writes build/reports/gate_hopper.md

A variant passes with

- nothing spilled, no stack, no access to local memory, no C75xx note (wgmma serialised, setmaxnreg ignored);
- as many products (HGMMA, QGMMA of 8 bits) as the tile has, once in the loop and once outside it;
- every special function of a loop between the waits for S and for O, where the tensor cores still multiply; a score
  modification may compute what follows from rows and keys alone before them. Or, of 8 bits at head dim 64 with three
  consumers, with 256 keys a tile and above head dim 128, after all waits, beside other consumers' products only: there
  registers hold the scores of a tile or its sums and not both, and the instructions of an iteration are no more than
  the clocks of those products;
- no more moves from vector to uniform registers in a loop than four by NVRTC, sixteen by nvcc; four more with a score
  modification, whose divisions by numbers move their reciprocals;
- where some tiles need a mask, a branch that passes it by in the others;
- the softmax's corrections computed from differences (FADD), never from fused products (FFMA), so that they are 1 where
  a maximum stays;
- where nothing but the scale stands between product and score, instructions of an iteration without a mask that take at
  most 60% of the issue slots while the tensor cores are busy: instructions times two over the products' clocks. With
  three consumers, at head dim 64, three warps share a scheduler, so that the true share is half as much again.
  8-bit products take half the clocks, and their softmax as many instructions as ever: there at most 110%, which says
  that the softmax is what they wait for.

Registers are those at launch; setmaxnreg then gives the producer 24 and consumers 240 of them, or 32 and 160 with three
consumers. Instructions are of an iteration without a mask, and what the mask adds. Seconds are of processor time for a
cold compile by NVRTC, the less of two.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases.score_mods import case_of, forward_graph
from emulated.forward import key_of, ml_dtype, problem_of
from mutation.forward_mutants import FUSED_CORRECTION
from support.exponents import fused_corrections
from support.gate import Code, WgmmaVariant, code_faults, failing, tiles_missed, with_bug, wrong
from support.hopper_sass import Loop, instructions_of, main_loops, opcodes
from support.logs import write_log

from gpu_actors import KernelSource
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.compiling.source import parse_resources
from gpu_actors.graph.match import match_attention
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import padded_head_dim
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.score_mod import ScoreMod

KERNEL = "forward_sm90"
NVCC = shutil.which("nvcc")
COMPILERS = ("NVRTC", "nvcc") if NVCC else ("NVRTC",)

SHARED_LIMIT = 232_448
FLOPS_A_CLOCK = 4096  # of a multiprocessor: 512 dense 16-bit multiply-adds on each of four tensor cores
REGISTERS = {12: 168, 16: 128}  # by warps: what 65,536 leave for each thread at launch, in steps of 8
# Of issue slots that an iteration without a mask may take while the tensor cores multiply: its instructions, twice (two
# warps share a scheduler), as a share of the products' clocks.
BUDGET = 0.60
# 8-bit products take half the clocks, and the softmax as many instructions as ever: it is what they wait for.
BUDGET_FP8 = 1.10
# From vector to uniform registers, in any loop. Where uniform ones run out, ptxas keeps a few descriptors in vector
# registers: none in most loops with NVRTC, whose cubins run, more with the older ptxas of nvcc 13.0.
MOVES = {"NVRTC": 4, "nvcc": 16}

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal varlen": {"causal": True, "layout": "varlen"},
    "pages": {"causal": True, "layout": "paged", "page_size": 64, "varlen_q": True, "seqlen_q": 64},
    "window": {"window_size": (9, 9)},
    "window sinks": {"causal": True, "window_size": (9, 0), "sink_tokens": 4, "sinks": True, "layout": "varlen"},
    "alibi": {"causal": True, "alibi": "heads"},
    "softcap": {"causal": True, "softcap": 20.0},
    "everything": {
        "causal": True,
        "window_size": (9, 0),
        "sink_tokens": 4,
        "sinks": True,
        "layout": "varlen",
        "alibi": "heads",
        "softcap": 20.0,
    },
    "bias": {"bias": ("bfloat16", False, False)},
    "wide bias": {"causal": True, "bias": ("float32", True, False)},
    "bool bias": {"bias": ("bool", False, True)},
    "dropout": {"causal": True, "dropout_p": 0.1, "layout": "varlen"},
    "dropout, places": {"dropout_p": 0.1, "q_positions": 2, "k_positions": 2},
    "everything dense": {
        "causal": True,
        "window_size": (9, 0),
        "sink_tokens": 4,
        "sinks": True,
        "alibi": "heads",
        "softcap": 20.0,
        "bias": ("float32", False, False),
        "dropout_p": 0.1,
    },
}
OPTIONS["everything biased"] = {**OPTIONS["everything dense"], "dropout_p": 0.0}
OPTIONS["everything dropped"] = {**OPTIONS["everything"], "dropout_p": 0.1}
# Philox multiplies by constants that lie in uniform registers.
DRAWS = ("dropout", "dropout, places", "everything dense", "everything dropped")
LOADS = ("bias", "wide bias", "bool bias", "everything biased")
# Score modifications of cases.score_mods: one that reads memory, one that divides integers, one with special functions.
MODIFIED = ("document mask", "natten 2d", "tanh gating")
SHAPES = (
    ("bfloat16", 64, 64),
    ("bfloat16", 96, 96),
    ("bfloat16", 128, 128),
    ("bfloat16", 192, 192),
    ("bfloat16", 192, 128),
    ("bfloat16", 256, 256),
    ("float16", 64, 64),
    ("float16", 128, 128),
    ("float16", 256, 256),
    ("float16", 40, 40),
    ("bfloat16", 80, 72),
    ("float8_e4m3fn", 64, 64),
    ("float8_e4m3fn", 128, 128),
    ("float8_e4m3fn", 256, 256),
    ("float8_e4m3fn", 192, 96),
    ("float8_e4m3fn", 192, 192),
    ("float8_e5m2", 64, 64),
    ("float8_e5m2", 128, 128),
    ("float8_e5m2", 256, 256),
)
FEW = ("causal", "everything")
FEW_FP8 = ("full", "causal", "window sinks", "everything", "wide bias", "bool bias")
SECONDS = 1.0  # that a cold compile may take


# Every option with every padded head dim in bf16, a few with the rest. Above head dim 192 a bias and dropout are two.
TWO = ("everything biased", "everything dropped")
VARIANTS = tuple(
    WgmmaVariant(*shape, option)
    for n, shape in enumerate(SHAPES)
    for option in ((*OPTIONS, *MODIFIED) if n < 6 else FEW_FP8 if ELEMENTS[shape[0]].fp8 else FEW)
    if option not in (("everything dense", "dropout, places") if shape[1] > 192 else TWO)
)
SAMPLE = (
    WgmmaVariant("bfloat16", 128, 128, "causal"),
    WgmmaVariant("bfloat16", 64, 64, "full"),
    WgmmaVariant("float8_e4m3fn", 128, 128, "full"),
)


class Finding(NamedTuple):
    """What became of a variant.

    clocks: that the products of an iteration take. products: HGMMA of an iteration. masked: whether some tiles need a
    mask. exponents: what is wrong with the softmax's exponentials.
    """

    variant: WgmmaVariant
    compiler: str
    macros: dict[str, int]
    code: Code
    clocks: float
    products: int
    masked: bool
    counts: dict[str, int]
    exponents: list[str]
    loops: list[Loop]

    @property
    def others(self) -> float:
        """Clocks that the products of the other consumers take."""
        consumers = self.macros["WARPS"] // 4 - 1
        return self.clocks * (consumers - 1) / consumers

    @property
    def share(self) -> float:
        """Of issue slots, of an iteration without a mask."""
        return 2 * self.loops[0].instructions / self.clocks


def is_fp8(variant: WgmmaVariant) -> bool:
    return ELEMENTS[variant.dtype].fp8


def score_mod(variant: WgmmaVariant) -> ScoreMod | None:
    if variant.option not in MODIFIED:
        return None
    return match_attention(forward_graph(case_of(variant.option, "float16"))).problem.score_mod


@functools.cache
def source_of(variant: WgmmaVariant) -> KernelSource:
    q, v = (np.zeros((1, 64, 2, width), ml_dtype(variant.dtype)) for width in (variant.dim, variant.dim_v))
    options = OPTIONS.get(variant.option) or {"score_mod": score_mod(variant)}
    problem = dataclasses.replace(problem_of(q, q, v), **options, descales=is_fp8(variant))
    return kernel_source(key_of(problem, "sm_90a", KERNEL))


def compile_with(compiler: str, source: KernelSource) -> tuple[bytes, str]:
    """The cubin, and what ptxas said."""
    if compiler == "NVRTC":
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


@functools.cache
def examine(variant: WgmmaVariant, compiler: str) -> Finding:
    source = source_of(variant)
    image, log = compile_with(compiler, source)
    macros = {name: int(value) for name, value in source.macros.items() if value.isdigit()}
    dim, dim_v = (padded_head_dim(dim, variant.dtype) for dim in (variant.dim, variant.dim_v))
    step = 32 if is_fp8(variant) else 16
    products = dim // step + macros.get("PIECES", 1) * macros["BLOCK_N"] // step
    code = instructions_of(image)
    text = "\n".join(instruction for _, instruction in code)
    counted = opcodes([instruction for _, instruction in code])
    return Finding(
        variant=variant,
        compiler=compiler,
        macros=macros,
        code=Code(parse_resources(log)[KERNEL], tuple(re.findall(r"C75\d\d", log)), text),
        clocks=2 * 2 * macros["BLOCK_M"] * macros["BLOCK_N"] * (dim + dim_v) / 2 / FLOPS_A_CLOCK * 16 / step,
        products=products,
        masked="WINDOW" in macros or "CAUSAL" in macros,
        counts={name: counted[name] for name in ("HGMMA", "QGMMA")},
        exponents=exponent_faults(text, macros),
        loops=main_loops(code, products),
    )


def exponent_faults(text: str, macros: dict[str, int]) -> list[str]:
    """A thread has half of a tile's keys, in the loop and before it. What rounding took off two bases comes last."""
    return fused_corrections(text, weights=macros["BLOCK_N"] + 2, corrections=2)


def faults(found: Finding) -> list[str]:
    """What the gate holds against a variant."""
    loops = found.loops
    expected, opcode = 2 * found.products, "QGMMA" if is_fp8(found.variant) else "HGMMA"
    plain = found.variant.option not in ("alibi", "softcap", "everything", *DRAWS, *LOADS, *MODIFIED)
    modified = found.variant.option in MODIFIED
    # What a modification computes of rows and keys alone may run before S is there.
    late = sum(loop.after["MUFU"] + (0 if modified else loop.before["MUFU"]) for loop in loops)
    checks = {
        f"{found.macros['SHARED_BYTES']} bytes of shared memory": found.macros["SHARED_BYTES"] > SHARED_LIMIT,
        f"{found.counts} instead of {expected} {opcode}": found.counts[opcode] != expected,
        f"{len(loops)} loops": len(loops) != 1,
        "the mask is not passed by": any(
            (loop.masking > found.macros["BLOCK_N"] // 2) != found.masked for loop in loops
        ),
        f"{late} special functions outside the overlap": late != 0,
        "moves to uniform registers": too_many_moves(found),
        "nothing runs beside its own products": any(loop.alone for loop in loops) and not may_be_alone(found),
    }
    text = code_faults(found.code, REGISTERS[found.macros["WARPS"]]) + wrong(checks) + found.exponents
    if loops and plain and found.share > (BUDGET_FP8 if is_fp8(found.variant) else BUDGET):
        text.append(f"{found.share:.0%} of issue slots")
    if plain and any(loop.alone and loop.instructions > found.others for loop in loops):
        text.append(f"more instructions than the {found.others:.0f} clocks of other consumers' products")
    return text


def may_be_alone(found: Finding) -> bool:
    """Where registers hold a tile's scores or its sums of 8-bit products, and not both."""
    widest = max(padded_head_dim(dim, found.variant.dtype) for dim in (found.variant.dim, found.variant.dim_v))
    return is_fp8(found.variant) and (widest > 128 or found.macros["WARPS"] == 16 or found.macros["BLOCK_N"] > 128)


def too_many_moves(found: Finding) -> bool:
    most = MOVES[found.compiler] + (
        4 if found.variant.option in MODIFIED else 8 if found.variant.option in DRAWS else 0
    )
    return any(loop.count("R2UR") > most for loop in found.loops)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_sample_of_the_variants_passes_the_gate(compiler):
    assert failing(lambda variant: examine(variant, compiler), faults, SAMPLE) == {}


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_variant_passes_the_gate(compiler):
    assert failing(lambda variant: examine(variant, compiler), faults, VARIANTS) == {}


SEEDS = {
    # As the comment in `mainloop_step` says: without the wait between, ptxas waits for O before the exponentials.
    "overlap": ("hopper/forward_sm90.cu", "if (more) wait_for_keys();\n  ptx::wgmma_wait<0>", "ptx::wgmma_wait<0>"),
    "C75": ("hopper/forward_sm90.cu", "  ptx::wgmma_fence();  // without it, ptxas puts one in (C7519)\n", ""),
    # A tile index that might differ between lanes, as far as the compiler knows.
    "uniform": ("hopper/schedule.cuh", "int tile = ptx::warp_uniform(", "int tile = int(threadIdx.x >> 20) + ("),
    "HGMMA": ("hopper/consumer.cuh", "n < BLOCK_N / STEP; n++", "n < BLOCK_N / STEP - 1; n++"),
    "fused products": ("mma/softmax.cuh", *FUSED_CORRECTION),
}  # fmt: skip


@pytest.mark.parametrize("fault", ["overlap", "fused products"])
def test_the_gate_sees_the_worst_of_it(fault, monkeypatch):
    check_seed(fault, monkeypatch)


# Of the compilers here, nvcc 13.0 alone puts a missing fence in.
@pytest.mark.sweep
@pytest.mark.parametrize("fault", [fault for fault in SEEDS if fault != "C75" or NVCC])
def test_the_gate_sees_what_it_is_for(fault, monkeypatch):
    check_seed(fault, monkeypatch)


def check_seed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = with_bug(source_of(SAMPLE[0]), *SEEDS[fault])
    monkeypatch.setattr(sys.modules[__name__], "source_of", lambda variant: seeded)
    seen = [text for compiler in COMPILERS for text in faults(examine.__wrapped__(SAMPLE[0], compiler))]
    assert any(fault in text for text in seen), seen


def test_every_row_of_the_tile_table_is_among_the_variants():
    assert tiles_missed(KERNEL, map(source_of, VARIANTS)) == set()


def seconds(variant: WgmmaVariant) -> float:
    """Of processor time for a cold compile by NVRTC, the less of two: other work on the machine only adds to it."""
    times = []
    for _ in range(2):
        start = time.thread_time()
        Compiler().compile(source_of(variant))
        times.append(time.thread_time() - start)
    return min(times)


def main() -> int:
    lines, failed, total, late = [], 0, 0, 0
    for variant in VARIANTS:
        verdicts = []
        for compiler in COMPILERS:
            found = examine(variant, compiler)
            verdict = "; ".join(faults(found)) or "passes"
            verdicts.append(verdict)
            failed += verdict != "passes"
            total += 1
            sys.stdout.write(f"{compiler} {variant}: {verdict}\n")
            sys.stdout.flush()
        timed = seconds(variant)
        late += timed > SECONDS
        lines.append(_row(examine(variant, "NVRTC"), timed, verdicts))
    summary = f"{total - failed} of {total} pass; {late} of {len(VARIANTS)} take more than {SECONDS:g} s to compile"
    write_log(
        "gate_hopper",
        summary,
        (
            "variant",
            *("tile", "shared memory", "registers", "products", "loop instructions", "slots", "overlapped", "seconds"),
            "verdict",
        ),
        lines,
    )
    sys.stdout.write(summary + "\n")
    return 1 if failed or late else 0


def _row(found: Finding, timed: float, verdicts: list[str]) -> str:
    beside = sum(loop.overlap["MUFU"] for loop in found.loops)
    overlap = f"{beside} of {sum(loop.count('MUFU') for loop in found.loops)}"
    overlap += ", others'" if any(loop.alone for loop in found.loops) else ""
    loops = " ".join(
        f"{loop.instructions} + {loop.masking}" if found.masked else str(loop.instructions) for loop in found.loops
    )
    tile = f"{found.macros['BLOCK_M']} x {found.macros['BLOCK_N']}"
    products = found.counts["HGMMA"] + found.counts["QGMMA"]
    cells = (
        found.variant, tile, found.macros["SHARED_BYTES"], found.code.resources.registers, products, loops,
        f"{found.share:.0%}", overlap, f"{timed:.2f}", " / ".join(dict.fromkeys(verdicts)),
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
