"""Prepares the new rows of a sequence whose keys lie on several workers, as its caches store them.

A worker does not know the positions of its keys in the whole sequence. So rows are rotated and quantised before they
are sent, with the arithmetic of the reference: in float64, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import adopt, check_device, name_of
from gpu_actors.errors import Unsupported
from gpu_actors.fields import FP8, describe, expect
from gpu_actors.kernels.append import AppendProblem
from gpu_actors.kv.requests import AppendRows
from gpu_actors.planning.append_rows import new_rows
from gpu_actors.planning.cached import tree_bits
from gpu_actors.reference.append import cast_saturating
from gpu_actors.reference.rope import apply_rope
from gpu_actors.validation.paged import MAX_TREE_ROWS

__all__ = ["ROTATION", "dense_operands", "on_host", "rotate_and_quantise", "tree_matrix"]

ROTATION: tuple[str, ...] = ("rope", "positions", "rope_cos", "rope_sin")
"""The options of an append that rotate its rows."""


def on_host(name: str, array: Any) -> Any:
    """Return an array of any library as a NumPy array. Raises `InvalidRequest` for an array on a GPU."""
    adopted = adopt(array, name)
    check_device(adopted, name, "cpu")
    return adopted.array


def rotate_and_quantise(
    pool: AppendProblem, descales: Mapping[str, Any], k: Any, v: Any, q: Any, begin: int, rotation: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Return k and v as elements of the cache, and q rotated like k. All are (rows, heads, dim).

    pool: the layout and the dtype of the caches.
    descales: k_descale and v_descale, (kv_heads,), if given.
    q: the queries, or None.
    begin: the position of the first row in the whole sequence.
    rotation: the options of `ROTATION`, by name.
    Raises what a single cache raises when it rotates its rows.
    """
    on_cpu = {name: one if one is None or name == "rope" else on_host(name, one) for name, one in rotation.items()}
    rows = new_rows(AppendRows(cache=0, seqs=None, k=k, v=v, **on_cpu), pool, None)
    if rows.rope is not None:
        expect(rows.rope.dim <= pool.head_dim, "rope.dim", rows.rope.dim, f"must be head_dim at most, {pool.head_dim}")
        if name_of(k.dtype) == pool.cache_dtype and pool.cache_dtype in FP8:
            raise Unsupported("dtype", pool.cache_dtype, "rows that are fp8 already cannot be rotated", "bfloat16")
        lengths = np.array([begin + len(k)])
        rows.check_reach(lengths)
        if q is not None:
            reason = f"must have 16 bits or more to be rotated with k, {name_of(k.dtype)}"
            expect(name_of(q.dtype) not in FP8, "q", describe(q), reason)
        angles = rows.angles(lengths)
        k = apply_rope(k, *angles, interleaved=rows.rope.interleaved)
        if q is not None:
            q = apply_rope(q, *angles, interleaved=rows.rope.interleaved).astype(q.dtype)
    dtype: Any = pool.cache_dtype
    elements = [cast_saturating(one, dtype, _factors(descales, side)) for side, one in (("k", k), ("v", v))]
    return elements[0], elements[1], q


def dense_operands(descales: Mapping[str, Any], q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The operands of a dense forward in which new rows attend to each other. fp8 k and v, and then q, become float32.

    descales: k_descale, v_descale and, for an fp8 q, q_descale, (kv_heads,), if given.
    """
    if name_of(k.dtype) not in FP8:
        return q, k, v
    wide = [one.astype(np.float32) * _factors(descales, side) for side, one in (("k", k), ("v", v))]
    factors = descales.get("q_descale")
    q_factors = np.float32(1.0) if factors is None else np.repeat(factors, q.shape[-2] // len(factors))[:, None]
    return q.astype(np.float32) * q_factors, wide[0], wide[1]


def tree_matrix(mask: Any, rows: int) -> Any:
    """bool (rows, rows): which of the last ``rows`` rows each of them sees.

    mask: uint64 or int64 (rows,), bit j for row j, or bool (rows, rows). Raises `InvalidRequest` and `Unsupported`.
    """
    host = on_host("tree_mask", mask)
    if rows > MAX_TREE_ROWS:
        raise Unsupported("tree_mask", rows, f"a tree mask has {MAX_TREE_ROWS} rows at most", MAX_TREE_ROWS)
    if name_of(host.dtype) == "bool":
        expect(host.shape == (rows, rows), "tree_mask", describe(host), f"must be ({rows}, {rows}) bool")
        return host
    sound = name_of(host.dtype) in ("uint64", "int64") and host.shape == (rows,)
    expect(sound, "tree_mask", describe(host), f"must be ({rows},) uint64, or ({rows}, {rows}) bool")
    return tree_bits(host)[:, None] >> np.arange(rows, dtype=np.uint64) & np.uint64(1) != 0


def _factors(descales: Mapping[str, Any], side: str) -> Any:
    factors = descales.get(f"{side}_descale")
    return np.float32(1.0) if factors is None else factors[:, None]
