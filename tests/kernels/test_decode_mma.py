"""The decode kernels on the CPU against the float64 oracle: the grid, edges, poison, addressing, the same bits."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch
from cases.decode import VARIANTS, Variant, draw
from emulated.decode import DecodeCase, check, check_results, key_of, problem_of, run
from emulated.far_pages import check_far_pages, check_far_rows
from inside.emulation import EmulationFault
from inside.testing import POISON_PAGE
from mutation import decode as decode_mutation
from mutation.decode_mutants import DECODE_DEFECTS

from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.decode.params import pack_pointers
from gpu_actors.kernels.decode.schedule import split_decode
from gpu_actors.kernels.decode.variant import ranges_of

DELIVERIES = ("late", "eager", "random")
SCHEDULES = ("greedy", "lane", "random", "round_robin")
LAUNCHES = tuple(itertools.product(DELIVERIES, SCHEDULES))
PROBLEMS = 40  # of each variant


def check_drawn(variant: Variant, seed: int, longest: int) -> None:
    delivery, schedule = LAUNCHES[(5 * seed + VARIANTS.index(variant)) % len(LAUNCHES)]
    check(
        draw(variant, seed, longest),
        arch=variant.arch,
        multiprocessors=1 + seed % 5,
        planned=seed % 2 == 0,
        delivery=delivery,
        schedule=schedule,
        seed=seed,
    )


@pytest.mark.timeout(180)  # each draws problems for which several kernels are built, where no cache holds them
@pytest.mark.parametrize("variant", VARIANTS[:-2], ids=str)  # the last two are the sweep's
def test_a_sample_agrees_with_the_oracle(variant):
    """Split by the host and by the device, with pinned splits and without."""
    for seed in range(2):
        check_drawn(variant, seed, 500)


@pytest.mark.usefixtures("fused")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("variant", VARIANTS[::5], ids=str)
def test_a_sample_with_fused_products_agrees_with_the_oracle(variant):
    check_drawn(variant, 2, 500)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_whole_grid_agrees_with_the_oracle(variant):
    """Sequences of 0 to 2,000 keys, six page sizes, 1 to 16 query heads a KV head, 1 to 64 new rows."""
    for seed in range(100, 100 + PROBLEMS):
        check_drawn(variant, seed, 2000)


def plain(
    lengths: tuple[int, ...] = (300, 0, 5, 700, 64), *, rows: int = 1, heads: tuple[int, int] = (4, 2), **options: Any
) -> DecodeCase:
    """A case of the first variant's kernels."""
    batch = random_batch(len(lengths), lengths, rows=rows, heads=heads, dim=64, dtype="float16")
    return DecodeCase(batch, options={"causal": True, **options})


def same(results: tuple[Any, Any], others: tuple[Any, Any]) -> None:
    for one, other in zip(results, others, strict=True):
        np.testing.assert_array_equal(one, other)


class TestSameBits:
    @pytest.mark.parametrize("splits", [0, 3])
    def test_whatever_the_schedule_and_the_delivery(self, splits):
        """300 keys and more are more tiles than the ring has stages, so that every stage is refilled."""
        case = plain(rows=3, num_splits=splits)
        first = run(case)
        check_results(case, *first)
        for seed, (delivery, schedule) in enumerate(LAUNCHES):
            same(run(case, delivery=delivery, schedule=schedule, seed=seed), first)

    def test_work_split_by_host_or_by_kernel_gives_the_same_bits(self):
        for case in (plain(), plain(num_splits=4), plain((0, 0)), plain((2000,), rows=4)):
            same(run(case, planned=True), run(case, planned=False))

    @pytest.mark.parametrize("splits", [1, 2, 5])
    def test_a_sequence_alone_and_in_a_batch_with_pinned_splits(self, splits):
        case = plain((700, 3, 1300, 0, 64), rows=4, num_splits=splits)
        out, lse = run(case, multiprocessors=3)
        for index in range(5):
            alone = run(case.alone(index), multiprocessors=1 + index)
            same((alone[0][0], alone[1][0]), (out[index], lse[index]))

    def test_rows_beside_longer_neighbours_with_pinned_splits(self):
        """A neighbour's 16 rows fill four tiles of 16; a single row has the same bits beside them and alone."""
        case = plain((700, 300, 1300), rows=16, num_splits=3)
        case.rows = [1, 16, 2]
        out, _ = run(case)
        check_results(case, out, _)
        ends = case.ends
        for index in range(3):
            part = case.alone(index)
            rows = part.rows[0]
            part.batch.q, part.rows = part.batch.q[:, 16 - rows :], [rows]
            np.testing.assert_array_equal(run(part)[0], out[ends[index] : ends[index + 1]])

    def test_where_the_splits_are_free_they_change_the_bits_and_nothing_else(self):
        case = plain((1500, 900), rows=2)
        answers = [run(case, multiprocessors=count) for count in (1, 2, 5)]
        for answer in answers:
            check_results(case, *answer)
        assert any((answers[0][0] != other[0]).any() for other in answers[1:]), "nothing was split"


