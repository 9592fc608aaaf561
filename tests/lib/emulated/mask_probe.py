"""Compares the functions of a mask with the keys that its rows see, pair by pair."""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any

import numpy as np
from emulated.forward import key_of, problem_of
from inside.emulation import EmulatedBuffer, EmulatedModule, build_module
from support.gate import kernel_source

from gpu_actors import KernelSource

__all__ = ["MASKS", "examine", "module_of"]

_PROBE = """
#include "common/mask.cuh"
#include "common/philox.cuh"
#include "common/score.cuh"
struct Case {
  int seqlen_k, left, right, chunk, tokens, row_first, row_step, key_first, key_step;
  int row_begin, row_end, key_begin, key_end, seqlen_q;
};
DEVICE Mask mask_of(const Case& c) {
  const Reach reach{c.left, c.right, c.chunk};
#if POSITIONS
  return {c.seqlen_k, reach, c.tokens, {{c.row_first, c.row_step}, {c.key_first, c.key_step}}};
#else
  return {c.seqlen_k, c.row_first, reach, c.tokens};
#endif
}
struct Answer {
  SeenColumns columns;
  KeyTiles tiles;
  SeenRows rows;
  SeenKeys keys;
  int all, in_place;
  uint32_t visible[24];
};
struct Arguments { const Case* in; Answer* out; int count; };
extern "C" __global__ void examine(const __grid_constant__ Arguments a) {
  for (int n = threadIdx.x; n < a.count; n += blockDim.x) {
    const Case& c = a.in[n];
    const Mask mask = mask_of(c);
    Answer& answer = a.out[n];
    answer.columns = mask.columns(c.row_begin, 2);
    answer.tiles = mask.tiles<8>(c.row_begin, c.row_end);
    answer.rows = mask.rows(c.seqlen_q, c.key_begin, c.key_end);
    answer.keys = seen_keys(mask, c.row_begin, c.row_end);
    answer.all = mask.all_visible(c.row_begin, c.row_end, c.key_begin, c.key_end);
    answer.in_place = 1;
    for (int i = 0; i < answer.tiles.count(); i++) {
      if (answer.tiles.before(answer.tiles.at(i)) != i) answer.in_place = 0;
    }
    for (int row = 0; row < c.seqlen_q; row++) {
      answer.visible[row] = 0;
      for (int key = 0; key < 32; key++) answer.visible[row] |= uint32_t(mask.visible(row, key)) << key;
    }
  }
}
"""
_UNBOUNDED = 1 << 30
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (6, 4)},
    "causal window": {"causal": True, "window_size": (6, -1)},
    "sink tokens": {"window_size": (6, 4), "sink_tokens": 9},
    "causal sink tokens": {"causal": True, "window_size": (6, -1), "sink_tokens": 9},
    "chunk": {"attention_chunk": 7},
    "causal chunk": {"causal": True, "attention_chunk": 7},
    "window in a chunk": {"window_size": (5, 3), "attention_chunk": 9},
    "chunk and sink tokens": {"causal": True, "window_size": (6, -1), "sink_tokens": 9, "attention_chunk": 8},
}
"""Options of masks, by name."""


def _probe_source(mask: str, positioned: bool) -> KernelSource:
    """The probe with the macros of a kernel of this mask."""
    q = np.zeros((1, 2, 1, 8), np.float32)
    problem = dataclasses.replace(problem_of(q, q, q, **MASKS[mask]), q_positions=2 if positioned else 0)
    source = kernel_source(key_of(problem, "sm_80"))
    assert source.macros.get("POSITIONS", "0") == str(int(positioned))
    return KernelSource("probe.cu", _PROBE, ("examine",), source.headers, source.macros)


@functools.cache
def module_of(source: KernelSource) -> EmulatedModule:
    return build_module(source.source, dict(source.macros), dict(source.headers), entries=source.entry_points)


def _random_case(rng: np.random.Generator, mask: str, positioned: bool) -> list[int]:
    left, right = MASKS[mask].get("window_size", (-1, -1))
    left, right = (_UNBOUNDED if bound < 0 else bound for bound in (left, right))
    seqlen_q, seqlen_k = int(rng.integers(1, 25)), int(rng.integers(1, 33))
    steps = [int(rng.integers(0, 20)), int(rng.integers(1, 5)), int(rng.integers(0, 20)), int(rng.integers(1, 5))]
    if not positioned:
        steps = [int(rng.integers(-20, 20)), 1, 0, 1]  # the first is the diagonal
    row_begin, key_begin = int(rng.integers(0, seqlen_q)), int(rng.integers(0, seqlen_k))
    row_end = int(rng.integers(row_begin + 1, seqlen_q + 1))
    key_end = int(rng.choice([key_begin + 1, rng.integers(key_begin + 1, 33)]))
    tokens, chunk = (MASKS[mask].get(name, 0) for name in ("sink_tokens", "attention_chunk"))
    return [seqlen_k, left, right, chunk, tokens, *steps, row_begin, row_end, key_begin, key_end, seqlen_q]


