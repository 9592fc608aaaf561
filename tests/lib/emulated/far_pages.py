"""Runs decode kernels over caches whose rows or pages lie too far apart for 32-bit offsets, with no memory between."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from cases.cached_batches import random_batch
from emulated.decode import DecodeCase, check_results, key_of, problem_of
from emulated.forward import module_of
from inside.devices import Buffer, Kernel
from inside.emulation import PAGE, POISON, EmulatedBuffer, Mapping, encode_tensor_map
from inside.kernels import DECODE, NO_VALUES, Target, program_of
from support.gate import kernel_source

__all__ = ["check_far_pages", "check_far_rows"]

# decode_mma counts chunks of 16 bytes, of which 32 bits reach 64 GiB. The far page and the last row lie beyond that.
PAGES_APART, ROWS_APART = 20 << 30, 24 << 30  # bytes from one to the next
LAST = 4  # the far page's number; pages between have no memory
ROWS, DIM = 16, 32


def _heads(kernel: str) -> int:
    """Heads of q over one KV head: as few as the kernel takes."""
    return 16 if kernel == "decode_sm90" else 2


class FarPool(EmulatedBuffer):
    """A pool of float16 of which only some parts have memory. Parts along ``axis`` begin ``apart`` bytes apart.

    parts: by their index along the axis, at most a page of memory each. shape: of the whole pool, whose other axes have
    no gaps.
    """

    def __init__(self, name: str, shape: tuple[int, ...], axis: int, apart: int, parts: dict[int, Any]) -> None:
        self.name = name
        last = max(parts)
        self.nbytes = last * apart + parts[last].nbytes
        self._shape, self._axis, self._apart = shape, axis, apart
        self._mapping = Mapping(PAGE, guard=last * apart // 2 + PAGE)
        self.address = self._mapping.map_begin + PAGE
        everything = np.asarray(FarBytes(self._mapping))
        for place, part in parts.items():
            begin = self.address + place * apart
            self._mapping.protect(begin, PAGE, mmap.PROT_READ | mmap.PROT_WRITE)
            window = everything[begin - self._mapping.map_begin :][:PAGE]
            window[:] = POISON
            window[: part.nbytes] = part.reshape(-1).view(np.uint8)

    def stray_write(self) -> str | None:
        return None

    @property
    def described(self) -> Buffer:
        strides = [int(np.prod(self._shape[axis + 1 :])) for axis in range(len(self._shape))]
        strides[self._axis] = self._apart // 2
        return Buffer(self.address, self._shape, tuple(strides), "float16")


class FarBytes:
    """All of a mapping's pages as bytes, accessible or not."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping

    @property
    def __array_interface__(self) -> dict[str, Any]:
        begin, end = self.mapping.map_begin, self.mapping.map_end
        return {"version": 3, "typestr": "|u1", "shape": (end - begin,), "data": (begin, False)}


def check_far_pages(kernel: str = DECODE, apart: int = PAGES_APART, **launch: Any) -> None:
    """Compare with the oracle over two pages of a pool. launch: arguments of EmulatedModule.launch."""
    batch = random_batch(0, (2 * ROWS,), heads=(_heads(kernel), 1), dim=DIM, dtype="float16")
    shape = (LAST + 1, ROWS, 1, DIM)
    pools = {
        f"{side}_cache": FarPool(f"{side}_cache", shape, 0, apart, {0: keys[:ROWS], LAST: keys[ROWS:]})
        for side, (keys,) in (("k", batch.k), ("v", batch.v))
    }
    case = DecodeCase(batch, page_size=ROWS, options={"causal": True, "num_splits": 1})
    check_over(case, kernel, pools, {"block_table": np.array([[0, LAST, 0]], np.int32)}, shape, **launch)


def check_far_rows(kernel: str = DECODE, apart: int = ROWS_APART, **launch: Any) -> None:
    """As `check_far_pages`, over four rows of a dense cache."""
    batch = random_batch(0, (4,), heads=(_heads(kernel), 1), dim=DIM, dtype="float16")
    shape = (1, 4, 1, DIM)
    pools = {
        f"{side}_cache": FarPool(f"{side}_cache", shape, 1, apart, dict(enumerate(keys)))
        for side, (keys,) in (("k", batch.k), ("v", batch.v))
    }
    case = DecodeCase(batch, "cache", options={"causal": True, "num_splits": 1})
    check_over(case, kernel, pools, {}, shape, **launch)


def check_over(
    case: DecodeCase,
    kernel: str,
    pools: dict[str, FarPool],
    others: dict[str, Any],
    shape: Sequence[int],
    **launch: Any,
) -> None:
    """Launch a case over pools of a shape and compare with the oracle. others: further operands."""
    batch = case.batch
    near = np.zeros(shape, np.float16)
    operands = {"q": batch.q, **dict.fromkeys(pools, near), "cache_seqlens": batch.lengths, **others}
    problem = problem_of(case, operands)
    target = Target(1, lambda tensor_map: encode_tensor_map(*tensor_map))
    arch = "sm_90a" if kernel == "decode_sm90" else "sm_80"
    program = program_of(problem, key_of(problem, arch, kernel), target)
    arrays = {name: array for name, array in operands.items() if name not in pools}
    if program.split is not None:
        arrays |= program.split({"cache_seqlens": batch.lengths})
    arrays |= {"out": np.full_like(batch.q, np.nan), "lse": np.full((1, _heads(kernel), 1), np.nan, np.float32)}
    memory = {name: EmulatedBuffer.of(array, name) for name, array in arrays.items()}
    buffers = {name: pool.described for name, pool in pools.items()}
    for name, array in arrays.items():
        strides = tuple(stride // array.itemsize for stride in array.strides)
        buffers[name] = Buffer(memory[name].address, array.shape, strides, array.dtype.name)
    (source,) = map(kernel_source, program.keys)
    (step,) = program.steps((Kernel(source.entry_points[0], None),), NO_VALUES)
    geometry = step.geometry
    module_of(source).launch(
        step.kernel.entry,
        geometry.grid,
        geometry.block,
        geometry.shared_bytes,
        step.pack(buffers),
        [*memory.values(), *pools.values()],
        **launch,
    )
    check_results(case, *(memory[name].view(arrays[name].dtype, arrays[name].shape) for name in ("out", "lse")))
