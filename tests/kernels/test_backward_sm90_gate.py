"""What ptxas makes of backward_sm90, which needs no GPU: spills, notes, and what a step of its main loop takes.

scripts/gate backward_sm90         every variant below; writes build/reports/gate_backward_sm90.md

A variant passes with

- nothing spilled, no stack, no access to local memory, no C75xx note (wgmma serialised, setmaxnreg ignored);
- as many products (HGMMA) in a step of the main loop as the tile has;
- the exponentials of a step between the wait for S and the first product of dV, while the tensor cores multiply dP,
  where the scale stands alone between product and weight: with options dP is multiplied later, for registers are short;
- with the scale alone, no more than four moves from vector to uniform registers;
- with the scale alone at head dim 128, at most 520 instructions a step and warp, which take at most 45% of the issue
  slots while the tensor cores multiply; and where dQ is not sent, at most 110% of these clocks of shared memory.

Instructions are of a step without a mask, and what masks add. Slots are instructions times two, because two warps share
a scheduler, over the clocks of the step's products. Shared memory is a count: the bytes that products read, that arrive
by TMA, and that dS, dQ and the statistics take, at 128 bytes a clock, over the same clocks. Seconds are of processor
time for a cold compile.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulated.backward import backward_problem_of
from emulated.forward import key_of, ml_dtype
from support.gate import Code, WgmmaVariant, code_faults, failing, tiles_missed, with_bug, write_page, wrong
from support.hopper_sass import instructions_of, opcodes, step_of

from gpu_actors import KernelSource
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.kernels.hopper_backward.launch import BACKWARD_SM90
from gpu_actors.kernels.hopper_backward.variant import sm90_backward_refuses
from gpu_actors.kernels.tiles import Tile, padded_backward_dims, shares_keys
from gpu_actors.kernels.variants import kernel_source

KERNEL = "backward_sm90"

SHARED_LIMIT = 232_448
PRODUCTS_A_CLOCK = 2048  # of a multiprocessor: 512 dense 16-bit multiply-adds on each of four tensor cores
SHARED_BYTES_A_CLOCK = 128
REGISTERS = 168  # what 65,536 leave for each of 384 threads at launch, in steps of 8
CONSUMER_WARPS = 8
INSTRUCTIONS = 520  # of a step without a mask, where only the scale stands between product and score
ISSUE = 0.45  # of the issue slots while the tensor cores multiply: two warps share a scheduler
SHARED = 1.10  # of the clocks of the products
MOVES = 4  # from vector to uniform registers
SECONDS = 1.0  # that a cold compile may take

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal varlen": {"causal": True, "layout": "varlen"},
    "window sinks": {"causal": True, "window_size": (9, 0), "sink_tokens": 4, "sinks": True, "layout": "varlen"},
    "deterministic": {"causal": True, "deterministic": True},
    "softcap": {"softcap": 20.0},
    "alibi": {"causal": True, "alibi": "heads"},
    "dropout": {"causal": True, "dropout_p": 0.1, "layout": "varlen"},
    "bias": {"causal": True, "bias": ("bfloat16", False, True), "deterministic": True},
    "bias dropout": {"bias": ("float32", True, True), "dropout_p": 0.1, "causal": True, "deterministic": True},
    "bias softcap": {"bias": ("bfloat16", False, True), "softcap": 20.0, "causal": True, "deterministic": True},
    "every gradient": {
        "causal": True,
        "window_size": (9, 0),
        "alibi": "heads",
        "softcap": 20.0,
        "dropout_p": 0.1,
        "bias": ("float32", True, True),
    },
    "everything": {
        "causal": True,
        "window_size": (9, 0),
        "sink_tokens": 4,
        "sinks": True,
        "layout": "varlen",
        "alibi": "heads",
        "softcap": 20.0,
        "dropout_p": 0.1,
    },
}
PLAIN = ("full", "causal", "causal varlen", "window sinks", "deterministic")
WHOLE = (("bfloat16", 128, 128), ("bfloat16", 64, 64), ("bfloat16", 256, 256), ("bfloat16", 192, 128))
SOME = (("float16", 128, 128), ("float16", 64, 64), ("float16", 192, 192), ("float16", 256, 256), ("bfloat16", 96, 96))
FEW = ("full", "causal")
MOST = (*FEW, "deterministic", "everything")


def wanted(shape: tuple[str, int, int], option: str) -> bool:
    """Whether the page has the variant, which the kernel then takes."""
    if shape in SOME:
        return option in (MOST if max(shape[1:]) > 128 else FEW)
    return backward_sm90_takes(shape, option)


def backward_sm90_takes(shape: tuple[str, int, int], option: str) -> bool:
    return sm90_backward_refuses(problem_of(*shape, option), "sm_90a") is None


def problem_of(dtype: str, dim: int, dim_v: int, option: str) -> Any:
    q, v = (np.zeros((1, 64, 2, width), ml_dtype(dtype)) for width in (dim, dim_v))
    return dataclasses.replace(backward_problem_of(q, q, v), **OPTIONS[option])


VARIANTS = tuple(
    WgmmaVariant(*shape, option) for shape in (*WHOLE, *SOME) for option in OPTIONS if wanted(shape, option)
)
SAMPLE = (WgmmaVariant("bfloat16", 128, 128, "full"), WgmmaVariant("bfloat16", 64, 64, "causal"))


class Finding(NamedTuple):
    """What became of a variant.

    step: instructions of a step of the main loop without what is passed by where nothing is hidden, by opcode. masks:
    instructions that are passed by.
    """

    variant: WgmmaVariant
    macros: dict[str, int]
    code: Code
    step: collections.Counter[str]
    masks: int
    overlapped: bool
    seconds: float

    @property
    def tile(self) -> Tile:
        return Tile(*(self.macros[name] for name in ("BLOCK_M", "BLOCK_N", "STAGES", "WARPS")))

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of Q and K, and of V and dO, as they are multiplied."""
        return padded_backward_dims(self.tile, self.variant.dim, self.variant.dim_v)

    @property
    def plain(self) -> bool:
        """Whether the scale stands alone between product and weight."""
        return self.variant.option in PLAIN

    @property
    def pieces(self) -> int:
        """Of dQ's columns, which a consumer multiplies one after the other."""
        if not shares_keys(self.tile):
            return 1
        if not self.plain:
            return self.dims[0] // 64
        return 2 if self.dims[0] == 256 else 1

    @property
    def products(self) -> int:
        """HGMMA of a step: S and dP, dV and dK, dQ."""
        m, n = self.tile[:2]
        return (sum(self.dims) + 2 * m + self.pieces * n) // 16

    @property
    def instructions(self) -> int:
        return self.step.total()

    @property
    def tensor_clocks(self) -> float:
        dim, dim_v = self.dims
        return self.tile.block_m * self.tile.block_n * (3 * dim + 2 * dim_v) / PRODUCTS_A_CLOCK

    @property
    def issue(self) -> float:
        """Of issue slots while the tensor cores multiply."""
        return self.instructions * (CONSUMER_WARPS // 4) / self.tensor_clocks

    @property
    def sends(self) -> bool:
        """Whether dQ goes through shared memory on its way to global memory."""
        waits = not self.plain or "DETERMINISTIC" in self.macros
        return waits and not shares_keys(self.tile) and not self.keeps

    @property
    def keeps(self) -> bool:
        """Whether products stay in shared memory for a second computation of the weights."""
        return "bias" in OPTIONS[self.variant.option] and "softcap" in OPTIONS[self.variant.option]

    @property
    def shared_clocks(self) -> float:
        """Bytes that a step moves into and out of shared memory, over what that can move in a clock.

        A product reads A (64 rows, where it is in shared memory) and B (its columns) of 32 bytes a step of its sum, in
        each consumer. Beside them: Q, dO and statistics arrive; dS is written, and P where keys are shared; dQ leaves
        registers, and where it is sent is read again; each warp loads the statistics of the rows of its scores.
        """
        (m, n), (dim, dim_v) = self.tile[:2], self.dims
        consumers = CONSUMER_WARPS // 4
        if shares_keys(self.tile):
            own = sum(self.dims) // consumers
            operands = (dim + dim_v) // 16 * (64 + m // consumers) + m // 16 * (2 * 64 + own)
            operands += n // 16 * (self.pieces * 64 + dim)
            written, loads = 2 * m * n * 2, CONSUMER_WARPS * m // consumers * 8
        else:
            dq_columns = dim if m == 128 else dim // 2
            operands = (dim + dim_v) // 16 * (64 + m) + m // 16 * (dim + dim_v) + n // 16 * (64 + dq_columns)
            written, loads = m * n * 2, CONSUMER_WARPS * m * 8
        moved = m * ((dim + dim_v) * 2 + 8) + written + (2 if self.sends else 1) * m * dim * 4 + loads
        moved += 3 * m * n * 4 if self.keeps else 0
        return (consumers * 32 * operands + moved) / SHARED_BYTES_A_CLOCK

    @property
    def shared(self) -> float:
        return self.shared_clocks / self.tensor_clocks


@functools.cache
def source_of(variant: WgmmaVariant) -> KernelSource:
    return kernel_source(key_of(problem_of(*variant), "sm_90a", KERNEL))


@functools.cache
def examine(variant: WgmmaVariant) -> Finding:
    source = source_of(variant)
    start = time.thread_time()
    cubin = Compiler().compile(source)
    seconds = time.thread_time() - start
    code = instructions_of(cubin.data)
    step, masks = step_of(code)
    return Finding(
        variant=variant,
        macros={name: int(value) for name, value in source.macros.items() if value.isdigit()},
        code=Code(cubin.resources[KERNEL], cubin.notes, "\n".join(text for _, text in code)),
        step=opcodes(step),
        masks=masks,
        overlapped=in_order(step),
        seconds=seconds,
    )


def in_order(step: list[str]) -> bool:
    """Whether exponentials stand between the waits for S and for dP, and the differences from delta after that.

    Beside the exponentials the tensor cores multiply dP, beside the differences dV.
    """
    waits = [n for n, text in enumerate(step) if "DEPBAR.LE gsb0" in text]
    exponents = [n for n, text in enumerate(step) if "MUFU.EX2" in text]
    weights = [n for n, text in enumerate(step) if "HGMMA" in text and ", R" in text and "tnspB" in text]
    return len(waits) >= 3 and all(waits[0] < n < weights[0] < waits[1] for n in exponents)


def faults(found: Finding) -> list[str]:
    """What the gate holds against a variant."""
    limited = found.plain and found.dims == (128, 128)
    return code_faults(found.code, REGISTERS) + wrong(
        {
            f"{found.macros['SHARED_BYTES']} bytes of shared memory": found.macros["SHARED_BYTES"] > SHARED_LIMIT,
            f"{found.step['HGMMA']} instead of {found.products} HGMMA a step": found.step["HGMMA"] != found.products,
            "exponentials do not run beside dP": found.plain and not found.overlapped,
            f"{found.step['R2UR']} moves to uniform registers": found.plain and found.step["R2UR"] > MOVES,
            f"{found.instructions} instructions a step": limited and found.instructions > INSTRUCTIONS,
            f"{found.issue:.0%} of issue slots": limited and found.issue > ISSUE,
            f"{found.shared:.0%} of shared memory": limited and not found.sends and found.shared > SHARED,
        }
    )


@pytest.mark.parametrize("variant", SAMPLE, ids=str)
def test_a_sample_of_the_variants_passes_the_gate(variant):
    assert faults(examine(variant)) == []


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_every_variant_passes_the_gate():
    assert failing(examine, faults, VARIANTS) == {}


@pytest.mark.parametrize("name", BACKWARD_SM90.companions)
def test_the_kernels_before_and_after_are_clean_as_well(name):
    q = np.zeros((1, 64, 2, 128), np.float16)
    key = key_of(backward_problem_of(q, q, q), "sm_90a", KERNEL)
    resources = Compiler().compile(kernel_source(dataclasses.replace(key, kernel=name))).resources[name]
    assert (resources.spill_bytes, resources.stack_bytes) == (0, 0)


_MAIN = "hopper_backward/backward_sm90.cu"
SEEDS = {
    "exponentials": (_MAIN, "wgmma_wait<DP_LATER ? 0 : 1>", "wgmma_wait<0>"),
    "HGMMA": ("hopper_backward/consumer.cuh", "n < BLOCK_N / STEP; n++", "n < BLOCK_N / STEP - 1; n++"),
    "instructions": (
        "hopper_backward/scores.cuh",
        "x = ptx::ex2(x * ",
        "for (int i = 0; i < 9; i++) x = x * 1.5f;\n      x = ptx::ex2(x * ",
    ),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name == "HGMMA" else pytest.mark.sweep) for name in SEEDS]
)
def test_the_gate_sees_what_it_is_for(fault, monkeypatch):
    seeded = with_bug(source_of(SAMPLE[0]), *SEEDS[fault])
    monkeypatch.setattr(sys.modules[__name__], "source_of", lambda variant: seeded)
    seen = faults(examine.__wrapped__(SAMPLE[0]))
    assert any(fault in text for text in seen), seen


def test_every_row_of_the_tile_table_is_among_the_variants():
    assert tiles_missed(KERNEL, map(source_of, VARIANTS)) == set()


def judge(variant: WgmmaVariant) -> tuple[str, list[str]]:
    found = examine(variant)
    cells = (
        f"{found.macros['BLOCK_M']} x {found.macros['BLOCK_N']}", found.macros["SHARED_BYTES"],
        f"{found.instructions} + {found.masks}", found.products, f"{found.issue:.0%}", f"{found.shared:.0%}",
        f"{found.seconds:.2f}",
    )  # fmt: skip
    return " | ".join(map(str, cells)), faults(found)


def main() -> int:
    return write_page(
        VARIANTS,
        judge,
        "backward_sm90",
        ("tile", "bytes a block", "instructions a step", "products", "slots", "shared memory", "seconds"),
    )


if __name__ == "__main__":
    sys.exit(main())
