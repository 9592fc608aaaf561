"""Decode kernels beyond right numbers: equal bits, what is read and answered, where operands lie."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases.cached_batches import random_batch
from cases.poison import POISON_PAGE
from emulated import decode as emulated_decode
from emulated.decode import DecodeCase, allocate, check_results, problem_of
from emulated.sweeps import LAUNCHES, assert_same_bits
from inside.emulation import EmulationFault

from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.decode_mma import DECODE, pack_pointers
from gpu_actors.kernels.decode_simple import DECODE_SIMPLE, SIMPLE, SIMPLE_COMBINE
from gpu_actors.kernels.decode_sm90 import NAME
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.key_checks import check_key
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.program import Target
from gpu_actors.kernels.support import capability, example_problem


class Kernel(NamedTuple):
    """Shapes of one compiled variant. pinned: rows and heads if splits are pinned; decode_sm90 then needs 16 heads."""

    name: str
    arch: str
    dtype: str
    dim: int
    rows: int
    pinned: tuple[int, tuple[int, int]]


MMA = Kernel(DECODE, "sm_80", "float16", 32, 5, (3, (4, 2)))
PLAIN = Kernel(SIMPLE, "sm_80", "float32", 20, 5, (1, (4, 2)))
SM90 = Kernel(NAME, "sm_90a", "bfloat16", 128, 9, (1, (16, 1)))
every = pytest.mark.parametrize("kernel", [MMA, PLAIN, SM90], ids=lambda kernel: kernel.name)
either = pytest.mark.parametrize("kernel", [MMA, PLAIN], ids=lambda kernel: kernel.name)


def plain(kernel: Kernel, *lengths: int, rows: int | None = None, **options: Any) -> DecodeCase:
    rows, heads = kernel.pinned if options.get("num_splits") else (rows or kernel.rows, (4, 2))
    batch = random_batch(len(lengths), lengths, rows=rows, heads=heads, dim=kernel.dim, dtype=kernel.dtype)
    return DecodeCase(batch, options={"causal": True, **options})


def run(kernel: Kernel, case: DecodeCase, **launch: Any) -> tuple[Any, Any]:
    return emulated_decode.run(case, **{"arch": kernel.arch, "kernel": kernel.name, **launch})


def checked(kernel: Kernel, case: DecodeCase, **launch: Any) -> tuple[Any, Any]:
    results = run(kernel, case, **launch)
    check_results(case, *results)
    return results


class TestSameBits:
    @pytest.mark.parametrize("step", [5, pytest.param(1, marks=[pytest.mark.sweep, pytest.mark.timeout(600)])])
    @every
    def test_whatever_the_schedule_and_the_delivery(self, kernel: Kernel, step: int) -> None:
        """One multiprocessor has more tiles than the ring has stages, so that each stage is refilled."""
        launch: dict[str, Any] = {"multiprocessors": 1, "arithmetic": "nearest"}  # a sweep's arithmetic errs by seed
        for splits in (0, 3):
            case = plain(kernel, 600, 0, 70, num_splits=splits)
            results = [checked(kernel, case, **launch)]
            for seed, (delivery, schedule) in enumerate(LAUNCHES[::step]):
                results.append(run(kernel, case, delivery=delivery, schedule=schedule, seed=seed, **launch))
            assert_same_bits(results)

    @every
    def test_work_split_by_host_or_by_kernel(self, kernel: Kernel) -> None:
        for case in (plain(kernel, 300, 0, 170), plain(kernel, 300, 0, 170, num_splits=4), plain(kernel, 0, 0)):
            assert_same_bits([run(kernel, case, planned=planned) for planned in (True, False)])

    @every
    def test_a_sequence_alone_and_in_a_batch_with_pinned_splits(self, kernel: Kernel) -> None:
        for splits in (1, 3):
            case = plain(kernel, 200, 3, 0, 330, num_splits=splits)
            out, lse = checked(kernel, case, multiprocessors=3)
            for index in range(4):
                alone = run(kernel, case.alone(index), multiprocessors=1 + index)
                assert_same_bits([(alone[0][0], alone[1][0]), (out[index], lse[index])])

    def test_rows_beside_longer_neighbours_with_pinned_splits(self) -> None:
        """A neighbour's 16 rows fill four packed tiles of 16; a single row has the same bits beside them and alone."""
        case = plain(MMA._replace(pinned=(16, (4, 2))), 700, 300, 1300, num_splits=3)
        case.rows = [1, 16, 2]
        out, _ = checked(MMA, case)
        ends = case.ends
        for index, rows in enumerate(case.rows):
            part = case.alone(index)
            part.batch.q = part.batch.q[:, 16 - rows :]
            np.testing.assert_array_equal(run(MMA, part)[0], out[ends[index] : ends[index + 1]])

    @either
    def test_free_splits_change_the_bits_and_nothing_else(self, kernel: Kernel) -> None:
        case = plain(kernel, 900, rows=1)
        one, other = (checked(kernel, case, multiprocessors=count)[0] for count in (1, 12))
        assert (one != other).any(), "nothing was split"


