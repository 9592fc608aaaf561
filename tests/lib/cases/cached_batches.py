"""Batches of sequences with new rows: packed, in pages, in a dense cache and in one array a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases.poison import PagedCache, nan_filled, paginate
from inside.testing import cast


@dataclass
class Batch:
    """Sequences of keys and values, (keys, heads_kv, dim) each, and q (batch, rows, heads, dim) of their last rows."""

    q: np.ndarray
    k: list[np.ndarray]
    v: list[np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(keys) for keys in self.k], np.int32)

    @property
    def packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """k, v and cu_seqlens_k, as for a varlen request."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        return np.concatenate(self.k), np.concatenate(self.v), ends

    def pages(self, page_size: int, seed: int = 0) -> PagedCache:
        """k and v in a pool of pages whose other rows are NaN. Unused entries of the block table name no page."""
        return paginate(np.random.default_rng(seed), self.k, self.v, page_size)

    def dense(self, spare: int = 3) -> tuple[np.ndarray, np.ndarray]:
        """k and v as (batch, capacity, heads_kv, dim). Rows without a key are NaN."""
        capacity = int(self.lengths.max(initial=0)) + spare
        pair = []
        for sequences in (self.k, self.v):
            first = sequences[0]
            cache = nan_filled((len(sequences), capacity, *first.shape[1:]), first.dtype.name)
            for index, sequence in enumerate(sequences):
                cache[index, : len(sequence)] = sequence
            pair.append(cache)
        return pair[0], pair[1]

    def arrays(self, spare: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """k and v as an array (heads_kv, max_seq, dim) a sequence."""
        k, v = self.dense(spare)
        return ([np.ascontiguousarray(cache.swapaxes(0, 1)) for cache in side] for side in (k, v))  # type: ignore[return-value]


def random_batch(
    seed: int,
    lengths: Sequence[int],
    *,
    rows: int = 1,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    dim_v: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
) -> Batch:
    rng = np.random.default_rng(seed)
    heads_q, heads_kv = heads
    q = cast(rng.standard_normal((len(lengths), rows, heads_q, dim)), dtype)
    k = [cast(rng.standard_normal((length, heads_kv, dim)), kv_dtype or dtype) for length in lengths]
    v = [cast(rng.standard_normal((length, heads_kv, dim_v or dim)), kv_dtype or dtype) for length in lengths]
    return Batch(q, k, v)


def tree_bits(mask: np.ndarray) -> np.ndarray:
    """A bool mask (..., rows, rows) as one uint64 a row, one bit a key."""
    bits = np.zeros(mask.shape[:-1], np.uint64)
    for key in range(mask.shape[-1]):
        bits |= np.where(mask[..., key], np.uint64(1 << key), np.uint64(0))
    return bits


def random_tree(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Draft tokens as one tree or several: each row sees itself and its ancestors. bool (rows, rows)."""
    mask = np.eye(rows, dtype=bool)
    for row in range(1, rows):
        parent = rng.integers(-1, row)
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def with_arrays(options: dict[str, Any], batch: Batch, seed: int = 0) -> dict[str, Any]:
    """Options in which True stands for an array that fits the batch."""
    rng = np.random.default_rng(seed)
    heads = batch.q.shape[2]
    arrays: dict[str, Any] = {
        "alibi_slopes": rng.uniform(0.01, 0.5, (len(batch.k), heads)).astype(np.float32),
        "sinks": rng.standard_normal((heads,)).astype(np.float32),
    }
    return {name: arrays[name] if value is True and name in arrays else value for name, value in options.items()}
