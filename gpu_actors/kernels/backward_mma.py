"""backward_mma: its macros, its parameters, its three kernels, and the scratch memory between them.

The keys of backward_prepare and backward_finish differ from its key in ``kernel`` alone. The parameters are struct
BackwardParams of kernels_cu/backward/params.cuh, which holds the forward's Params.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer, ScratchSpec
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.family import GREATEST_DIM, KernelFamily
from gpu_actors.kernels.macros import Macros, flags, forward_macros
from gpu_actors.kernels.params import (
    Binder,
    Operand,
    ParamsLayout,
    forward_operands,
    forward_scalars,
    launch_values,
    score_packer,
    struct_layout,
)
from gpu_actors.kernels.program import Pack, Part, Program, Target, Values, flat_grid
from gpu_actors.kernels.shared_gradients import part_dtype, sum_parts, sum_scratch
from gpu_actors.kernels.support import ELEMENTS, bias_turns_refusal, capability, order_refusal
from gpu_actors.kernels.tiles import backward_warp_tile, shared_bytes_of, tile_for, tile_of
from gpu_actors.kernels.trials import batch_trials

__all__ = [
    "BACKWARD_MMA",
    "NAMES",
    "backward_macros",
    "backward_packer",
    "backward_threads",
    "dq_floats",
    "gradient_macros",
    "gradient_program",
    "keys_of",
    "query_slots",
]

NAMES = _PREPARE, _MAIN, _FINISH = "backward_prepare", "backward_mma", "backward_finish"

_PREPARE_THREADS = 128
_WARP = 32
_DS_BITS, _DS_BITS_OF_MODS = 14, 7  # of the 15 that float16 has; 7 leave room for derivatives up to 256
_FIRST_VECTOR_REDUCTION = 90  # compute capability from which four floats are added to global memory at once

# The macros of the prepare and finish kernels. Options that these do not read would only make more variants.
_COMMON = ("BLOCK_M", "ELEMENT", "KV_ELEMENT", "OUT_ELEMENT", "VARLEN", "SINKS", "DS_BITS")
_PREPARE_MACROS = (*_COMMON, "HEAD_DIM_V", "COMPUTE_BITS", "TIES_AWAY", "NATURAL_LSE")
_FINISH_MACROS = (*_COMMON, "HEAD_DIM", "WARPS", "BIAS_ELEMENT", "SUMMED_Q")


def keys_of(key: DispatchKey, names: Sequence[str]) -> tuple[DispatchKey, ...]:
    """The keys of all kernels of a launch in order, from the key of any of them."""
    return tuple(dataclasses.replace(key, kernel=name) for name in names)


def gradient_macros(key: DispatchKey, names: Sequence[str], own: Macros) -> Macros:
    """The macros of the kernel that a key names. own: macros of the second and third of the three kernels alone."""
    prepare, main, finish = keys_of(key, names)
    macros = {name: value for name, value in forward_macros(main).items() if name != "LSE"}
    if key.dtype == "float16":  # bf16, and float32 rounded for tensor cores, have float32's range
        macros["DS_BITS"] = _DS_BITS if key.score_mod is None else _DS_BITS_OF_MODS
    scored = key.softcap or key.alibi or key.bias is not None or key.score_mod is not None
    macros |= flags(NATURAL_LSE=scored)
    if key == prepare:
        return {name: macros[name] for name in _PREPARE_MACROS if name in macros} | {"HEAD_DIM": key.head_dim_v}
    if key == finish:
        if key.bias == "bool":
            del macros["BIAS_ELEMENT"]  # a mask has no gradient
        return {name: macros[name] for name in _FINISH_MACROS if name in macros} | {"HEAD_DIM_V": key.head_dim} | own
    return macros | own | {"STAGES": tile_of(main).stages} | ({"DETERMINISTIC": 1} if key.deterministic else {})


def backward_macros(key: DispatchKey) -> Macros:
    width = 4 if capability(key.arch) >= _FIRST_VECTOR_REDUCTION else 1
    return gradient_macros(
        key, NAMES, {"DQ_FLOATS": dq_floats(key), "REDUCE_WIDTH": width, "WARP_TILE": _warp_tile(key)}
    )


def backward_threads(key: DispatchKey) -> int:
    return _PREPARE_THREADS if key.kernel == NAMES[0] else tile_of(keys_of(key, NAMES)[1]).warps * _WARP


def dq_floats(key: DispatchKey) -> int:
    """The floats of dQ in a slot: all that the lanes hold in registers, padding columns included.

    Columns in kernels_cu/mma/shares.cuh divides pairs of blocks of 8 columns in the same way; the kernels assert it.
    """
    tile = tile_of(keys_of(key, NAMES)[1])
    chunk = 16 // ELEMENTS[key.dtype].itemsize
    chunks = -(-key.head_dim // chunk // 2) * 2
    factor = next(factor for factor in (8, 4, 2) if chunks % factor == 0)
    pair = 16 // chunk
    group = max(factor, pair)
    pairs_a_group = group // pair
    rows = _warp_tile(key)
    sharing = tile.warps // (tile.block_m // rows)
    parts = pairs_a_group if sharing % pairs_a_group == 0 else 2 if sharing % 2 == 0 else 1
    groups = -(-chunks // group)
    pairs = -(-groups // (sharing // parts)) * (pairs_a_group // parts)
    return 2 * pairs * 4 * (rows // 16) * tile.warps * _WARP


def _warp_tile(key: DispatchKey) -> int:
    return backward_warp_tile(tile_of(keys_of(key, NAMES)[1]), key.dtype, key.head_dim, key.head_dim_v)


_FORWARD = "forward."
# The scratch memory of the kernels. Its shapes are those of `Program.scratch`.
_SCRATCH = (
    "statistics",
    "dq_sums",
    "dq_turns",
    "dbias_sums",
    "dbias_turns",
    "dsinks_parts",
    "tickets",
    "ds_bounds",
    "ds_exponents",
)


def backward_packer(problem: AttentionProblem, scored: bool, number: int = 0) -> Pack:
    """Return what packs the parameters of one kernel of a gradient. number: its pass, for backward_simple.

    scored: whether to include the parameters of the score modification, unknown to the prepare and finish kernels. The
    buffers are the forward's operands, out and lse as for `forward_packer`; dout like out; dq, dk and dv like q, k and
    v, or the memory of `sum_scratch` for those that sequences share; dbias like bias, without gaps; dsinks like sinks;
    dlse like lse, or missing; the scratch of the program. Only buffers that the problem asks for are read.
    """
    binder = functools.cache(lambda: _binder(problem, number))
    score = score_packer(problem) if scored else None
    summed_in_place = problem.bias is not None and problem.bias[0] == "float32"

    def pack(buffers: Mapping[str, Buffer], values: Values) -> bytes:
        more = launch_values(problem, buffers, values.dropout_seed, _FORWARD)
        more |= {name: buffers[name].address for name in _SCRATCH if name in buffers}
        # The first kernel clears the sums. It is not compiled for their sizes, which depend on the tiles of the others.
        if "dq_sums" in buffers:
            more["slot_floats"] = buffers["dq_sums"].shape[1]
        if "dq_turns" in buffers:
            more["slot_turns"] = math.prod(buffers["dq_turns"].shape[1:])
        if "dbias_turns" in buffers:
            more["dbias_turns_size"] = math.prod(buffers["dbias_turns"].shape)
        if summed_in_place and "dbias" in buffers:
            more["dbias_sums"] = buffers["dbias"].address
        packed = binder().pack(buffers, more)
        if problem.sinks and buffers["dsinks"].dtype != buffers["sinks"].dtype:
            raise InvalidRequest("dsinks", buffers["dsinks"].dtype, f"has the sinks' dtype, {buffers['sinks'].dtype}")
        return packed if score is None else packed + score(buffers, values)

    return pack


def _binder(problem: AttentionProblem, number: int) -> Binder:
    layout = struct_layout("BackwardParams", "common/params.cuh", "backward/params.cuh")
    operands = tuple(_operands(problem, layout))
    scalars = forward_scalars(problem, _FORWARD) | {"batch": problem.batch, "pass": number}
    for operand in operands:
        if operand.name == "dbias":
            # The kernels use the strides of dbias for its sums, too. Neither has gaps.
            scalars["dbias_size"] = math.prod(operand.shape)
    return Binder.of(layout, operands, scalars)


def _operands(problem: AttentionProblem, layout: ParamsLayout) -> Iterator[Operand]:
    shapes = {
        operand.name: operand
        for operand in forward_operands(dataclasses.replace(problem, return_lse=True), layout, _FORWARD)
    }
    yield from shapes.values()
    operand = layout.operand
    varlen = problem.layout == "varlen"
    axes, lse_axes = ("rh.", "hr") if varlen else ("brh.", "bhr")
    yield operand("dout", axes, shapes["out"].shape, problem.out_dtype)
    yield operand("dlse", lse_axes, shapes["lse"].shape, "float32", optional=True)
    for name in ("q", "k", "v"):
        if name in problem.summed:
            yield operand(f"d{name}_parts", axes, shapes[name].shape, part_dtype(problem), field=f"d{name}")
        else:
            yield operand(f"d{name}", axes, shapes[name].shape, *shapes[name].dtypes)
    if problem.dbias:
        yield operand("dbias", "bhr.", shapes["bias"].shape, *shapes["bias"].dtypes)
    if problem.sinks:
        yield operand("dsinks", ".", shapes["sinks"].shape, *shapes["sinks"].dtypes)


_BOUNDS = 4  # words that kernels_cu/backward/bounds.cuh keeps for each sequence and KV head


def backward_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    pack = backward_packer(problem, True)
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
    """The program of the kernels of these names: over rows, over tiles of keys (``key``'s), and over rows again.

    pack: for the kernel of ``key``. floats: floats of dQ in a slot. shares: the shape of a slot's turns, () for one.
    """
    tile, outer = tile_of(key), backward_packer(problem, False)
    row_blocks = -(-problem.seqlen_q // tile.block_m) * problem.heads_q
    key_blocks = -(-problem.seqlen_k // tile.block_n) * problem.heads_kv
    parts = []
    for part in keys_of(key, names):
        blocks, shared_bytes = (key_blocks, shared_bytes_of(key)) if part == key else (row_blocks, 0)
        geometry = flat_grid(blocks * problem.batch, threads(part), shared_bytes, "batch", problem.batch)
        parts.append(Part(part, geometry, pack if part == key else outer))
    scratch = _scratch(key, problem, floats, shares) | sum_scratch(problem)
    return Program((*parts, *sum_parts(problem, key)), scratch)


def query_slots(problem: AttentionProblem, block_m: int) -> int:
    """The number of slots of ``block_m`` query rows: see kernels_cu/backward/params.cuh."""
    if problem.layout == "varlen":
        return (problem.total_q // block_m + problem.batch) * problem.heads_q
    return problem.batch * -(-problem.seqlen_q // block_m) * problem.heads_q


def _scratch(
    key: DispatchKey, problem: AttentionProblem, floats: int, shares: tuple[int, ...]
) -> dict[str, ScratchSpec]:
    """The scratch memory that the kernels share. The first one clears the sums that the others add to."""
    tile, slots = tile_of(key), query_slots(problem, tile_of(key).block_m)
    row_tiles = -(-problem.seqlen_q // tile.block_m)
    scratch = {
        "statistics": ScratchSpec((slots, 2, tile.block_m), "float32"),
        "dq_sums": ScratchSpec((slots, floats), "float32"),
    }
    if problem.dtype == "float16":
        pairs = (problem.batch, problem.heads_kv)
        scratch["ds_bounds"] = ScratchSpec((*pairs, _BOUNDS), "int32", zero=True, rearmed=True)
        scratch["ds_exponents"] = ScratchSpec(pairs, "int32")
    if problem.sinks:
        scratch["dsinks_parts"] = ScratchSpec((problem.heads_q, problem.batch, row_tiles), "float32")
    if key.deterministic:
        scratch["dq_turns"] = ScratchSpec((slots, *shares), "int32")
        scratch["tickets"] = ScratchSpec((1,), "int32")
    if problem.dbias:
        if key.bias != "float32":
            scratch["dbias_sums"] = ScratchSpec(problem.bias_shape, "float32")
        if key.deterministic:
            key_tiles = -(-problem.seqlen_k // tile.block_n)
            scratch["dbias_turns"] = ScratchSpec((*problem.bias_shape[:2], row_tiles, key_tiles), "int32")
    return scratch


def _refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    """Why blocks of keys are not whole tiles (one tile has 48 keys) or turns at a bias are never taken, or None."""
    size = None if problem.score_mod is None else problem.score_mod.block_size
    if size is None:
        return bias_turns_refusal(problem)
    if problem.deterministic and problem.dbias:
        reason = "blocks take turns at a bias by batch and head, and each head has lists of its own"
        return order_refusal(problem, reason, "bias", problem.bias_shape, None)
    widest = min(max(problem.head_dim, problem.head_dim_v), GREATEST_DIM)  # wider heads are refused anyway
    keys = tile_for(_MAIN, "backward", arch, problem.dtype, widest, problem.mask, False, problem.layout).block_n
    if size[1] % keys == 0:
        return None
    wanted = size[1] * keys
    return Unsupported("block_mask", size, f"{_MAIN} has tiles of {keys} keys here", (size[0], wanted))


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
    invariant=True,
    positions=True,
    trials=lambda key: batch_trials(key, tile_of(key)),
)
