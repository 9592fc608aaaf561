"""Published rules for choices between launches that compute the same result, and the source of each rule.

    choice                              rule                                           the caller decides by
    rows of a group packed, keys split  FlashAttention: `should_pack`, `split_count`   ``pack_gqa`` of `FlashForward`
    ranges of keys over a cache         stream-K, FlashInfer: `RANGE_KEYS`             ``num_splits`` of `PagedForward`
    a shared prefix read once           vLLM: `SHARED_KEYS`, `SHARING_SEQUENCES`       ``cascade`` of a KvCache

FlashAttention: Dao et al., hopper/heuristics.h, and ``get_pack_gqa`` and ``get_num_splits`` in hopper/flash_api.cpp.
Stream-K: Osama et al., arXiv 2301.03598. `gpu_actors.kernels.decode_schedule` gives each block a range of equal length.
FlashAttention's search for the number of splits that leaves few blocks idle is therefore not needed there. The shortest
range is FlashInfer's: ``PrefillPlan`` and ``DecodePlan`` in include/flashinfer/attention/scheduler.cuh.
vLLM: ``use_cascade_attention`` in vllm/v1/attention/backends/flash_attn.py. Its last clause compares split keys with a
prefix that is not split. Here both parts of a cascade are split, so the clause is left out.

The thresholds are the authors' own. None of them has been tuned for the kernels of this package.
"""

from __future__ import annotations

import math

__all__ = ["RANGE_KEYS", "SHARED_KEYS", "SHARING_SEQUENCES", "fill", "should_pack", "split_count"]

RANGE_KEYS = 128
"""The fewest keys of a range, if there are as many."""

SHARED_KEYS = 256
"""The fewest keys in a shared prefix for which a cascade pays."""

SHARING_SEQUENCES = 8
"""The fewest sequences that share a prefix for which a cascade pays."""

_OCCUPIED = 0.8  # of the multiprocessors: with as many tiles, keys are not split
_FEW_KEY_TILES = 4  # as few tiles of keys are not split either
_MOST_SPLITS = 128
_NEAR_BEST = 0.85  # of the best efficiency: more splits cost more traffic
_WORTH_PACKING = 0.9


def split_count(tiles: int, key_tiles: int, multiprocessors: int) -> int:
    """The number of splits that FlashAttention's ``num_splits_heuristic`` cuts the keys of a tile of rows into.

    tiles: tiles of packed rows of all heads and sequences. key_tiles: tiles of keys that a tile of rows reads.

    The smallest number whose efficiency (waves over waves rounded up) is at least 85% of the best one's. The clause for
    heads larger than the L2 cache is left out: it needs two tiles of one head for each multiprocessor, more than few
    rows fill.
    """
    if tiles >= _OCCUPIED * multiprocessors or key_tiles <= _FEW_KEY_TILES:
        return 1
    waves = [tiles * splits / multiprocessors for splits in range(1, min(_MOST_SPLITS, multiprocessors, key_tiles) + 1)]
    efficiencies = [wave / math.ceil(wave) for wave in waves]
    least = _NEAR_BEST * max(efficiencies)
    return 1 + next(index for index, efficiency in enumerate(efficiencies) if efficiency >= least)


def should_pack(rows: int, heads: int, tile: int) -> bool:
    """Whether FlashAttention's ``should_pack_gqa`` packs the rows of the query heads that share a KV head.

    rows: of a head. heads: query heads per KV head. tile: rows of a tile.
    """
    return fill(rows, tile) < _WORTH_PACKING * fill(rows * heads, tile)


def fill(rows: int, tile: int) -> float:
    """The share of their tiles that ``rows`` rows fill."""
    return rows / (-(-rows // tile) * tile)
