"""What ptxas makes of forward_wide, which needs no GPU: registers, spills, shared memory and tensor-core instructions.

scripts/gate forward_wide      every variant below on every architecture; writes build/reports/gate_forward_wide.md
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
from support.exponents import fused_corrections
from support.gate import (
    ARCHS,
    Code,
    MmaVariant,
    code_faults,
    code_of,
    failing,
    register_limit,
    sample_of,
    tiles_missed,
    write_page,
    wrong,
)
from test_static_gate import FEW, OPTIONS

from gpu_actors import DispatchKey
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import capability, example_problem
from gpu_actors.kernels.variants import kernel_source

KERNEL = "forward_wide"

# (dtype, compute, head_dim, head_dim_v): every row of the tile table, unequal dims, halves that are not alike.
SHAPES: tuple[tuple[str, str | None, int, int], ...] = (
    ("bfloat16", None, 512, 512),
    ("float16", None, 512, 256),
    ("float16", None, 264, 512),
    ("bfloat16", None, 320, 320),
    ("bfloat16", None, 448, 448),
)
# Checked by every test run; the rest is the sweep's.
SAMPLE = {
    "sm_80": (),
    "sm_86": (),
    "sm_89": (),
    "sm_90a": (("bfloat16", 512, "window sinks"),),
    "sm_100a": (),
    "sm_120a": (),
}
VARIANTS = tuple(
    MmaVariant(arch, shape, option)
    for arch in ARCHS
    for shape in SHAPES
    for option in (OPTIONS if shape == SHAPES[0] else FEW)
)


class Finding(NamedTuple):
    """What became of a variant. expected: HMMA. exponents: what is wrong with the softmax's exponentials."""

    key: DispatchKey
    code: Code
    shared: int
    threads: int
    expected: int
    exponents: list[str]

    @property
    def tensor(self) -> int | None:
        return self.code.count(r"\bHMMA\.")


def key_of_variant(variant: MmaVariant) -> DispatchKey:
    dtype, _, dim, dim_v = variant.shape
    options: dict[str, Any] = {"head_dim_v": dim_v, "return_lse": True, **OPTIONS[variant.option]}
    return dispatch_key(example_problem(dtype, dim, **options), variant.arch)


def expected_instructions(macros: dict[str, str], arch: str) -> int:
    """HMMA of a warp: the sum over its half of head_dim is unrolled by two pairs of chunks.

    Of an odd number of pairs, code for sm_100 and later has the first one before the loop, once more in the text and as
    often in the run; code for others leaves the loop in its middle.
    """
    number = {name: int(value) for name, value in macros.items() if value.isdigit()}
    half_v = -(-number["HEAD_DIM_V"] // 64) * 4  # blocks of 8 columns
    if number["HEAD_DIM_V"] % 64:
        half_v -= max(0, 4 - number["HEAD_DIM_V"] % 64 // 8)  # which exist for neither warp
    groups, rest = divmod(number["HEAD_DIM"], 64)
    pairs = 2 * groups + min(2, -(-rest // 16))  # of chunks, that exist in the first warp's half
    unrolled = 2 + (pairs % 2 if capability(arch) >= 100 else 0)
    return number["BLOCK_N"] // 8 * unrolled + number["BLOCK_N"] // 16 * half_v


def examine(variant: MmaVariant) -> Finding:
    key = key_of_variant(variant)
    source = kernel_source(key)
    code, macros = code_of(source, KERNEL), dict(source.macros)
    return Finding(
        key=key,
        code=code,
        shared=int(macros["SHARED_BYTES"]),
        threads=32 * int(macros["WARPS"]),
        expected=expected_instructions(macros, variant.arch),
        exponents=[] if code.text is None else fused_corrections(code.text, int(macros["BLOCK_N"]) + 2, 4),
    )


def faults(found: Finding) -> list[str]:
    """What the gate holds against a variant."""
    limit = shared_mem_limit(capability(found.key.arch))
    checks = {
        f"{found.key.kernel} takes it": found.key.kernel != KERNEL,
        f"{found.shared} bytes of shared memory of {limit}": found.shared > limit,
        f"{found.tensor} HMMA instead of {found.expected}": found.tensor not in (None, found.expected),
    }
    return code_faults(found.code, register_limit(found.threads)) + wrong(checks) + found.exponents


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if SAMPLE[arch]])
def test_a_sample_of_the_variants_passes_the_gate(arch: str) -> None:
    assert failing(examine, faults, sample_of(VARIANTS, arch, SAMPLE[arch])) == {}


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_passes_the_gate(arch: str) -> None:
    assert failing(examine, faults, [variant for variant in VARIANTS if variant.arch == arch]) == {}


def test_every_row_of_the_tile_table_is_among_the_variants() -> None:
    assert tiles_missed(KERNEL, (kernel_source(key_of_variant(variant)) for variant in VARIANTS)) == set()


def judge(variant: MmaVariant) -> tuple[str, list[str]]:
    found = examine(variant)
    return f"{found.code.resources.registers} | {found.shared} | {found.threads} | {found.tensor}", faults(found)


def main() -> int:
    return write_page(VARIANTS, judge, "forward_wide", ("registers", "shared memory, bytes", "threads", "HMMA"))


if __name__ == "__main__":
    sys.exit(main())
