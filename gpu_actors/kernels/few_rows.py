"""Answers batches as requests over a cache of the same arrays: dense ones of few rows, if a published rule says so.

    forward_sm90, forward_mma     a tile of up to 192 rows holds the rows of one query head, and reads all its keys
    decode_sm90, decode_mma       a tile of 16 to 128 rows holds the rows of a whole group, and its keys are split

Keys and values stay where they lie: a dense cache is an array (batch, seqlen_k, heads_kv, dim).

Rows of an invariant context have the bits that they have over a cache, so any number of them is packed there. Each of
the packed sequences (total_k, heads_kv, dim) has the whole array as its cache. Its keys end where ``cu_seqlens_k``
says, and the rows before them count as padding. So the bounds may lie anywhere, and nothing is copied.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer, ScratchSpec
from gpu_actors.errors import Unqualified, Unsupported
from gpu_actors.kernels.decode_mma import DECODE_MMA
from gpu_actors.kernels.decode_sm90 import DECODE_SM90
from gpu_actors.kernels.decode_tiles import decode_tile, items_of
from gpu_actors.kernels.dispatch import Barred, dispatch_key, program_of
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.forward import FORWARD_MMA
from gpu_actors.kernels.forward_sm90 import FORWARD_SM90, MULTIPROCESSORS, ROWS
from gpu_actors.kernels.params import ITEMSIZES
from gpu_actors.kernels.program import Pack, Part, Program, Target, Values
from gpu_actors.kernels.rules import fill, should_pack, split_count
from gpu_actors.kernels.support import capability
from gpu_actors.kernels.tiles import tile_of

__all__ = ["Packing", "as_cache", "has_cache_form", "option_without_cache", "packed_program", "packing_of"]

_MULTIPROCESSORS = {80: 108}  # of an A100, where a device does not say how many it has; else those of an H100
_RENAMED = {"k": "k_cache", "v": "v_cache"}
_TILED = (FORWARD_SM90.name, FORWARD_MMA.name)
# Options that packed rows lack or understand differently. Two have another name in a request.
_LACKING = ("dropout_p", "score_mod", "alibi_signed", "q_positions", "k_positions", "positions", "varlen_q", "wide_lse")
_OF_REQUESTS = {"score_mod": "block_mask", "wide_lse": "lse_dtype"}


class Packing(NamedTuple):
    """How the rows of a dense problem would be packed. key: that of the kernel that attends packed rows.

    tiled_by: the kernel that takes the problem otherwise. tile: the rows of its tile. rows: those of a head. heads:
    query heads per KV head. splits: see `split_count`. asked: ``pack_gqa`` of the request.
    """

    tiled_by: str
    key: DispatchKey
    tile: int
    rows: int
    heads: int
    splits: int
    asked: bool | None = None

    @property
    def taken(self) -> bool:
        if self.asked is not None:
            return self.asked
        # `should_pack` decides on every architecture. FlashAttention always packs before sm_90, to have fewer binaries.
        return self.splits > 1 or should_pack(self.rows, self.heads, self.tile)

    @property
    def reason(self) -> str:
        """A sentence for `explain`."""
        verb = "are packed" if self.taken else "stay in tiles"
        if self.asked is not None:
            return f"pack_gqa={self.asked}: rows {verb}"
        alone, together = (f"{fill(rows, self.tile):.0%}" for rows in (self.rows, self.rows * self.heads))
        filled = f"one head's rows fill {alone} of tiles of {self.tile}, those of a group {together}"
        return f"rows {verb} by FlashAttention's rule: num_splits is {self.splits}; in {self.tiled_by} {filled}"


def packing_of(
    problem: AttentionProblem,
    key: DispatchKey,
    families: Sequence[KernelFamily],
    multiprocessors: int | None = None,
    asked: bool | None = None,
    barred: Barred | None = None,
) -> Packing | None:
    """Return how rows of a dense problem would be packed, or None if no kernel packs them.

    key: what answers the problem otherwise. families: those that can read k and v where they lie. multiprocessors: the
    device's, None if unknown. asked: ``pack_gqa`` of the request. barred: as for `dispatch_key`.
    """
    if not _may_pack(problem, key):
        return None
    cached = as_cache(problem)
    known = tuple(family for family in (DECODE_SM90, DECODE_MMA) if family in families)
    try:
        packed = dispatch_key(cached, key.arch, known, barred)
    except (Unsupported, Unqualified):
        return None
    count = multiprocessors or _MULTIPROCESSORS.get(capability(key.arch), MULTIPROCESSORS)
    key_tiles = -(-_seen(problem) // decode_tile(packed).tile.block_n)
    splits = split_count(items_of(cached, packed.row_tile), key_tiles, count)
    return Packing(key.kernel, packed, tile_of(key).block_m, problem.seqlen_q, problem.gqa_ratio, splits, asked)


def _may_pack(problem: AttentionProblem, key: DispatchKey) -> bool:
    p = problem
    few = p.layout == "dense" and p.seqlen_q < ROWS and p.dtype != "float32"
    return few and key.kernel in _TILED and has_cache_form(p)


def has_cache_form(problem: AttentionProblem) -> bool:
    """Whether kernels over caches can take a batch in the form of `as_cache`, apart from their own refusals."""
    p = problem
    return min(p.batch, p.seqlen_q, p.total_k) > 0 and option_without_cache(p) is None


def option_without_cache(problem: AttentionProblem) -> str | None:
    """The field of a request that keeps its batch from the form of `as_cache`, or None."""
    measured = problem.mask != "full" or problem.alibi is not None  # from the diagonal
    if measured and problem.alignment == "top_left":
        return "alignment"
    name = next((name for name in _LACKING if getattr(problem, name)), None)
    return None if name is None else _OF_REQUESTS.get(name, name)


def as_cache(problem: AttentionProblem) -> AttentionProblem:
    """The problem over a cache that holds a batch's keys and values. Sequences of a dense batch have all its keys."""
    splits = 1 if problem.invariant else 0
    if problem.layout == "dense":
        return dataclasses.replace(problem, layout="cache", alignment="bottom_right", num_splits=splits)
    shared: dict[str, Any] = {"layout": "cache", "cache_leftpad": True, "varlen_q": True}
    shared |= {"seqlen_k": problem.total_k, "bias_keys": problem.seqlen_k}
    return dataclasses.replace(problem, **shared, alignment="bottom_right", num_splits=splits)


