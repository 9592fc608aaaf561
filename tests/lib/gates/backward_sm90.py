"""The rows of backward_sm90 and of the kernels before and after it.

Besides the limits of every row:

- as many products (HGMMA) in a step of the main loop as the tile has;
- with the scale alone between product and weight, all exponentials of a step between the wait for S and the first
  product of dV, while the tensor cores multiply dP (with options, dP is multiplied later, because registers are short);
- with the scale alone, at most four moves from vector to uniform registers;
- with the scale alone at head dim 128, at most 520 instructions a step and warp, which take at most 45% of the issue
  slots while the tensor cores multiply; if dQ is not sent, shared memory takes at most 110% of the same clocks.

Instructions are counted for a step without a mask; those of masks are counted apart. Slots are instructions times two,
because two warps share a scheduler, over the clocks of the step's products. Shared memory's time is computed: the bytes
that products read, that arrive by TMA, and that dS, dQ and statistics take, at 128 bytes a clock, over these clocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from emulated.backward import backward_problem_of
from emulated.forward import key_of, ml_dtype
from gates.hopper import ARCH, REGISTERS, SHARED_BYTES_A_CLOCK, SHARED_LIMIT, WgmmaVariant
from gates.rows import SHARED, Family, Plan, Row, at_most, exactly, numbers_of, plain_plan, rows_of
from inside.kernels import BACKWARD_SM90, Tile, padded_backward_dims, shares_keys, sm90_backward_refuses
from support.gate import Code, kernel_source
from support.hopper_sass import instructions_of, opcodes, step_of

__all__ = ["BACKWARD_SM90_ROWS"]

KERNEL = "backward_sm90"

PRODUCTS_A_CLOCK = 2048  # of a multiprocessor: 512 dense 16-bit multiply-adds on each of four tensor cores
CONSUMER_WARPS = 8
INSTRUCTIONS = 520  # of a step without a mask, with only the scale between product and score
ISSUE = 0.45  # of the issue slots while the tensor cores multiply: two warps share a scheduler
SHARED_TIME = 1.10  # of the clocks of the products
MOVES = 4  # from vector to uniform registers
BESIDE, UNIFORM = "exponentials that do not run beside dP", "moves to uniform registers"
STEP, SLOTS, TIME = "instructions a step", "issue slots", "shared memory's time"

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


def problem_of(variant: WgmmaVariant) -> Any:
    q, v = (np.zeros((1, 64, 2, width), ml_dtype(variant.dtype)) for width in (variant.dim, variant.dim_v))
    return dataclasses.replace(backward_problem_of(q, q, v), **OPTIONS[variant.option])


def variants() -> list[WgmmaVariant]:
    """Every option that the kernel takes with the usual head dims, a few with the others."""
    whole = [WgmmaVariant(*shape, option) for shape in WHOLE for option in OPTIONS]
    some = [WgmmaVariant(*shape, o) for shape in SOME for o in (MOST if max(shape[1:]) > 128 else FEW)]
    return [*(each for each in whole if sm90_backward_refuses(problem_of(each), ARCH) is None), *some]


class Work(NamedTuple):
    """The work of a step of the main loop."""

    variant: WgmmaVariant
    number: dict[str, int]

    @property
    def tile(self) -> Tile:
        return Tile(*(self.number[name] for name in ("BLOCK_M", "BLOCK_N", "STAGES", "WARPS")))

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of Q and K, and of V and dO, with padding."""
        return padded_backward_dims(self.tile, self.variant.dim, self.variant.dim_v)

    @property
    def plain(self) -> bool:
        """Whether only the scale is between product and weight."""
        return self.variant.option in PLAIN

    @property
    def pieces(self) -> int:
        """How many pieces of dQ's columns a consumer multiplies, one after the other."""
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
    def tensor_clocks(self) -> float:
        dim, dim_v = self.dims
        return self.tile.block_m * self.tile.block_n * (3 * dim + 2 * dim_v) / PRODUCTS_A_CLOCK

    @property
    def sends(self) -> bool:
        """Whether dQ goes through shared memory on its way to global memory."""
        waits = not self.plain or "DETERMINISTIC" in self.number
        return waits and not shares_keys(self.tile) and not self.keeps

    @property
    def keeps(self) -> bool:
        """Whether products stay in shared memory for a second computation of the weights."""
        return "bias" in OPTIONS[self.variant.option] and "softcap" in OPTIONS[self.variant.option]

    @property
    def shared_clocks(self) -> float:
        """Bytes that a step moves into and out of shared memory, over the bytes that it can move in a clock.

        In each consumer, a step of a product's sum reads 32 bytes of each row of A (64, if it is in shared memory) and
        of each column of B. Besides: Q, dO and statistics arrive; dS is written, and P if keys are shared; dQ leaves
        registers, and is read again if it is sent; each warp loads the statistics of its scores' rows.
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


def not_beside(step: list[str]) -> int:
    """How many exponentials are not between the wait for S and the first product of dV, which the wait for dP follows.

    The tensor cores multiply dP beside the exponentials, and dV beside the differences from delta.
    """
    waits = [n for n, text in enumerate(step) if "DEPBAR.LE gsb0" in text]
    exponents = [n for n, text in enumerate(step) if "MUFU.EX2" in text]
    weights = [n for n, text in enumerate(step) if "HGMMA" in text and ", R" in text and "tnspB" in text]
    if len(waits) < 3:
        return max(1, len(exponents))
    return sum(not waits[0] < n < weights[0] < waits[1] for n in exponents)


def plan(variant: WgmmaVariant) -> Plan:
    source = kernel_source(key_of(problem_of(variant), ARCH, KERNEL))
    number = numbers_of(source)
    work = Work(variant, number)
    limits = {SHARED: at_most(SHARED_LIMIT), "HGMMA a step": exactly(work.products)}
    if work.plain:
        limits |= {BESIDE: exactly(0), UNIFORM: at_most(MOVES)}
    if work.plain and work.dims == (128, 128):
        limits |= {STEP: at_most(INSTRUCTIONS), SLOTS: at_most(ISSUE)}
        if not work.sends:
            limits[TIME] = at_most(SHARED_TIME)

    def read(code: Code) -> dict[str, float]:
        assert code.text is not None
        step, masks = step_of(instructions_of(code.text))
        counted = opcodes(step)
        return {
            "HGMMA a step": counted["HGMMA"],
            STEP: counted.total(),
            "instructions of masks": masks,
            SLOTS: counted.total() * (CONSUMER_WARPS // 4) / work.tensor_clocks,
            UNIFORM: counted["R2UR"],
            BESIDE: not_beside(step),
        }

    given = {SHARED: number["SHARED_BYTES"], TIME: work.shared_clocks / work.tensor_clocks}
    return Plan(source, KERNEL, REGISTERS[12], limits, given, read)


def companion_rows(name: str) -> tuple[Row, ...]:
    """The rows of a kernel that runs before or after backward_sm90."""

    def own_plan(variant: WgmmaVariant) -> Plan:
        key = key_of(problem_of(variant), ARCH, KERNEL)
        return plain_plan(dataclasses.replace(key, kernel=name), name)

    usual = [WgmmaVariant("float16", 128, 128, "full")]
    return rows_of(name, usual, own_plan, usual)


BACKWARD_SM90_ROWS = Family(
    "backward_sm90",
    (
        *rows_of(
            "backward_sm90",
            variants(),
            plan,
            [WgmmaVariant("bfloat16", 128, 128, "full"), WgmmaVariant("bfloat16", 64, 64, "causal")],
        ),
        *(row for name in BACKWARD_SM90.companions for row in companion_rows(name)),
    ),
    tiles=KERNEL,
)
