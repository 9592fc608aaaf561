"""Runs the append and page-copy kernels on the CPU over arrays and compares whole caches with the oracle. For tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from emulated import contraction
from inside.devices import Buffer
from inside.emulation import EmulatedBuffer, EmulatedModule, build_module
from inside.kernels import (
    AppendProblem,
    append_geometry,
    append_variant,
    pack_append,
    pack_page_copy,
    page_copy_geometry,
    page_copy_variant,
)
from inside.reference import append_rows, appended_rows, apply_rope, assert_rows_close, assert_same_bits, rope_angles
from support.gate import kernel_source

from gpu_actors import KernelSource, Rope

FP8 = ("float8_e4m3fn", "float8_e5m2")
UNUSED_ENTRY = 2147480000  # in block tables, past a sequence's last page


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@functools.cache
def module_of(source: KernelSource) -> EmulatedModule:
    return build_module(source.source, dict(source.macros), dict(source.headers), entries=source.entry_points)


@dataclasses.dataclass(kw_only=True)
class AppendCase:
    """An append with its data. new: rows of each sequence. before: keys of each sequence in the cache already.

    Caches are filled with random bytes, so that a written neighbour shows. even: all sequences have the same number of
    new rows, and the kernel gets no cu_seqlens_q.
    """

    new: tuple[int, ...]
    before: tuple[int, ...]
    layout: str = "paged"
    dtype: str = "float16"
    cache_dtype: str = "float16"
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    page_size: int = 8
    capacity: int | None = None
    rope: Rope | None = None
    positions: bool = False
    heads_q: int = 0
    descales: bool = False
    even: bool = False
    scale: float = 1.0
    seed: int = 0

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def repro(self) -> str:
        return repr(self)


class Operands:
    """The arrays of a case, by the kernel's names."""

    def __init__(self, case: AppendCase) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        total, batch = sum(case.new), len(case.new)
        self.cu_seqlens = np.concatenate([[0], np.cumsum(case.new)]).astype(np.int32)
        self.cache_seqlens = (np.array(case.before) + np.array(case.new)).astype(np.int32)

        def rows(heads: int, dim: int) -> Any:
            drawn = rng.standard_normal((total, heads, dim)) * case.scale
            return drawn.astype(np.float32).astype(dtype_of(case.dtype))

        longest = case.capacity or max(8, int(self.cache_seqlens.max(initial=0)))
        self.arrays: dict[str, Any] = {"k": rows(case.heads_kv, case.head_dim), "v": rows(case.heads_kv, case.dim_v)}
        self.arrays["cache_seqlens"] = self.cache_seqlens
        if not case.even:
            self.arrays["cu_seqlens_q"] = self.cu_seqlens
        self.max_blocks = -(-longest // case.page_size)
        self.num_blocks = batch * self.max_blocks + 3
        self.max_seq = longest
        self.caches = [self._cache(case.head_dim), self._cache(case.dim_v)]
        self.table = None
        if case.layout == "paged":
            pages = -(-self.cache_seqlens // case.page_size)
            order = rng.permutation(self.num_blocks)
            # The pool's last page is in use: the first one of the first sequence that has any.
            first, last = int(np.argmax(pages > 0)) * self.max_blocks, int(np.argmax(order))
            order[[first, last]] = order[[last, first]]
            self.table = order[: batch * self.max_blocks].reshape(batch, self.max_blocks).astype(np.int32)
            self.table[np.arange(self.max_blocks) >= pages[:, None]] = UNUSED_ENTRY
            self.arrays["block_table"] = self.table
        for name in ("k_descale", "v_descale") if case.descales else ():
            self.arrays[name] = rng.uniform(0.01, 3.0, (batch, case.heads_kv)).astype(np.float32)
        if case.heads_q:
            self.arrays["q"] = rows(case.heads_q, case.head_dim)
        places = np.zeros(total, np.int32)
        for row, _, place in appended_rows(self.cu_seqlens, self.cache_seqlens):
            places[row] = place
        self.positions = rng.integers(0, 3000, total).astype(np.int32) if case.positions else places
        if case.positions:
            self.arrays["positions"] = self.positions
        if case.rope is not None and case.rope.table_rows:
            inv_freq = 10000.0 ** (-np.arange(0, case.rope.dim, 2) / case.rope.dim)
            angles = rope_angles(np.arange(case.rope.table_rows), inv_freq)
            # The tables differ from what a kernel would compute from the base.
            self.arrays["rope_cos"] = (1.25 * np.cos(angles)).astype(np.float32)
            self.arrays["rope_sin"] = (1.25 * np.sin(angles)).astype(np.float32)

    @property
    def problem(self) -> AppendProblem:
        case = self.case
        return AppendProblem(
            layout=case.layout,  # type: ignore[arg-type]
            batch=len(case.new),
            total=sum(case.new),
            rows=case.new[0] if case.even else 0,
            heads_kv=case.heads_kv,
            head_dim=case.head_dim,
            head_dim_v=case.dim_v,
            dtype=case.dtype,
            cache_dtype=case.cache_dtype,
            page_size=case.page_size if case.layout == "paged" else 0,
            num_blocks=self.num_blocks if case.layout == "paged" else 0,
            max_blocks=self.max_blocks if case.layout == "paged" else 0,
            max_seq=0 if case.layout == "paged" else self.max_seq,
            rope=case.rope,
            positions=case.positions,
            heads_q=case.heads_q,
            descales=case.descales,
        )

    def rope_tables(self) -> tuple[Any, Any] | None:
        rope = self.case.rope
        if rope is None:
            return None
        if rope.table_rows:
            return self.arrays["rope_cos"][self.positions], self.arrays["rope_sin"][self.positions]
        angles = rope_angles(self.positions, np.array(rope.frequencies))
        return np.cos(angles), np.sin(angles)

    def _cache(self, dim: int) -> Any:
        case = self.case
        shape: tuple[int, ...] = (self.num_blocks, case.page_size, case.heads_kv, dim)
        if case.layout == "dense":
            shape = (len(case.new), self.max_seq, case.heads_kv, dim)
        elif case.layout == "pointers":
            shape = (len(case.new), case.heads_kv, self.max_seq, dim)
        dtype = dtype_of(case.cache_dtype)
        bits = np.random.default_rng(case.seed + dim).integers(0, 256, (*shape[:-1], dim * dtype.itemsize), np.uint8)
        return bits.view(dtype)


def placed(arrays: dict[str, Any]) -> tuple[dict[str, Buffer], dict[str, EmulatedBuffer]]:
    """Put arrays into the emulated device's memory."""
    memory = {name: EmulatedBuffer.of(array, name) for name, array in arrays.items()}
    return {name: buffer_of(array, memory[name].address) for name, array in arrays.items()}, memory


def launch_append(
    problem: AppendProblem, buffers: dict[str, Buffer], memory: Sequence[EmulatedBuffer], **launch: Any
) -> None:
    """Launch append, unless the grid is empty. launch: arguments of EmulatedModule.launch."""
    geometry = append_geometry(problem)
    if all(geometry.grid):
        module_of(kernel_source(append_variant(problem, "sm_90a"))).launch(
            "append",
            geometry.grid,
            geometry.block,
            geometry.shared_bytes,
            pack_append(problem, buffers),
            memory,
            **{"arithmetic": contraction.arithmetic(), **launch},
        )


def run(operands: Operands, **launch: Any) -> tuple[list[Any], Any]:
    """([k cache, v cache] after the launch, rotated q or None)."""
    case, problem = operands.case, operands.problem
    buffers, memory = placed(operands.arrays)
    parts: list[list[EmulatedBuffer]] = []
    for name, cache in zip(("k", "v"), operands.caches, strict=True):
        if case.layout == "pointers":
            parts.append([EmulatedBuffer.of(one, f"{name}_cache[{n}]") for n, one in enumerate(cache)])
            addresses = np.array([part.address for part in parts[-1]], np.uint64)
            memory[f"{name}_pointers"] = EmulatedBuffer.of(addresses, f"{name}_pointers")
            buffers[f"{name}_pointers"] = buffer_of(addresses, memory[f"{name}_pointers"].address)
        else:
            parts.append([EmulatedBuffer.of(cache, f"{name}_cache")])
            buffers[f"{name}_cache"] = buffer_of(cache, parts[-1][0].address)
    if case.heads_q:
        memory["q_rotated"] = EmulatedBuffer(operands.arrays["q"].nbytes, "q_rotated")
        buffers["q_rotated"] = buffer_of(operands.arrays["q"], memory["q_rotated"].address)
    launch_append(problem, buffers, [*memory.values(), *parts[0], *parts[1]], **launch)
    caches = []
    for cache, memory_of_cache in zip(operands.caches, parts, strict=True):
        written = np.concatenate([part.array for part in memory_of_cache])
        caches.append(written.view(cache.dtype).reshape(cache.shape))
    q = memory["q_rotated"].view(operands.arrays["q"].dtype, operands.arrays["q"].shape) if case.heads_q else None
    return caches, q


def expected(operands: Operands, *, exact: bool) -> list[Any]:
    """The oracle's caches: in the caches' dtype, or if not exact in float64."""
    case = operands.case
    caches = [cache.copy() for cache in operands.caches]
    if not exact:
        with np.errstate(invalid="ignore"):
            caches = [cache.astype(np.float64) for cache in caches]
    tables = operands.rope_tables()
    k, v = operands.arrays["k"], operands.arrays["v"]
    descales = {name: operands.arrays.get(name) for name in ("k_descale", "v_descale")}
    if not exact:
        k, v = k.astype(np.float64), v.astype(np.float64)
        for name, sequences in (("k", descales.pop("k_descale")), ("v", descales.pop("v_descale"))):
            if sequences is not None:
                of_row = np.repeat(sequences.astype(np.float64), case.new, axis=0)[:, :, None]
                k, v = (k / of_row, v) if name == "k" else (k, v / of_row)
    append_rows(
        k,
        v,
        *(caches if case.layout != "pointers" else [list(cache) for cache in caches]),
        operands.cu_seqlens,
        operands.cache_seqlens,
        block_table=operands.table,
        rope=tables,
        interleaved=case.rope is not None and case.rope.interleaved,
        **descales,
    )
    return caches


def check(case: AppendCase, **launch: Any) -> None:
    """Raise AssertionError unless the caches are the oracle's: bit by bit, but for rotated K and q, which may differ by
    the error of float arithmetic and one rounding."""
    operands = Operands(case)
    caches, q = run(operands, **launch)
    exact = expected(operands, exact=True)
    same_bits("v_cache", caches[1], exact[1], case)
    if case.rope is None:
        same_bits("k_cache", caches[0], exact[0], case)
        return
    touched = touched_elements(operands)
    same_bits("k_cache", np.where(touched, exact[0], caches[0]), exact[0], case)
    reference = expected(operands, exact=False)[0]
    close(
        "k_cache",
        caches[0][touched],
        reference[touched],
        case,
        np.abs(operands.arrays["k"].astype(float)).max(initial=0),
    )
    if q is not None:
        q_rows, tables = operands.arrays["q"], operands.rope_tables()
        assert tables is not None
        rotated = apply_rope(q_rows, *tables, interleaved=case.rope.interleaved)
        q_case = dataclasses.replace(case, cache_dtype=case.dtype, descales=False)
        close("q_rotated", q, rotated, q_case, np.abs(q_rows.astype(float)).max(initial=0))


def touched_elements(operands: Operands) -> Any:
    """True for the elements of K's cache that a new row goes to."""
    case = operands.case
    ones = [np.ones((sum(case.new), case.heads_kv, dim)) for dim in (case.head_dim, case.dim_v)]
    marks = [np.zeros(cache.shape) for cache in operands.caches]
    append_rows(
        *ones,
        *(marks if case.layout != "pointers" else [list(mark) for mark in marks]),
        operands.cu_seqlens,
        operands.cache_seqlens,
        block_table=operands.table,
    )
    return marks[0] != 0


def same_bits(name: str, actual: Any, expected: Any, case: AppendCase) -> None:
    assert_same_bits(name, actual, expected, case.repro)


def close(name: str, actual: Any, expected: Any, case: AppendCase, largest: float) -> None:
    assert_rows_close(name, actual, expected, largest, 0.01 if case.descales else 1.0, case.repro)


def buffer_of(array: Any, address: int) -> Buffer:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Buffer(address, array.shape, strides, array.dtype.name)


def run_copy(
    k_cache: Any,
    v_cache: Any,
    pairs: Any,
    *,
    pages: tuple[Any, Any] | None = None,
    leaving: bool = False,
    **launch: Any,
) -> tuple[Any, Any]:
    """The pools after page copies within them or from ``pages``; if leaving, ``pages`` after copies to them."""
    arrays = {"k_cache": k_cache, "v_cache": v_cache, "page_pairs": np.asarray(pairs, np.int32).reshape(-1, 2)}
    names = ("cache", "cache")
    if pages is not None:
        arrays |= {"k_pages": pages[0], "v_pages": pages[1]}
        names = ("cache", "pages") if leaving else ("pages", "cache")
    buffers, memory = placed(arrays)
    launch_copy(k_cache, v_cache, len(pairs), buffers, list(memory.values()), *names, **launch)
    changed = [f"{side}_{names[1]}" for side in "kv"]
    return tuple(memory[name].view(arrays[name].dtype, arrays[name].shape) for name in changed)


def launch_copy(
    k_cache: Any,
    v_cache: Any,
    pairs: int,
    buffers: dict[str, Buffer],
    memory: Sequence[EmulatedBuffer],
    source: str = "cache",
    target: str = "cache",
    **launch: Any,
) -> None:
    """Launch copy_pages for so many pairs. k_cache, v_cache: only their shapes. source, target: "cache" or "pages"."""
    blocks, page_size, heads, dim = k_cache.shape
    dtype = k_cache.dtype.name
    pool = AppendProblem(
        layout="paged", batch=1, total=1, heads_kv=heads, head_dim=dim, head_dim_v=v_cache.shape[3], dtype=dtype,
        cache_dtype=dtype, page_size=page_size, num_blocks=blocks,
    )  # fmt: skip
    geometry = page_copy_geometry(pairs, pool)
    if all(geometry.grid):
        module_of(kernel_source(page_copy_variant("sm_90a"))).launch(
            "copy_pages",
            geometry.grid,
            geometry.block,
            geometry.shared_bytes,
            pack_page_copy(pairs, pool, buffers, source, target),
            memory,
            **{"arithmetic": contraction.arithmetic(), **launch},
        )
