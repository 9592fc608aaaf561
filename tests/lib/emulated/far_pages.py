"""Runs decode_mma over a pool whose pages lie more than 2^32 chunks of 16 bytes apart; nothing between is there."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from cases.cached_batches import Batch, random_batch
from emulated.decode import DecodeCase, check_results, kernel_of, key_of, problem_of

from gpu_actors.devices.emulation import EmulatedBuffer
from gpu_actors.devices.emulation.memory import PAGE, POISON, Mapping
from gpu_actors.devices.interface import Buffer
from gpu_actors.kernels.dispatch import program_of
from gpu_actors.kernels.program import NO_VALUES, Target
from gpu_actors.kernels.variants import kernel_source

__all__ = ["check_far_pages"]

APART = 80 << 30  # bytes between the two pages
LAST = 4  # the far page's number; those between are not there
ROWS, DIM = 16, 32


class FarPool(EmulatedBuffer):
    """A pool (LAST + 1, ROWS, 1, DIM) of float16 with two pages: the first, and the last APART bytes further on."""

    def __init__(self, name: str, first: Any, last: Any) -> None:
        self.name = name
        self.nbytes = APART + first.nbytes
        self._mapping = Mapping(PAGE, guard=APART // 2 + PAGE)
        self.address = self._mapping.map_begin + PAGE
        everything = FarBytes(self._mapping)
        for begin, page in ((self.address, first), (self.address + APART, last)):
            self._mapping.protect(begin, PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
            window = np.asarray(everything)[begin - self._mapping.map_begin :][:PAGE]
            window[:] = POISON
            window[: page.nbytes] = page.reshape(-1).view(np.uint8)

    def stray_write(self) -> str | None:
        return None

    @property
    def described(self) -> Buffer:
        return Buffer(self.address, (LAST + 1, ROWS, 1, DIM), (APART // LAST // 2, DIM, DIM, 1), "float16")


class FarBytes:
    """All of a mapping's pages as bytes, whether they may be touched or not."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping

    @property
    def __array_interface__(self) -> dict[str, Any]:
        begin, end = self.mapping.map_begin, self.mapping.map_end
        return {"version": 3, "typestr": "|u1", "shape": (end - begin,), "data": (begin, False)}


def check_far_pages(**launch: Any) -> None:
    """Compare with the oracle. launch: as EmulatedModule.launch takes it."""
    batch = random_batch(0, (2 * ROWS,), heads=(2, 1), dim=DIM, dtype="float16")
    case = DecodeCase(batch, page_size=ROWS, options={"causal": True, "num_splits": 1})
    pools = {f"{side}_cache": far_pool(batch, side) for side in "kv"}
    table = np.array([[0, LAST, 0]], np.int32)
    near = np.zeros((LAST + 1, ROWS, 1, DIM), np.float16)
    operands = {"q": batch.q, "k_cache": near, "v_cache": near, "block_table": table, "cache_seqlens": batch.lengths}
    problem = problem_of(case, operands)
    program = program_of(problem, key_of(problem, "sm_80"), Target(1))
    assert program.split is not None
    arrays = {name: array for name, array in operands.items() if name not in pools}
    arrays |= program.split(batch.lengths, None)
    arrays |= {"out": np.full_like(batch.q, np.nan), "lse": np.full((1, 2, 1), np.nan, np.float32)}
    memory = {name: EmulatedBuffer.of(array, name) for name, array in arrays.items()}
    buffers = {name: pool.described for name, pool in pools.items()}
    for name, array in arrays.items():
        strides = tuple(stride // array.itemsize for stride in array.strides)
        buffers[name] = Buffer(memory[name].address, array.shape, strides, array.dtype.name)
    (step,) = program.steps(tuple(kernel_of(kernel_source(key)) for key in program.keys), NO_VALUES)
    geometry = step.geometry
    step.kernel.handle.launch(
        step.kernel.entry,
        geometry.grid,
        geometry.block,
        geometry.shared_bytes,
        step.pack(buffers),
        [*memory.values(), *pools.values()],
        **launch,
    )
    check_results(case, *(memory[name].view(arrays[name].dtype, arrays[name].shape) for name in ("out", "lse")))


def far_pool(batch: Batch, side: str) -> FarPool:
    keys = getattr(batch, side)[0]
    return FarPool(f"{side}_cache", keys[:ROWS], keys[ROWS:])
