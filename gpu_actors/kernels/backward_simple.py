"""How backward_simple is compiled and launched: one kernel in up to three passes."""

from __future__ import annotations

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import ScratchSpec
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.backward_mma import backward_packer, query_slots
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.macros import Macros, forward_macros
from gpu_actors.kernels.program import Part, Program, Target, flat_grid
from gpu_actors.kernels.shared_gradients import SUM, SUM_THREADS, sum_macros, sum_parts, sum_scratch
from gpu_actors.kernels.support import MAX_HEAD_DIM
from gpu_actors.kernels.tiles import shared_bytes_of, tile_for, tile_of
from gpu_actors.kernels.trials import batch_trials

__all__ = ["BACKWARD_SIMPLE"]

_WARP = 32


def simple_backward_macros(key: DispatchKey) -> Macros:
    """The forward macros without LSE, since gradients always read the LSE. backward_sum has its own macros."""
    if key.kernel == SUM:
        return sum_macros(key)
    return {name: value for name, value in forward_macros(key).items() if name != "LSE"}


def simple_backward_threads(key: DispatchKey) -> int:
    if key.kernel == SUM:
        return SUM_THREADS
    return tile_of(key).warps * _WARP


def simple_backward_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    """The passes over queries, over keys, and, if these have gradients, over sinks and tiles of the bias."""
    tile, threads, shared_bytes = tile_of(key), simple_backward_threads(key), shared_bytes_of(key)
    row_tiles = -(-problem.seqlen_q // tile.block_m)
    queries = row_tiles * problem.heads_q * problem.batch
    keys = -(-problem.seqlen_k // tile.block_m) * problem.heads_kv * problem.batch
    options = problem.heads_q if problem.sinks else 0
    if problem.dbias:
        batch, heads, rows, _ = problem.bias_shape
        options += batch * heads * -(-rows // tile.block_m)
    parts = []
    for number, blocks in enumerate((queries, keys, options) if options else (queries, keys)):
        geometry = flat_grid(blocks, threads, shared_bytes, "batch", problem.batch)
        parts.append(Part(key, geometry, backward_packer(problem, True, number)))
    dtype = "float64" if key.dtype == "float64" else "float32"
    slots = query_slots(problem, tile.block_m)
    scratch = {"statistics": ScratchSpec((slots, tile.block_m), dtype)} | sum_scratch(problem)
    return Program((*parts, *sum_parts(problem, key)), scratch)


def _refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """Refuse rows that do not fit into shared memory: over 256 columns of float64 where a block has under 163 KiB."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:  # refused on any architecture
        return None
    try:
        tile_for("backward_simple", "backward", arch, problem.dtype, widest, problem.mask)
    except Unsupported:
        reason = f"tiles of rows of {problem.dtype} do not fit into shared memory on {arch}"
        return Unsupported("head_dim", widest, reason, 256)
    return None


BACKWARD_SIMPLE = KernelFamily(
    "backward_simple",
    "computes the gradients of every option of dense and varlen batches on CUDA cores",
    simple_backward_program,
    simple_backward_macros,
    simple_backward_threads,
    "backward",
    ("dense", "varlen"),
    tensor_cores=False,
    companions=(SUM,),  # backward_mma has it, too: this family takes the same problems, and float64
    refuses=_refuses,
    score_mods=True,
    invariant=True,
    positions=True,
    trials=lambda key: batch_trials(key, tile_of(key)),
)