def examine(mask: str, positioned: bool, cases: int = 400) -> None:
    """Raise AssertionError if an answer of the mask contradicts the keys that the rows see, pair by pair."""
    rng = np.random.default_rng(len(mask))
    inputs = np.array([_random_case(rng, mask, positioned) for _ in range(cases)], np.int32)
    source, result = EmulatedBuffer.of(inputs, "in"), EmulatedBuffer((3 + 3 + 2 + 3 + 2 + 24) * 4 * cases, "out")
    params = struct.pack("<QQi4x", source.address, result.address, cases)
    module_of(_probe_source(mask, positioned)).launch("examine", 1, 32, 0, params, [source, result])
    for case, answer in zip(inputs.tolist(), result.view(np.int32, (cases, -1)).tolist(), strict=True):
        _check_case(mask, case, answer)


def _check_case(mask: str, case: list[int], answer: list[int]) -> None:
    seqlen_k, left, right, chunk, tokens, q_first, q_step, k_first, k_step, *ranges = case
    row_begin, row_end, key_begin, key_end, seqlen_q = ranges
    rows, keys = q_first + q_step * np.arange(seqlen_q)[:, None], k_first + k_step * np.arange(seqlen_k)
    options = MASKS[mask]
    inside = (keys >= rows - left) & (keys <= rows + right)
    if chunk:
        inside &= keys // chunk == rows // chunk
    windowed = "window_size" in options or chunk > 0
    if options.get("causal"):
        inside &= keys <= rows
    sinks = (keys < tokens) & ((keys <= rows) if options.get("causal") else True)
    seen = inside | (sinks if windowed else False)
    sinks_from_2, begin_from_2, end_from_2, *answer = answer
    columns = np.arange(seqlen_k) - 2
    in_range = columns < end_from_2
    if windowed:
        in_range &= columns >= begin_from_2
        in_range |= (columns < sinks_from_2) & ("sink_tokens" in options)
    np.testing.assert_array_equal(in_range, seen[row_begin], f"columns {case}")
    sink_tiles, begin, end, first_row, last_row, sink_keys, first_key, last_key, all_seen, in_place = answer[:10]
    visible = np.array([[word >> key & 1 for key in range(32)] for word in answer[10 : 10 + seqlen_q]], bool)
    np.testing.assert_array_equal(visible[:, :seqlen_k], seen, f"visible {case}")
    assert not visible[:, seqlen_k:].any(), f"visible past the end {case}"
    of_rows = seen[row_begin:row_end].any(axis=0)
    listed = np.zeros(40, bool)
    for tile in (*range(sink_tiles), *range(begin, end)):
        listed[8 * tile : 8 * tile + 8] = True
    assert not (of_rows & ~listed[:seqlen_k]).any(), f"tiles leave a seen key out {case}"
    assert in_place, f"a tile is not where it comes before no other {case}"
    in_key_range = np.array(
        [first_key <= key < last_key or ("sink_tokens" in options and key < sink_keys) for key in range(40)]
    )
    assert not (of_rows & ~in_key_range[:seqlen_k]).any(), f"keys leave a seen one out {case}"
    assert not in_key_range[seqlen_k:].any(), f"keys past the end {case}"
    if q_step == k_step == 1:
        needed = np.append(of_rows, np.zeros(40 - seqlen_k, bool)).reshape(5, 8).any(axis=1)
        np.testing.assert_array_equal(needed, listed[::8], f"tiles hold no seen key {case}")
        np.testing.assert_array_equal(of_rows, in_key_range[:seqlen_k], f"keys hold an unseen one {case}")
    whole = key_end <= seqlen_k and bool(inside[row_begin:row_end, key_begin:key_end].all())
    assert all_seen == whole, f"all_visible {case}"
    of_keys = seen[:, key_begin:key_end].any(axis=1)
    in_range = np.array([first_row <= row < last_row for row in range(seqlen_q)])
    assert not (of_keys & ~in_range).any(), f"rows leave one out {case}"
    if key_end == key_begin + 1:
        np.testing.assert_array_equal(of_keys, in_range, f"rows hold one that sees nothing {case}")
