"""Philox4x32-10, the counter-based random number generator of dropout.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11), section 3.3. A draw is
a pure function of a 128-bit counter and a 64-bit key, so every kernel, the mock device and the backward
pass agree on which probabilities were dropped without storing them. The bits of attention's dropout are
fixed by this project:

    key     = (seed mod 2^32, seed div 2^32)
    counter = (j div 4, i, b * heads_q + h, 0)
    bits    = word j mod 4 of philox4x32(counter, key)
    keep    = bits >= round(p * 2^32)          kept probabilities are scaled by 1 / (1 - p)

b is the sequence's index in the batch, h the query head, i the row and j the key, both counted from the
start of the sequence (never of the packed batch, nor of a tile). Kernels reproduce these bits exactly.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_actors.errors import InvalidRequest

__all__ = ["dropout_bits", "dropout_keep", "dropout_threshold", "philox4x32"]

_Words: TypeAlias = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
_LANES = 4


def _multiply(multiplier: np.uint64, word: _Words) -> tuple[_Words, _Words]:
    """The high and the low 32 bits of a 32 x 32 bit product."""
    product = multiplier * word
    return product >> _SHIFT, product & _LOW


def philox4x32(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], key: tuple[int, int]
) -> npt.NDArray[np.uint32]:
    """Ten rounds of Philox4x32 on many counters at once.

    counter: four words below 2^32, each a number or an array; they broadcast against each other.
    key: two words below 2^32.
    Returns uint32 of the broadcast shape plus a last axis of the 4 output words.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    shape = np.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    words = np.empty((*shape, _LANES), dtype=np.uint32)
    for lane, word in enumerate((c0, c1, c2, c3)):
        words[..., lane] = word
    return words


def dropout_bits(
    seed: int, sequence_head: npt.NDArray[Any], rows: npt.NDArray[Any], keys: int | npt.NDArray[Any]
) -> npt.NDArray[np.uint32]:
    """The 32 bits that decide whether each probability of a tile of rows is kept.

    seed: 0 <= seed < 2^64, else InvalidRequest.
    sequence_head: integers b * heads_q + h, any shape S.
    rows: (R,) row indices inside the sequence.
    keys: the number of keys, from the first on; or (K,) their positions.
    Returns uint32 (*S, R, K).
    """
    if not 0 <= seed < 1 << 64:
        raise InvalidRequest("dropout_seed", seed, "the seed is an unsigned 64-bit integer")
    groups = np.unique(keys // _LANES) if isinstance(keys, np.ndarray) else np.arange(-(-keys // _LANES))
    words = philox4x32(
        (groups, rows[:, None], np.asarray(sequence_head)[..., None, None], 0),
        (seed & 0xFFFFFFFF, seed >> 32),
    )
    if isinstance(keys, np.ndarray):
        drawn: npt.NDArray[np.uint32] = words[..., np.searchsorted(groups, keys // _LANES), keys % _LANES]
        return drawn
    return words.reshape(*words.shape[:-2], -1)[..., :keys]


def dropout_threshold(dropout_p: float) -> int:
    """The smallest 32-bit draw that is kept: round(p * 2^32), half to even.

    The product is exact in float64, so every host computes the same threshold; kernels get it as a
    uint32. Raises InvalidRequest unless 0 <= p < 1 and the threshold fits 32 bits (p so close to 1 that no
    draw would be kept).
    """
    if not 0.0 <= dropout_p < 1.0:
        raise InvalidRequest("dropout_p", dropout_p, "the dropout probability is in [0, 1)")
    threshold = round(dropout_p * 2.0**32)
    if threshold >> 32:
        raise InvalidRequest("dropout_p", dropout_p, "so close to 1 that no probability would ever be kept")
    return threshold


def dropout_keep(
    dropout_p: float, seed: int, sequence_head: npt.NDArray[Any], rows: npt.NDArray[Any], keys: int | npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Which probabilities of a tile dropout keeps: bool (*S, R, K), see `dropout_bits`."""
    return dropout_bits(seed, sequence_head, rows, keys) >= np.uint32(dropout_threshold(dropout_p))
