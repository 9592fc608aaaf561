"""Append beyond the oracle's cells: roundings, far positions, views of operands, refusals."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from emulated.append import (
    FP8,
    AppendCase,
    Operands,
    buffer_of,
    dtype_of,
    expected,
    launch_append,
    placed,
    run,
    same_bits,
)
from inside.devices import Buffer
from inside.emulation import EmulatedBuffer

from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.append import (
    AppendProblem,
    Rope,
    append_geometry,
    append_layout,
    cut_rows,
    pack_append,
)
from gpu_actors.kernels.copy_pages import pack_page_copy


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


class TestRotation:
    @pytest.mark.parametrize("position", [1, 4095, (1 << 31) - 1])
    def test_the_angle_is_exact_however_far_the_position(self, position):
        rope = Rope(dim=32, base=1e4)
        operands = Operands(AppendCase(new=(1,), before=(0,), dtype="float32", cache_dtype="float32", rope=rope))
        operands = Operands(dataclasses.replace(operands.case, positions=True))
        operands.positions[:] = position
        operands.arrays["k"][...] = 0
        operands.arrays["k"][..., :16] = 1
        caches, _ = run(operands)
        row = caches[0][operands.table[0, 0], 0, 0].astype(np.float64)
        # Angles are computed in integers, because float64 is no more exact than the kernel at 2^31 radians.
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


class TestViews:
    @pytest.mark.parametrize("offset", [1, 8])
    @pytest.mark.parametrize("cache_dtype", ["float16", FP8[0]])
    def test_new_rows_may_be_a_part_of_a_fused_projection(self, offset, cache_dtype):
        """k and v lie in one (total, width) array of q, k and v, at any column."""
        case = AppendCase(new=(5, 9), before=(3, 0), rope=Rope(dim=16), cache_dtype=cache_dtype)
        operands = Operands(case)
        width = 4 * 64 + offset
        fused = np.full((14, width), np.nan, np.float16)
        for number, name in enumerate("kv"):
            fused[:, offset + 64 * number :][:, :64] = operands.arrays[name].reshape(14, 64)
        buffers, memory = placed({**operands.arrays, "fused": fused})
        for number, name in enumerate("kv"):
            address = memory["fused"].address + 2 * (offset + 64 * number)
            buffers[name] = Buffer(address, (14, 2, 32), (width, 32, 1), "float16")
        for name, cache in zip(("k_cache", "v_cache"), operands.caches, strict=True):
            memory[name] = EmulatedBuffer.of(cache, name)
            buffers[name] = buffer_of(cache, memory[name].address)
        launch_append(operands.problem, buffers, list(memory.values()))
        wanted, _ = run(Operands(case))
        for name, cache, want in zip(("k_cache", "v_cache"), operands.caches, wanted, strict=True):
            same_bits(name, memory[name].view(cache.dtype, cache.shape), want, case)

    @pytest.mark.parametrize("shift", [2, 16])
    def test_pages_may_hold_heads_first_and_begin_anywhere(self, shift):
        """A pool (num_blocks, heads, page_size, dim), seen as (num_blocks, page_size, heads, dim)."""
        case = AppendCase(new=(5, 9), before=(3, 0), head_dim=24)
        operands = Operands(case)
        buffers, memory = placed(operands.arrays)
        blocks, size, heads, dim = operands.caches[0].shape
        pools = {}
        for name, cache in zip(("k_cache", "v_cache"), operands.caches, strict=True):
            turned = np.ascontiguousarray(cache.transpose(0, 2, 1, 3))
            raw = np.concatenate([np.zeros(shift, np.uint8), turned.reshape(-1).view(np.uint8)])
            pools[name] = memory[name] = EmulatedBuffer.of(raw, name)
            strides = (size * heads * dim, dim, size * dim, 1)
            buffers[name] = Buffer(pools[name].address + shift, cache.shape, strides, "float16")
        launch_append(operands.problem, buffers, list(memory.values()))
        for name, want in zip(("k_cache", "v_cache"), expected(operands, exact=True), strict=True):
            got = pools[name].array[shift:].view(np.float16).reshape(blocks, heads, size, dim).transpose(0, 2, 1, 3)
            same_bits(name, got, want, case)
            assert (pools[name].array[:shift] == 0).all()


class TestPacking:
    CASE = AppendCase(new=(2, 1), before=(0, 3), rope=Rope(dim=8, table_rows=9), heads_q=2, positions=True)

    def pack(self, **changes: Buffer | None) -> bytes:
        operands = Operands(self.CASE)
        buffers = {name: buffer_of(array, 4096) for name, array in operands.arrays.items()}
        buffers |= {"q_rotated": buffers["q"], "k_cache": buffer_of(operands.caches[0], 4096)}
        buffers["v_cache"] = buffers["k_cache"]
        buffers = {name: buffer for name, buffer in {**buffers, **changes}.items() if buffer is not None}
        return pack_append(operands.problem, buffers)

    def test_the_struct_is_as_large_as_the_compilers(self):
        assert len(self.pack()) == append_layout().size

    def test_an_operand_that_is_missing_is_named(self):
        for name in ("k", "k_cache", "cache_seqlens", "block_table", "cu_seqlens_q", "positions"):
            with pytest.raises(InvalidRequest, match=name):
                self.pack(**{name: None})

    def test_shapes_dtypes_and_strides_are_checked(self):
        good = Buffer(4096, (3, 2, 32), (64, 32, 1), "float16")
        self.pack(k=good)
        for wrong in (
            good._replace(shape=(4, 2, 32)),
            good._replace(dtype="bfloat16"),
            good._replace(strides=(64, 1, 2)),
            good._replace(address=4097),
        ):
            with pytest.raises(InvalidRequest, match="k"):
                self.pack(k=wrong)

    def test_pools_must_be_contiguous_within_a_page(self):
        pool = AppendProblem(
            layout="paged", batch=1, total=1, heads_kv=2, head_dim=8, head_dim_v=8, dtype="float16",
            cache_dtype="float16", page_size=8, num_blocks=2,
        )  # fmt: skip
        good = Buffer(4096, (2, 8, 2, 8), (999, 16, 8, 1), "float16")
        pairs = Buffer(4096, (1, 2), (2, 1), "int32")
        pack_page_copy(1, pool, {"k_cache": good, "v_cache": good, "page_pairs": pairs})
        turned = good._replace(strides=(128, 8, 64, 1))
        with pytest.raises(InvalidRequest, match="v_cache"):
            pack_page_copy(1, pool, {"k_cache": good, "v_cache": turned, "page_pairs": pairs})


def test_small_batches_spread_over_blocks_and_large_ones_fill_them():
    def cut(**given):
        return cut_rows(Operands(AppendCase(**given)).problem)

    assert cut(new=(1,) * 9, before=(0,) * 9).block_rows == 1
    assert cut(new=(300, 4000), before=(0, 9), heads_kv=1, head_dim=8, rope=Rope(dim=4)).block_rows == 16
    assert cut(new=(2, 1), before=(6, 0), heads_kv=32, head_dim=128, rope=Rope(dim=128), heads_q=64).parts > 1


def test_no_rows_at_all_launch_nothing():
    problem = Operands(AppendCase(new=(0, 0), before=(3, 0))).problem
    assert append_geometry(problem).grid[0] == 0
