"""Hard problems of the merge of partials and of its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulated.append import dtype_of
from emulated.merge import run_merge, run_merge_gradients
from inside.reference import assert_merge_close, assert_merge_gradients_close

from gpu_actors.partial import Partial, empty

KERNELS = ("merge", "merge_gradients")


def partials_of(
    count: int, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 3, 4, 40), spread: float = 3.0, seed: int = 0
) -> list[Partial]:
    rng = np.random.default_rng(seed)
    *outer, rows, heads, _ = shape
    made = []
    for _ in range(count):
        lse = (rng.standard_normal((*outer, heads, rows)) * spread).astype(np.float32)
        made.append(Partial(rng.standard_normal(shape).astype(dtype_of(dtype)), lse))
    return made


def check_merge(partials: list[Partial], sinks: Any = None, out_dtype: str | None = None, **launch: Any) -> None:
    """Raise AssertionError if the kernel differs from the merge in float64 by more than the rounding of its sums."""
    assert_merge_close(run_merge(partials, sinks, out_dtype, **launch), partials, sinks)


def with_empty_rows(partials: list[Partial]) -> list[Partial]:
    """Rows without keys hold NaN. A row of two heads has no keys in any partial, and one partial is empty."""
    for index, partial in enumerate(partials):
        partial.lse[..., (0, 3), 1] = -np.inf
        partial.lse[..., index % 4, 2] = -np.inf
    partials[1].lse[...] = -np.inf
    for partial in partials:
        partial.out[np.isneginf(np.swapaxes(partial.lse, -1, -2))] = np.nan
    return partials


def strided(partial: Partial) -> Partial:
    """The same numbers in heads-first memory, from element 1 of rows with spare columns."""
    *outer, rows, heads, columns = partial.out.shape
    memory = np.zeros((*outer, heads, rows, columns + 3), partial.out.dtype)
    out = np.swapaxes(memory, -2, -3)[..., 1 : columns + 1]
    out[...] = partial.out
    return Partial(out, np.asfortranarray(partial.lse))


SINKS = np.array([0.5, -3.0, 2.0, -np.inf], np.float32)
CASES: dict[str, tuple[list[Partial], Any, str | None]] = {
    "plain": (partials_of(3), None, None),
    "one": (partials_of(1), None, None),
    "many": (partials_of(40), SINKS, None),
    "empty": (with_empty_rows(partials_of(4)), None, None),
    "empty, sinks": (with_empty_rows(partials_of(4)), SINKS, None),
    "nothing": ([empty((2, 3, 4, 40), dtype="bfloat16")] * 2, None, None),
    "packed": (partials_of(3, shape=(7, 4, 40)), SINKS, None),
    "cut columns": (partials_of(3, shape=(2, 3, 4, 21)), None, None),
    "strided": ([strided(p) for p in partials_of(3)], None, None),
    "far apart": (partials_of(3, spread=800.0), SINKS, None),
    "wide lse": ([Partial(p.out, p.lse.astype(np.float64)) for p in partials_of(3, "float32")], None, None),
    "more blocks": (partials_of(2, shape=(3, 17, 4, 72)), None, None),
}
_DTYPES: dict[str, tuple[list[Partial], Any, str | None]] = {
    "float16": (with_empty_rows(partials_of(4, "float16")), SINKS.astype(np.float16), None),
    "float32": (with_empty_rows(partials_of(4, "float32")), SINKS, None),
    "float32 to bfloat16": (with_empty_rows(partials_of(4, "float32")), None, "bfloat16"),
    "float16 to float32": (partials_of(4, "float16", (2, 3, 4, 21)), SINKS, "float32"),
    "bfloat16 to float16": (partials_of(4), None, "float16"),
    "float64": (with_empty_rows(partials_of(4, "float64", (2, 3, 4, 21))), SINKS.astype(np.float64), None),
    "float64 to float32": (partials_of(3, "float64"), None, "float32"),
    "float32 to float64": (partials_of(3, "float32"), None, "float64"),
}


def gradients_of(partials: list[Partial], dtype: str | None, into_lse: bool, seed: int = 5) -> tuple[Any, Any]:
    """dout, which has strides of its own if the seed is even, and dlse or None."""
    rng = np.random.default_rng(seed)
    out, lse = partials[0]
    dout = rng.standard_normal(out.shape).astype(dtype_of(dtype or out.dtype.name))
    wide = "float64" in (dout.dtype.name, lse.dtype.name)
    dlse = rng.standard_normal(lse.shape).astype(np.float64 if wide else np.float32) if into_lse else None
    return (strided(Partial(dout, lse)).out if seed % 2 == 0 else dout), dlse


def check_gradients(
    partials: list[Partial],
    sinks: Any = None,
    dtype: str | None = None,
    into_lse: bool = True,
    seed: int = 5,
    **launch: Any,
) -> None:
    """Raise AssertionError if the kernel differs from float64 by more than the rounding of its sums."""
    dout, dlse = gradients_of(partials, dtype, into_lse, seed)
    gradients = run_merge_gradients(partials, dout, dlse, sinks, **launch)
    assert_merge_gradients_close(gradients, partials, dout, dlse, sinks)


_GRADIENTS: dict[str, tuple[Any, ...]] = {
    "without dlse": (partials_of(3), SINKS, None, False, 5),
    "strided dout": (partials_of(3, shape=(2, 3, 4, 72)), None, None, True, 4),
    "wide rows": (partials_of(2, shape=(2, 3, 4, 520)), SINKS, None, True, 5),
    "one column": (partials_of(2, shape=(2, 3, 4, 1)), None, None, True, 5),
    "a merge of float32": (with_empty_rows(partials_of(4)), SINKS, "float32", True, 5),
}
_GRADIENT_DTYPES: dict[str, tuple[Any, ...]] = {
    "float16": (with_empty_rows(partials_of(4, "float16")), SINKS.astype(np.float16), None),
    "float32": (with_empty_rows(partials_of(4, "float32")), SINKS, None),
    "float32 to bfloat16": (with_empty_rows(partials_of(4, "float32")), None, "bfloat16"),
    "float64": (with_empty_rows(partials_of(4, "float64", (2, 3, 4, 21))), SINKS.astype(np.float64), None),
    "float64 from bfloat16": (partials_of(3, "float64"), None, "bfloat16"),
    "float32 from float64": (partials_of(3, "float32"), None, "float64"),
    "float32 with a wide lse": ([Partial(p.out, p.lse.astype(np.float64)) for p in partials_of(3, "float32")], SINKS),
}
_MERGES: dict[str, tuple[Any, ...]] = {**CASES, **_DTYPES}
_ALL_GRADIENTS = {f"gradient {name}": case for name, case in {**CASES, **_GRADIENTS, **_GRADIENT_DTYPES}.items()}
ROWS = (*_MERGES, *_ALL_GRADIENTS)
# Each needs a build of its own.
RARE = (frozenset(_DTYPES) - {"float32 to bfloat16", "float64"}) | (
    frozenset(f"gradient {name}" for name in _GRADIENT_DTYPES) - {"gradient float64"}
)
GRID: tuple[str, ...] = ()
USUAL: tuple[str, ...] = ()


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    for schedule in ("greedy", "lane"):
        if row in _MERGES:
            check_merge(*_MERGES[row], schedule=schedule)
        else:
            check_gradients(*_ALL_GRADIENTS[row], schedule=schedule)


def run_variant(variant: str, *, thorough: bool) -> None:
    """The family has no variants."""
    raise LookupError(variant, thorough)