@every
@pytest.mark.parametrize("padding", [1, 2, 4])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_rows_of_q_and_of_the_output_may_lie_at_any_element(kernel: Kernel, padding: int, splits: int) -> None:
    """Wide accesses need aligned addresses. The pieces of 300 keys are merged; 5 keys are one piece."""
    case = plain(kernel, 300, 5, num_splits=splits)
    checked(kernel, case, padding=padding)
    if kernel is MMA:
        problem = dataclasses.replace(problem_of(case, case.operands()), out_dtype="float32")
        checked(kernel, case, padding=padding, problem=problem)


@every
def test_special_values_reach_the_rows_that_see_them_and_no_others(kernel: Kernel) -> None:
    """Rows and keys share a tile: the weight 0 of a hidden key must not be multiplied by NaN."""
    for special, side in itertools.product((np.nan, np.inf), "kv"):
        case = plain(kernel, 260, 40)
        getattr(case.batch, side)[0][-3, :, 3] = special
        out, _ = checked(kernel, case)
        assert np.isfinite(out[0, :-3]).all()
        assert not np.isfinite(out[0, -3:]).all()


@pytest.mark.parametrize("page_size", [16, 24])
@every
def test_pages_and_table_entries_that_no_row_sees_are_not_read(kernel: Kernel, page_size: int) -> None:
    case = plain(kernel, 400, 310, window_size=(100, -1))
    case.page_size = page_size
    operands = case.operands()
    table = operands["block_table"]
    for index, length in enumerate(case.batch.lengths):
        hidden = (length - kernel.rows - 100) // page_size  # pages that end before the first row's window
        for column in range(hidden):
            operands["k_cache"][table[index, column]] = operands["v_cache"][table[index, column]] = np.nan
        table[index, :hidden] = POISON_PAGE
    checked(kernel, case, operands=operands)


@either
def test_a_wrong_page_in_a_used_entry_is_an_access_out_of_bounds(kernel: Kernel) -> None:
    case = plain(kernel, 300)
    operands = case.operands()
    operands["block_table"][0, 3] = POISON_PAGE
    with pytest.raises(EmulationFault, match="out_of_bounds"):
        run(kernel, case, operands=operands)


