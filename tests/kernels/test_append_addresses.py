"""Where append reads and writes: strided views, addresses off 16 bytes, offsets past 32 bits; copies of pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulated.append import FP8, AppendCase, Operands, buffer_of, dtype_of, expected, module_of, run_copy, same_bits
from inside.devices import Buffer
from inside.emulation import EmulatedBuffer, Mapping
from inside.reference import copy_pages

from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.append.params import pack_append
from gpu_actors.kernels.append.variant import AppendProblem, Rope, append_geometry, append_key
from gpu_actors.kernels.variants import kernel_source

APART = 12 << 30  # bytes


def launch(operands: Operands, buffers: dict[str, Buffer], memory: list[EmulatedBuffer]) -> None:
    problem = operands.problem
    key = append_key(problem, "sm_90a")
    geometry = append_geometry(key, problem)
    module_of(kernel_source(key)).launch(
        "append",
        geometry.grid,
        geometry.block,
        geometry.shared_bytes,
        pack_append(key, problem, buffers),
        memory,
    )


def placed(arrays: dict[str, Any]) -> tuple[dict[str, Buffer], dict[str, EmulatedBuffer]]:
    memory = {name: EmulatedBuffer.of(array, name) for name, array in arrays.items()}
    return {name: buffer_of(array, memory[name].address) for name, array in arrays.items()}, memory


class TestViews:
    @pytest.mark.parametrize("offset", [0, 1, 3, 8])
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
        launch(operands, buffers, list(memory.values()))
        plain = Operands(case)
        wanted = reference_run(plain)
        for name, cache, want in zip(("k_cache", "v_cache"), operands.caches, wanted, strict=True):
            same_bits(name, memory[name].view(cache.dtype, cache.shape), want, case)

    @pytest.mark.parametrize("shift", [0, 2, 16])
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
        launch(operands, buffers, list(memory.values()))
        for name, want in zip(("k_cache", "v_cache"), expected(operands, exact=True), strict=True):
            got = pools[name].array[shift:].view(np.float16).reshape(blocks, heads, size, dim).transpose(0, 2, 1, 3)
            same_bits(name, got, want, case)
            assert (pools[name].array[:shift] == 0).all()


def reference_run(operands: Operands) -> list[Any]:
    """What the kernel writes for contiguous operands, which other tests hold against the oracle."""
    from emulated.append import run

    return run(operands)[0]


class TestFar:
    """Two halves of a tensor lie more than 2^32 elements apart; what lies between is not accessible."""

    @pytest.mark.parametrize("axis", ["block", "row", "head"])
    def test_strides_of_caches_past_32_bits_are_followed(self, axis):
        case = AppendCase(new=(2, 2), before=(0, 0), layout="dense", capacity=2, head_dim=16)
        operands = Operands(case)
        where = {"block": 0, "row": 1, "head": 2}[axis]
        buffers, memory = placed(operands.arrays)
        halves = far_halves([[np.take(cache, [half], where) for cache in operands.caches] for half in range(2)])
        for index, name in enumerate(("k_cache", "v_cache")):
            buffers[name] = far(operands.caches[index], where, [half[index].address for half in halves])
        launch(operands, buffers, [*memory.values(), *halves[0], *halves[1]])
        for index, wanted in enumerate(expected(operands, exact=True)):
            shape = tuple(1 if n == where else extent for n, extent in enumerate(wanted.shape))
            got = np.concatenate([half[index].view(np.float16, shape) for half in halves], where)
            same_bits(f"cache {index}", got, wanted, case)

    @pytest.mark.parametrize("axis", [0, 1])
    def test_strides_of_new_rows_past_32_bits_are_followed(self, axis):
        case = AppendCase(new=(2,), before=(0,), head_dim=16)
        operands = Operands(case)
        buffers, memory = placed({**operands.arrays})
        halves = far_halves([[np.take(operands.arrays[name], [half], axis) for name in "kv"] for half in range(2)])
        for index, name in enumerate("kv"):
            del memory[name]
            buffers[name] = far(operands.arrays[name], axis, [half[index].address for half in halves])
        for name, cache in zip(("k_cache", "v_cache"), operands.caches, strict=True):
            memory[name] = EmulatedBuffer.of(cache, name)
            buffers[name] = buffer_of(cache, memory[name].address)
        launch(operands, buffers, [*memory.values(), *halves[0], *halves[1]])
        for name, wanted in zip(("k_cache", "v_cache"), expected(operands, exact=True), strict=True):
            same_bits(name, memory[name].view(np.float16, wanted.shape), wanted, case)


def far_halves(arrays: list[list[Any]]) -> list[list[EmulatedBuffer]]:
    """Buffers of two lists of arrays, each of the second list more than 2^32 elements from each of the first."""
    kept: list[Any] = []  # what was placed too near stays, so that the next try lands elsewhere
    first = [EmulatedBuffer.of(array, "near") for array in arrays[0]]
    while True:
        kept.append(Mapping(0, guard=APART))
        second = [EmulatedBuffer.of(array, "far") for array in arrays[1]]
        if all(abs(a.address - b.address) > APART for a in first for b in second):
            return [first, second]
        kept.append(second)


def far(array: Any, axis: int, addresses: list[int]) -> Buffer:
    """A tensor of extent 2 on ``axis``, whose halves lie at two addresses."""
    half = [1 if n == axis else extent for n, extent in enumerate(array.shape)]
    strides = [int(np.prod(half[n + 1 :])) for n in range(len(half))]
    strides[axis] = (addresses[1] - addresses[0]) // array.itemsize
    assert abs(strides[axis]) > 1 << 32
    return Buffer(addresses[0], array.shape, tuple(strides), array.dtype.name)


class TestPacking:
    CASE = AppendCase(new=(2, 1), before=(0, 3), rope=Rope(dim=8, table_rows=9), heads_q=2, positions=True)

    def pack(self, **changes: Buffer | None) -> bytes:
        operands = Operands(self.CASE)
        buffers = {name: buffer_of(array, 4096) for name, array in operands.arrays.items()}
        buffers |= {"q_rotated": buffers["q"], "k_cache": buffer_of(operands.caches[0], 4096)}
        buffers["v_cache"] = buffers["k_cache"]
        buffers = {name: buffer for name, buffer in {**buffers, **changes}.items() if buffer is not None}
        return pack_append(append_key(operands.problem, "sm_90a"), operands.problem, buffers)

    def test_the_struct_is_as_large_as_the_compilers(self):
        from gpu_actors.kernels.append.params import append_layout

        assert len(self.pack()) == append_layout().size

    @pytest.mark.parametrize("name", ["k", "k_cache", "cache_seqlens", "block_table", "cu_seqlens_q", "positions"])
    def test_an_operand_that_is_missing_is_named(self, name):
        with pytest.raises(InvalidRequest, match=name):
            self.pack(**{name: None})

    def test_shapes_dtypes_and_strides_are_checked(self):
        good = Buffer(4096, (3, 2, 32), (64, 32, 1), "float16")
        self.pack(k=good)
        for wrong in (
            dataclasses.replace(good, shape=(4, 2, 32)),
            dataclasses.replace(good, dtype="bfloat16"),
            dataclasses.replace(good, strides=(64, 1, 2)),
            dataclasses.replace(good, address=4097),
        ):
            with pytest.raises(InvalidRequest, match="k"):
                self.pack(k=wrong)


class TestPageCopies:
    @pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float32"])
    @pytest.mark.parametrize("dims", [(32, 32), (5, 3), (128, 64)])
    def test_pages_are_copied_whole_and_no_others_change(self, dtype, dims):
        k, v = (pool((12, 8, 3, dim), dtype, dim) for dim in dims)
        pairs = np.array([(3, 7), (3, 0), (5, 11), (-1, 2), (4, -1), (12, 1)], np.int32)
        copied = run_copy(k, v, pairs, schedule="random", seed=1)
        wanted = [k.copy(), v.copy()]
        copy_pages(wanted, pairs[:3])
        for name, got, want in zip("kv", copied, wanted, strict=True):
            same_bits(name, got, want, AppendCase(new=(), before=()))

    @pytest.mark.parametrize("leaving", [False, True])
    def test_pages_leave_a_pool_and_come_in(self, leaving):
        k, v = (pool((12, 8, 3, dim), "float16", dim) for dim in (32, 5))
        pages = tuple(pool((6, 8, 3, dim), "float16", dim + 1) for dim in (32, 5))
        pairs = np.array([(7, 2), (0, 0), (11, 5), (12, 1), (-1, 3), (4, 6)], np.int32)
        pairs = pairs if leaving else pairs[:, ::-1].copy()
        found = run_copy(k, v, pairs, pages=pages, leaving=leaving, schedule="random", seed=1)
        wanted = [one.copy() for one in (pages if leaving else (k, v))]
        for got, want, source in zip(found, wanted, (k, v) if leaving else pages, strict=True):
            want[pairs[:3, 1]] = source[pairs[:3, 0]]
            same_bits("page", got, want, AppendCase(new=(), before=()))

    def test_pages_larger_than_a_part_are_copied_whole(self):
        k = pool((3, 64, 4, 100), "float16", 0)
        copied, _ = run_copy(k, k, [(2, 0)])
        wanted = k.copy()
        wanted[0] = k[2]
        same_bits("k", copied, wanted, AppendCase(new=(), before=()))

    def test_pools_must_be_contiguous_within_a_page(self):
        from gpu_actors.kernels.append.copy_pages import pack_page_copy

        pool = AppendProblem(
            layout="paged", batch=1, total=1, heads_kv=2, head_dim=8, head_dim_v=8, dtype="float16",
            cache_dtype="float16", page_size=8, num_blocks=2,
        )  # fmt: skip
        good = Buffer(4096, (2, 8, 2, 8), (999, 16, 8, 1), "float16")
        pairs = Buffer(4096, (1, 2), (2, 1), "int32")
        pack_page_copy(1, pool, {"k_cache": good, "v_cache": good, "page_pairs": pairs})
        turned = dataclasses.replace(good, strides=(128, 8, 64, 1))
        with pytest.raises(InvalidRequest, match="v_cache"):
            pack_page_copy(1, pool, {"k_cache": good, "v_cache": turned, "page_pairs": pairs})


def pool(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    kind = dtype_of(dtype)
    bits = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8)
    return bits.view(kind)
