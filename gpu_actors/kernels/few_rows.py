"""Dense requests of few query rows as requests over a cache of the same arrays, where a model says that this pays.

    forward_sm90, forward_mma     a tile of up to 192 rows holds the rows of one query head, and reads all its keys
    decode_sm90, decode_mma       a tile of 16 to 128 rows holds those of a whole group, and its keys are split

Keys and values stay where they lie: a dense cache is an array (batch, seqlen_k, heads_kv, dim), and every sequence of
it has seqlen_k keys. `clocks_of_tiles` and `clocks_of_ranges` are the model. Its figures come from data sheets and are
bounds that no measurement has confirmed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer, ScratchSpec
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.decode_mma import DECODE_MMA
from gpu_actors.kernels.decode_schedule import ITEM_UNITS, min_units
from gpu_actors.kernels.decode_sm90 import DECODE_SM90
from gpu_actors.kernels.decode_tiles import decode_tile, items_of
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.forward import FORWARD_MMA
from gpu_actors.kernels.forward_sm90 import FORWARD_SM90, MULTIPROCESSORS, ROWS
from gpu_actors.kernels.program import Pack, Part, Program, Target, Values
from gpu_actors.kernels.support import ELEMENTS, capability
from gpu_actors.kernels.tiles import tile_of

__all__ = ["Packing", "as_cache", "packed_program", "packing_of"]

_MULTIPROCESSORS = {80: 108}  # of an A100, where a device does not say how many it has; else those of an H100
# Of a multiprocessor, in bytes and multiply-adds of 16 bits a clock: data sheets of A100 and H100.
_L2, _SHARED, _MEMORY = 64, 128, 16
_MMA, _WGMMA = 1024, 2048
_WIDENED = 32  # bytes of 8-bit keys that a warp widens in a clock: docs/kernels_decode.md counts the instructions
_START = 4000  # clocks from the end of a kernel to the first work of the next, assumed
_WAIT = 270  # clocks of a read from L2, of which the merge of p pieces has 4 + p / 16 + p / 4, one after another
_FLOAT = 4  # bytes of an element of a piece
_RENAMED = {"k": "k_cache", "v": "v_cache"}
_TILED = (FORWARD_SM90.name, FORWARD_MMA.name)
# What packed rows do not have, or mean otherwise.
_LACKING = ("dropout_p", "score_mod", "alibi_signed", "positions", "varlen_q")


class Packing(NamedTuple):
    """What packing the rows of a dense problem comes to. key: of the kernel that attends packed rows.

    tiled: clocks of the kernel that ``tiled_by`` names, by the model. packed: of ``key``.
    """

    tiled_by: str
    key: DispatchKey
    tiled: int
    packed: int

    @property
    def pays(self) -> bool:
        """Whether the rows are packed: where the model, which errs, sees a quarter of the clocks gained."""
        return 4 * self.packed <= 3 * self.tiled

    @property
    def reason(self) -> str:
        """A sentence for `explain`."""
        figures = f"{self.packed} clocks packed by {self.key.kernel}, {self.tiled} in tiles of {self.tiled_by}"
        rule = "" if self.pays else "; rows are packed where that saves a quarter"
        return f"by the model, rows that fill little of a tile take {figures}{rule}"


def packing_of(
    problem: AttentionProblem, key: DispatchKey, families: Sequence[KernelFamily], multiprocessors: int | None = None
) -> Packing | None:
    """Whether rows of a dense problem are packed, or None where no kernel packs them.

    key: what answers the problem otherwise. families: to choose from, for operands that lie as k and v do.
    multiprocessors: of the device, where it says.
    """
    if not _may_pack(problem, key):
        return None
    cached = as_cache(problem)
    known = tuple(family for family in (DECODE_SM90, DECODE_MMA) if family in families)
    try:
        packed = dispatch_key(cached, key.arch, known)
    except Unsupported:
        return None
    count = multiprocessors or _MULTIPROCESSORS.get(capability(key.arch), MULTIPROCESSORS)
    return Packing(key.kernel, packed, clocks_of_tiles(problem, key, count), clocks_of_ranges(cached, packed, count))


def _may_pack(problem: AttentionProblem, key: DispatchKey) -> bool:
    p = problem
    measured = p.mask != "full" or p.alibi is not None  # from the diagonal
    return (
        p.layout == "dense"
        and key.kernel in _TILED
        and p.dtype != "float32"
        and 0 < p.seqlen_q < ROWS
        and p.seqlen_k > 0
        and p.batch > 0
        and not (measured and p.alignment == "top_left")
        and not any(getattr(p, name) for name in _LACKING)
    )


def as_cache(problem: AttentionProblem) -> AttentionProblem:
    """A dense problem over a cache that holds its keys and values, in which every sequence has all keys."""
    return dataclasses.replace(problem, layout="cache", alignment="bottom_right")


def clocks_of_tiles(problem: AttentionProblem, key: DispatchKey, multiprocessors: int) -> int:
    """Clocks of a kernel that gives each query head tiles of its own, by the model.

    The busiest multiprocessor brings the keys of its tiles, one tile after another. A tile takes as long for few rows
    as for all that it has room for.
    """
    tile = tile_of(key)
    tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // tile.block_m)
    hopper = key.kernel == FORWARD_SM90.name
    readers = tile.block_m // ROWS if hopper else tile.warps
    passes: float = 1 + readers
    if ELEMENTS[problem.dtype].fp8:  # V is read and written once more, transposed
        passes += 2 * problem.head_dim_v / _columns(problem)
    clocks = _clocks_a_key(problem, tile.block_m, passes, _WGMMA if hopper else _MMA)
    busiest = -(-tiles // multiprocessors) * _seen(problem) * clocks
    return round(max(busiest, _memory(problem, multiprocessors)))


def clocks_of_ranges(cached: AttentionProblem, key: DispatchKey, multiprocessors: int) -> int:
    """Clocks of the kernels over caches, by the model: the longest ranges of a multiprocessor, and the merge."""
    tile, blocks, _ = decode_tile(key)
    narrow, hopper = ELEMENTS[key.kv_dtype].fp8, key.kernel == DECODE_SM90.name
    items = items_of(cached, key.row_tile)
    units = items * (-(-_seen(cached) // tile.block_n) + ITEM_UNITS)
    used = min(multiprocessors * (1 if hopper else blocks), max(1, units // min_units(key)))
    ranges = -(-used // multiprocessors)  # of the busiest multiprocessor
    readers = key.row_tile // (ROWS if hopper else 16)
    # 8-bit keys are widened once for all readers on Hopper, in shared memory; else by each.
    passes = 4 + 2 * readers if narrow and hopper else 1 + readers
    clocks = _clocks_a_key(cached, key.row_tile, passes, _WGMMA if hopper else _MMA)
    if narrow and not hopper:
        clocks = max(clocks, readers * _bytes_a_key(cached) / _WIDENED)
    busiest = ranges * -(-units // used) * tile.block_n * clocks
    pieces = -(-used // items) + 1
    merge = _START + _WAIT * (4 + -(-pieces // 16) + -(-pieces // 4))
    merge += 2 * (used + items) * key.row_tile * cached.head_dim_v * _FLOAT // (multiprocessors * _L2)
    return round(max(busiest, _memory(cached, multiprocessors)) + merge)


def _seen(problem: AttentionProblem) -> int:
    """The keys of a sequence that one of its rows sees."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    begin, end, offset = (np.array([value], np.int64) for value in (0, rows, keys - rows))
    sinks, first, last = (int(found.max()) for found in problem.key_ranges(begin, end, offset, keys))
    first = max(sinks, first)
    return sinks + max(0, last - first)


