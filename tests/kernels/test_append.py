"""The append kernel on the CPU: every cell of the caches is the oracle's, those that no new row goes to included."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from emulated.append import FP8, AppendCase, Operands, check, dtype_of, expected, run, same_bits

from gpu_actors.kernels.append.variant import Rope, append_geometry, append_key, cut_rows

SCHEDULES = ("greedy", "lane", "random", "round_robin")

# Sequences without new rows and without keys, pages that are begun, filled and crossed, a table of tables.
NEW, BEFORE = (3, 0, 21, 1, 0, 8), (5, 2, 7, 0, 0, 8)
CASES = {
    "copy": AppendCase(new=NEW, before=BEFORE),
    "copy bfloat16, values wider": AppendCase(
        new=NEW, before=BEFORE, dtype="bfloat16", cache_dtype="bfloat16", head_dim=40, head_dim_v=64, page_size=16
    ),
    "copy float32, odd columns": AppendCase(
        new=NEW, before=BEFORE, dtype="float32", cache_dtype="float32", head_dim=5, head_dim_v=3, layout="dense"
    ),
    "copy float64, odd columns": AppendCase(
        new=NEW, before=BEFORE, dtype="float64", cache_dtype="float64", head_dim=16, head_dim_v=7
    ),
    "copy fp8": AppendCase(new=NEW, before=BEFORE, dtype=FP8[0], cache_dtype=FP8[0], layout="pointers"),
    "narrow": AppendCase(new=NEW, before=BEFORE, dtype="float32", cache_dtype="bfloat16", head_dim=20),
    "e4m3": AppendCase(new=NEW, before=BEFORE, cache_dtype=FP8[0], descales=True, head_dim=64, scale=30),
    "e5m2, odd columns": AppendCase(
        new=NEW, before=BEFORE, dtype="float32", cache_dtype=FP8[1], descales=True, head_dim=13, layout="pointers"
    ),
    "e4m3 without descales": AppendCase(new=NEW, before=BEFORE, dtype="bfloat16", cache_dtype=FP8[0], layout="dense"),
    # More than 64 columns of either pair's elements, and some behind them.
    "halves": AppendCase(new=NEW, before=BEFORE, rope=Rope(dim=192), head_dim=200, heads_q=4),
    "halves, dim 6 of 24": AppendCase(new=NEW, before=BEFORE, rope=Rope(dim=6, base=500.0), head_dim=24, heads_q=2),
    "halves, odd columns": AppendCase(
        new=NEW, before=BEFORE, dtype="bfloat16", cache_dtype="bfloat16", rope=Rope(dim=34), head_dim=37, layout="dense"
    ),
    "interleaved": AppendCase(
        new=NEW, before=BEFORE, rope=Rope(dim=96, interleaved=True), head_dim=112, heads_q=6, layout="pointers"
    ),
    "interleaved, dim 10 of 24": AppendCase(
        new=NEW, before=BEFORE, dtype="float32", cache_dtype="float32", rope=Rope(dim=10, interleaved=True), head_dim=24
    ),
    "tables and positions": AppendCase(
        new=NEW, before=BEFORE, rope=Rope(dim=16, table_rows=3000), positions=True, heads_q=2
    ),
    "positions": AppendCase(new=NEW, before=BEFORE, rope=Rope(dim=16, interleaved=True), positions=True, heads_q=1),
    "scaled frequencies": AppendCase(
        new=NEW, before=BEFORE, rope=Rope(dim=8, inv_freq=(1.0, 7.5, -0.25, 0.001)), positions=True
    ),
    "halves to e4m3": AppendCase(
        new=NEW, before=BEFORE, rope=Rope(dim=32), cache_dtype=FP8[0], descales=True, heads_q=2, head_dim=64
    ),
    "interleaved to e5m2": AppendCase(
        new=NEW, before=BEFORE, dtype="bfloat16", rope=Rope(dim=20, interleaved=True), cache_dtype=FP8[1], head_dim=24
    ),
    "one row each": AppendCase(new=(1,) * 9, before=(0, 7, 8, 15, 16, 63, 3, 31, 1), even=True),
    "two rows each": AppendCase(new=(2,) * 5, before=(0, 7, 8, 15, 30), even=True, rope=Rope(dim=32), layout="dense"),
    "many heads": AppendCase(new=(2, 1), before=(6, 0), heads_kv=32, head_dim=128, rope=Rope(dim=128), heads_q=64),
    "one head, many rows": AppendCase(
        new=(300, 4000, 0, 250), before=(0, 9, 0, 4), heads_kv=1, head_dim=8, page_size=128, rope=Rope(dim=4)
    ),
}


# Each is a variant to build; the default run takes a sample.
REST = (
    *("copy bfloat16, values wider", "copy fp8", "narrow", "e4m3 without descales", "halves, dim 6 of 24"),
    *("positions", "scaled frequencies", "interleaved to e5m2", "two rows each"),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.sweep) if n in REST else n for n in CASES])
def test_new_rows_arrive_and_nothing_else_changes(name):
    for seed, schedule in enumerate(SCHEDULES):
        check(dataclasses.replace(CASES[name], seed=seed), schedule=schedule, seed=seed)


def random_case(seed: int) -> AppendCase:
    rng = np.random.default_rng(seed)
    batch = int(rng.integers(1, 7))
    dtype = str(rng.choice(["float16", "bfloat16", "float32"]))
    cache_dtype = str(rng.choice([dtype, *FP8]))
    head_dim = int(rng.choice([5, 16, 33, 64, 80, 128]))
    rope = None
    if rng.random() < 0.6:
        rows = 4000 if rng.random() < 0.3 else 0
        dim = 2 * int(rng.integers(1, head_dim // 2 + 1))
        rope = Rope(dim=dim, base=float(rng.choice([100.0, 1e4, 5e5])), interleaved=rng.random() < 0.5)
        rope = dataclasses.replace(rope, table_rows=rows)
    return AppendCase(
        new=tuple(int(n) for n in rng.choice([0, 1, 1, 2, 5, 17, 40], batch)),
        before=tuple(int(n) for n in rng.choice([0, 0, 1, 7, 8, 15, 16, 100], batch)),
        layout=str(rng.choice(["paged", "paged", "dense", "pointers"])),
        dtype=dtype,
        cache_dtype=cache_dtype,
        heads_kv=int(rng.integers(1, 5)),
        head_dim=head_dim,
        head_dim_v=int(rng.choice([head_dim, 16, 24])),
        page_size=int(rng.choice([8, 16, 64])),
        rope=rope,
        positions=rope is not None and rng.random() < 0.4,
        heads_q=int(rng.integers(0, 5)) if rope is not None else 0,
        descales=cache_dtype != dtype and rng.random() < 0.7,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(2))
def test_random_appends_agree_with_the_oracle(seed):
    check(random_case(seed), schedule=SCHEDULES[seed % 4], seed=seed)


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_three_hundred_random_appends_agree_with_the_oracle():
    for seed in range(100, 400):
        check(random_case(seed), schedule=SCHEDULES[seed % 4], seed=seed)


class TestPlaces:
    CASE = AppendCase(new=(2, 3, 4), before=(8, 0, 14), page_size=8, capacity=24)

    def unchanged_but(self, operands: Operands, kept: tuple[int, ...]) -> None:
        """Only the new rows of the sequences ``kept`` were written."""
        caches, _ = run(operands)
        whole = Operands(self.CASE)
        wanted = [cache.copy() for cache in whole.caches]
        for index, cache in enumerate(expected(whole, exact=True)):
            for sequence in kept:
                pages = whole.table[sequence][: -(-int(whole.cache_seqlens[sequence]) // 8)]
                wanted[index][pages] = cache[pages]
        for name, got, want in zip(("k_cache", "v_cache"), caches, wanted, strict=True):
            same_bits(name, got, want, self.CASE)

    def test_new_rows_of_every_sequence_arrive(self):
        self.unchanged_but(Operands(self.CASE), (0, 1, 2))

    def test_a_sequence_of_length_0_is_padding(self):
        operands = Operands(self.CASE)
        operands.cache_seqlens[1] = 0
        self.unchanged_but(operands, (0, 2))

    def test_rows_beyond_a_sequences_capacity_are_written_nowhere(self):
        operands = Operands(self.CASE)
        operands.cache_seqlens[2] = 28  # places 24 to 27 of 24
        self.unchanged_but(operands, (0, 1))

    @pytest.mark.parametrize("entry", [-1, 12, 2147480000])
    def test_pages_outside_the_pool_are_written_nowhere(self, entry):
        operands = Operands(self.CASE)
        assert operands.num_blocks == 12
        operands.table[1, 0] = entry
        self.unchanged_but(operands, (0, 2))

    def test_rows_after_the_last_sequences_are_nobodys(self):
        operands = Operands(self.CASE)
        operands.cu_seqlens[3] = 5  # the third sequence has none now, and four rows are left over
        self.unchanged_but(operands, (0, 1))

    def test_no_rows_at_all_launch_nothing(self):
        operands = Operands(AppendCase(new=(0, 0), before=(3, 0)))
        assert append_geometry(append_key(operands.problem, "sm_90a"), operands.problem).grid[0] == 0
        caches, _ = run(operands)
        same_bits("k_cache", caches[0], operands.caches[0], operands.case)


class TestRounding:
    @pytest.mark.parametrize("cache_dtype", FP8)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_every_16_bit_value_is_rounded_as_ml_dtypes_does_saturating(self, dtype, cache_dtype):
        rows = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 2, 32).view(dtype_of(dtype))
        operands = Operands(AppendCase(new=(len(rows),), before=(0,), dtype=dtype, cache_dtype=cache_dtype))
        operands.arrays["k"], operands.arrays["v"] = rows, rows[::-1].copy()
        caches, _ = run(operands)
        for cache, given in zip(caches, (rows, rows[::-1]), strict=True):
            pages = operands.table[0]
            got = cache[pages].reshape(-1, 2, 32)[: len(rows)]
            limit = float(ml_dtypes.finfo(cache.dtype).max)
            with np.errstate(invalid="ignore"):
                wanted = np.clip(given.astype(np.float32), -limit, limit).astype(cache.dtype)
                nan = np.isnan(given)
                assert np.isnan(got[nan].astype(np.float32)).all()
            np.testing.assert_array_equal(got[~nan].view(np.uint8), wanted[~nan].view(np.uint8))

    def test_a_plain_copy_keeps_every_bit(self):
        operands = Operands(AppendCase(new=(1024,), before=(3,)))
        for name in ("k", "v"):
            operands.arrays[name] = np.arange(1 << 16, dtype=np.uint16).reshape(1024, 2, 32).view(np.float16)
        caches, _ = run(operands)
        for cache, wanted in zip(caches, expected(operands, exact=True), strict=True):
            same_bits("cache", cache, wanted, operands.case)

    def test_values_beyond_float16_become_infinite(self):
        operands = Operands(AppendCase(new=(4,), before=(0,), dtype="float32", scale=1e5))
        caches, _ = run(operands)
        with np.errstate(over="ignore"):
            same_bits("k_cache", caches[0], expected(operands, exact=True)[0], operands.case)
        assert np.isinf(caches[0][operands.table[0, 0], :4]).any()


class TestRotation:
    @pytest.mark.parametrize("position", [0, 1, 4095, 1 << 20, (1 << 31) - 1])
    def test_the_angle_is_exact_however_far_the_position(self, position):
        rope = Rope(dim=32, base=1e4)
        operands = Operands(AppendCase(new=(1,), before=(0,), dtype="float32", cache_dtype="float32", rope=rope))
        operands = Operands(dataclasses.replace(operands.case, positions=True))
        operands.positions[:] = position
        operands.arrays["k"][...] = 0
        operands.arrays["k"][..., :16] = 1
        caches, _ = run(operands)
        row = caches[0][operands.table[0, 0], 0, 0].astype(np.float64)
        # Angles in integers: what float64 keeps of 2^31 radians is no better than the kernel.
        turns = [(position * round(f / np.pi / 2 * 2**60)) % 2**60 / 2**60 for f in rope.frequencies]
        angles = 2 * np.pi * np.array(turns)
        np.testing.assert_allclose(row[:16], np.cos(angles), atol=3e-7)
        np.testing.assert_allclose(row[16:], np.sin(angles), atol=3e-7)

    def test_a_position_that_the_tables_lack_shows_as_nan(self):
        case = AppendCase(new=(2,), before=(0,), rope=Rope(dim=16, table_rows=8), positions=True, heads_q=1)
        operands = Operands(case)
        operands.positions[:] = (3, 8)
        caches, q = run(operands)
        page = caches[0][operands.table[0, 0]]
        assert np.isfinite(page[0]).all()
        assert np.isnan(page[1][:, :16]).all()
        assert np.isfinite(page[1][:, 16:]).all()
        assert np.isnan(q[1][:, :16]).all()

    def test_q_of_rows_that_no_cache_takes_is_rotated_all_the_same(self):
        case = AppendCase(new=(2, 1), before=(4, 0), capacity=8, rope=Rope(dim=32), heads_q=2)
        operands = Operands(case)
        operands.table[0, 0] = -1
        _, q = run(operands)
        whole = Operands(case)
        _, wanted = run(whole)
        same_bits("q_rotated", q, wanted, case)


def test_small_batches_spread_over_blocks_and_large_ones_fill_them():
    small = Operands(CASES["one row each"])
    assert cut_rows(append_key(small.problem, "sm_90a"), small.problem).block_rows == 1
    large = Operands(CASES["one head, many rows"])
    assert cut_rows(append_key(large.problem, "sm_90a"), large.problem).block_rows == 16
    wide = Operands(CASES["many heads"])
    assert cut_rows(append_key(wide.problem, "sm_90a"), wide.problem).parts > 1