def _seen(problem: AttentionProblem) -> int:
    """The number of keys of a sequence that any of its rows sees."""
    rows, keys = problem.seqlen_q, problem.seqlen_k
    begin, end, offset = (np.array([value], np.int64) for value in (0, rows, keys - rows))
    sinks, first, last = (int(found.max()) for found in problem.key_ranges(begin, end, offset, keys))
    first = max(sinks, first)
    return sinks + max(0, last - first)


def packed_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The program of a problem whose key names a kernel over caches.

    For a dense problem, lengths and the split of the work follow from shapes: each launch copies the same few numbers.
    """
    program = program_of(as_cache(problem), key, target._replace(lengths_on_host=True))
    parts = (Part(part.key, part.geometry, functools.partial(_as_caches, part.pack)) for part in program.parts)
    if problem.layout == "varlen":
        return Program(tuple(parts), program.scratch)
    known = {"cache_seqlens": np.full(problem.batch, problem.seqlen_k, np.int32)}
    if program.split is not None:
        known |= program.split(known)
    scratch = {
        name: ScratchSpec(array.shape, "int32", contents=functools.partial(_constant, array.tobytes()))
        for name, array in known.items()
    }
    return Program(tuple(parts), {**program.scratch, **scratch})


def _constant(contents: bytes, buffers: Mapping[str, Buffer]) -> bytes:
    return contents


def _as_caches(pack: Pack, buffers: Mapping[str, Buffer], values: Values) -> bytes:
    caches = {_RENAMED.get(name, name): buffer for name, buffer in buffers.items()}
    if (ends := buffers.get("cu_seqlens_k")) is not None:
        shape = (ends.shape[0] - 1,)
        caches["cache_leftpad"] = ends._replace(shape=shape)
        caches["cache_seqlens"] = ends._replace(shape=shape, address=ends.address + ITEMSIZES[ends.dtype])
        for name in _RENAMED.values():
            whole = caches[name]
            caches[name] = whole._replace(shape=(*shape, *whole.shape), strides=(0, *whole.strides))
    return pack(caches, values)
