"""What backward_mma launches: the kernels before, in and after the products, with memory between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import ScratchSpec
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.backward.params import pack_backward
from gpu_actors.kernels.backward.shared import sum_parts, sum_scratch
from gpu_actors.kernels.backward.variant import NAMES, backward_macros, backward_threads, dq_floats, keys_of
from gpu_actors.kernels.family import GREATEST_DIM, KernelFamily
from gpu_actors.kernels.program import Pack, Part, Program, Target, flat_grid
from gpu_actors.kernels.support import bias_turns_refusal
from gpu_actors.kernels.tiles import shared_bytes_of, tile_for, tile_of

__all__ = ["BACKWARD_MMA", "gradient_program", "query_slots"]

_BOUNDS = 3  # that kernels_cu/backward/bounds.cuh keeps of each sequence and KV head


def backward_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The three kernels of ``key``. Raises Unsupported where a grid cannot hold their blocks."""
    pack = functools.partial(pack_backward, problem, True)
    return gradient_program(problem, key, NAMES, backward_threads, pack, dq_floats(key))


def gradient_program(
    problem: AttentionProblem,
    key: DispatchKey,
    names: Sequence[str],
    threads: Callable[[DispatchKey], int],
    pack: Pack,
    floats: int,
    shares: tuple[int, ...] = (),
) -> Program:
    """The kernels of these names: over rows, over tiles of keys (that of ``key``), and over rows again.

    pack: for the kernel of ``key``. floats: of dQ that a slot holds. shares: turns that a slot has, beside one.
    Raises Unsupported where a grid cannot hold the blocks.
    """
    tile, outer = tile_of(key), functools.partial(pack_backward, problem, False)
    row_blocks = -(-problem.seqlen_q // tile.block_m) * problem.heads_q
    key_blocks = -(-problem.seqlen_k // tile.block_n) * problem.heads_kv
    parts = []
    for part in keys_of(key, names):
        blocks, shared_bytes = (key_blocks, shared_bytes_of(key)) if part == key else (row_blocks, 0)
        geometry = flat_grid(blocks * problem.batch, threads(part), shared_bytes, "batch", problem.batch)
        parts.append(Part(part, geometry, pack if part == key else outer))
    # The sums of a float bias' gradient are taken in the gradient itself, which then has to start as zeros.
    summed_in_place = problem.bias is not None and problem.bias[0] == "float32"
    zeroed = frozenset({"dbias"} if summed_in_place else ())
    scratch = _scratch(key, problem, floats, shares) | sum_scratch(problem)
    return Program((*parts, *sum_parts(problem, key)), scratch, zeroed)


def query_slots(problem: AttentionProblem, block_m: int) -> int:
    """How many slots of so many query rows there are: see kernels_cu/backward/params.cuh."""
    if problem.layout == "varlen":
        return (problem.total_q // block_m + problem.batch) * problem.heads_q
    return problem.batch * -(-problem.seqlen_q // block_m) * problem.heads_q


def _scratch(
    key: DispatchKey, problem: AttentionProblem, floats: int, shares: tuple[int, ...]
) -> dict[str, ScratchSpec]:
    """What the kernels hand to each other."""
    tile, slots = tile_of(key), query_slots(problem, tile_of(key).block_m)
    row_tiles = -(-problem.seqlen_q // tile.block_m)
    scratch = {
        "statistics": ScratchSpec((slots, 2, tile.block_m), "float32"),
        "dq_sums": ScratchSpec((slots, floats), "float32", zero=True),
    }
    if problem.dtype == "float16":
        scratch["ds_bounds"] = ScratchSpec((problem.batch, problem.heads_kv, _BOUNDS), "int32", zero=True)
    if problem.sinks:
        scratch["dsinks_parts"] = ScratchSpec((problem.heads_q, problem.batch, row_tiles), "float32")
    if key.deterministic:
        scratch["dq_turns"] = ScratchSpec((slots, *shares), "int32", zero=True)
        scratch["tickets"] = ScratchSpec((1,), "int32", zero=True)
    if problem.dbias:
        if key.bias != "float32":
            scratch["dbias_sums"] = ScratchSpec(problem.bias_shape, "float32", zero=True)
        if key.deterministic:
            key_tiles = -(-problem.seqlen_k // tile.block_n)
            scratch["dbias_turns"] = ScratchSpec((*problem.bias_shape[:2], row_tiles, key_tiles), "int32", zero=True)
    return scratch


def _refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """A block of keys that a tile of keys does not divide, which one has 48 of, and turns that are never taken."""
    size = None if problem.score_mod is None else problem.score_mod.block_size
    if size is None:
        return bias_turns_refusal(problem)
    if problem.deterministic and problem.dbias:
        reason = "blocks take turns at a bias by batch and head, and each head has lists of its own"
        return Unsupported("deterministic", True, reason, False)
    widest = min(max(problem.head_dim, problem.head_dim_v), GREATEST_DIM)  # wider ones are refused anyway
    keys = tile_for(_MAIN, "backward", arch, problem.dtype, widest, problem.mask, False, problem.layout).block_n
    if size[1] % keys == 0:
        return None
    wanted = size[1] * keys
    return Unsupported("block_mask", size, f"{_MAIN} has tiles of {keys} keys here", (size[0], wanted))


_PREPARE, _MAIN, _FINISH = NAMES
BACKWARD_MMA = KernelFamily(
    _MAIN,
    "computes the gradients of every option of dense and varlen batches on tensor cores, with mma.sync",
    backward_program,
    backward_macros,
    backward_threads,
    "backward",
    ("dense", "varlen"),
    ("float16", "float32", "bfloat16"),
    companions=(_PREPARE, _FINISH),
    score_mods=True,
    block_masks=True,
    refuses=_refuses,
    positions=True,
)
