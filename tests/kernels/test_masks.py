"""The tiles that kernels skip or take whole by a mask, compared with the mask key by key, over many shapes."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pytest
from emulated import mask_probe
from emulated.forward import key_of, module_of, problem_of
from inside.emulation import EmulatedBuffer
from support.gate import kernel_source

from gpu_actors import KernelSource

# Each function of a mask with each of its variants; the sweep has the other combinations.
USUAL = {
    (False, "causal"),
    (False, "window"),
    (False, "causal sink tokens"),
    (False, "window in a chunk"),
    (True, "full"),
    (True, "causal window"),
    (True, "sink tokens"),
    (True, "chunk and sink tokens"),
}


@pytest.mark.parametrize(
    ("positioned", "mask"),
    [
        pytest.param(*case, marks=[pytest.mark.sweep] * (case not in USUAL))
        for case in itertools.product((False, True), mask_probe.MASKS)
    ],
)
def test_the_mask_agrees_with_itself_pair_by_pair(positioned: bool, mask: str) -> None:
    mask_probe.examine(mask, positioned=positioned)


# Each block has one shape. It reports the number of a broken rule, the row and the key. EXACT: also checks that
# nothing is masked needlessly.
PROBE = """
#include "forward_sm90/consumer.cuh"
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
      checks.expect(all || masked, 1, work.row_begin, first);
      checks.expect(!all || !masked || SINK_TOKENS || !EXACT, 2, work.row_begin, first);
    }
  }
}
"""
MASKS: dict[str, dict[str, int]] = {
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
USUAL_WHOLE = ("causal", "sink tokens", "causal chunks", "positions")
SHAPE_COUNT = 400


def shapes(tile: tuple[int, int], largest: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """Rows of `Shape`: lengths, windows and chunks, mostly next to multiples of a tile."""
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


@pytest.mark.parametrize(
    "mask", [pytest.param(mask, marks=[pytest.mark.sweep] * (mask not in USUAL_WHOLE)) for mask in MASKS]
)
def test_tiles_that_forward_sm90_takes_as_whole_are_seen_by_all_rows(mask: str) -> None:
    q = np.zeros((1, 64, 1, 64), np.float16)
    source = kernel_source(key_of(problem_of(q, q, q, causal=True), "sm_90a", "forward_sm90"))
    tile = int(source.macros["BLOCK_M"]), int(source.macros["BLOCK_N"])
    given = shapes(tile, (2 * tile[0], 5 * tile[1]), 2)
    # Positions of the first row and key, and the steps between the others.
    positions = np.random.default_rng(0).integers([20, 1, 0, 1], [40, 4, 40, 4], (SHAPE_COUNT, 4)).astype(np.int32)
    exact = int("POSITIONS" not in MASKS[mask])  # with steps, ranges may hold keys that no row sees
    macros = {**source.macros, "EXACT": exact, "CAUSAL": 0, **MASKS[mask]}
    module = module_of(KernelSource("probe.cu", PROBE, ("whole",), source.headers, macros))
    out = EmulatedBuffer(12 * SHAPE_COUNT, "out")
    out.view(np.int32)[:] = 0
    buffers = [EmulatedBuffer.of(given, "shapes"), EmulatedBuffer.of(positions, "positions"), out]
    module.launch("whole", SHAPE_COUNT, 32, 0, struct.pack("<3Q", *(buffer.address for buffer in buffers)), buffers)
    found = out.view(np.int32, (SHAPE_COUNT, 3))
    assert [(*found[n].tolist(), given[n].tolist()) for n in range(SHAPE_COUNT) if found[n, 0]] == []
