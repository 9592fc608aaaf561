"""Checks the results of a kernel before it is timed: slices against the float64 oracle, by the tests' tolerance rule.

A whole output of 8k rows would take the oracle minutes, so only blocks of rows are compared: of the first and the last
head and sequence, and of random ones. Every element is checked for NaN, because outputs are filled with NaN before.

For gradients, a block of rows with all the keys that it sees is enough to compute its dq. A block of keys with all the
rows that see it is enough to compute its dk and dv, if the rows' LSE and output are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpu_actors.bench.arrays import has_special
from gpu_actors.bench.cases import Case
from gpu_actors.reference import ReferenceGradients, attention_backward
from gpu_actors.reference.gradient_tolerance import check_gradients
from gpu_actors.reference.tolerance import check_output

__all__ = ["Checked", "check_backward", "check_decode", "check_forward", "visible_part"]

Array: TypeAlias = np.ndarray[Any, Any]

_ROWS = 64


class Checked(NamedTuple):
    """The result of a check.

    slices: the number of slices that were compared.
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
    for sequence, head in _places(case, rng):
        for rows in _blocks(case.rows, rng):
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

    Causal masks and left bounds count from the last row's last key, so the rows see the same keys without those after
    it.
    """
    return slice(0, max(0, rows.stop + case.keys - case.rows) if case.causal else case.keys)


def _places(case: Case, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Pairs (sequence, head): the first, the last and a random pair."""
    drawn = (int(rng.integers(case.batch)), int(rng.integers(case.heads)))
    yield from sorted({(0, 0), (case.batch - 1, case.heads - 1), drawn})


def _blocks(rows: int, rng: np.random.Generator) -> Iterator[slice]:
    """Blocks of 64 rows: the first, the last and a random block."""
    last = max(0, rows - _ROWS)
    for start in sorted({0, last, int(rng.integers(last + 1))}):
        yield slice(start, min(start + _ROWS, rows))


def _check_finite(name: str, array: Array) -> None:
    if has_special(array):
        raise AssertionError(f"{name} holds NaN or infinities: not every element was written, or not from its inputs")


def check_backward(
    case: Case, operands: Mapping[str, Array], gradients: Mapping[str, Array], *, seed: int = 0
) -> Checked:
    """Raise AssertionError with the worst row if gradients are wrong.

    operands: q, k, v, dout, out, and lse (batch, heads, rows). The numbers of rows and keys must be equal.
    gradients: dq, dk, dv.
    The forward output is checked first, because the expected dk and dv depend on it.
    """
    assert case.rows == case.keys
    checked = check_forward(case, operands["q"], operands["k"], operands["v"], operands["out"], seed=seed)
    rng = np.random.default_rng((seed, 1))
    worst, slices = checked.worst, checked.slices
    for sequence, head in _places(case, rng):
        for block in _blocks(case.rows, rng):
            worst = max(worst, _rows(case, operands, gradients, sequence, head, block))
            worst = max(worst, _keys(case, operands, gradients, sequence, head * case.kv_heads // case.heads, block))
            slices += 2
    return Checked(slices, worst)


def _rows(
    case: Case, operands: Mapping[str, Array], gradients: Mapping[str, Array], sequence: int, head: int, rows: slice
) -> float:
    """Check dq of a block of rows. Returns the largest error / bound."""
    heads, kv = slice(head, head + 1), head * case.kv_heads // case.heads
    keys = visible_part(case, rows)
    q, dout, dq = (_part(x, sequence, rows, heads) for x in (operands["q"], operands["dout"], gradients["dq"]))
    k, v = (_part(operands[name], sequence, keys, slice(kv, kv + 1)) for name in ("k", "v"))
    return _compare(case, {"dq": dq}, (dout, q, k, v), f"sequence {sequence}, head {head}, rows from {rows.start}", {})


def _keys(
    case: Case, operands: Mapping[str, Array], gradients: Mapping[str, Array], sequence: int, kv: int, keys: slice
) -> float:
    """Check dk and dv of a block of keys. Under a causal mask earlier rows do not see it, and are left out."""
    rows = slice(keys.start if case.causal else 0, case.rows)
    ratio = case.heads // case.kv_heads
    heads = slice(kv * ratio, (kv + 1) * ratio)
    q, dout, out = (_part(operands[name], sequence, rows, heads) for name in ("q", "dout", "out"))
    of_keys = [_part(x, sequence, keys, slice(kv, kv + 1)) for x in (operands["k"], operands["v"])]
    slices = {name: _part(gradients[name], sequence, keys, slice(kv, kv + 1)) for name in ("dk", "dv")}
    saved = {"out": out, "lse": operands["lse"][sequence : sequence + 1, heads, rows], "alignment": "top_left"}
    return _compare(
        case, slices, (dout, q, *of_keys), f"sequence {sequence}, KV head {kv}, keys from {keys.start}", saved
    )


def _part(array: Array, sequence: int, rows: slice, heads: slice) -> Array:
    return array[sequence, rows, heads][None]


def _compare(
    case: Case, slices: Mapping[str, Array], arguments: tuple[Any, ...], place: str, saved: Mapping[str, Any]
) -> float:
    """Check the gradients in ``slices``. The oracle's replace the others, because a slice has only a part of them."""
    options = {**case.options(), **saved}
    reference = attention_backward(*arguments, **options)
    names = ("dq", "dk", "dv")
    gradients = ReferenceGradients(*(slices.get(name, getattr(reference, name)) for name in names))
    return check_gradients(gradients, *arguments, repro=f"{case.name}: {place}", **options)
