"""Decode kernels whose rows and keys stand in a larger problem, on the CPU against the float64 oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch, random_tree, tree_bits
from emulated.decode import DecodeCase, check, check_results, key_of, problem_of, run
from mutation import decode as decode_mutation
from mutation.decode_mutants import POSITION_DEFECTS
from support.gate import code_faults, code_of, register_limit

import gpu_actors as ga
from gpu_actors.kernels.decode.variant import decode_keys
from gpu_actors.kernels.dispatch import program_of
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.program import Target
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.variants import block_threads, kernel_source

LENGTHS = (300, 0, 5, 700)
SLOPES = np.array([0.03, 0.1, 0.01, 0.0], np.float32)
ALL: dict[str, Any] = {"causal": True, "window_size": (90, 0), "sink_tokens": 200, "alibi_slopes": SLOPES}
OPTIONS: dict[str, dict[str, Any]] = {
    "all": ALL,
    "causal": {"causal": True},
    "full": {"softcap": 3.0},
    "window": {"window_size": (200, 90), "sink_tokens": 40},
    "chunks": {"causal": True, "attention_chunk": 150, "sink_tokens": 9},
    "signs of distances": {"alibi_slopes": SLOPES},
}


def ints(*steps: Any) -> Any:
    return np.array(steps, np.int32)


# Rows among, behind and before the keys; sequences one, two and four steps apart; the third has few keys.
PLACES: dict[str, dict[str, Any]] = {
    "steps": {
        "q_positions": ints([500, 3], [9, 1], [7, 2], [1400, 1]), "k_positions": ints([1, 4], [0, 1], [3, 2], [0, 2]),
    },
    "first": {"q_positions": ints(450, 0, 3, 90), "k_positions": ints(200, 0, 0, 0)},
    "keys alone": {"k_positions": ints([40, 2], [0, 1], [7, 3], [100, 4])},
    "rows alone": {"q_positions": ints(299, 0, 2, 350)},
    "behind and before": {"q_positions": ints(5000, 0, 0, 0), "k_positions": ints(0, 0, 5, 3000)},
}  # fmt: skip


def case_of(options: dict[str, Any], places: str = "steps", rows: int = 5, **given: Any) -> DecodeCase:
    fields = {name: given.pop(name) for name in ("layout", "page_size", "rows_of", "tree") if name in given}
    if "rows_of" in fields:
        fields["rows"] = fields.pop("rows_of")
    batch = random_batch(4, LENGTHS, rows=rows, heads=(4, 2), **{"dim": 32, "dtype": "float16", **given})
    return DecodeCase(batch, options={**options, **PLACES[places]}, **fields)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("places", PLACES)
def test_every_option_means_positions(places: str) -> None:
    check(case_of(ALL, places), multiprocessors=3)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("layout", ["paged", "cache", "pointers"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_by_layout_and_architecture(name: str, layout: str, arch: str) -> None:
    for seed, places in enumerate(PLACES):
        for rows in (1,) if layout == "pointers" else (1, 5, 17):
            if layout == "pointers" and OPTIONS[name].get("causal"):
                continue
            for splits in (0, 3):
                case = case_of({**OPTIONS[name], "num_splits": splits}, places, rows, layout=layout)
                check(case, arch=arch, multiprocessors=1 + seed, delivery="random", schedule="random", seed=seed)


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_packed_rows_eight_bits_trees_and_nonfinite_values() -> None:
    for places in PLACES:
        check(case_of(ALL, places, rows_of=[5, 0, 2, 1]))
        check(case_of({"causal": True}, places, kv_dtype="float8_e4m3fn"))
        rng = np.random.default_rng(0)
        tree = np.stack([tree_bits(random_tree(rng, 5)) for _ in LENGTHS])
        check(case_of({"alibi_slopes": SLOPES}, places, tree=tree))
        case = case_of(ALL, places)
        case.batch.v[0][120, :, 3] = np.nan
        case.batch.v[3][695, :, 3] = np.inf
        check(case)


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_pieces_and_schedules_change_no_bit() -> None:
    case = case_of(ALL, rows=3)
    first = run(case, multiprocessors=3)
    check_results(case, *first)
    for delivery, schedule in (("late", "lane"), ("eager", "random"), ("random", "round_robin")):
        for one, other in zip(run(case, delivery=delivery, schedule=schedule), first, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_device_splits_the_work_of_rows_with_positions() -> None:
    """The host cannot: it counts the tiles that rows see from where they lie."""
    problem = problem_of(case_of(ALL), case_of(ALL).operands())
    program = program_of(problem, key_of(problem, "sm_80"), Target(3, lengths_on_host=True))
    assert program.split is None
    assert [key.kernel for key in program.keys] == ["decode_plan", "decode_mma", "decode_combine"]
    assert all(key.positions for key in program.keys)


@pytest.mark.timeout(180)
def test_a_service_request_reaches_the_kernels() -> None:
    """The variant of the tests above, through the actor, with a sequence beside another."""
    case = case_of(ALL)
    pages = case.batch.pages(16, 4)
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        request = {**case.options, "cache_seqlens": case.batch.lengths, "block_table": pages.block_table}
        answer = ctx.flash_attn.paged_forward(case.q, pages.k, pages.v, **request, return_lse=True).result(300)
    check_results(case, answer.out, answer.lse)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_kernel_of_a_launch_is_compiled_for_positions(arch: str) -> None:
    problem = example_problem("bfloat16", 64, layout="cache", k_positions=2, causal=True)
    key = key_of(problem, arch)
    check_key(key)
    for part in decode_keys(problem, key, planned=False):
        assert kernel_source(part).macros["POSITIONS"] == "1"
        plain = dataclasses.replace(part, positions=False)
        assert "POSITIONS" not in kernel_source(plain).macros


@pytest.mark.timeout(120)
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.sweep)])
def test_ptxas_spills_nothing(arch: str) -> None:
    fields: dict[str, Any] = {"layout": "paged", "page_size": 64, "seqlen_q": 4, "total_q": 4, "heads_q": 4}
    fields |= {"causal": True, "window_size": (90, 0), "sink_tokens": 4, "alibi": "heads"}
    problem = example_problem("bfloat16", 128, q_positions=2, k_positions=2, **fields)
    key = key_of(problem, arch)
    code = code_of(kernel_source(key), key.kernel)
    assert code_faults(code, register_limit(block_threads(key), 1)) == []


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_bugs_of_positions_are_caught(tmp_path: Any) -> None:
    for mutant in POSITION_DEFECTS:
        with pytest.raises(AssertionError):
            decode_mutation.run_probes(mutant, tmp_path)
