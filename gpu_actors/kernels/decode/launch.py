"""What a request over a cache launches: its kernels, the memory they share, and the split of the work.

    split on the host         decode_mma -> decode_combine       lengths are NumPy arrays
    split on the device       decode_plan -> decode_mma -> decode_combine     with positions too

Grids and scratch memory depend on shapes alone and on no length, so that a recorded launch serves every step of a
sequence. With one split pinned there is nothing to combine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import ScratchSpec
from gpu_actors.kernels.decode.params import CHUNK, pack_cache_layouts, pack_decode, pack_pointers
from gpu_actors.kernels.decode.schedule import split_decode
from gpu_actors.kernels.decode.variant import (
    COMBINE,
    DECODE,
    PLAN,
    ROW_TILES,
    decode_keys,
    decode_macros,
    decode_refuses,
    decode_threads,
    items_of,
    ranges_of,
    row_tile_of,
    row_tiles,
    step_geometry,
)
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.program import Part, Program, Target
from gpu_actors.kernels.support import MAX_HEAD_DIM

__all__ = ["DECODE_MMA", "UNKNOWN_MULTIPROCESSORS", "cache_tables", "split_program"]

UNKNOWN_MULTIPROCESSORS = 4
"""Of an emulated device: a few ranges show every way of splitting."""


def decode_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The kernels of ``key``, which names decode_mma. Raises Unsupported as `decode_tile` does."""
    ranges = ranges_of(key, target.multiprocessors or UNKNOWN_MULTIPROCESSORS)
    pack = functools.partial(pack_decode, problem, key, ranges)
    planned = target.lengths_on_host and not (problem.positions or problem.cache_leftpad)  # the host knows neither
    return split_program(problem, Part(key, step_geometry(key, problem, ranges), pack), ranges, planned)


def split_program(problem: AttentionProblem, main: Part, ranges: int, lengths_on_host: bool) -> Program:
    """A kernel that attends ranges of the work, with what splits the work before it and merges pieces behind it.

    main: of a grid of ``ranges`` blocks.
    """
    keys = decode_keys(problem, main.key, lengths_on_host)
    pack = functools.partial(pack_decode, problem, main.key, ranges)
    return Program(
        tuple(main if part == main.key else Part(part, step_geometry(part, problem, ranges), pack) for part in keys),
        _scratch(problem, main.key, keys, ranges),
        split=functools.partial(_split, problem, main.key, ranges) if lengths_on_host else None,
    )


def _split(
    problem: AttentionProblem, key: DispatchKey, ranges: int, cache_seqlens: Any, cu_seqlens_q: Any
) -> dict[str, Any]:
    """The ranges, int32 (ranges + 1, 4), from lengths that are NumPy arrays."""
    rows = None if cu_seqlens_q is None else np.diff(cu_seqlens_q)
    return {"plan": split_decode(problem, key, ranges, cache_seqlens, rows).positions}


def cache_tables(problem: AttentionProblem, alignment: int = CHUNK) -> dict[str, ScratchSpec]:
    """Where the arrays of "pointers" lie, and how. alignment: as of `pack_pointers`."""
    specs = {}
    if problem.layout == "pointers":
        for side in "kv":
            contents = functools.partial(pack_pointers, problem, f"{side}_cache", alignment)
            specs[f"{side}_ptrs"] = ScratchSpec((problem.batch,), "uint64", contents=contents)
    if problem.own_layouts:
        contents = functools.partial(pack_cache_layouts, problem)
        specs["cache_layouts"] = ScratchSpec((problem.batch, 5), "int64", contents=contents)
    return specs


def _scratch(
    problem: AttentionProblem, key: DispatchKey, keys: Sequence[DispatchKey], ranges: int
) -> dict[str, ScratchSpec]:
    specs = cache_tables(problem)
    kernels = {part.kernel for part in keys}
    if PLAN in kernels:
        specs["plan"] = ScratchSpec((ranges + 1, 4), "int32")
        specs["sums"] = ScratchSpec((problem.batch * row_tiles(problem, key.row_tile),), "int64")
    if COMBINE in kernels:
        pieces = items_of(problem, key.row_tile) * problem.num_splits or 2 * ranges
        rows = (pieces, key.row_tile)
        specs["partial_out"] = ScratchSpec((*rows, problem.head_dim_v), "float32")
        specs["partial_sums"] = ScratchSpec((*rows, 2), "float32")
    return specs


DECODE_MMA = KernelFamily(
    DECODE,
    "computes every option of new rows over pages, caches and pointers on tensor cores, splitting the keys",
    decode_program,
    decode_macros,
    decode_threads,
    "forward",
    ("cache", "pointers", "paged"),
    refuses=decode_refuses,
    companions=(PLAN, COMBINE),
    row_tile=row_tile_of,
    row_tiles=(*ROW_TILES, 128),  # the last one for the split and the merge of decode_sm90
    positions=True,
    greatest_dim=MAX_HEAD_DIM,
    chunks=True,
)
