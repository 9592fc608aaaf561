"""Hard problems of decode_simple and of its merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from cases.cached_batches import Batch, random_batch
from cases.decode import SIMPLE_VARIANTS
from emulated.decode import DecodeCase, allocate, check, problem_of
from emulated.decode import run as run_decode
from emulated.far_pages import check_far_pages, check_far_rows
from inside.emulation import PAGE
from inside.kernels import SIMPLE, SIMPLE_COMBINE
from inside.reference import round_inputs

from gpu_actors.testing import check_output
from matrix.decode import (
    CAUSAL,
    SINKS,
    SLOPES,
    batch_of,
    check_drawn,
    placed,
    rising,
    tree_case,
    trees,
    whole_table,
    with_scales,
)

KERNELS = (SIMPLE, SIMPLE_COMBINE)
LAUNCHES = (("late", "greedy", 0), ("late", "lane", 1), ("random", "random", 2))
_PINNED: dict[str, Any] = {**CAUSAL, "num_splits": 3}


def narrow(*lengths: int, **given: Any) -> Batch:
    """Head dim 20: not in whole chunks of 16-bit elements, nor a power of two."""
    return batch_of(*lengths, **{"dim": 20, "dtype": "float32", **given})


def _steep(batch: Batch) -> DecodeCase:
    """Scores that rise by more than the range of float exponents."""
    batch.q *= 16
    return DecodeCase(batch, options={**CAUSAL, "num_splits": 4})


def _latent(dtype: str, dim: int, dim_v: int) -> DecodeCase:
    batch = random_batch(2, (70, 0, 33), rows=3, heads=(6, 1), dim=dim, dtype=dtype)
    batch.v = [np.ascontiguousarray(keys[..., :dim_v]) for keys in batch.k]
    return DecodeCase(batch, latent=True, options=CAUSAL)


def _everywhere(dtype: str = "float32") -> DecodeCase:
    """Rows and keys with positions in a larger problem, under every mask and ALiBi."""
    masks = {**CAUSAL, "window_size": (300, 0), "sink_tokens": 200, "alibi_slopes": SLOPES}
    batch = random_batch(4, (300, 9, 130), rows=5, heads=(4, 2), dim=20, dtype=dtype)
    return placed(
        DecodeCase(batch, options=masks),
        q_positions=[[500, 3], [9, 1], [70, 2]],
        k_positions=[[1, 4], [0, 1], [3, 2]],
    )


# Most have several tiles of keys, and keys that end inside a tile.
_PROBLEMS: dict[str, Callable[[], DecodeCase]] = {
    "plain": lambda: DecodeCase(rising(narrow(300, 0, 5, 40, 140)), options=_PINNED),
    "one": lambda: DecodeCase(narrow(40, 9), options={**CAUSAL, "num_splits": 1}),
    "pinned": lambda: DecodeCase(narrow(130, 300), options=_PINNED),
    "rows": lambda: DecodeCase(narrow(100, 12, rows=5, heads=(6, 2)), options=_PINNED),
    "steep": lambda: _steep(rising(narrow(900, heads=(2, 1)))),
    "early rows": lambda: placed(
        DecodeCase(narrow(80, rows=8, heads=(1, 1)), options=_PINNED), q_positions=[[-20, 10]]
    ),
    "few keys": lambda: DecodeCase(narrow(3, 1, 0, 7, rows=7, heads=(1, 1)), options=_PINNED),
    "ends": lambda: DecodeCase(narrow(1, 31, 32, 33, 63, 64, 65, 128, 129), options=_PINNED),
    "full": lambda: DecodeCase(narrow(304, 304, 200), options=_PINNED),
    "alibi": lambda: DecodeCase(narrow(100, 9), options={**_PINNED, "alibi_slopes": SLOPES}),
    "alibi rows": lambda: DecodeCase(narrow(100, 9, rows=20), options={**CAUSAL, "alibi_slopes": SLOPES}),
    "varlen": lambda: DecodeCase(
        narrow(100, 12, 70, rows=5, heads=(6, 2)), rows=[5, 0, 2], options={**CAUSAL, "num_splits": 1}
    ),
    "varlen pinned": lambda: DecodeCase(narrow(100, 12, 70, rows=5, heads=(6, 2)), rows=[5, 0, 2], options=_PINNED),
    "tree": lambda: tree_case(narrow(70, 9, 40, rows=9)),
    "varlen tree": lambda: tree_case(narrow(70, 9, 40, rows=9), rows=[9, 3, 5]),
    "window": lambda: DecodeCase(narrow(300, rows=5), options={**CAUSAL, "window_size": (40, 0), "sink_tokens": 9}),
    "last keys": lambda: placed(
        DecodeCase(narrow(100, 9, 50, rows=5), options={**CAUSAL, "alibi_slopes": SLOPES}),
        k_positions=[[40, 2], [0, 1], [7, 3]],
    ),
    "placed": _everywhere,
    "sinks": lambda: DecodeCase(narrow(170, 9), options={**_PINNED, **SINKS}),
    "fp8": lambda: with_scales(narrow(70, 40, dtype="float16", kv_dtype="float8_e4m3fn")),
    "fp8 pinned": lambda: with_scales(narrow(70, 40, dtype="float16", kv_dtype="float8_e4m3fn")),
    "wide": lambda: DecodeCase(rising(narrow(200, dim=130, rows=3)), options={**CAUSAL, "num_splits": 1}),
    "unequal": lambda: DecodeCase(narrow(100, 9, dim_v=36), options=CAUSAL),
    "latent": lambda: _latent("float32", 24, 17),
    "pointers": lambda: DecodeCase(narrow(300, 70, 9, heads=(1, 1), dim=3), "pointers"),
    "odd": lambda: DecodeCase(narrow(100, 9, dim=5), options=CAUSAL),
}
_FAR = {"far": check_far_pages, "far rows": check_far_rows}
ROWS = (*_PROBLEMS, *_FAR, "tf32", "bf16", "broken")
# Each needs a build of its own for paths that other rows take.
RARE = frozenset({"bf16", "unequal", "latent", "early rows", "far rows"})


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    for delivery, schedule, seed in LAUNCHES:
        launch: dict[str, Any] = {"delivery": delivery, "schedule": schedule, "seed": seed}
        if row in _FAR:
            _FAR[row](SIMPLE, (4 << 30) - 2 * PAGE, **launch)  # the kernel takes strides of 32 bits
        else:
            _run(row, kernel=SIMPLE, **launch)


def _run(row: str, **launch: Any) -> None:
    if row in ("tf32", "bf16"):
        _check_rounded(_PROBLEMS["one"](), row, **launch)
        return
    if row == "broken":
        case = DecodeCase(narrow(300, 12, 70, rows=5, heads=(6, 2)), options=_PINNED)
        operands = case.operands() | {"cache_seqlens": np.array([300, 1 << 20, 70], np.int32)}
        _check_broken(case, operands, **launch)
        return
    case = _PROBLEMS[row]()
    operands = case.operands()
    multiprocessors = 4
    if row == "fp8 pinned":
        case.options["num_splits"] = 3
    if row in ("fp8 pinned", "pointers"):
        multiprocessors = 3
    if row == "pointers":
        for key in [key for key in operands if "_cache." in key]:  # to addresses that are only multiples of 4
            operands[key] = _moved(operands[key])
    if row == "full":
        operands["block_table"] = whole_table(operands)
    check(case, operands=operands, multiprocessors=multiprocessors, **launch)
    if row == "full":
        operands["cache_seqlens"] = np.array([304, 305, 200], np.int32)
        _check_broken(case, operands, **launch)


def _check_broken(case: DecodeCase, operands: dict[str, Any], **launch: Any) -> None:
    """The second sequence, whose length is too large, gets NaN, and the others finite numbers."""
    out, _ = run_decode(case, operands=operands, planned=False, zero=True, **launch)
    assert np.isnan(out[1]).all(), "out differs"
    assert (np.isfinite(out) & (out != 0))[[0, 2]].all(), "out differs"


def _moved(array: Any) -> Any:
    memory = allocate((array.size + 1,), array.dtype.name)
    memory[1:] = array.ravel()
    return memory[1:].reshape(array.shape)


def _check_rounded(case: DecodeCase, compute: str, **launch: Any) -> None:
    """Out and LSE are those of rounded operands."""
    problem = dataclasses.replace(problem_of(case, case.operands()), compute=compute)
    out, lse = run_decode(case, problem=problem, **launch)
    k, v, ends = case.batch.packed
    rounded = round_inputs(case.q.reshape(-1, *case.q.shape[-2:]), k, v, compute)
    packed = {"cu_seqlens_q": case.ends, "cu_seqlens_k": ends, "compute": compute}
    check_output(out[:, 0], lse[:, :, 0].T, *rounded, causal=True, **packed)


_DRAWN = {str(variant): variant for variant in SIMPLE_VARIANTS}
_OTHERS = {f"others-{dtype}": dtype for dtype in ("float32", "float64", "float16", "bfloat16")}
GRID = (*_DRAWN, *_OTHERS)
USUAL = frozenset(str(variant) for variant in SIMPLE_VARIANTS[1:3])


def run_variant(variant: str, *, thorough: bool) -> None:
    """Sequences of 0 to 1,000 keys, nine page sizes, 1 to 16 query heads a KV head, 1 to 32 new rows."""
    if variant in _OTHERS:
        _check_others(_OTHERS[variant])
        return
    seeds, longest = (range(100, 120), 1000) if thorough else (range(1, 2), 200)
    check_drawn(_DRAWN[variant], SIMPLE_VARIANTS, seeds, longest, arch=_DRAWN[variant].arch, kernel=SIMPLE)


def _check_others(dtype: str) -> None:
    """Positions, trees and latent caches of a dtype."""
    for arch in ("sm_80", "sm_86", "sm_90a"):
        case = _everywhere(dtype)
        rest = {name: case.options[name] for name in ("k_positions", "alibi_slopes")}
        tree = dataclasses.replace(case, tree=trees(case.batch), options=rest)
        for one in (_latent(dtype, 576, 500), case, tree):
            check(one, arch=arch, kernel=SIMPLE)