class TestEdges:
    def test_a_sequence_without_keys_is_zero_and_its_lse_minus_infinity(self):
        for case in (plain((0,)), plain((0, 0, 0), rows=3, num_splits=2), plain((0, 200, 0))):
            out, lse = run(case)
            for index, length in enumerate(case.batch.lengths):
                if length == 0:
                    assert (out[index] == 0).all()
                    assert np.isneginf(lse[index]).all()

    def test_rows_before_the_first_key_see_nothing(self):
        """The last row lies on the last key, so the first ones see nothing."""
        case = plain((3, 1, 0, 7), rows=7)
        out, lse = run(case)
        check_results(case, out, lse)
        assert (out[0, :4] == 0).all()
        assert np.isneginf(lse[0, :, :4]).all()

    def test_a_sink_of_a_row_that_sees_nothing_is_its_lse(self):
        sinks = np.array([0.5, -3.0, 40.0, 2.0], np.float32)
        case = plain((0, 300), sinks=sinks)
        out, lse = run(case)
        check_results(case, out, lse)
        np.testing.assert_allclose(lse[0, :, 0], sinks, rtol=1e-6)

    def test_strictly_rising_scores_correct_old_sums(self):
        """Every tile brings a new maximum, of which old sums must be corrected; splits have different ones."""
        case = plain((1000, 2000, 130), rows=2)
        ramps = [np.linspace(0, 24, length)[:, None, None] for length in case.batch.lengths]
        case.batch.k = [np.broadcast_to(ramp, (len(ramp), 2, 64)).astype(np.float16) / 8 for ramp in ramps]
        case.batch.q[...] = 1.0
        for splits in (0, 1, 4):
            case.options["num_splits"] = splits
            check(case, multiprocessors=4)

    @pytest.mark.parametrize("special", [np.nan, np.inf])
    def test_special_values_reach_the_rows_that_see_them_and_no_others(self, special):
        """Rows and keys of one tile: the weight 0 of a hidden key, times NaN, would be NaN."""
        for side, splits in itertools.product("kv", (0, 3)):
            case = plain((260, 40), rows=6, num_splits=splits)
            getattr(case.batch, side)[0][257, :, 3] = special
            out, lse = run(case)
            check_results(case, out, lse)
            assert np.isfinite(out[0, :3]).all()
            assert not np.isfinite(out[0, 3:]).all()

    def test_pages_and_table_entries_that_no_row_sees_are_not_read(self):
        case = plain((900, 310), rows=2, window_size=(100, -1))
        operands = case.operands()
        table, page = operands["block_table"], case.page_size
        for index, length in enumerate(case.batch.lengths):
            hidden = (length - 2 - 100) // page  # pages that end before the first row's window
            for column in range(hidden):
                operands["k_cache"][table[index, column]] = operands["v_cache"][table[index, column]] = np.nan
            table[index, :hidden] = POISON_PAGE
        check_results(case, *run(case, operands=operands))

    def test_descales_may_be_zero_and_negative(self):
        batch = random_batch(0, (300, 90), heads=(4, 2), dim=80, dtype="float16", kv_dtype="float8_e4m3fn")
        scales = {
            "k_descale": np.array([[0.0, -1.0], [2.0, 1e-3]], np.float32),
            "v_descale": np.array([[1.0, 0.0], [-3.0, 448.0]], np.float32),
        }
        check(DecodeCase(batch, options={"causal": True, **scales}))

    @pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_every_8_bit_value_is_widened_exactly(self, dtype, kv_dtype):
        """One key a sequence: the output is its value."""
        if (dtype, kv_dtype) == ("bfloat16", "float8_e4m3fn"):
            arch, dim = "sm_86", 96
        else:
            arch, dim = "sm_80", 80
        batch = random_batch(0, (1, 1, 1, 1), heads=(1, 1), dim=dim, dtype=dtype, kv_dtype=kv_dtype)
        values = np.resize(np.arange(256, dtype=np.uint8), (4, 1, 1, dim)).view(batch.v[0].dtype)
        batch.v = list(values)
        scales = {"v_descale": np.ones((4, 1), np.float32), "k_descale": np.ones((4, 1), np.float32)}
        case = DecodeCase(batch, options={"causal": True, **scales})
        out, _ = run(case, arch=arch)
        np.testing.assert_array_equal(out[:, 0].astype(np.float32), values[:, 0].astype(np.float32))

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", pytest.param("float8_e5m2", marks=pytest.mark.sweep)])
    def test_every_8_bit_query_is_widened_exactly(self, dtype):
        """One key a sequence: the LSE is its score. Each query is one value in one column, beside zeros."""
        batch = random_batch(0, (1,) * 64, heads=(4, 1), dim=80, dtype=dtype)
        values, columns = np.arange(256, dtype=np.uint8).view(batch.q.dtype), np.arange(256) * 7 % 80
        batch.q[...] = 0
        batch.q.reshape(256, 80)[np.arange(256), columns] = values
        factors = 2.0 ** (np.arange(80) % 8)
        batch.k = [np.broadcast_to(factors.astype(batch.q.dtype), (1, 1, 80)).copy() for _ in batch.k]
        scales = {name: np.full((64, 1), 0.5, np.float32) for name in ("q_descale", "k_descale", "v_descale")}
        _, lse = run(DecodeCase(batch, rows=[1] * 64, options={"causal": True, "softmax_scale": 2.0**18, **scales}))
        lse, expected = lse.T.reshape(256), values.astype(np.float64) * factors[columns] * 2.0**16
        finite = np.isfinite(expected)
        np.testing.assert_allclose(lse[finite], expected[finite], rtol=1e-6, atol=1e-6)
        assert not np.isfinite(lse[~finite]).any()


