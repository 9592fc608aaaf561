"""Seeds faults into the asm statements of kernels_cu/ptx, one at a time, and says what catches each.

scripts/mutants asm            every mutant, a second to five seconds each; writes build/reports/mutation_asm.md
scripts/mutants asm NAME...    only these, and writes nothing
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import test_conformance_convert as convert
import test_conformance_copies as copies
import test_conformance_pipelines as pipelines
import test_conformance_tensors as tensors
import test_conformance_warp as warp
import test_conformance_wgmma as wgmma
from asm_statements import judge_in, wrapper_statements
from inside.emulation import EmulationFault, UnknownAsm, build_module
from kernel_runs import ORDERS, KernelRun, Results, Runner, launch_emulated, read_source, unoptimised_toolchain
from mutation.asm_mutants import MUTANTS
from mutation.forward_mutants import Mutant
from mutation.run import probes_of, run_mutants
from support.service import KERNELS_CU

from gpu_actors.errors import CompileError

__all__ = ["PROBES", "main"]

SECONDS = 5.0  # of a launch that a fault keeps from ending


# A few instructions of each kind: a module of all takes long to build.
_SIZES = [wgmma.Variant("f16", n) for n in (8, 64, 72)]
_KINDS = [
    wgmma.Variant("bf16", 40, trans_a=True),
    wgmma.Variant("bf16", 40, trans_b=True),
    wgmma.Variant("e4m3", 8),
    wgmma.Variant("e5m2", 8),
]


def _wgmma(runner: Runner) -> None:
    for variant in (*_SIZES, *_KINDS):
        product = wgmma.Product(variant)
        for entry in ("multiply_shared", "multiply_registers")[: 1 if variant.trans_a else 2]:
            for result in runner(product.run(entry, [*_SIZES, *_KINDS])):
                result.check(d=product.d)

    def among(run: KernelRun) -> Iterator[Results]:
        return runner(dataclasses.replace(run, macros=wgmma.cases([*_SIZES, *_KINDS])))

    wgmma.test_descriptors_hold_address_offsets_and_swizzle(among)
    product = wgmma.Product(wgmma.Variant("f16", 64))
    a, b = (x.astype(np.float32) for x in (product.a, product.b))
    expected = 2 * a[:, :16] @ b[:, :16].T + a[:, 16:] @ b[:, 16:].T
    for result in among(product.run("multiply_groups", _SIZES)):
        result.check(d=expected)


def _tensors(rank: int, runner: Runner) -> None:
    for move in tensors.INSIDE_AND_OVER_EDGES:
        if len(move.shape) == rank:
            tensors.test_a_box_moves_with_zeros_outside_and_nothing_written_there(runner, move)


def _all(*tests: Callable[..., None], each: Sequence[Any] = ()) -> Callable[[Runner], None]:
    def run(runner: Runner) -> None:
        for test in tests:
            if each:
                for value in each:
                    test(runner, value)
            else:
                test(runner)

    return run


PROBES: Mapping[str, Callable[[Runner], None]] = {
    "convert": _all(
        convert.test_every_half_widens_to_its_value,
        convert.test_floats_narrow_to_the_nearest_and_pack_low_word_first,
        convert.test_fast_functions_stay_within_their_error_and_flush_subnormals,
        convert.test_products_of_pairs_round_to_nearest_and_keep_subnormals_and_signs,
    ),
    "e4m3": _all(convert.test_floats_narrow_to_the_nearest_e4m3_and_to_the_largest_beyond_it),
    "copies": _all(copies.test_async_copies_fill_a_ring_and_zero_what_is_not_valid, each=(4, 8, 16)),
    "ungrouped copies": _all(copies.test_waiting_for_all_copies_needs_no_group),
    "ldmatrix": _all(copies.test_matrix_loads_spread_rows_over_lanes),
    "mma": _all(copies.test_mma_multiplies_its_fragments, each=("f16", "bf16", "tf32", "e4m3", "e5m2")),
    "wide": _all(copies.test_wide_accesses_keep_every_word),
    "bulk pipeline": _all(pipelines.test_bulk_loads_feed_consumers_through_mbarriers),
    "copy arrivals": _all(pipelines.test_mbarriers_track_async_copies),
    "bulk stores": _all(pipelines.test_bulk_stores_copy_and_add),
    "bulk loads of stores": _all(pipelines.test_a_bulk_load_reads_what_threads_wrote_before_the_fence),
    "stmatrix": _all(pipelines.test_matrix_stores_gather_rows_from_lanes),
    "specialised": _all(pipelines.test_specialised_warps_elect_one_lane_each),
    **{f"tensors {rank}": functools.partial(_tensors, rank) for rank in range(1, 6)},
    "named barriers": _all(warp.test_named_barriers_hand_a_slot_back_and_forth, warp.test_an_arrival_does_not_wait),
    "last arrival": _all(warp.test_the_last_block_to_arrive_sees_all_parts),
    "turns": _all(warp.test_blocks_take_turns_by_acquire_and_release),
    "wgmma": _wgmma,
}


def seeded_runner(changed: Mapping[str, str], cache: Path) -> Runner:
    """Runs a kernel by its asm in each order. changed: headers other than those of kernels_cu."""
    toolchain = unoptimised_toolchain()

    def run(wanted: KernelRun) -> Iterator[Results]:
        source, headers = read_source(wanted.file)
        module = build_module(source, wanted.macros, {**headers, **changed}, toolchain, cache, name=wanted.file)
        module.launch = functools.partial(module.launch, limit_seconds=SECONDS)  # type: ignore[method-assign]
        for order in ORDERS:
            yield launch_emulated(module, wanted, order)

    return run


def changed_by(mutant: Mutant) -> dict[str, str]:
    """The header with the fault, by its name."""
    text = (KERNELS_CU / mutant.file).read_text()
    if mutant.old not in text:
        raise LookupError(f"{mutant.name}: {mutant.file} has no {mutant.old!r}")
    return {mutant.file: text.replace(mutant.old, mutant.new)}


def verdict(mutant: Mutant, cache: Path) -> str:
    """How the mutant was caught, or "survived"."""
    changed = changed_by(mutant)
    try:
        statements = wrapper_statements(changed)
    except UnknownAsm:
        return "capture: a form that is not known"
    judge = judge_in(cache)
    near = {mutant.file, "ptx/wgmma.cuh"} if "wgmma" in mutant.file else {mutant.file}
    for statement in statements:
        if statement.file in near and (reason := judge(statement)) is not None:
            return f"refused: {reason}".replace("|", "\\|")
    runner = seeded_runner(changed, cache)
    try:
        for probe in mutant.probes:
            PROBES[probe](runner)
    except EmulationFault as fault:
        return f"emulation: {fault.kind}"
    except CompileError:
        return "constraint: does not compile"
    except AssertionError:
        return "numbers differ"
    return "survived"


def run_probes(mutant: Mutant, cache: Path) -> None:
    """Raises AssertionError, which says what caught the mutant."""
    found = verdict(mutant, cache)
    if found != "survived":
        raise AssertionError(found)


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    runner = seeded_runner({}, cache)
    for probe in probes_of(chosen):
        PROBES[probe](runner)


def main(names: list[str]) -> int:
    return run_mutants("asm", MUTANTS, names, check_clean, run_probes, told=str)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
