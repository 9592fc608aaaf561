"""The three kernels of a backward request: their macros, grids, and the scratch memory between them.

backward_prepare and backward_finish belong to backward_mma: they share its tile and its parameters, and their keys are
its key under their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpu_actors.devices.interface import LaunchGeometry, ScratchSpec
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.macros import Macros, forward_macros
from gpu_actors.kernels.support import ELEMENTS, capability
from gpu_actors.kernels.tiles import num_kv_tiles, num_q_tiles, shared_bytes_of, tile_of
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = [
    "FINISH",
    "MAIN",
    "NAMES",
    "PREPARE",
    "backward_macros",
    "backward_threads",
    "dq_floats",
    "gradient_geometry",
    "gradient_macros",
    "gradient_scratch",
    "keys_of",
    "summed_in_place",
]

NAMES = PREPARE, MAIN, FINISH = "backward_prepare", "backward_mma", "backward_finish"

_PREPARE_THREADS = 128
_WARP = 32
_MAX_BLOCKS = (1 << 31) - 1
_FIRST_VECTOR_REDUCTION = 90  # compute capability from which four floats are added to global memory at once

# The macros of the outer kernels. Options that they do not read would only make more variants.
_COMMON = ("BLOCK_M", "ELEMENT", "KV_ELEMENT", "OUT_ELEMENT", "VARLEN", "SINKS")
_PREPARE = (*_COMMON, "HEAD_DIM_V", "COMPUTE_BITS", "TIES_AWAY")
_FINISH = (*_COMMON, "HEAD_DIM", "WARPS", "BIAS_ELEMENT")


def keys_of(key: DispatchKey, names: Sequence[str]) -> tuple[DispatchKey, ...]:
    """The keys of the kernels of these names that are launched for the key of any of them, in order."""
    return tuple(dataclasses.replace(key, kernel=name) for name in names)


def gradient_macros(key: DispatchKey, names: Sequence[str], own: Macros) -> Macros:
    """The macros of the kernel before, in or after the products that a key names. own: of those but the first."""
    prepare, main, finish = keys_of(key, names)
    macros = {name: value for name, value in forward_macros(main).items() if name != "LSE"}
    if key == prepare:
        return {name: macros[name] for name in _PREPARE if name in macros} | {"HEAD_DIM": key.head_dim_v}
    if key == finish:
        return {name: macros[name] for name in _FINISH if name in macros} | {"HEAD_DIM_V": key.head_dim} | own
    return macros | own | {"STAGES": tile_of(main).stages} | ({"DETERMINISTIC": 1} if key.deterministic else {})


def backward_macros(key: DispatchKey) -> Macros:
    """The macros of kernels_cu/backward/params.cuh, for any of the three kernels."""
    width = 4 if capability(key.arch) >= _FIRST_VECTOR_REDUCTION else 1
    return gradient_macros(key, NAMES, {"DQ_FLOATS": dq_floats(key), "REDUCE_WIDTH": width})


def backward_threads(key: DispatchKey) -> int:
    """The threads of a block of one of the three kernels."""
    return _PREPARE_THREADS if key.kernel == PREPARE else tile_of(keys_of(key, NAMES)[1]).warps * _WARP


def gradient_geometry(key: DispatchKey, main: DispatchKey, problem: AttentionProblem, threads: int) -> LaunchGeometry:
    """The launch of one of three kernels: ``main``, over tiles of keys, or one of the two around it, over rows.

    Raises Unsupported where a grid cannot hold its blocks.
    """
    tile = tile_of(main)
    if key == main:
        blocks, shared_bytes = num_kv_tiles(problem.seqlen_k, tile.block_n) * problem.heads_kv, shared_bytes_of(main)
    else:
        blocks, shared_bytes = num_q_tiles(problem.seqlen_q, tile.block_m) * problem.heads_q, 0
    if blocks * problem.batch > _MAX_BLOCKS:
        reason = f"a sequence makes {blocks} blocks of {key.kernel}, and a grid holds {_MAX_BLOCKS}"
        raise Unsupported("batch", problem.batch, reason, max(1, _MAX_BLOCKS // blocks))
    return LaunchGeometry((blocks * problem.batch, 1, 1), (threads, 1, 1), shared_bytes)


def gradient_scratch(
    key: DispatchKey, problem: AttentionProblem, floats: int, shares: tuple[int, ...] = ()
) -> dict[str, ScratchSpec]:
    """What the kernels hand to each other; see kernels_cu/backward/params.cuh for the layout of slots.

    key: of the kernel of the products. floats: of dQ that a slot holds. shares: turns that a slot has, beside one. The
    sums of a float bias' gradient are taken in the gradient itself, which then has to start as zeros.
    """
    tile = tile_of(key)
    row_tiles = num_q_tiles(problem.seqlen_q, tile.block_m)
    tiles = problem.batch * row_tiles
    if problem.layout == "varlen":
        tiles = problem.total_q // tile.block_m + problem.batch
    slots = tiles * problem.heads_q
    scratch = {
        "statistics": ScratchSpec((slots, 2, tile.block_m), "float32"),
        "dq_sums": ScratchSpec((slots, floats), "float32", zero=True),
    }
    if problem.sinks:
        scratch["dsinks_parts"] = ScratchSpec((problem.heads_q, problem.batch, row_tiles), "float32")
    if key.deterministic:
        scratch["dq_turns"] = ScratchSpec((slots, *shares), "int32", zero=True)
        scratch["tickets"] = ScratchSpec((1,), "int32", zero=True)
    if problem.bias is not None:
        dtype, one_batch, one_head = problem.bias
        heads = (1 if one_batch else problem.batch, 1 if one_head else problem.heads_q)
        if dtype != "float32":
            scratch["dbias_sums"] = ScratchSpec((*heads, problem.seqlen_q, problem.seqlen_k), "float32", zero=True)
        if key.deterministic:
            key_tiles = num_kv_tiles(problem.seqlen_k, tile.block_n)
            scratch["dbias_turns"] = ScratchSpec((*heads, row_tiles, key_tiles), "int32", zero=True)
    return scratch


def summed_in_place(problem: AttentionProblem) -> frozenset[str]:
    """The gradients that kernels add to, which start as zeros."""
    return frozenset({"dbias"} if problem.bias is not None and problem.bias[0] == "float32" else ())


def dq_floats(key: DispatchKey) -> int:
    """Floats of dQ that a slot holds: what the lanes have in registers, columns that do not exist included.

    As Columns in kernels_cu/mma/shares.cuh deals out pairs of blocks of 8 columns; the kernels assert that it agrees.
    """
    tile = tile_of(keys_of(key, NAMES)[1])
    chunk = 16 // ELEMENTS[key.dtype].itemsize
    chunks = -(-key.head_dim // chunk // 2) * 2
    factor = next(factor for factor in (8, 4, 2) if chunks % factor == 0)
    pair = 16 // chunk
    group = max(factor, pair)
    pairs_a_group = group // pair
    sharing = tile.warps // (tile.block_m // 16)
    parts = pairs_a_group if sharing % pairs_a_group == 0 else 2 if sharing % 2 == 0 else 1
    groups = -(-chunks // group)
    pairs = -(-groups // (sharing // parts)) * (pairs_a_group // parts)
    return 2 * pairs * 4 * tile.warps * _WARP
