"""Checks gradients before they are timed, in slices: see `checks`.

A block of rows with all the keys that it sees has its whole dq. A block of keys with all the rows that see it has its
whole dk and dv, if the rows' LSE and output are given. So both are compared in blocks, at the corners and at random
positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_actors.bench.cases import Case
from gpu_actors.bench.checks import Array, Checked, blocks_of, check_forward, places_of, visible_part
from gpu_actors.reference import ReferenceGradients, attention_backward
from gpu_actors.reference.gradient_tolerance import check_gradients

__all__ = ["check_backward"]


def check_backward(
    case: Case, operands: Mapping[str, Array], gradients: Mapping[str, Array], *, seed: int = 0
) -> Checked:
    """Raise AssertionError with the worst row if gradients are wrong.

    operands: q, k, v, dout, out, lse (batch, heads, rows). There are as many rows as keys.
    gradients: dq, dk, dv.
    The forward output is checked first, because the expected dk and dv depend on it.
    """
    assert case.rows == case.keys
    checked = check_forward(case, operands["q"], operands["k"], operands["v"], operands["out"], seed=seed)
    rng = np.random.default_rng((seed, 1))
    worst, slices = checked.worst, checked.slices
    for sequence, head in places_of(case, rng):
        for block in blocks_of(case.rows, rng):
            worst = max(worst, _rows(case, operands, gradients, sequence, head, block))
            worst = max(worst, _keys(case, operands, gradients, sequence, head * case.kv_heads // case.heads, block))
            slices += 2
    return Checked(slices, worst)


def _rows(
    case: Case, operands: Mapping[str, Array], gradients: Mapping[str, Array], sequence: int, head: int, rows: slice
) -> float:
    """dq of a block of rows."""
    heads, kv = slice(head, head + 1), head * case.kv_heads // case.heads
    keys = visible_part(case, rows)
    q, dout, dq = (_part(x, sequence, rows, heads) for x in (operands["q"], operands["dout"], gradients["dq"]))
    k, v = (_part(operands[name], sequence, keys, slice(kv, kv + 1)) for name in ("k", "v"))
    return _compare(case, {"dq": dq}, (dout, q, k, v), f"sequence {sequence}, head {head}, rows from {rows.start}", {})


def _keys(
    case: Case, operands: Mapping[str, Array], gradients: Mapping[str, Array], sequence: int, kv: int, keys: slice
) -> float:
    """dk and dv of a block of keys, which the rows before it do not see under a causal mask."""
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
    """Check the slices' gradients. Those of which a slice has only a part are replaced by the oracle's."""
    options = {**case.options(), **saved}
    reference = attention_backward(*arguments, **options)
    names = ("dq", "dk", "dv")
    gradients = ReferenceGradients(*(slices.get(name, getattr(reference, name)) for name in names))
    return check_gradients(gradients, *arguments, repro=f"{case.name}: {place}", **options)
