"""Which tile each block has: the kernels' headers on the CPU against the order of the benchmark's model."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
from emulated.backward import backward_problem_of
from emulated.forward import key_of, module_of, problem_of
from inside.emulation import EmulatedBuffer
from support.gate import kernel_source

from benchmarks.order import SECTION_BLOCKS, ranked, section_size
from gpu_actors import KernelSource
from gpu_actors.kernels.forward_sm90 import COUNTER, Sections, _schedule_binder, section_heads
from gpu_actors.kernels.params import Buffer
from gpu_actors.kernels.tiles import tile_of

PROBE = """
#include "backward/keys.cuh"
#include "common/block_tile.cuh"
struct Arguments {
  int32_t heads_q, heads_kv, seqlen_q, seqlen_k, tiles, unused;
  const int32_t* lengths_q;
  const int32_t* lengths_k;
  int32_t* out;
};
DEVICE Params params_of(const Arguments& a) {
  Params p{};
  p.heads_q = a.heads_q;
  p.heads_kv = a.heads_kv;
  p.seqlen_q = a.seqlen_q;
  p.seqlen_k = a.seqlen_k;
  p.cu_seqlens_q = a.lengths_q;
  p.cu_seqlens_k = a.lengths_k;
  return p;
}
DEVICE void answer(const Arguments& a, int sequence, int head, int tile) {
  const int values[3] = {sequence, head, tile};
  if (threadIdx.x == 0) for (int i = 0; i < 3; i++) a.out[3 * blockIdx.x + i] = values[i];
}
extern "C" __global__ void rows(const __grid_constant__ Arguments a) {
  const BlockTile at = locate(params_of(a), a.tiles);
  answer(a, at.sequence, at.head, at.row_begin / BLOCK_M);
}
extern "C" __global__ void keys(const __grid_constant__ Arguments a) {
  const KeyPlace at = locate_keys(params_of(a), a.tiles, BLOCK_N, int(blockIdx.x));
  answer(a, at.sequence, at.kv_head, at.part);
}
"""

HOPPER_PROBE = """
#include "forward_sm90/schedule.cuh"
struct Arguments { Schedule schedule; int32_t heads_q, heads_kv, seqlen_q, seqlen_k; int32_t* out; };
extern "C" __global__ void tiles(const __grid_constant__ Arguments a) {
  LaunchParams p{};
  p.heads_q = a.heads_q;
  p.heads_kv = a.heads_kv;
  p.seqlen_q = a.seqlen_q;
  p.seqlen_k = a.seqlen_k;
  const Work work = work_of(p, a.schedule, int(blockIdx.x));
  const int values[3] = {work.sequence, work.head, work.row_begin / BLOCK_M};
  if (threadIdx.x == 0) for (int i = 0; i < 3; i++) a.out[3 * blockIdx.x + i] = values[i];
}
"""

Order = list[tuple[int, ...]]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (64, 64)},
    "varlen": {"causal": True, "layout": "varlen"},
}
# (sequences, query heads, KV heads, tiles of the longest sequence)
SHAPES = [
    (1, 1, 1, 1),
    (1, 8, 2, 5),
    (3, 6, 2, 7),
    (2, 64, 8, 16),
    (5, 12, 4, 33),
    (1, 40, 8, 64),
    (1, 3, 3, 600),
    (700, 2, 1, 1),
]


def launch(
    probe: str, entry: str, source: KernelSource, blocks: int, params: bytes, out: EmulatedBuffer, *given: Any
) -> Order:
    module = module_of(KernelSource("probe.cu", probe, (entry,), source.headers, source.macros))
    module.launch(entry, blocks, 32, 0, params, [out, *given])
    return [tuple(each) for each in out.view(np.int32, (blocks, 3)).tolist()]


def order_of(entry: str, mask: str, shape: tuple[int, int, int, int], lengths: list[int] | None = None) -> Order:
    """(sequence, head, tile) of each block. lengths: of packed sequences, in tiles."""
    batch, heads_q, heads_kv, tiles = shape
    q = np.zeros((1, 64, 1, 64), np.float16)
    problem = dataclasses.replace(backward_problem_of(q, q, q), **MASKS[mask])
    key = key_of(problem, "sm_80", "backward_mma")
    tile = tile_of(key).block_m if entry == "rows" else tile_of(key).block_n
    blocks = batch * (heads_q if entry == "rows" else heads_kv) * tiles
    ends = np.cumsum([0, *(lengths or [tiles] * batch)], dtype=np.int32) * np.int32(tile)
    cumulated, out = EmulatedBuffer.of(ends, "lengths"), EmulatedBuffer(12 * blocks, "out")
    sizes = (heads_q, heads_kv, tiles * tile, tiles * tile, tiles, 0)
    params = struct.pack("<6i3Q", *sizes, cumulated.address, cumulated.address, out.address)
    return launch(PROBE, entry, kernel_source(key), blocks, params, out, cumulated)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_the_models_order_is_the_kernels(mask: str) -> None:
    for batch, heads_q, heads_kv, tiles in SHAPES:
        for entry, heads, group in (("rows", heads_q, heads_q // heads_kv), ("keys", heads_kv, 1)):
            section = 1 if mask == "full" else section_size(tiles, group)
            wanted = [
                (*divmod(head, heads), tiles - 1 - rank if entry == "rows" and mask != "full" else rank)
                for head, rank in ranked(batch * heads, tiles, section)
            ]
            assert order_of(entry, mask, (batch, heads_q, heads_kv, tiles)) == wanted
            assert len(set(wanted)) == len(wanted) == batch * heads * tiles


def test_the_models_order_is_that_of_forward_sm90() -> None:
    q = np.zeros((1, 64, 1, 64), np.float16)
    key = key_of(dataclasses.replace(problem_of(q, q, q), causal=True), "sm_90a", "forward_sm90")
    counter = {COUNTER: Buffer(64, (1,), (1,), "int32")}
    for batch, heads_q, heads_kv, tiles in SHAPES:
        heads = batch * heads_q
        section = section_heads(heads, heads_q // heads_kv, (32 << 20) // 5)
        problem = dataclasses.replace(problem_of(q, q, q), heads_q=heads_q, heads_kv=heads_kv)
        schedule = _schedule_binder(problem, Sections(heads * tiles, tiles, heads, section)).pack(counter)
        rows, out = tiles * tile_of(key).block_m, EmulatedBuffer(12 * heads * tiles, "out")
        sizes = struct.pack("<4iQ", heads_q, heads_kv, rows, rows, out.address)
        wanted = [(*divmod(head, heads_q), tiles - 1 - rank) for head, rank in ranked(heads, tiles, section, True)]
        assert launch(HOPPER_PROBE, "tiles", kernel_source(key), heads * tiles, schedule + sizes, out) == wanted
        assert len(set(wanted)) == len(wanted) == heads * tiles


@pytest.mark.parametrize("lengths", [[7, 1, 4, 0, 7], [1, 2, 3], [3], [9, 2]], ids=str)
def test_packed_sequences_start_with_the_longest_and_by_tiles_left(lengths: list[int]) -> None:
    """In [9, 2] a sequence is longer than the caller said, so its blocks take several tiles each."""
    tiles = min(max(lengths), 7)
    order = order_of("keys", "varlen", (len(lengths), 4, 2, tiles), lengths)
    assert sorted(order) == [(n, head, part) for n in range(len(lengths)) for head in range(2) for part in range(tiles)]
    used = [(n, head, part) for n, head, part in order if part < lengths[n]]
    if max(lengths) <= tiles:
        left = [lengths[n] - part for n, _, part in used]
        assert left == sorted(left, reverse=True)
    for n, head in {each[:2] for each in order}:
        parts = [part for *other, part in used if tuple(other) == (n, head)]
        assert parts == sorted(parts), "a block waits for turns of earlier keys, which must have lower numbers"


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_a_block_waits_for_lower_numbers_alone(mask: str) -> None:
    """dQ waits for earlier keys of its head; a shared dbias for the same keys of earlier heads and sequences."""
    for shape in SHAPES:
        number = {at: n for n, at in enumerate(order_of("keys", mask, shape))}
        for (sequence, head, part), own in number.items():
            assert part == 0 or number[sequence, head, part - 1] < own
            assert head == 0 or number[sequence, head - 1, part] < own
            assert sequence == 0 or number[sequence - 1, shape[2] - 1, part] < own


def test_a_section_has_whole_groups_and_the_blocks_that_keep_a_gpu_busy() -> None:
    for ranks in (1, 7, 16, 512, 4096):
        for group in (1, 4, 8):
            size = section_size(ranks, group)
            assert size % group == 0
            assert size * ranks >= SECTION_BLOCKS > (size - group) * ranks


def test_sections_of_forward_sm90_end_full() -> None:
    """33 heads in sections of 8 would leave one head, whose tiles are as long as all others', to the end."""
    assert section_heads(33, 1, 4 << 20) == 7
    assert section_heads(32, 1, 4 << 20) == 8
    assert section_heads(36, 4, 8 << 20) == 12
    assert section_heads(5, 1, 64 << 20) == 1
    assert section_heads(64, 8, 1 << 20) == 64
