"""What kernels skip or take as whole by a mask, tile by tile, beside the mask itself, key by key, over many shapes.

EXACT: nothing is read or masked without need, either.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
from emulated.forward import key_of, module_of, problem_of
from inside.emulation import EmulatedBuffer

from gpu_actors import KernelSource
from gpu_actors.kernels.variants import kernel_source

# A block has a shape. It reports the number of the rule that is broken, and the row and the key.
PROBE = """
#ifdef HOPPER
#include "hopper/consumer.cuh"
#else
#include "common/mask.cuh"
#endif
struct Shape { int32_t seqlen_q, seqlen_k, left, right, sinks, chunk, row_begin, row_end, key_begin, key_end; };
struct Arguments { const Shape* shapes; const int32_t* positions; int32_t* out; };
struct Checks {
  int32_t* out;
  __device__ __forceinline__ void expect(bool holds, int rule, int row, int key) const {
    if (!holds && out[0] == 0) out[0] = rule, out[1] = row, out[2] = key;
  }
};
DEVICE Mask mask_of(const Shape& shape, const int32_t* positions) {
  Params p{};
  p.window_left = shape.left;
  p.window_right = shape.right;
  p.sink_tokens = shape.sinks;
  p.attention_chunk = shape.chunk;
  p.q_positions = positions;
  p.k_positions = positions + 2;
  p.q_position_words = p.k_position_words = 2;
  return make_mask(p, shape.seqlen_q, shape.seqlen_k, 0);
}
DEVICE bool seen_by_any(const Mask& mask, int row_begin, int row_end, int key) {
  for (int row = row_begin; row < row_end; row++) if (mask.visible(row, key)) return true;
  return false;
}
"""
BOUNDS = """
constexpr int TILE = 8;
extern "C" __global__ void bounds(const __grid_constant__ Arguments a) {
  if (threadIdx.x != 0) return;
  const Shape shape = a.shapes[blockIdx.x];
  const Checks checks{a.out + 3 * blockIdx.x};
  const Mask mask = mask_of(shape, a.positions + 4 * blockIdx.x);
  const int row_begin = shape.row_begin, row_end = shape.row_end;
  const KeyTiles tiles = mask.tiles<TILE>(row_begin, row_end);
  const SeenKeys keys = seen_keys(mask, row_begin, row_end);
  checks.expect(tiles.begin >= tiles.sinks && tiles.end >= tiles.begin, 1, tiles.begin, tiles.end);
  for (int key = 0; key < shape.seqlen_k; key++) {
    const int tile = key / TILE;
    const bool seen = seen_by_any(mask, row_begin, row_end, key);
    const bool has_tile = tile < tiles.sinks || (tile >= tiles.begin && tile < tiles.end);
    checks.expect(has_tile || !seen, 2, tiles.begin, key);
    checks.expect(keys.has(key) || !seen, 3, keys.begin, key);
    checks.expect(!EXACT || seen || !keys.has(key), 4, keys.begin, key);
    if (!has_tile) continue;
    const int place = tiles.before(tile);
    checks.expect(tiles.at(place) == tile && place < tiles.count(), 5, tile, key);
  }
  for (int n = 0; EXACT && n < tiles.count(); n++) {
    const int first = tiles.at(n) * TILE;
    bool seen = false;
    for (int key = first; key < first + TILE; key++) seen = seen || seen_by_any(mask, row_begin, row_end, key);
    checks.expect(seen, 6, n, first);
  }
  bool all = true;
  for (int row = row_begin; row < row_end; row++) {
    const SeenColumns columns = mask.columns(row, shape.key_begin);
    for (int key = 0; key < shape.seqlen_k + TILE; key++) {
      const bool seen = mask.visible(row, key);
      checks.expect(columns.has(key - shape.key_begin) == seen, 7, row, key);
      if (key >= shape.key_begin && key < shape.key_end) all = all && seen;
    }
  }
  const bool told = mask.all_visible(row_begin, row_end, shape.key_begin, shape.key_end);
  checks.expect(all || !told, 8, row_begin, shape.key_begin);
  checks.expect(told || !all || SINK_TOKENS || !EXACT, 9, row_begin, shape.key_begin);
  const SeenRows rows = mask.rows(shape.seqlen_q, shape.key_begin, shape.key_end);
  for (int row = 0; row < shape.seqlen_q; row++) {
    bool seen = false;
    for (int key = shape.key_begin; key < shape.key_end; key++) seen = seen || mask.visible(row, key);
    checks.expect(rows.has(row) || !seen, 10, row, shape.key_begin);
    checks.expect(!EXACT || seen || !rows.has(row), 11, row, shape.key_begin);
  }
}
"""
WHOLE = """
extern "C" __global__ void whole(const __grid_constant__ Arguments a) {
  if (threadIdx.x != 0) return;
  const Shape shape = a.shapes[blockIdx.x];
  const Checks checks{a.out + 3 * blockIdx.x};
  Work work{};
  work.seqlen_q = shape.seqlen_q;
  work.mask = mask_of(shape, a.positions + 4 * blockIdx.x);
  for (work.row_begin = 0; work.exists(); work.row_begin += BLOCK_M) {
    work.keys = work.mask.tiles<BLOCK_N>(work.row_begin, work.row_end());
    uint32_t told[2];
    find_whole_tiles(told, work);
    for (int n = 0; n < work.keys.count(); n++) {
      const int first = work.keys.at(n) * BLOCK_N;
      bool all = true;
      for (int row = work.row_begin; row < work.row_end(); row++) {
        const SeenColumns columns = work.mask.columns(row, first);
        for (int column = 0; column < BLOCK_N; column++) all = all && columns.has(column);
      }
      // The last tile has a mask of its own where it is short.
      const bool masked = needs_mask(told, work, n, first) || first + BLOCK_N > shape.seqlen_k;
      checks.expect(all || masked, 12, work.row_begin, first);
      checks.expect(!all || !masked || SINK_TOKENS || !EXACT, 13, work.row_begin, first);
    }
  }
}
"""
MASKS: dict[str, dict[str, int]] = {
    "full": {},
    "causal": {"CAUSAL": 1},
    "causal from the top left": {"CAUSAL": 1, "TOP_LEFT": 1},
    "window": {"WINDOW": 1},
    "causal window": {"CAUSAL": 1, "WINDOW": 1},
    "sink tokens": {"WINDOW": 1, "SINK_TOKENS": 1},
    "causal sink tokens": {"CAUSAL": 1, "WINDOW": 1, "SINK_TOKENS": 1},
    "chunks": {"WINDOW": 1, "CHUNKED": 1},
    "causal chunks": {"CAUSAL": 1, "WINDOW": 1, "CHUNKED": 1},
    "positions": {"CAUSAL": 1, "WINDOW": 1, "SINK_TOKENS": 1, "POSITIONS": 1},
}
SHAPE_COUNT = 400


def shapes(tile: tuple[int, int], largest: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """Rows of `Shape`: lengths, windows and chunks next to multiples of a tile as often as elsewhere."""
    rng = np.random.default_rng(seed)

    def near(size: int, high: int) -> int:
        value = size * int(rng.integers(0, high // size + 1)) + int(rng.integers(-2, 3))
        return int(np.clip(value if rng.random() < 0.7 else rng.integers(0, high + 1), 0, high))

    found = []
    for _ in range(SHAPE_COUNT):
        seqlen_q, seqlen_k = max(1, near(tile[0], largest[0])), max(1, near(tile[1], largest[1]))
        left, right = (near(tile[1], largest[1]) for _ in "lr")
        row_begin, key_begin = int(rng.integers(0, seqlen_q)), int(rng.integers(0, seqlen_k))
        row_end, key_end = int(rng.integers(row_begin, seqlen_q)) + 1, int(rng.integers(key_begin, seqlen_k)) + 1
        chunk = max(1, near(tile[1], largest[1]))
        sinks = near(tile[1], 2 * tile[1])
        found.append((seqlen_q, seqlen_k, left, right, sinks, chunk, row_begin, row_end, key_begin, key_end))
    return np.array(found, np.int32)


def broken(
    probe: str, entry: str, macros: dict[str, int], given: np.ndarray[Any, Any], source: KernelSource
) -> list[Any]:
    """The rule that a shape breaks, with the row and the key, of every shape that breaks one."""
    count = len(given)
    # Of the first row and key, and how far the others stand apart.
    positions = np.random.default_rng(0).integers([20, 1, 0, 1], [40, 4, 40, 4], (count, 4)).astype(np.int32)
    exact = int("POSITIONS" not in macros)  # with steps, ranges may hold keys that no row sees
    all_macros = {**source.macros, "EXACT": exact, **macros}
    module = module_of(KernelSource("probe.cu", PROBE + probe, (entry,), source.headers, all_macros))
    buffers = [
        EmulatedBuffer.of(given, "shapes"),
        EmulatedBuffer.of(positions, "positions"),
        EmulatedBuffer(12 * count, "out"),
    ]
    buffers[2].view(np.int32)[:] = 0
    module.launch(entry, count, 32, 0, struct.pack("<3Q", *(buffer.address for buffer in buffers)), buffers)
    out = buffers[2].view(np.int32, (count, 3))
    return [(*out[i].tolist(), given[i].tolist()) for i in range(count) if out[i, 0]]


def plain_source(arch: str, kernel: str, **changes: Any) -> KernelSource:
    q = np.zeros((1, 64, 1, 64), np.float16)
    return kernel_source(key_of(dataclasses.replace(problem_of(q, q, q), **changes), arch, kernel))


@pytest.mark.parametrize("mask", MASKS)
def test_no_bound_of_a_mask_hides_a_key_that_a_row_sees(mask: str) -> None:
    source = plain_source("sm_80", "forward_mma")
    assert broken(BOUNDS, "bounds", MASKS[mask], shapes((1, 8), (30, 60), 1), source) == []


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "full"])
def test_tiles_that_forward_sm90_takes_as_whole_are_seen_by_all_rows(mask: str) -> None:
    source = plain_source("sm_90a", "forward_sm90", causal=True)
    tile = int(source.macros["BLOCK_M"]), int(source.macros["BLOCK_N"])
    given = shapes(tile, (2 * tile[0], 5 * tile[1]), 2)
    assert broken(WHOLE, "whole", {"CAUSAL": 0, "HOPPER": 1, **MASKS[mask]}, given, source) == []