class TestBroken:
    """Values that only the device sees cannot be checked before the launch: wrong ones are answered with NaN."""

    @either
    def test_a_broken_length_changes_no_bit_of_others_with_pinned_splits(self, kernel: Kernel) -> None:
        case = plain(kernel, 300, 50, 200, num_splits=2)
        good = run(kernel, case)
        for length in (-1, 1 << 30):
            operands = case.operands() | {"cache_seqlens": np.array([300, length, 200], np.int32)}
            out, lse = run(kernel, case, operands=operands, planned=False, zero=True)
            assert np.isnan(out[1]).all()
            assert np.isnan(lse[1]).all()
            assert_same_bits([(out[[0, 2]], lse[[0, 2]]), (good[0][[0, 2]], good[1][[0, 2]])])

    def test_more_rows_than_the_longest_sequence_may_have(self) -> None:
        case = plain(MMA, 300, 50, rows=8)
        case.rows = [8, 2]
        operands = case.operands()
        problem = dataclasses.replace(problem_of(case, operands), seqlen_q=4)
        out, lse = run(MMA, case, operands=operands, problem=problem, planned=False)
        assert np.isnan(out[:8]).all()
        assert np.isnan(lse[:, :8]).all()
        assert np.isfinite(out[8:]).all()

    @either
    def test_an_array_that_begins_at_a_wrong_byte(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = random_batch(0, (300, 50, 0), heads=(4, 2), dim=kernel.dim, dtype=kernel.dtype)
        case = DecodeCase(batch, "pointers")
        good = run(kernel, case)

        def crooked(*arguments: Any) -> bytes:
            table = np.frombuffer(pack_pointers(*arguments), np.uint64)
            return (table + np.array([0, 2, 2], np.uint64)).tobytes()

        monkeypatch.setattr("gpu_actors.kernels.decode_mma.pack_pointers", crooked)
        out, lse = run(kernel, case, planned=False)
        assert np.isnan(out[1]).all()
        assert np.isnan(lse[1]).all()
        assert np.isfinite(out[0]).all()
        assert_same_bits([(out[2], lse[2]), (good[0][2], good[1][2])])


class TestOperands:
    @pytest.mark.parametrize("padding", [8, 3])
    @either
    def test_strided_views_are_read_where_they_lie(self, kernel: Kernel, padding: int) -> None:
        """q and the table of both kernels, and the caches of decode_simple, whose rows may begin at any element."""
        case = plain(kernel, 300, 90, 7)
        operands = case.operands()
        problem, table = problem_of(case, operands), operands["block_table"]
        wider = np.full((3, table.shape[1] + 5), POISON_PAGE, np.int32)
        wider[:, : table.shape[1]] = table
        operands["block_table"] = in_memory(wider)[:, : table.shape[1]]
        for name in ("q", *(("k_cache", "v_cache") if kernel is PLAIN else ())):
            wide = np.full((*operands[name].shape[:3], kernel.dim + 2 * padding), np.nan, kernel.dtype)
            wide[..., padding:-padding] = operands[name]
            operands[name] = in_memory(wide)[..., padding:-padding]
        checked(kernel, case, operands=operands, problem=problem)

    @either
    def test_a_cache_of_other_strides_is_refused(self, kernel: Kernel) -> None:
        case = plain(kernel, 40)
        operands = case.operands()
        problem = problem_of(case, operands)
        shape, dim = operands["k_cache"].shape, kernel.dim
        memory = in_memory(np.zeros((*shape[:3], dim + 4), kernel.dtype))[..., :dim]
        operands["k_cache"] = memory[::-1] if kernel is PLAIN else memory
        reason = "strides of a cache" if kernel is PLAIN else "multiples of 16 bytes"
        with pytest.raises(InvalidRequest, match=reason) as refused:
            run(kernel, case, operands=operands, problem=problem)
        assert refused.value.field == "k_cache"


def in_memory(array: Any) -> Any:
    memory = allocate(array.shape, array.dtype.name)
    memory[...] = array
    return memory


class TestBytes:
    @pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_every_value_is_widened_exactly(self, dtype: str, kv_dtype: str) -> None:
        """One key a sequence: the output is its value."""
        arch, dim = ("sm_86", 96) if (dtype, kv_dtype) == ("bfloat16", "float8_e4m3fn") else ("sm_80", 80)
        batch = random_batch(0, (1, 1, 1, 1), heads=(1, 1), dim=dim, dtype=dtype, kv_dtype=kv_dtype)
        values = np.resize(np.arange(256, dtype=np.uint8), (4, 1, 1, dim)).view(batch.v[0].dtype)
        batch.v = list(values)
        scales = {name: np.ones((4, 1), np.float32) for name in ("k_descale", "v_descale")}
        out, _ = run(MMA, DecodeCase(batch, options={"causal": True, **scales}), arch=arch)
        np.testing.assert_array_equal(out[:, 0].astype(np.float32), values[:, 0].astype(np.float32))

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", pytest.param("float8_e5m2", marks=pytest.mark.sweep)])
    def test_every_query_is_widened_exactly(self, dtype: str) -> None:
        """One key a sequence: the LSE is its score. Each query is one value in one column, beside zeros."""
        batch = random_batch(0, (1,) * 64, heads=(4, 1), dim=80, dtype=dtype)
        values, columns = np.arange(256, dtype=np.uint8).view(batch.q.dtype), np.arange(256) * 7 % 80
        batch.q[...] = 0
        batch.q.reshape(256, 80)[np.arange(256), columns] = values
        factors = 2.0 ** (np.arange(80) % 8)
        batch.k = [np.broadcast_to(factors.astype(batch.q.dtype), (1, 1, 80)).copy() for _ in batch.k]
        scales = {name: np.full((64, 1), 0.5, np.float32) for name in ("q_descale", "k_descale", "v_descale")}
        options = {"causal": True, "softmax_scale": 2.0**18, **scales}
        _, lse = run(MMA, DecodeCase(batch, rows=[1] * 64, options=options))
        lse, expected = lse.T.reshape(256), values.astype(np.float64) * factors[columns] * 2.0**16
        finite = np.isfinite(expected)
        np.testing.assert_allclose(lse[finite], expected[finite], rtol=1e-6, atol=1e-6)
        assert not np.isfinite(lse[~finite]).any()


class TestDecodeSimple:
    def test_a_launch_has_as_many_pieces_as_it_says(self) -> None:
        """The merge is launched only if there are pieces to merge; the grid depends on no length."""
        case = plain(PLAIN, 900, rows=1)
        problem = problem_of(case, case.operands())
        for splits, multiprocessors, kernels, blocks in (
            (1, 100, [SIMPLE], 2),
            (5, 1, [SIMPLE, SIMPLE_COMBINE], 10),
            (0, 3, [SIMPLE, SIMPLE_COMBINE], 6),  # two blocks a multiprocessor, for two items
            (0, 1, [SIMPLE], 2),
            (0, 1000, [SIMPLE, SIMPLE_COMBINE], 14),  # 128 keys a piece
        ):
            asked = dataclasses.replace(problem, num_splits=splits)
            program = program_of(asked, dispatch_key(asked, "sm_80"), Target(multiprocessors))
            assert [key.kernel for key in program.keys] == kernels
            assert program.parts[0].geometry.grid == (blocks, 1, 1)
            assert all(check_key(key) is key for key in program.keys)

    @pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
    def test_every_head_dim_fits_into_shared_memory(self, arch: str) -> None:
        """Also of latent caches. The first tile of keys that fits is taken."""
        limit = shared_mem_limit(capability(arch))
        dtypes, dims = ("float32", "float64", "bfloat16"), (1, 128, 256, 509, 576)
        for dtype, dim, rows in itertools.product(dtypes, dims, (1, 9, 200)):
            fields = {"seqlen_q": rows, "total_q": rows, "layout": "cache", "latent": dim == 576}
            problem = example_problem(dtype, dim, head_dim_v=min(dim, 512), **fields)
            key = dispatch_key(problem, arch, (DECODE_SIMPLE,))
            assert 0 < program_of(problem, key).parts[0].geometry.shared_bytes <= limit
