"""decode_sm90 on the CPU against the float64 oracle: options, pages, poison, the same bits; what decode_mma keeps."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch, random_tree, tree_bits
from cases.decode import SM90_VARIANTS, Variant, draw
from emulated import decode as emulated_decode
from emulated.decode import DecodeCase, check_results, problem_of
from inside.emulation import EmulationFault
from inside.testing import POISON_PAGE
from mutation import decode_sm90 as sm90_mutation
from mutation.decode_sm90_mutants import DEFECTS
from mutation.forward_mutants import Mutant

from gpu_actors.kernels.decode.variant import decode_tile
from gpu_actors.kernels.dispatch import dispatch_key, explain
from gpu_actors.kernels.hopper_decode.params import part_of
from gpu_actors.kernels.hopper_decode.variant import sm90_decode_tile

KERNEL, ARCH = "decode_sm90", "sm_90a"
LAUNCHES = tuple(itertools.product(("late", "eager", "random"), ("greedy", "lane", "random", "round_robin")))
PROBLEMS = 25  # of each variant


def run(case: DecodeCase, **launch: Any) -> tuple[Any, Any]:
    return emulated_decode.run(case, arch=ARCH, kernel=KERNEL, **launch)


def check(case: DecodeCase, **launch: Any) -> None:
    check_results(case, *run(case, **launch))


def check_drawn(variant: Variant, seed: int, longest: int) -> None:
    delivery, schedule = LAUNCHES[(5 * seed + SM90_VARIANTS.index(variant)) % len(LAUNCHES)]
    launch: dict[str, Any] = {"delivery": delivery, "schedule": schedule, "seed": seed}
    check(draw(variant, seed, longest), multiprocessors=1 + seed % 5, planned=seed % 2 == 0, **launch)


def plain(
    lengths: tuple[int, ...] = (300, 0, 5, 64), *, rows: int = 8, heads: tuple[int, int] = (4, 2), **options: Any
) -> DecodeCase:
    """A case of one compiled variant; with more rows, of its twin with two warpgroups."""
    batch = random_batch(len(lengths), lengths, rows=rows, heads=heads, dim=128, dtype="bfloat16")
    return DecodeCase(batch, options={"causal": True, **options})


def same(results: tuple[Any, Any], others: tuple[Any, Any]) -> None:
    for one, other in zip(results, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", SM90_VARIANTS, ids=str)
def test_the_whole_grid_agrees_with_the_oracle(variant: Variant) -> None:
    """Sequences of 0 to 2,000 keys, six page sizes, 16 packed rows and more, split by host and device."""
    for seed in range(100, 100 + PROBLEMS):
        check_drawn(variant, seed, 2000)


class TestSameBits:
    @pytest.mark.sweep
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("rows", [8, 40])
    def test_in_every_delivery_and_schedule(self, rows: int) -> None:
        """1,500 keys on one multiprocessor are more tiles than there are stages, so that each stage is refilled."""
        case = plain((1500, 0, 70), rows=rows)
        launch: dict[str, Any] = {"multiprocessors": 1, "arithmetic": "nearest"}  # a sweep's own errs by the seed
        first = run(case, **launch)
        check_results(case, *first)
        for seed, (delivery, schedule) in enumerate(LAUNCHES):
            same(run(case, delivery=delivery, schedule=schedule, seed=seed, **launch), first)

    def test_more_tiles_than_stages_in_two_orders(self) -> None:
        case = plain((600, 0, 70))
        assert sm90_decode_tile(key_of(case)).tile.stages < -(-600 // 64)
        first = run(case, multiprocessors=1)
        check_results(case, *first)
        same(run(case, multiprocessors=1, delivery="eager", schedule="random", seed=3), first)

    def test_work_split_by_host_or_by_kernel(self) -> None:
        case = plain((300, 0, 170))
        same(run(case, planned=True), run(case, planned=False))

    @pytest.mark.parametrize("splits", [1, 3])
    def test_a_sequence_alone_and_in_a_batch_with_pinned_splits(self, splits: int) -> None:
        case = plain((200, 3, 330), rows=1, heads=(16, 1), num_splits=splits)
        out, lse = run(case, multiprocessors=3)
        check_results(case, out, lse)
        alone = run(case.alone(2), multiprocessors=2)
        same((alone[0][0], alone[1][0]), (out[2], lse[2]))


class TestEdges:
    def test_rows_before_the_first_key_see_nothing(self) -> None:
        case = plain((3, 100, 0, 7))
        out, lse = run(case)
        check_results(case, out, lse)
        assert (out[0, :5] == 0).all()
        assert np.isneginf(lse[0, :, :5]).all()

    def test_an_8_bit_cache_is_widened_exactly_and_its_nonfinite_values_stay_with_their_rows(self) -> None:
        """Values of all bytes; of the last keys, which some rows do not see, one is NaN."""
        batch = random_batch(1, (300, 256), rows=8, heads=(4, 2), dim=128, dtype="bfloat16", kv_dtype="float8_e4m3fn")
        numbers = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)
        batch.v[1] = np.resize(numbers, batch.v[1].shape).view(batch.v[1].dtype)
        batch.v[0][297, :, 3] = np.nan
        scales = np.array([[[0.5, -1.0], [2.0, 0.0]], [[1.0, -2.0], [0.25, 3.0]]], np.float32)
        case = DecodeCase(batch, options={"causal": True, "k_descale": scales[0], "v_descale": scales[1]})
        out, lse = run(case, delivery="eager", schedule="random", seed=2)
        check_results(case, out, lse)
        assert np.isfinite(out[0, :5]).all()
        assert np.isnan(out[0, 5:, :, 3]).all()

    @pytest.mark.sweep
    @pytest.mark.timeout(600)
    def test_members_without_rows(self) -> None:
        case = plain((3, 100, 0, 7))
        case.rows = [8, 0, 8, 2]
        out, lse = run(case)
        check_results(case, out, lse)
        assert (out[:5] == 0).all()
        assert np.isneginf(lse[:, :5]).all()

    @pytest.mark.parametrize("special", [np.nan, np.inf])
    def test_special_values_reach_the_rows_that_see_them_and_no_others(self, special: float) -> None:
        for side in "kv":
            case = plain((260, 40))
            getattr(case.batch, side)[0][257, :, 3] = special
            out, lse = run(case)
            check_results(case, out, lse)
            assert np.isfinite(out[0, :5]).all()
            assert not np.isfinite(out[0, 5:]).all()

    @pytest.mark.parametrize("page_size", [16, 24, 128])
    def test_pages_and_table_entries_that_no_row_sees_are_not_read(self, page_size: int) -> None:
        case = plain((400, 310), window_size=(100, -1))
        case.page_size = page_size
        operands = case.operands()
        table = operands["block_table"]
        for index, length in enumerate(case.batch.lengths):
            hidden = (length - 8 - 100) // page_size  # pages that end before the first row's window
            for column in range(hidden):
                operands["k_cache"][table[index, column]] = operands["v_cache"][table[index, column]] = np.nan
            table[index, :hidden] = POISON_PAGE
        check_results(case, *run(case, operands=operands))

    @pytest.mark.parametrize("beyond", [1, 16, 1 << 29])
    def test_a_length_outside_the_capacity_is_answered_with_nan(self, beyond: int) -> None:
        """Behind a full row of the table lies the next sequence's, whose pages would be read."""
        case = plain((304, 304, 200))
        operands, good = case.operands(), run(case, planned=False)
        capacity = operands["block_table"].shape[1] * case.page_size
        operands["cache_seqlens"] = np.array([304, capacity + beyond, 200], np.int32)
        out, lse = run(case, operands=operands, planned=False)
        assert np.isnan(out[1]).all()
        assert np.isnan(lse[1]).all()
        np.testing.assert_allclose(out[[0, 2]], good[0][[0, 2]], atol=2e-2)

    @pytest.mark.parametrize("rows", [pytest.param(9, marks=pytest.mark.sweep), 40])
    def test_a_tree_of_drafts(self, rows: int) -> None:
        """Of more than 32 rows: the words of their bits have 64."""
        batch = random_batch(3, (300, rows, 130), rows=rows, heads=(4, 2), dim=128, dtype="bfloat16")
        rng = np.random.default_rng(0)
        check(DecodeCase(batch, tree=np.stack([tree_bits(random_tree(rng, rows)) for _ in batch.k])))

    def test_values_narrower_than_keys(self) -> None:
        """A stage waits for the bytes of both."""
        batch = random_batch(3, (300, 70), rows=8, heads=(4, 2), dim=128, dim_v=64, dtype="bfloat16")
        check(DecodeCase(batch, options={"causal": True}))

    @pytest.mark.sweep
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("chunk", [1, 17, 64, 150])
    def test_chunks(self, chunk: int) -> None:
        check(plain((300, 70, 9), rows=9, attention_chunk=chunk))


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(bug, marks=[] if n == 1 else pytest.mark.sweep) for n, bug in enumerate(DEFECTS)],
    ids=lambda bug: bug.name,
)
def test_what_barriers_and_fences_are_there_against_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, EmulationFault)):
        sm90_mutation.run_probes(mutant, mutant.probes, tmp_path)


