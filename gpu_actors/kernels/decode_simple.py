"""decode_simple, the kernel of every request over caches that tensor cores do not take, and its merge.

    one split      decode_simple
    more splits    decode_simple -> decode_simple_combine

Every item is cut into the same number of pieces, whether lengths lie on the host or on the device. No further kernel
and no code on the host splits the work. kernels_cu/decode/decode_simple.cu says what a block does.
"""

from __future__ import annotations

import dataclasses

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import LaunchGeometry, ScratchSpec
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.decode_mma import UNKNOWN_MULTIPROCESSORS, cache_tables, split_macros, split_packer
from gpu_actors.kernels.decode_tiles import items_of, packed_rows
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.macros import Macros, bias_macros, compute_macros, flags, score_macros, tile_macros
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.program import Part, Program, Target, flat_grid
from gpu_actors.kernels.support import ELEMENTS, MAX_HEAD_DIM, capability
from gpu_actors.kernels.tiles import Tile, shared_mem_bytes
from gpu_actors.kernels.trials import cache_trials

__all__ = ["DECODE_SIMPLE", "SIMPLE", "SIMPLE_COMBINE"]

SIMPLE, SIMPLE_COMBINE = "decode_simple", "decode_simple_combine"

_ROW_TILES = (4, 8, 16, 32)
_KEYS = (32, 16)  # of a tile; the first that fits counts
_COMBINE_WARPS = 4
_WARP = 32
_LEAST_KEYS = 128  # of a piece of the longest sequence that a table or cache can hold, if no splits are pinned
_BLOCKS = 2  # per multiprocessor, if no splits are pinned


def simple_row_tile(problem: AttentionProblem) -> int:
    """The packed rows of a block: 8 if there are no more, else as many as registers can sum."""
    widest, double = max(problem.head_dim, problem.head_dim_v), problem.dtype == "float64"
    if double and widest > MAX_HEAD_DIM:
        return 4  # latent cache: 8 rows do not fit into the shared memory of every architecture
    if packed_rows(problem) <= 8 or (double and widest > 256):
        return 8
    return 32 if widest <= 128 and not double else 16


def simple_tile(key: DispatchKey) -> tuple[Tile, int]:
    """The tile of a key, and the shared memory of its block in bytes."""
    warps = 2 if key.row_tile == 4 else 4
    for keys in _KEYS:
        tile = Tile(key.row_tile, keys, 1, warps)
        shared = shared_mem_bytes(SIMPLE, tile, key.dtype, key.head_dim, key.head_dim_v)
        if shared <= shared_mem_limit(capability(key.arch)):
            return tile, shared
    reason = f"rows of {key.dtype} do not fit into shared memory on {key.arch}"
    raise Unsupported("head_dim", key.head_dim, reason, MAX_HEAD_DIM)


def simple_macros(key: DispatchKey) -> Macros:
    """The macros of the kernel or of its merge. Options that the merge does not read keep one value."""
    tile, shared = simple_tile(key)
    work = split_macros(key) | {"CACHE_ALIGNMENT": ELEMENTS[key.kv_dtype].itemsize}
    if key.kernel == SIMPLE_COMBINE:
        merged = dataclasses.replace(key, head_dim=key.head_dim_v, kv_dtype=key.dtype)
        sizes = tile_macros(merged, tile._replace(warps=_COMBINE_WARPS), 0)
        own = {"CACHE_ALIGNMENT": ELEMENTS[key.dtype].itemsize}
        return sizes | work | own | flags(SINKS=key.sinks, LSE=key.lse)
    options = flags(PAGED=key.paged, SINGLE=key.page_size == 1, TREE=key.tree_mask, LATENT=key.latent)
    options |= score_macros(key) | bias_macros(key) | compute_macros(key)
    return tile_macros(key, tile, shared) | work | options


def simple_threads(key: DispatchKey) -> int:
    return (_COMBINE_WARPS if key.kernel == SIMPLE_COMBINE else simple_tile(key)[0].warps) * _WARP


def splits_of(problem: AttentionProblem, row_tile: int, multiprocessors: int) -> int:
    """The most pieces of an item: those that the request pins, or enough for all multiprocessors."""
    if problem.num_splits:
        return problem.num_splits
    wanted = -(-_BLOCKS * multiprocessors // max(1, items_of(problem, row_tile)))
    return max(1, min(wanted, problem.seqlen_k // _LEAST_KEYS))


def simple_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    splits = splits_of(problem, key.row_tile, target.multiprocessors or UNKNOWN_MULTIPROCESSORS)
    items = items_of(problem, key.row_tile)
    pack = split_packer(problem, key, splits)
    parts = [
        Part(key, flat_grid(items * splits, simple_threads(key), simple_tile(key)[1], "batch", problem.batch), pack)
    ]
    scratch = cache_tables(problem, alignment=ELEMENTS[problem.kv_dtype].itemsize)
    if splits > 1:
        merge = dataclasses.replace(key, kernel=SIMPLE_COMBINE)
        parts.append(Part(merge, LaunchGeometry((items, 1, 1), (simple_threads(merge), 1, 1), 0), pack))
        rows, real = (items * splits, key.row_tile), "float64" if problem.dtype == "float64" else "float32"
        scratch["partial_out"] = ScratchSpec((*rows, problem.head_dim_v), real)
        scratch["partial_sums"] = ScratchSpec((*rows, 2), real)
    return Program(tuple(parts), scratch)


DECODE_SIMPLE = KernelFamily(
    SIMPLE,
    "computes every option of new rows over pages, caches and pointers on CUDA cores, splitting the keys",
    simple_program,
    simple_macros,
    simple_threads,
    "forward",
    ("cache", "pointers", "paged"),
    tensor_cores=False,
    companions=(SIMPLE_COMBINE,),
    row_tile=simple_row_tile,
    row_tiles=_ROW_TILES,
    invariant=True,
    positions=True,
    lacks=("dropout_p",),
    trials=lambda key: cache_trials(key, simple_tile(key)[0], simple_row_tile),
)
