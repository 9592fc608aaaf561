"""Seeds bugs into the append and page-copy kernels, one at a time, and shows that the tests' comparison catches each.

scripts/mutants append            every mutant, about two seconds each; writes build/reports/mutation_append.md
scripts/mutants append NAME...    only these, and writes nothing
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import append as emulated_append
from emulated.append import FP8, AppendCase, Operands, check, expected, run, run_copy, same_bits
from inside.emulation import EmulatedModule, build_module
from inside.reference import copy_pages
from mutation.append_mutants import MUTANTS
from mutation.forward import mutated
from mutation.forward_mutants import Mutant
from mutation.run import probes_of, run_mutants

from gpu_actors import KernelSource, Rope

LAUNCHES = (("greedy", 0), ("lane", 1), ("random", 2), ("round_robin", 3))

_MIXED = AppendCase(new=(3, 0, 21, 1, 0, 8), before=(5, 2, 7, 0, 0, 8))
CASES = {
    "copy": _MIXED,
    "wide": AppendCase(new=(2, 1), before=(6, 0), heads_kv=32, head_dim=128),
    "even": AppendCase(new=(2,) * 5, before=(0, 7, 8, 15, 30), even=True),
    "values wider": dataclasses.replace(_MIXED, head_dim=24, head_dim_v=40),
    "pointers": dataclasses.replace(_MIXED, layout="pointers"),
    "odd": dataclasses.replace(_MIXED, head_dim=13, head_dim_v=5),
    "halves": dataclasses.replace(_MIXED, rope=Rope(dim=32), heads_q=2),
    "interleaved": dataclasses.replace(_MIXED, rope=Rope(dim=32, interleaved=True)),
    "part": dataclasses.replace(_MIXED, rope=Rope(dim=20), head_dim=32),
    "positions": dataclasses.replace(_MIXED, rope=Rope(dim=32), positions=True),
    "tables": dataclasses.replace(_MIXED, rope=Rope(dim=32, table_rows=100)),
    "many": AppendCase(new=(600,), before=(0,), heads_kv=1, head_dim=8, page_size=64, rope=Rope(dim=8)),
    "fp8": dataclasses.replace(_MIXED, cache_dtype=FP8[0], descales=True, scale=200.0),
    "ties": dataclasses.replace(_MIXED, cache_dtype=FP8[0]),
}
# Rows without a place: what is changed, as (array, index, value).
_MISPLACED: dict[str, tuple[tuple[str, Any, int], ...]] = {
    "beyond": (("cache_seqlens", 5, 33),),
    "before": (("cache_seqlens", 2, 0),),
    "unused": (("table", (2, 1), emulated_append.UNUSED_ENTRY),),
    "minus": (("table", (2, 1), -1),),
    "left over": (("cu_seqlens", 6, 30), ("cache_seqlens", 5, 12)),
}


def run_probe(name: str, schedule: str, seed: int) -> None:
    """Raise AssertionError or EmulationFault where a probe shows a difference."""
    if name in CASES:
        check(CASES[name], schedule=schedule, seed=seed, limit_seconds=20.0)
    elif name in _MISPLACED:
        operands = Operands(dataclasses.replace(_MIXED, capacity=32))
        for array, index, value in _MISPLACED[name]:
            getattr(operands, array)[index] = value
        caches, _ = run(operands, schedule=schedule, seed=seed, limit_seconds=20.0)
        for cache, wanted in zip(caches, expected(operands, exact=True), strict=True):
            same_bits("cache", cache, wanted, operands.case)
    elif name == "far":
        from test_append_addresses import TestFar

        for axis in ("block", "row", "head"):
            TestFar().test_strides_of_caches_past_32_bits_are_followed(axis)
    elif name == "pages":
        k, v = (
            np.random.default_rng(dim).integers(0, 1 << 16, (9, 8, 3, dim), np.uint16).view(np.float16)
            for dim in (21, 200)
        )
        pairs = [(8, 2), (3, 0), (-1, 5), (9, 6)]
        wanted = [k.copy(), v.copy()]
        copy_pages(wanted, pairs[:2])
        for got, want in zip(run_copy(k, v, pairs, schedule=schedule, seed=seed), wanted, strict=True):
            same_bits("page", got, want, _MIXED)
        others = [one[:3].copy() for one in (k, v)]
        leaving = [(8, 1), (0, 2), (7, 3)]
        for got, kept, source in zip(
            run_copy(k, v, leaving, pages=tuple(others), leaving=True), others, (k, v), strict=True
        ):
            want = kept.copy()
            want[[1, 2]] = source[[8, 0]]
            same_bits("page", got, want, _MIXED)
    else:
        raise LookupError(name)


def run_probes(mutant: Mutant | None, probes: tuple[str, ...], cache: Path) -> None:
    def build(source: KernelSource) -> EmulatedModule:
        text, headers = (source.source, dict(source.headers)) if mutant is None else mutated(source, mutant)
        return build_module(text, dict(source.macros), headers, cache_dir=cache, entries=source.entry_points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_append, "module_of", build)
        if "far" in probes:
            import test_append_addresses

            patch.setattr(test_append_addresses, "module_of", build)
        for probe in probes:
            for schedule, seed in LAUNCHES:
                run_probe(probe, schedule, seed)


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    run_probes(None, probes_of(chosen), cache)


def run_own_probes(mutant: Mutant, cache: Path) -> None:
    run_probes(mutant, mutant.probes, cache)


def main(names: list[str]) -> int:
    return run_mutants("append", MUTANTS, names, check_clean, run_own_probes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