def key_of(case: DecodeCase) -> Any:
    return emulated_decode.key_of(problem_of(case, case.operands()), ARCH, KERNEL)


class TestDispatch:
    PROBLEM = problem_of(plain(), plain().operands())

    @pytest.mark.parametrize(
        ("changes", "row_tile"),
        [
            ({}, 64),
            ({"seqlen_q": 32}, 64),
            ({"seqlen_q": 33}, 128),
            ({"page_size": 24, "seqlen_k": 720}, 64),
            ({"layout": "cache", "page_size": 0, "head_dim": 128, "head_dim_v": 40}, 64),
            ({"kv_dtype": "float8_e4m3fn", "descales": True}, 64),
            ({"kv_dtype": "float8_e5m2", "seqlen_q": 40}, 128),
        ],
    )
    def test_it_takes_sixteen_packed_rows_and_more(self, changes: dict[str, Any], row_tile: int) -> None:
        key = dispatch_key(dataclasses.replace(self.PROBLEM, **changes), ARCH)
        assert (key.kernel, key.row_tile) == (KERNEL, row_tile)
        assert sm90_decode_tile(key).tile.block_n == decode_tile(key).tile.block_n, "split and merge count other tiles"

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"seqlen_q": 7}, "16 rows times heads"),
            ({"num_splits": 2}, "16 heads a KV head"),
            ({"head_dim": 136}, "in registers"),
            ({"head_dim_v": 256}, "in registers"),
            ({"layout": "pointers", "page_size": 0}, "computes cache, paged"),
            ({"page_size": 1}, "multiple of 8 keys"),
            ({"page_size": 12}, "multiple of 8 keys"),
        ],
    )
    def test_others_stay_with_decode_mma(self, changes: dict[str, Any], reason: str) -> None:
        problem = dataclasses.replace(self.PROBLEM, **changes)
        assert dispatch_key(problem, ARCH).kernel == "decode_mma"
        verdict = next(verdict for verdict in explain(problem, ARCH) if verdict.family == KERNEL)
        assert not verdict.taken
        assert reason in verdict.reason

    @pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a"])
    def test_other_architectures_stay_with_decode_mma(self, arch: str) -> None:
        assert dispatch_key(self.PROBLEM, arch).kernel == "decode_mma"


@pytest.mark.parametrize(("page_size", "part"), [(0, 64), (8, 8), (24, 8), (16, 16), (64, 64), (96, 32), (256, 64)])
def test_copies_bring_what_pages_and_tiles_share(page_size: int, part: int) -> None:
    assert part_of(page_size, 64) == part


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize("row_tile", [64, 128])
@pytest.mark.parametrize(("kv_dtype", "itemsize"), [("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_128_kib_are_on_their_way_while_a_stage_is_multiplied(
    dims: tuple[int, int], row_tile: int, kv_dtype: str, itemsize: int
) -> None:
    given: dict[str, Any] = {"head_dim": dims[0], "head_dim_v": dims[1], "row_tile": row_tile, "kv_dtype": kv_dtype}
    tile, blocks, shared = sm90_decode_tile(dataclasses.replace(key_of(plain()), **given))
    stage = tile.block_n * sum(dims) * itemsize
    assert blocks == 1
    assert (tile.stages - 1) * stage >= 128 << 10
    assert shared <= 232448
