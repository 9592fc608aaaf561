"""decode_mma: the problems that it takes, the macros, grids and parameters of its kernels, and their launch.

    split on the host         decode_mma -> decode_combine                    lengths are NumPy arrays
    split on the device       decode_plan -> decode_mma -> decode_combine     else, or with positions or cache_leftpad

The keys of one launch differ in ``kernel`` alone. kernels_cu/decode/decode_mma.cu says how rows are packed and split.
All three kernels take struct DecodeParams of kernels_cu/decode/params.cuh. Grids and scratch memory depend on shapes
alone, not on lengths, so that a captured launch serves every step of a sequence. If a single split is pinned, nothing
is combined.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.devices.interface import Buffer, LaunchGeometry, ScratchSpec
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.decode_schedule import ITEM_UNITS, min_units, splitter
from gpu_actors.kernels.decode_tiles import (
    ROW_TILES,
    decode_tile,
    items_of,
    row_tile_of,
    row_tiles,
    value_warps,
)
from gpu_actors.kernels.family import GREATEST_DIM, KernelFamily
from gpu_actors.kernels.macros import Macros, bias_macros, flags, mask_macros, score_macros, tile_macros
from gpu_actors.kernels.params import (
    ITEMSIZES,
    Binder,
    Operand,
    ParamsLayout,
    divider,
    forward_operands,
    forward_scalars,
    launch_values,
    struct_layout,
)
from gpu_actors.kernels.program import Pack, Part, Program, Split, Target, Values
from gpu_actors.kernels.support import (
    ELEMENTS,
    FIRST_FP8_CAPABILITY,
    MAX_HEAD_DIM,
    capability,
    example_problem,
    scale_refusal,
)
from gpu_actors.kernels.trials import cache_trials

__all__ = [
    "CHUNK",
    "COMBINE",
    "DECODE",
    "DECODE_MMA",
    "PLAN",
    "UNKNOWN_MULTIPROCESSORS",
    "cache_tables",
    "decode_keys",
    "decode_layout",
    "decode_packer",
    "decode_refuses",
    "pack_pointers",
    "query_macros",
    "ranges_of",
    "rows_refusal",
    "split_macros",
    "split_packer",
    "split_program",
    "step_geometry",
    "usual_decode_problems",
]

PLAN, DECODE, COMBINE = "decode_plan", "decode_mma", "decode_combine"

_MAX_ITEMS = (1 << 31) - 1
_WARP = 32
_PLAN_WARPS = 8
_COMBINE_WARPS = 4
_COMBINE_ROWS = 4


def decode_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    if ELEMENTS[problem.dtype].itemsize > 2:
        reason = "tensor cores multiply 16-bit queries here, or 8-bit ones over a cache of their dtype"
        return Unsupported("dtype", problem.dtype, reason, "bfloat16")
    shared = 2 * 8 * 16 // ELEMENTS[problem.kv_dtype].itemsize  # columns of whole chunks of two warps
    if problem.latent and problem.head_dim > GREATEST_DIM and problem.head_dim_v % shared:
        reason = f"two warps share the values of a latent cache of {problem.kv_dtype} by multiples of {shared} columns"
        return Unsupported("head_dim_v", problem.head_dim_v, reason, -(-problem.head_dim_v // shared) * shared)
    if items_of(problem, row_tile_of(problem)) * max(1, problem.num_splits) > _MAX_ITEMS:
        return Unsupported("batch", problem.batch, f"decode_mma counts {_MAX_ITEMS} pieces of work at most")
    return scale_refusal(problem)


def decode_keys(problem: AttentionProblem, key: DispatchKey, planned: bool) -> tuple[DispatchKey, ...]:
    """The keys of a launch in order. key: the attending kernel's. planned: whether the host splits the work."""
    names = [key.kernel] if planned else [PLAN, key.kernel]
    if problem.num_splits != 1:
        names.append(COMBINE)
    return tuple(key if name == key.kernel else dataclasses.replace(key, kernel=name) for name in names)


def ranges_of(key: DispatchKey, multiprocessors: int) -> int:
    """The ranges that the work is split into: as many as there are blocks that run at once."""
    return max(1, multiprocessors) * decode_tile(key).blocks


