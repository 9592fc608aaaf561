"""decode_simple on the CPU against the float64 oracle: every dtype, head dim and option; alignment, poison, splits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch, random_tree, tree_bits
from cases.decode import SIMPLE_VARIANTS, Variant, draw
from emulated import decode as emulated_decode
from emulated.decode import DecodeCase, check_results, device_of, problem_of
from inside.emulation import EmulationFault
from inside.testing import POISON_PAGE, round_inputs
from mutation import decode_simple as simple_mutation
from mutation.decode_simple_mutants import DEFECTS

from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.decode.params import pack_pointers
from gpu_actors.kernels.decode.simple import DECODE_SIMPLE, SIMPLE, SIMPLE_COMBINE
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.program import Target
from gpu_actors.kernels.support import capability, example_problem
from gpu_actors.testing import check_output

LAUNCHES = tuple(itertools.product(("late", "eager", "random"), ("greedy", "lane", "random", "round_robin")))
PROBLEMS = 20  # of each variant
ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a")
CAUSAL: dict[str, Any] = {"causal": True}


def run(case: DecodeCase, **launch: Any) -> tuple[Any, Any]:
    return emulated_decode.run(case, kernel=SIMPLE, **launch)


def check(case: DecodeCase, **launch: Any) -> None:
    check_results(case, *run(case, **launch))


def check_drawn(variant: Variant, seed: int, longest: int) -> None:
    delivery, schedule = LAUNCHES[(5 * seed + SIMPLE_VARIANTS.index(variant)) % len(LAUNCHES)]
    launch: dict[str, Any] = {"delivery": delivery, "schedule": schedule, "seed": seed}
    check(draw(variant, seed, longest), arch=variant.arch, multiprocessors=1 + seed % 5, **launch)


def plain(lengths: tuple[int, ...] = (300, 0, 5, 700), *, rows: int = 1, dtype: str = "float32", **options: Any) -> Any:
    """A case of few compiled variants. Head dim 20 has no whole chunks in 16 bits."""
    batch = random_batch(len(lengths), lengths, rows=rows, heads=(4, 2), dim=20, dtype=dtype)
    return DecodeCase(batch, options={**CAUSAL, **options})


def same(results: tuple[Any, Any], others: tuple[Any, Any]) -> None:
    for one, other in zip(results, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("variant", SIMPLE_VARIANTS[:4], ids=str)
def test_a_sample_agrees_with_the_oracle(variant: Variant) -> None:
    check_drawn(variant, 1, 200)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", SIMPLE_VARIANTS, ids=str)
def test_the_whole_grid_agrees_with_the_oracle(variant: Variant) -> None:
    """Sequences of 0 to 1,000 keys, nine page sizes, 1 to 16 query heads a KV head, 1 to 32 new rows."""
    for seed in range(100, 100 + PROBLEMS):
        check_drawn(variant, seed, 1000)


class TestSplits:
    @pytest.mark.parametrize("splits", [3, pytest.param(1, marks=pytest.mark.sweep)])
    def test_a_sequence_alone_and_in_a_batch_with_pinned_splits(self, splits: int) -> None:
        case = plain((400, 3, 0, 64), num_splits=splits)
        out, lse = run(case, multiprocessors=3)
        check_results(case, out, lse)
        for index in (0, 3):
            alone = run(case.alone(index), multiprocessors=1 + index)
            same((alone[0][0], alone[1][0]), (out[index], lse[index]))

    def test_lengths_on_the_device_are_split_alike(self) -> None:
        for case in (plain(), plain(num_splits=4)):
            same(run(case, planned=True), run(case, planned=False))

    def test_free_splits_change_the_bits_and_nothing_else(self) -> None:
        case = plain((900,))
        answers = [run(case, multiprocessors=count) for count in (1, 12)]
        for answer in answers:
            check_results(case, *answer)
        assert (answers[0][0] != answers[1][0]).any(), "nothing was split"

    def test_the_schedule_and_the_delivery_change_no_bit(self) -> None:
        case = plain((300, 5), num_splits=3)
        first = run(case)
        for seed, (delivery, schedule) in enumerate(LAUNCHES[::5]):
            same(run(case, delivery=delivery, schedule=schedule, seed=seed), first)

    def test_a_launch_has_as_many_pieces_as_it_says(self) -> None:
        """The merge is launched where there is something to merge; the grid depends on no length."""
        case = plain((900,))
        problem = problem_of(case, case.operands())
        for splits, multiprocessors, kernels, blocks in (
            (1, 100, [SIMPLE], 2),
            (5, 1, [SIMPLE, SIMPLE_COMBINE], 10),
            (0, 3, [SIMPLE, SIMPLE_COMBINE], 6),  # two blocks a multiprocessor of two items
            (0, 1, [SIMPLE], 2),
            (0, 1000, [SIMPLE, SIMPLE_COMBINE], 14),  # 128 keys a piece
        ):
            asked = dataclasses.replace(problem, num_splits=splits)
            program = program_of(asked, dispatch_key(asked, "sm_80"), Target(multiprocessors))
            assert [key.kernel for key in program.keys] == kernels
            assert program.parts[0].geometry.grid == (blocks, 1, 1)
            assert all(check_key(key) is key for key in program.keys)


class TestEdges:
    def test_a_sequence_without_keys_is_zero_and_its_lse_minus_infinity(self) -> None:
        for case in (plain((0,)), plain((0, 200, 0), num_splits=2)):
            out, lse = run(case)
            check_results(case, out, lse)
            assert (out[0] == 0).all()
            assert np.isneginf(lse[0]).all()

    @pytest.mark.parametrize("special", [np.nan, pytest.param(np.inf, marks=pytest.mark.sweep)])
    def test_special_values_reach_the_rows_that_see_them_and_no_others(self, special: float) -> None:
        for side, splits in itertools.product("kv", (0, 3)):
            case = plain((260, 40), rows=6, num_splits=splits)
            getattr(case.batch, side)[0][257, :, 3] = special
            out, lse = run(case)
            check_results(case, out, lse)
            assert np.isfinite(out[0, :3]).all()
            assert not np.isfinite(out[0, 3:]).all()

    def test_pages_and_table_entries_that_no_row_sees_are_not_read(self) -> None:
        case = plain((600, 310), rows=2, window_size=(100, -1))
        operands = case.operands()
        table, page = operands["block_table"], case.page_size
        for index, length in enumerate(case.batch.lengths):
            hidden = (length - 2 - 100) // page  # pages that end before the first row's window
            for column in range(hidden):
                operands["k_cache"][table[index, column]] = operands["v_cache"][table[index, column]] = np.nan
            table[index, :hidden] = POISON_PAGE
        check_results(case, *run(case, operands=operands))

    @pytest.mark.sweep
    def test_strictly_rising_scores_correct_old_sums(self) -> None:
        case = plain((700, 130), rows=2, dtype="float64")
        ramps = [np.linspace(0, 24, length)[:, None, None] for length in case.batch.lengths]
        case.batch.k = [np.broadcast_to(ramp, (len(ramp), 2, 20)) / 8 for ramp in ramps]
        case.batch.q[...] = 1.0
        for splits in (1, 4):
            case.options["num_splits"] = splits
            check(case)

    def test_a_length_outside_the_capacity_is_answered_with_nan(self) -> None:
        for splits, length in ((1, -1), (2, 1 << 30)):
            case = plain((300, 50, 200), num_splits=splits)
            operands, good = case.operands(), run(case)
            operands["cache_seqlens"] = np.array([300, length, 200], np.int32)
            out, lse = run(case, operands=operands, planned=False, zero=True)
            assert np.isnan(out[1]).all()
            assert np.isnan(lse[1]).all()
            for index in (0, 2):
                same((out[index], lse[index]), (good[0][index], good[1][index]))


class TestMemory:
    """Rows may begin at any element, and are read where they are."""

    @pytest.mark.parametrize("layout", ["paged", pytest.param("cache", marks=pytest.mark.sweep)])
    def test_rows_of_any_stride_and_address(self, layout: str) -> None:
        case = dataclasses.replace(plain((90, 7)), layout=layout)
        operands = case.operands()
        problem = problem_of(case, operands)
        for name in ("k_cache", "v_cache", "q"):
            given = operands[name]
            memory = device_of().allocate((*given.shape[:3], 27), given.dtype.name)
            memory[...] = np.nan
            memory[..., 3:23] = given
            operands[name] = memory[..., 3:23]
        check_results(case, *run(case, operands=operands, problem=problem))

    def test_an_address_that_is_no_elements_is_answered_with_nan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = DecodeCase(random_batch(0, (90, 50, 0), heads=(2, 2), dim=20, dtype="float32"), "pointers")
        good = run(case)

        def crooked(*arguments: Any) -> bytes:
            table = np.frombuffer(pack_pointers(*arguments), np.uint64)
            return (table + np.array([0, 2, 2], np.uint64)).tobytes()

        monkeypatch.setattr("gpu_actors.kernels.decode.launch.pack_pointers", crooked)
        out, lse = run(case, planned=False)
        assert np.isnan(out[1]).all()
        for index in (0, 2):
            same((out[index], lse[index]), (good[0][index], good[1][index]))

    def test_strides_that_the_parameters_cannot_hold_are_refused(self) -> None:
        case = plain((40,))
        operands = case.operands()
        memory = device_of().allocate(operands["k_cache"].shape, "float32")
        problem = problem_of(case, operands)
        operands["k_cache"] = memory[::-1]
        with pytest.raises(InvalidRequest, match="strides of a cache") as refused:
            run(case, operands=operands, problem=problem)
        assert refused.value.field == "k_cache"

    def test_a_wrong_page_in_a_used_entry_is_an_access_out_of_bounds(self) -> None:
        case = plain((300,))
        operands = case.operands()
        operands["block_table"][0, 3] = POISON_PAGE
        with pytest.raises(EmulationFault, match="out_of_bounds"):
            run(case, operands=operands)


def latent_case(dtype: str, dim: int, dim_v: int) -> DecodeCase:
    batch = random_batch(2, (70, 0, 33), rows=3, heads=(6, 1), dim=dim, dtype=dtype)
    batch.v = [np.ascontiguousarray(keys[..., :dim_v]) for keys in batch.k]
    return DecodeCase(batch, latent=True, options=CAUSAL)


def placed_case() -> DecodeCase:
    """Rows and keys that stand in a larger problem, under every mask and ALiBi."""
    positions = {"q_positions": [[500, 3], [9, 1], [70, 2]], "k_positions": [[1, 4], [0, 1], [3, 2]]}
    masks = {"window_size": (300, 0), "sink_tokens": 200, "alibi_slopes": np.array([0.03, 0.1, 0.01, 0.0], np.float32)}
    options = {**CAUSAL, **masks, **{name: np.array(steps, np.int32) for name, steps in positions.items()}}
    return DecodeCase(random_batch(4, (300, 9, 130), rows=5, heads=(4, 2), dim=20, dtype="float32"), options=options)


def test_values_that_are_columns_of_keys() -> None:
    check(latent_case("float32", 24, 17))


def test_rows_and_keys_at_positions() -> None:
    check(placed_case())


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_positions_trees_and_latents_of_every_dtype(dtype: str) -> None:
    for arch in ("sm_80", "sm_86", "sm_90a"):
        check(latent_case(dtype, 576, 500), arch=arch)
        case = placed_case()
        case.batch.q = case.batch.q.astype(dtype)
        case.batch.k, case.batch.v = ([one.astype(dtype) for one in side] for side in (case.batch.k, case.batch.v))
        check(case, arch=arch)
        tree = np.stack([tree_bits(random_tree(np.random.default_rng(0), 5)) for _ in case.batch.k])
        rest = {name: case.options[name] for name in ("k_positions", "alibi_slopes")}
        check(dataclasses.replace(case, tree=tree, options=rest), arch=arch)


@pytest.mark.parametrize("compute", ["tf32", pytest.param("bf16", marks=pytest.mark.sweep)])
def test_a_narrower_compute_rounds_the_operands(compute: str) -> None:
    case = plain((90, 7))
    operands = case.operands()
    problem = dataclasses.replace(problem_of(case, operands), compute=compute)
    out, lse = run(case, problem=problem)
    k, v, ends = case.batch.packed
    q = case.q.reshape(-1, 4, 20)
    packed = {"cu_seqlens_q": case.ends, "cu_seqlens_k": ends}
    check_output(out[:, 0], lse[:, :, 0].T, *round_inputs(q, k, v, compute), **CAUSAL, **packed, compute=compute)
    assert (out != run(case)[0]).any(), "nothing was rounded"


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_fits_into_shared_memory(arch: str) -> None:
    """Of latent caches, too. The first tile of keys that fits is taken."""
    limit = shared_mem_limit(capability(arch))
    for dtype, dim, rows in itertools.product(("float32", "float64", "bfloat16"), (1, 128, 256, 509, 576), (1, 9, 200)):
        fields = {"seqlen_q": rows, "total_q": rows, "layout": "cache", "latent": dim == 576}
        problem = example_problem(dtype, dim, head_dim_v=min(dim, 512), **fields)
        key = dispatch_key(problem, arch, (DECODE_SIMPLE,))
        geometry = program_of(problem, key).parts[0].geometry
        assert 0 < geometry.shared_bytes <= limit


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_defects_that_such_kernels_have_had_are_caught(mutant: Any, tmp_path: Any) -> None:
    with pytest.raises((AssertionError, EmulationFault)):
        simple_mutation.run_probes(mutant, mutant.probes, tmp_path)
