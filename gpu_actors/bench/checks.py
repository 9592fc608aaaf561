"""Checks the results of a kernel before it is timed: slices against the float64 oracle, by the tests' tolerance rule.

A whole output of 8k rows would take the oracle minutes, so blocks of rows are compared, of the first, the last and some
other heads and sequences, which are random for every case. Every element is checked for NaN, which the outputs had
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpu_actors.bench.arrays import has_special
from gpu_actors.bench.cases import Case
from gpu_actors.reference.tolerance import check_output

__all__ = ["Array", "Checked", "blocks_of", "check_decode", "check_forward", "places_of", "visible_part"]

Array: TypeAlias = np.ndarray[Any, Any]

_ROWS = 64


class Checked(NamedTuple):
    """The result of a check.

    slices: how many were compared.
    worst: the largest |out - reference| / bound, below 1.
    """

    slices: int
    worst: float


def check_forward(
    case: Case, q: Array, k: Array, v: Array, out: Array, *, weights_dtype: str | None = None, seed: int = 0
) -> Checked:
    """Raise AssertionError with the worst row if the output is wrong.

    q, out: (batch, rows, heads, dim).
    k, v: (batch, keys, kv_heads, dim).
    weights_dtype: as for `check_output`.
    """
    _check_finite("out", out)
    rng = np.random.default_rng(seed)
    ratio = case.heads // case.kv_heads
    worst, slices = 0.0, 0
    for sequence, head in places_of(case, rng):
        for rows in blocks_of(case.rows, rng):
            keys = visible_part(case, rows)
            kv = (sequence, keys, slice(head // ratio, head // ratio + 1))
            place = (sequence, rows, slice(head, head + 1))
            repro = f"{case.name}: sequence {sequence}, head {head}, rows {rows.start} to {rows.stop - 1}"
            worst = max(
                worst,
                check_output(
                    out[place][None],
                    None,
                    q[place][None],
                    k[kv][None],
                    v[kv][None],
                    repro=repro,
                    weights_dtype=weights_dtype,
                    **case.options(),
                ),
            )
            slices += 1
    return Checked(slices, worst)


def check_decode(
    case: Case, q: Array, caches: Callable[[int], tuple[Array, Array]], out: Array, *, seed: int = 0
) -> Checked:
    """`check_forward` of all heads of some sequences. caches: returns k and v (keys, kv_heads, dim) of a sequence."""
    _check_finite("out", out)
    rng = np.random.default_rng(seed)
    sequences = sorted({0, case.batch - 1, int(rng.integers(case.batch))})
    worst = 0.0
    for sequence in sequences:
        k, v = caches(sequence)
        part = slice(sequence, sequence + 1)
        repro = f"{case.name}: sequence {sequence}"
        worst = max(worst, check_output(out[part], None, q[part], k[None], v[None], repro=repro, **case.options()))
    return Checked(len(sequences), worst)


def visible_part(case: Case, rows: slice) -> slice:
    """The keys that form a smaller problem with these rows.

    Causal masks and left bounds count from the last row's last key: without the keys behind it, the rows see the same
    keys.
    """
    return slice(0, max(0, rows.stop + case.keys - case.rows) if case.causal else case.keys)


def places_of(case: Case, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """(sequence, head): the first, the last and a random one."""
    drawn = (int(rng.integers(case.batch)), int(rng.integers(case.heads)))
    yield from sorted({(0, 0), (case.batch - 1, case.heads - 1), drawn})


def blocks_of(rows: int, rng: np.random.Generator) -> Iterator[slice]:
    """Blocks of 64 rows: the first, the last and a random one."""
    last = max(0, rows - _ROWS)
    for start in sorted({0, last, int(rng.integers(last + 1))}):
        yield slice(start, min(start + _ROWS, rows))


def _check_finite(name: str, array: Array) -> None:
    if has_special(array):
        raise AssertionError(f"{name} holds NaN or infinities: not every element was written, or not from its inputs")
