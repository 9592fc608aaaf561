"""Poisoned problems: memory that must not be read is NaN, so that a read shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from inside.attention import MASK_OPTIONS, KeyMask

from gpu_actors.testing import BackwardCase, ForwardCase

__all__ = [
    "POISON_PAGE",
    "PagedCache",
    "nan_filled",
    "paginate",
    "poison_tail",
    "poison_unseen",
    "poison_unseen_backward",
]

Array = npt.NDArray[Any]

POISON_PAGE = 2147480000
"""A block-table entry that no pool has: reading the page it names faults."""


def nan_filled(shape: tuple[int, ...], dtype: str) -> Array:
    """An output buffer of NaN, so that an element that a kernel does not write shows."""
    return np.full(shape, np.nan, getattr(ml_dtypes, dtype, dtype))


def poison_tail(array: Array, rows: int) -> Array:
    """A packed array (total, ...) with ``rows`` rows of NaN behind its last sequence."""
    return np.concatenate([array, nan_filled((rows, *array.shape[1:]), array.dtype.name)])


def poison_unseen(case: ForwardCase) -> ForwardCase:
    """The same case with NaN in every key and value that its mask hides from all rows of its sequence.

    The oracle ignores them. A kernel may load them with the visible keys of a tile, but must not multiply them by a
    probability of 0.
    """
    mask = KeyMask(**{name: case.options[name] for name in MASK_OPTIONS if name in case.options})
    k, v = case.k.copy(), case.v.copy()
    start = 0
    for index, (rows, keys) in enumerate(case.seqlens):
        visible = mask.visible_keys(np.arange(rows), rows, keys)
        unseen = np.full(keys, rows == 0) if visible is None else ~visible.any(axis=0)
        for array in (k, v):
            sequence = array[start : start + keys] if "cu_seqlens_k" in case.options else array[index]
            sequence[unseen] = np.nan
        start += keys
    return dataclasses.replace(case, k=k, v=v, repro=f"poison_unseen({case.repro})")


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Keys and values in a pool of pages.

    k, v: (blocks, page, heads_kv, dim).
    block_table: int32 (batch, max_blocks).
    cache_seqlens: int32 (batch,).
    """

    k: Array
    v: Array
    block_table: Array
    cache_seqlens: Array


def paginate(
    rng: np.random.Generator, k: Sequence[Array], v: Sequence[Array], page_size: int, *, spare_pages: int = 3
) -> PagedCache:
    """Sequences (keys, heads_kv, dim) scattered over the pages of a pool, in random order.

    Unused pages and the rows behind a sequence's end are NaN, and the table's unused entries are POISON_PAGE. Its last
    column is always unused.
    """
    counts = [-(-len(keys) // page_size) for keys in k]
    order = rng.permutation(sum(counts) + spare_pages)
    table = np.full((len(counts), max(counts, default=0) + 1), POISON_PAGE, np.int32)
    pools = [nan_filled((len(order), page_size, *x[0].shape[1:]), x[0].dtype.name) for x in (k, v)]
    for index, count in enumerate(counts):
        pages, order = order[:count], order[count:]
        table[index, :count] = pages
        for pool, rows in zip(pools, (k[index], v[index]), strict=True):
            for page, start in zip(pages, range(0, len(rows), page_size), strict=True):
                part = rows[start : start + page_size]
                pool[page, : len(part)] = part
    lengths = np.array([len(keys) for keys in k], np.int32)
    return PagedCache(pools[0], pools[1], table, lengths)


def poison_unseen_backward(case: BackwardCase) -> BackwardCase:
    """The same case with NaN in every key and value that its mask hides from all rows, whose gradients are zeros.

    Rows that see no key are poisoned too, in q, dout and out: they have no gradient and contribute to none.
    """
    blind = np.isneginf(case.lse) if "sinks" not in case.options else np.zeros(case.lse.shape, bool)
    rows = np.moveaxis(blind, -2, -1)
    q, dout, out = (array.copy() for array in (case.forward.q, case.dout, case.out))
    for array in (q, dout, out):
        array[rows] = np.nan
    forward = dataclasses.replace(poison_unseen(case.forward), q=q)
    return dataclasses.replace(case, forward=forward, dout=dout, out=out, repro=f"poison_unseen_backward({case.repro})")
