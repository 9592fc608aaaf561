"""Hard problems of append and copy_pages: every cell of the caches is compared, including those without a new row."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
from emulated.append import (
    FP8,
    UNUSED_ENTRY,
    AppendCase,
    Operands,
    check,
    dtype_of,
    expected,
    launch_append,
    launch_copy,
    placed,
    run_copy,
    same_bits,
)
from emulated.append import run as run_append
from emulated.far_tensors import far_buffer, far_halves
from inside.emulation import EmulatedBuffer
from inside.reference import copy_pages

from gpu_actors import Rope

KERNELS = ("append", "copy_pages")
_SCHEDULES = ("greedy", "lane", "random", "round_robin")

# Sequences without new rows and without keys, pages that are begun, filled and crossed.
_MIXED = AppendCase(new=(3, 0, 21, 1, 0, 8), before=(5, 2, 7, 0, 0, 8))


def mixed(**changes: Any) -> AppendCase:
    return dataclasses.replace(_MIXED, **changes)


_CASES = {
    "copy": _MIXED,
    "wide": AppendCase(new=(2, 1), before=(6, 0), heads_kv=32, head_dim=128),
    "even": AppendCase(new=(2,) * 5, before=(0, 7, 8, 15, 30), even=True),
    "one row each": AppendCase(new=(1,) * 9, before=(0, 7, 8, 15, 16, 63, 3, 31, 1), even=True),
    "full": AppendCase(new=(4, 8, 32), before=(28, 0, 0), capacity=32),
    "nothing": AppendCase(new=(0, 0), before=(3, 0)),
    "values wider": mixed(head_dim=24, head_dim_v=40),
    "pointers": mixed(layout="pointers"),
    "odd": mixed(head_dim=13, head_dim_v=5),
    "float32": mixed(dtype="float32", cache_dtype="float32", head_dim=5, head_dim_v=3, layout="dense"),
    "float64": mixed(dtype="float64", cache_dtype="float64", head_dim=16, head_dim_v=7),
    "bfloat16": mixed(dtype="bfloat16", cache_dtype="bfloat16", head_dim=40, head_dim_v=64, page_size=16),
    "rounded": mixed(dtype="float32", cache_dtype="bfloat16", head_dim=20),
    "overflow": AppendCase(new=(4,), before=(0,), dtype="float32", scale=1e5),
    "halves": mixed(rope=Rope(dim=32), heads_q=2),
    "interleaved": mixed(rope=Rope(dim=32, interleaved=True)),
    "part": mixed(rope=Rope(dim=20), head_dim=32),
    "positions": mixed(rope=Rope(dim=32), positions=True),
    "tables": mixed(rope=Rope(dim=32, table_rows=100)),
    "many": AppendCase(new=(600,), before=(0,), heads_kv=1, head_dim=8, page_size=64, rope=Rope(dim=8)),
    "many more": AppendCase(
        new=(300, 4000, 0, 250), before=(0, 9, 0, 4), heads_kv=1, head_dim=8, page_size=128, rope=Rope(dim=4)
    ),
    # More than 64 pairs in a row, and columns behind the rotated ones.
    "more pairs than threads": mixed(rope=Rope(dim=320), head_dim=320),
    "halves wide": mixed(rope=Rope(dim=192), head_dim=200, heads_q=4),
    "halves odd": mixed(dtype="bfloat16", cache_dtype="bfloat16", rope=Rope(dim=34), head_dim=37, layout="dense"),
    "halves narrow": mixed(rope=Rope(dim=6, base=500.0), head_dim=24, heads_q=2),
    "interleaved wide": mixed(rope=Rope(dim=96, interleaved=True), head_dim=112, heads_q=6, layout="pointers"),
    "interleaved narrow": mixed(
        dtype="float32", cache_dtype="float32", rope=Rope(dim=10, interleaved=True), head_dim=24
    ),
    "tables and positions": mixed(rope=Rope(dim=16, table_rows=3000), positions=True, heads_q=2),
    "interleaved positions": mixed(rope=Rope(dim=16, interleaved=True), positions=True, heads_q=1),
    "frequencies": mixed(rope=Rope(dim=8, inv_freq=(1.0, 7.5, -0.25, 0.001)), positions=True),
    "even halves": AppendCase(new=(2,) * 5, before=(0, 7, 8, 15, 30), even=True, rope=Rope(dim=32), layout="dense"),
    "many heads": AppendCase(new=(2, 1), before=(6, 0), heads_kv=32, head_dim=128, rope=Rope(dim=128), heads_q=64),
    "fp8": mixed(cache_dtype=FP8[0], descales=True, scale=200.0),
    "ties": mixed(cache_dtype=FP8[0]),
    "fp8 copied": mixed(dtype=FP8[0], cache_dtype=FP8[0], layout="pointers"),
    "e5m2": mixed(dtype="float32", cache_dtype=FP8[1], descales=True, head_dim=13, layout="pointers"),
    "e4m3 dense": mixed(dtype="bfloat16", cache_dtype=FP8[0], layout="dense"),
    "halves to e4m3": mixed(rope=Rope(dim=32), cache_dtype=FP8[0], descales=True, heads_q=2, head_dim=64),
    "interleaved to e5m2": mixed(
        dtype="bfloat16", rope=Rope(dim=20, interleaved=True), cache_dtype=FP8[1], head_dim=24
    ),
}
# Rows without a place in the cache: what is changed, as (array, index, value).
_MISPLACED: dict[str, tuple[tuple[str, Any, int], ...]] = {
    "beyond": (("cache_seqlens", 5, 33),),
    "before": (("cache_seqlens", 2, 0),),
    "unused": (("table", (2, 1), UNUSED_ENTRY),),
    "past the pool": (("table", (2, 1), 27),),
    "minus": (("table", (2, 1), -1),),
    "left over": (("cu_seqlens", 6, 30), ("cache_seqlens", 5, 12)),
}
ROWS = (*_CASES, *_MISPLACED, "bits", "far", "far new rows", "far pages", "pages", "pages of any dtype")
# Each needs a build of its own for paths that other rows take.
RARE = frozenset(
    {"bfloat16", "rounded", "halves narrow", "interleaved positions", "frequencies", "even halves"}
    | {"e4m3 dense", "interleaved to e5m2"}
)


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    for seed, schedule in enumerate(_SCHEDULES):
        launch = {"schedule": schedule, "seed": seed}
        if row in _CASES:
            check(_CASES[row], limit_seconds=20.0, **launch)
        elif row in _MISPLACED:
            operands = Operands(mixed(capacity=32))
            assert operands.num_blocks == 27
            for array, index, value in _MISPLACED[row]:
                getattr(operands, array)[index] = value
            _check_exactly(operands, limit_seconds=20.0, **launch)
        elif row == "bits":
            operands = Operands(AppendCase(new=(1024,), before=(3,)))
            for name in ("k", "v"):
                operands.arrays[name] = np.arange(1 << 16, dtype=np.uint16).reshape(1024, 2, 32).view(np.float16)
            _check_exactly(operands, **launch)
        elif row == "far":
            for axis in range(3):
                _check_far(
                    AppendCase(new=(2, 2), before=(0, 0), layout="dense", capacity=2, head_dim=16), axis, **launch
                )
        elif row == "far new rows":
            for axis in range(2):
                _check_far_rows(AppendCase(new=(2,), before=(0,), head_dim=16), axis, **launch)
        elif row == "far pages":
            for pair in ((0, 1), (1, 0)):
                _check_far_pages(pair, **launch)
        elif row == "pages":
            _check_pages(**launch)
        else:
            for dtype, dims in itertools.product(("float16", FP8[0], "float32"), ((32, 32), (5, 3), (128, 64))):
                _check_pages_of(dtype, dims, **launch)
            _check_pages_of(FP8[0], (9, 5), page_size=1, **launch)  # pages begin at any byte


def _check_exactly(operands: Operands, **launch: Any) -> None:
    caches, _ = run_append(operands, **launch)
    for cache, wanted in zip(caches, expected(operands, exact=True), strict=True):
        same_bits("cache", cache, wanted, operands.case)


def _halves(arrays: dict[str, Any], axis: int) -> tuple[dict[str, Any], list[dict[str, EmulatedBuffer]]]:
    """Arrays of extent 2 along the axis, whose halves lie far apart."""

    def half(n: int) -> dict[str, EmulatedBuffer]:
        return {name: EmulatedBuffer.of(np.take(array, [n], axis), name) for name, array in arrays.items()}

    halves = far_halves(half)
    buffers = {name: far_buffer(array, axis, [half[name].address for half in halves]) for name, array in arrays.items()}
    return buffers, halves


def _check_far(case: AppendCase, axis: int, **launch: Any) -> None:
    """Two blocks, rows or heads of a dense cache lie more than 2^32 elements apart."""
    operands = Operands(case)
    near, memory = placed(operands.arrays)
    far, halves = _halves(dict(zip(("k_cache", "v_cache"), operands.caches, strict=True)), axis)
    parts = [part for half in halves for part in half.values()]
    launch_append(operands.problem, near | far, [*memory.values(), *parts], **launch)
    for name, wanted in zip(far, expected(operands, exact=True), strict=True):
        shape = tuple(1 if n == axis else extent for n, extent in enumerate(wanted.shape))
        got = np.concatenate([half[name].view(wanted.dtype, shape) for half in halves], axis)
        same_bits(name, got, wanted, case)


def _check_far_rows(case: AppendCase, axis: int, **launch: Any) -> None:
    """Two new rows or heads lie more than 2^32 elements apart."""
    operands = Operands(case)
    caches = dict(zip(("k_cache", "v_cache"), operands.caches, strict=True))
    near, memory = placed({name: array for name, array in operands.arrays.items() if name not in "kv"} | caches)
    far, halves = _halves({name: operands.arrays[name] for name in "kv"}, axis)
    parts = [part for half in halves for part in half.values()]
    launch_append(operands.problem, near | far, [*memory.values(), *parts], **launch)
    for name, wanted in zip(caches, expected(operands, exact=True), strict=True):
        same_bits(name, memory[name].view(wanted.dtype, wanted.shape), wanted, case)


def _check_far_pages(pair: tuple[int, int], **launch: Any) -> None:
    """The two pages of a pool lie more than 2^32 elements apart, and one is copied to the other."""
    rng = np.random.default_rng(0)
    pools = {f"{side}_cache": rng.standard_normal((2, 8, 1, 16)).astype(np.float16) for side in "kv"}
    wanted = [pool.copy() for pool in pools.values()]
    copy_pages(wanted, [pair])
    near, memory = placed({"page_pairs": np.array([pair], np.int32)})
    far, halves = _halves(pools, 0)
    parts = [part for half in halves for part in half.values()]
    launch_copy(*pools.values(), 1, near | far, [*memory.values(), *parts], **launch)
    for name, want in zip(pools, wanted, strict=True):
        got = np.concatenate([half[name].view(want.dtype, (1, *want.shape[1:])) for half in halves])
        same_bits(name, got, want, _MIXED)


def _check_pages(**launch: Any) -> None:
    """Pages are copied within the pools, out of them and into them; pairs that name no page are skipped."""
    k, v = (
        np.random.default_rng(dim).integers(0, 1 << 16, (9, 8, 3, dim), np.uint16).view(np.float16) for dim in (21, 200)
    )
    pairs = [(8, 2), (3, 0), (-1, 5), (9, 6)]
    wanted = [k.copy(), v.copy()]
    copy_pages(wanted, pairs[:2])
    for got, want in zip(run_copy(k, v, pairs, **launch), wanted, strict=True):
        same_bits("page", got, want, _MIXED)
    others = [one[:3].copy() for one in (k, v)]
    leaving = [(8, 1), (0, 2), (7, 3)]
    found = run_copy(k, v, leaving, pages=(others[0], others[1]), leaving=True, **launch)
    for got, kept, source in zip(found, others, (k, v), strict=True):
        want = kept.copy()
        want[[1, 2]] = source[[8, 0]]
        same_bits("page", got, want, _MIXED)
    # Pages come in from a list with as many pages as pairs.
    found = run_copy(*others, [(4, 1), (0, 2), (5, 1), (-1, 2), (3, 3)], pages=(k[:5].copy(), v[:5].copy()), **launch)
    for got, kept, source in zip(found, others, (k, v), strict=True):
        want = kept.copy()
        want[[1, 2]] = source[[4, 0]]
        same_bits("page", got, want, _MIXED)


def _check_pages_of(dtype: str, dims: tuple[int, int], *, page_size: int = 8, **launch: Any) -> None:
    kind = dtype_of(dtype)
    k, v = (
        np.random.default_rng(dim).integers(0, 256, (12, page_size, 3, dim * kind.itemsize), np.uint8).view(kind)
        for dim in dims
    )
    pairs = np.array([(3, 7), (3, 0), (5, 11), (-1, 2), (4, -1), (12, 1)], np.int32)
    wanted = [k.copy(), v.copy()]
    copy_pages(wanted, pairs[:3])
    for got, want in zip(run_copy(k, v, pairs, **launch), wanted, strict=True):
        same_bits("page", got, want, _MIXED)


_DRAWN = {f"random-{number}": range(30 * number, 30 * number + 30) for number in range(10)}
GRID = tuple(_DRAWN)
USUAL = frozenset(GRID[:1])


def run_variant(variant: str, *, thorough: bool) -> None:
    """Check thirty random appends, or the first two of them without ``thorough``."""
    for seed in _DRAWN[variant] if thorough else _DRAWN[variant][:2]:
        check(_drawn(seed), schedule=_SCHEDULES[seed % 4], seed=seed)


def _drawn(seed: int) -> AppendCase:
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