def step_geometry(key: DispatchKey, problem: AttentionProblem, ranges: int) -> LaunchGeometry:
    """The grid of one kernel of a launch. It does not depend on lengths, so that a graph can hold it."""
    if key.kernel == PLAN:
        return LaunchGeometry((1, 1, 1), (decode_threads(key), 1, 1), 0)
    if key.kernel == DECODE:
        return LaunchGeometry((ranges, 1, 1), (decode_threads(key), 1, 1), decode_tile(key).shared_bytes)
    merged = items_of(problem, key.row_tile) if problem.num_splits else ranges - 1
    return LaunchGeometry((merged, key.row_tile // _COMBINE_ROWS, 1), (decode_threads(key), 1, 1), 0)


def usual_decode_problems(arch: str) -> list[AttentionProblem]:
    """Problems worth compiling ahead: over pages and pointers, with 1 or 8 new rows of up to 8 heads per KV head."""
    kv_dtypes = ["bfloat16"]
    if capability(arch) >= FIRST_FP8_CAPABILITY:
        kv_dtypes.append("float8_e4m3fn")
    problems = [_usual(kv_dtype, 128, 8, rows) for kv_dtype in kv_dtypes for rows in (1, 8)]
    problems += [_usual("bfloat16", dim, 8, 1) for dim in (64, 80, 256)]
    decode = dataclasses.replace(problems[0], layout="pointers", causal=False, page_size=0)
    return [*problems, decode]


def _usual(kv_dtype: str, head_dim: int, ratio: int, rows: int) -> AttentionProblem:
    sizes = {"seqlen_q": rows, "total_q": rows, "heads_q": ratio, "page_size": 64}
    cache: dict[str, Any] = {"layout": "paged", "kv_dtype": kv_dtype, "descales": ELEMENTS[kv_dtype].fp8}
    return example_problem("bfloat16", head_dim, causal=True, **cache, **sizes)


def decode_macros(key: DispatchKey) -> Macros:
    """The macros of a kernel of the three. Options that it does not read keep one value, to make no more variants."""
    tile, _, shared_bytes = decode_tile(key)
    work = split_macros(key)
    if key.kernel == DECODE:
        options = flags(PAGED=key.paged, SINGLE=key.page_size == 1, TREE=key.tree_mask, LATENT=key.latent)
        options |= score_macros(key) | bias_macros(key) | _sharing(key)
        return tile_macros(key, tile, shared_bytes) | query_macros(key) | work | options | {"STAGES": tile.stages}
    unseen: dict[str, Any] = dict.fromkeys(("dtype", "kv_dtype", "out_dtype"), "float16")
    unseen |= dict.fromkeys(("head_dim", "head_dim_v"), 64)
    if key.kernel == COMBINE:
        unseen |= {"head_dim_v": key.head_dim_v, "out_dtype": key.out_dtype}
    macros = tile_macros(dataclasses.replace(key, **unseen), tile, 0) | work
    if key.kernel == PLAN:
        return macros | {"WARPS": _PLAN_WARPS}
    return macros | flags(SINKS=key.sinks, LSE=key.lse) | {"WARPS": _COMBINE_WARPS}


def query_macros(key: DispatchKey) -> Macros:
    """The macros that widen 8-bit queries to halves, as keys and values are: exactly, and in the fewest steps."""
    element = ELEMENTS[key.dtype]
    return {"Q_ELEMENT": element.c_type, "ELEMENT": ELEMENTS["float16"].c_type} if element.fp8 else {}


def _sharing(key: DispatchKey) -> Macros:
    return {} if value_warps(key) == 1 else {"VALUE_WARPS": value_warps(key)}


def split_macros(key: DispatchKey) -> Macros:
    """The macros of every kernel that counts tiles of keys."""
    work = flags(VARLEN=key.varlen_q, POINTERS=key.layout == "pointers", POSITIONS=key.positions)
    work |= flags(OWN_LAYOUTS=key.own_layouts, BATCH_IDX=key.cache_batch_idx, LEFTPAD=key.cache_leftpad)
    return work | mask_macros(key)


def decode_threads(key: DispatchKey) -> int:
    return {PLAN: _PLAN_WARPS, COMBINE: _COMBINE_WARPS}.get(key.kernel, decode_tile(key).tile.warps) * _WARP


_ATTENTION = "attention."
_SCRATCH = ("plan", "sums", "partial_out", "partial_sums", "cache_layouts")
CHUNK = 16
"""The bytes that a cp.async copies. Its addresses are multiples of it."""


decode_layout = functools.partial(struct_layout, "DecodeParams", "common/params.cuh", "decode/params.cuh")


def decode_packer(problem: AttentionProblem, key: DispatchKey, ranges: int) -> Pack:
    """Return what packs the parameters of a launch over a cache. ranges: the ranges that the work is split into.

    The buffers are those of `_operands`, by name, with any outer strides, and the scratch memory of the launch. With
    "pointers", all caches have the strides of k_cache.0 and v_cache.0. Rows of caches must begin at multiples of 16
    bytes.
    """
    ranged = {"ranges": ranges, "min_units": min_units(key)}
    return _packer(problem, lambda: _binder(problem, key.row_tile, problem.num_splits, ranged), CHUNK)


def split_packer(problem: AttentionProblem, key: DispatchKey, splits: int) -> Pack:
    """Return what packs the parameters of decode_simple and its merge. Both cut every item into equal pieces.

    splits: the most pieces of an item. The buffers are as for `decode_packer`, except that partial_out and partial_sums
    are float64 if q is, and that rows of caches may begin at multiples of the element size.
    """
    return _packer(problem, lambda: _binder(problem, key.row_tile, splits, {}), ITEMSIZES[problem.kv_dtype])


def _packer(problem: AttentionProblem, make: Callable[[], Binder], alignment: int) -> Pack:
    binder = functools.cache(make)

    def pack(buffers: Mapping[str, Buffer], values: Values) -> bytes:
        scratch = {name: buffers[name].address for name in _SCRATCH if name in buffers}
        packed = binder().pack(buffers, launch_values(problem, buffers, prefix=_ATTENTION) | scratch)
        if problem.layout != "pointers":
            for name in ("k_cache",) if problem.latent else ("k_cache", "v_cache"):
                _check_alignment(name, buffers[name], (0, 1, 2), alignment)
        return packed

    return pack


def pack_pointers(problem: AttentionProblem, side: str, alignment: int, buffers: Mapping[str, Buffer]) -> bytes:
    """The addresses of a batch's cache arrays, uint64 (batch,). side: "k_cache" or "v_cache".

    alignment: rows begin at multiples of this many bytes.
    """
    first = buffers[f"{side}.0"]
    addresses = []
    for index in range(problem.batch):
        name = f"{side}.{index}"
        buffer = buffers[name]
        alike = (buffer.shape, buffer.strides, buffer.dtype) == (first.shape, first.strides, first.dtype)
        if not (alike or problem.own_layouts):
            raise InvalidRequest(name, f"{buffer.shape}, {buffer.strides}", f"must be laid out as {side}.0")
        _check_alignment(name, buffer, (0, 1), alignment)
        addresses.append(buffer.address)
    return struct.pack(f"<{len(addresses)}Q", *addresses)


def pack_cache_layouts(problem: AttentionProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The strides and capacities of a batch's cache arrays: CacheLayout of kernels_cu/decode/params.cuh, (batch,)."""
    packed = []
    for index in range(problem.batch):
        k, v = (buffers[f"{side}_cache.{index}"] for side in "kv")
        for name, one, dim in (("k", k, problem.head_dim), ("v", v, problem.head_dim_v)):
            wanted = (problem.heads_kv, k.shape[1], dim)
            if one.shape != wanted or one.dtype != problem.kv_dtype or (dim > 1 and one.strides[2] != 1):
                given = f"{one.dtype}{list(one.shape)}, strides {one.strides}"
                reason = f"must be {problem.kv_dtype} of shape {wanted}, the last axis contiguous"
                raise InvalidRequest(f"{name}_cache.{index}", given, reason)
        packed.append(struct.pack("<5q", *k.strides[:2], *v.strides[:2], k.shape[1]))
    return b"".join(packed)


def _binder(problem: AttentionProblem, row_tile: int, splits: int, ranged: Mapping[str, int]) -> Binder:
    layout = decode_layout()
    scalars = forward_scalars(problem, _ATTENTION) | {
        **ranged,
        "batch": problem.batch,
        "capacity": problem.seqlen_k,
        "row_tiles": row_tiles(problem, row_tile),
        "splits": splits,
        "item_units": ITEM_UNITS,
    }
    if problem.cache_batch_idx:
        scalars["cache_sequences"] = problem.total_k // problem.seqlen_k
    if problem.page_size:
        factor, shift = divider(problem.page_size)
        scalars |= {"page_size": problem.page_size, "page_factor": factor, "page_shift": shift}
    return Binder.of(layout, _operands(problem, layout), scalars)


def _operands(p: AttentionProblem, layout: ParamsLayout) -> Iterator[Operand]:
    yield from forward_operands(p, layout, _ATTENTION)
    operand = layout.operand
    yield operand("cache_seqlens", ".", (p.batch,), "int32", field="seq_lens")
    for name in ("cache_batch_idx", "cache_leftpad"):
        if getattr(p, name):
            yield operand(name, ".", (p.batch,), "int32")
    if p.tree_mask:
        shape = (p.total_q,) if p.varlen_q else (p.batch, p.seqlen_q)
        yield operand("tree_mask", "r" if p.varlen_q else "br", shape, "uint64")
    if p.layout == "paged":
        yield operand("block_table", ("table_stride", "."), (p.batch, p.seqlen_k // p.page_size), "int32")
    if p.layout == "pointers":
        for side, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
            axes = (f"{_ATTENTION}{side}_strides.head", f"{_ATTENTION}{side}_strides.row", ".")
            if not p.own_layouts:
                yield operand(f"{side}_cache.0", axes, (p.heads_kv, p.seqlen_k, dim), p.kv_dtype, field="")
            yield operand(f"{side}_ptrs", ".", (p.batch,), "uint64")


def _check_alignment(name: str, cache: Buffer, axes: tuple[int, ...], alignment: int) -> None:
    strides = [cache.strides[axis] * ITEMSIZES[cache.dtype] for axis in axes if cache.shape[axis] > 1]
    reason = rows_refusal(cache.address, strides, alignment)
    if reason is not None:
        raise InvalidRequest(name, f"address {cache.address:#x}, strides {cache.strides}", reason)


def rows_refusal(address: int, strides: Sequence[int], alignment: int = CHUNK) -> str | None:
    """Why a kernel cannot follow the rows of a cache, or None.

    strides: in bytes, of the axes of extent above 1. alignment: rows must begin at multiples of this many bytes.
    """
    if address % alignment or any(stride % alignment for stride in strides):
        return f"rows of a cache must begin at multiples of {alignment} bytes"
    if not all(0 <= stride < alignment << 31 for stride in strides):
        return f"strides of a cache must be from 0 to {alignment << 31} bytes"
    return None


UNKNOWN_MULTIPROCESSORS = 4
"""The multiprocessors assumed for an emulated device: a few ranges show every way of splitting."""


def decode_program(problem: AttentionProblem, key: DispatchKey, target: Target) -> Program:
    ranges = ranges_of(key, target.multiprocessors or UNKNOWN_MULTIPROCESSORS)
    pack = decode_packer(problem, key, ranges)
    planned = target.lengths_on_host and not (problem.positions or problem.cache_leftpad)  # the host knows neither
    return split_program(problem, Part(key, step_geometry(key, problem, ranges), pack), pack, ranges, planned)


def split_program(problem: AttentionProblem, main: Part, pack: Pack, ranges: int, lengths_on_host: bool) -> Program:
    """The program of a kernel that attends ranges, with the kernels that split the work before and merge pieces after.

    main: that kernel, with a grid of ``ranges`` blocks. pack: for the other kernels.
    """
    keys = decode_keys(problem, main.key, lengths_on_host)
    return Program(
        tuple(main if part == main.key else Part(part, step_geometry(part, problem, ranges), pack) for part in keys),
        _scratch(problem, main.key, keys, ranges),
        split=_split(problem, main.key, ranges) if lengths_on_host else None,
    )


def _split(problem: AttentionProblem, key: DispatchKey, ranges: int) -> Split:
    """Return what makes the ranges, int32 (ranges + 1, 4), from lengths in NumPy arrays."""
    split = splitter(problem, key, ranges)

    def plan(inputs: Mapping[str, Any]) -> dict[str, Any]:
        ends = inputs.get("cu_seqlens_q")
        return {"plan": split(inputs["cache_seqlens"], None if ends is None else np.diff(ends)).positions}

    return plan


def cache_tables(problem: AttentionProblem, alignment: int = CHUNK) -> dict[str, ScratchSpec]:
    """The tables of addresses and layouts of the arrays of "pointers". alignment: as for `pack_pointers`."""
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
    invariant=True,
    positions=True,
    greatest_dim=MAX_HEAD_DIM,
    chunks=True,
    trials=lambda key: cache_trials(key, decode_tile(key).tile, row_tile_of),
)