class TestBrokenLengths:
    """Lengths on the device cannot be checked before the launch: what contradicts it is answered with NaN."""

    @pytest.mark.parametrize("length", [-1, 1 << 30])
    @pytest.mark.parametrize("splits", [0, 2])
    def test_a_length_outside_the_capacity(self, length, splits):
        case = plain((300, 50, 200), num_splits=splits)
        operands, good = case.operands(), run(case)
        operands["cache_seqlens"] = np.array([300, length, 200], np.int32)
        out, lse = run(case, operands=operands, planned=False)
        assert np.isnan(out[1]).all()
        assert np.isnan(lse[1]).all()
        if splits:
            for index in (0, 2):
                same((out[index], lse[index]), (good[0][index], good[1][index]))

    def test_more_rows_than_the_longest_sequence_may_have(self):
        case = plain((300, 50), rows=8)
        case.rows = [8, 2]
        operands = case.operands()
        problem = dataclasses.replace(problem_of(case, operands), seqlen_q=4)
        out, lse = run(case, operands=operands, problem=problem, planned=False)
        assert np.isnan(out[:8]).all()
        assert np.isnan(lse[:, :8]).all()
        assert np.isfinite(out[8:]).all()

    def test_an_array_that_does_not_begin_at_16_bytes(self, monkeypatch):
        """Addresses in a table on the device are seen by nobody but the kernel."""
        batch = random_batch(0, (300, 50, 0), heads=(4, 4), dim=128, dtype="float16")
        rng = np.random.default_rng(0)
        options = {"sinks": np.zeros(4, np.float32), "alibi_slopes": rng.uniform(0, 1, (3, 4)).astype(np.float32)}
        case = DecodeCase(batch, "pointers", options=options)
        good = run(case)

        def crooked(*arguments: Any) -> bytes:
            table = np.frombuffer(pack_pointers(*arguments), np.uint64)
            return (table + np.array([0, 2, 2], np.uint64)).tobytes()

        monkeypatch.setattr("gpu_actors.kernels.decode.launch.pack_pointers", crooked)
        out, lse = run(case, planned=False)
        assert np.isnan(out[1]).all()
        assert np.isnan(lse[1]).all()
        same((out[2], lse[2]), (good[0][2], good[1][2]))
        assert np.isfinite(out[0]).all()


