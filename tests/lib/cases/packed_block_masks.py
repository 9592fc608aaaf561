"""Packed sequences with block masks: lists, arrays, and out and LSE by the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases.block_lists import BLOCK, kinds_of, near, ordered
from emulated.forward import ml_dtype

import gpu_actors as ga

__all__ = [
    "BATCH",
    "BLOCK",
    "DIM",
    "HEADS",
    "HEADS_KV",
    "KEYS",
    "KINDS",
    "PACKED",
    "ROWS",
    "C",
    "R",
    "arrays_of",
    "ends",
    "explicit",
    "mask_of",
    "near",
    "poisoned",
]

HEADS, HEADS_KV, DIM = 4, 2, 32
ROWS, KEYS = (300, 70, 0, 129), (520, 300, 40, 257)  # of each sequence
BATCH, R, C = len(ROWS), -(-max(ROWS) // BLOCK), -(-max(KEYS) // BLOCK)

KINDS = kinds_of(BATCH, HEADS, R, C)  # lists go on behind the ends of sequences


def mask_of(kinds: Any = KINDS, full: bool = True, mask_mod: Any = near, seed: int = 4) -> ga.BlockMask:
    rng = np.random.default_rng(seed)
    lists: dict[str, Any] = {}
    for side, turned in (("kv", kinds), ("q", kinds.swapaxes(2, 3))):
        for name, listed in (("", turned == 1), ("full_", turned == 2)) if full else (("", turned > 0),):
            lists[f"{name}{side}_num_blocks"], lists[f"{name}{side}_indices"] = ordered(listed, rng)
    return ga.BlockMask(**lists, block_size=(BLOCK, BLOCK), mask_mod=mask_mod)


def ends(lengths: Any) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def arrays_of(dtype: str = "float16") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {"q": rng.standard_normal((sum(ROWS), HEADS, DIM)).astype(ml_dtype(dtype))}
    found |= {name: rng.standard_normal((sum(KEYS), HEADS_KV, DIM)).astype(ml_dtype(dtype)) for name in "kv"}
    return found


PACKED = {"cu_seqlens_q": ends(ROWS), "cu_seqlens_k": ends(KEYS), "softmax_scale": 0.2}


def pieces() -> Any:
    """The rows and keys of each sequence."""
    for n, (rows, keys) in enumerate(zip(ROWS, KEYS, strict=True)):
        yield n, slice(ends(ROWS)[n], ends(ROWS)[n] + rows), slice(ends(KEYS)[n], ends(KEYS)[n] + keys)


def seen_by(sequence: int, kinds: Any, causal: bool, modified: Any) -> Any:
    """bool (heads, rows, keys)."""
    rows, keys = ROWS[sequence], KEYS[sequence]
    seen = (kinds[sequence] > 0).repeat(BLOCK, 1).repeat(BLOCK, 2)[:, :rows, :keys]
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    if modified:
        seen = seen & (modified(i, j) if callable(modified) else near(sequence, np.arange(HEADS)[:, None, None], i, j))
    return seen & (j <= i + keys - rows) if causal else seen


def explicit(arrays: dict[str, Any], causal: bool, modified: Any, kinds: Any = KINDS) -> tuple[Any, Any]:
    """Output and LSE in float64, from the formula alone."""
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    out, lse = np.zeros(q.shape), np.full((HEADS, len(q)), -np.inf)
    for n, rows, keys in pieces():
        k_n, v_n = (np.repeat(array[keys], HEADS // HEADS_KV, axis=1).swapaxes(0, 1) for array in (k, v))
        scores = 0.2 * q[rows].swapaxes(0, 1) @ k_n.swapaxes(1, 2)
        exponentials = np.where(seen_by(n, kinds, causal, modified), np.exp(scores), 0)
        total = exponentials.sum(-1, keepdims=True)
        out[rows] = (exponentials / np.where(total == 0, 1, total) @ v_n).swapaxes(0, 1)
        with np.errstate(divide="ignore"):
            lse[:, rows] = np.log(total[..., 0])
    return out, lse


def poisoned(arrays: dict[str, Any]) -> dict[str, Any]:
    """The same arrays, with NaN in keys and values that no listed block has: block 2 of sequence 0 and KV head 0."""
    arrays = dict(arrays)
    for name in "kv":
        arrays[name] = arrays[name].copy()
        arrays[name][2 * BLOCK : 3 * BLOCK, 0] = np.nan
    return arrays