def _columns(problem: AttentionProblem) -> int:
    return problem.head_dim + problem.head_dim_v


def _bytes_a_key(problem: AttentionProblem) -> int:
    return _columns(problem) * ELEMENTS[problem.kv_dtype].itemsize


def _clocks_a_key(problem: AttentionProblem, rows: int, passes: float, products: int) -> float:
    """Clocks of a tile of so many rows for one key: from L2, through shared memory ``passes`` times, and multiplied."""
    own, doubled = _bytes_a_key(problem), 2 if products == _WGMMA and not problem.decoding else 1
    rate = products * (doubled if ELEMENTS[problem.dtype].fp8 else 1)
    return max(own / _L2, own * passes / _SHARED, rows * _columns(problem) / rate)


def _memory(problem: AttentionProblem, multiprocessors: int) -> float:
    """Clocks in which memory brings all keys and values once."""
    keys = problem.batch * problem.heads_kv * _seen(problem)
    return keys * _bytes_a_key(problem) / (multiprocessors * _MEMORY)


def packed_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """What is launched for a dense problem whose key names a kernel over caches. Raises Unsupported as `program_of`.

    Lengths and the split of the work follow from shapes, so that every launch copies the same few numbers.
    """
    program = program_of(as_cache(problem), key, target._replace(lengths_on_host=True))
    assert program.split is not None, "the host splits work whose lengths it knows"
    lengths = np.full(problem.batch, problem.seqlen_k, np.int32)
    known = {"cache_seqlens": lengths, **program.split(lengths, None)}
    scratch = {
        name: ScratchSpec(array.shape, "int32", contents=functools.partial(_constant, array.tobytes()))
        for name, array in known.items()
    }
    parts = (Part(part.key, part.geometry, functools.partial(_as_caches, part.pack)) for part in program.parts)
    return Program(tuple(parts), {**program.scratch, **scratch})


def _constant(contents: bytes, buffers: Mapping[str, Buffer]) -> bytes:
    return contents


def _as_caches(pack: Pack, buffers: Mapping[str, Buffer], values: Values) -> bytes:
    return pack({_RENAMED.get(name, name): buffer for name, buffer in buffers.items()}, values)