class TestArguments:
    def test_a_cache_whose_rows_are_not_aligned_is_refused(self):
        case = plain((40,))
        operands = case.operands()
        wide = np.zeros((*operands["k_cache"].shape[:3], 68), np.float16)
        wide[..., :64] = operands["k_cache"]
        with pytest.raises(InvalidRequest, match="multiples of 16 bytes"):
            run_in_place(case, operands | {"k_cache": wide}, "k_cache", lambda pool: pool[..., :64])

    @pytest.mark.parametrize("padding", [8, 1])
    def test_q_and_the_table_may_be_strided_views(self, padding):
        case = plain((300, 90, 7), rows=3)
        operands = case.operands()
        q, table = operands["q"], operands["block_table"]
        wide = np.full((*q.shape[:3], 64 + 2 * padding), np.nan, np.float16)
        wide[..., padding : padding + 64] = q
        results = run_in_place(case, operands | {"q": wide}, "q", lambda base: base[..., padding : padding + 64])
        check_results(case, *results)
        wider = np.full((3, table.shape[1] + 5), POISON_PAGE, np.int32)
        wider[:, : table.shape[1]] = table
        cut = slice(table.shape[1])
        results = run_in_place(case, operands | {"block_table": wider}, "block_table", lambda base: base[:, cut])
        check_results(case, *results)


def run_in_place(case: DecodeCase, operands: dict[str, Any], name: str, view: Any) -> tuple[Any, Any]:
    """Run with an operand that is a view of device memory, which is not copied."""
    from emulated.decode import device_of

    given = operands[name]
    memory = device_of().allocate(given.shape, given.dtype.name)
    memory[...] = given
    operands = operands | {name: view(memory)}
    return run(case, operands=operands, problem=problem_of(case, operands))


def test_pages_further_apart_than_32_bits_count():
    check_far_pages()


def test_rows_further_apart_than_32_bits_count():
    check_far_rows()


def test_an_item_may_have_more_pieces_than_a_warp_has_lanes():
    case = decode_mutation.PROBES["many pieces"]()
    key = key_of(problem_of(case, case.operands()), "sm_80")
    ranges = ranges_of(key, decode_mutation.MULTIPROCESSORS["many pieces"])
    schedule = split_decode(problem_of(case, case.operands()), key, ranges, case.batch.lengths, None)
    assert (schedule.positions[:, 0] == 0).sum() > 33
    decode_mutation.check_probe("many pieces")


@pytest.mark.parametrize("mutant", DECODE_DEFECTS[:2], ids=lambda mutant: mutant.name)
def test_defects_that_such_kernels_have_had_are_caught(mutant, tmp_path):
    with pytest.raises((AssertionError, EmulationFault)):
        decode_mutation.run_probes(mutant, tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", DECODE_DEFECTS[2:], ids=lambda mutant: mutant.name)
def test_the_other_defects_are_caught(mutant, tmp_path):
    with pytest.raises((AssertionError, EmulationFault)):
        decode_mutation.run_probes(mutant, tmp_path)


def test_a_wrong_page_in_a_used_entry_is_an_access_out_of_bounds():
    case = plain((300,))
    operands = case.operands()
    operands["block_table"][0, 3] = POISON_PAGE
    with pytest.raises(EmulationFault, match="out_of_bounds"):
        run(case, operands=operands)
