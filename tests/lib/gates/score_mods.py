"""The rows of the attention kernels with score modifications, block masks and their lists compiled in.

Besides the limits of every row: forward_sm90 with lists, which it keeps in registers, has all the registers that its
warps can have at launch.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from cases.score_mod_gradients import backward_graph
from cases.score_mods import MODIFICATIONS, case_of, forward_graph
from gates.rows import Family, Plan, exactly, plain_plan, rows_of
from inside.graph import match_attention
from inside.kernels import dispatch_key, tile_of
from inside.planning import cached_problem, masked_problem
from inside.validation import forward_problem

import gpu_actors as ga
from gpu_actors import AttentionProblem, DeviceInfo, OperationGraph

__all__ = ["SCORE_MODS", "Modified", "matched"]

ARCHS = ("sm_80", "sm_90a")
FORWARD = {"sm_80": "forward_mma", "sm_90a": "forward_sm90"}
BACKWARD = {"sm_80": "backward_mma", "sm_90a": "backward_sm90"}
DTYPES = {64: "float16", 128: "bfloat16", 256: "float16"}
WIDTHS = (64, 96, 128, 192, 256)
MASKS = {"none": ga.Mask.none(), "causal": ga.Mask.causal(), "window": ga.Mask.sliding_window(9)}
DOCUMENTS = ((2, 1, 256, 1), (2, 1, 1, 256))
LISTS = {
    full + name: dims
    for full in ("", "full_")
    for name, dims in {"kv_num_blocks": (2, 4, 2), "kv_indices": (2, 4, 2, 2)}.items()
}


def near(b: Any, h: Any, row: Any, key: Any) -> Any:
    """A mask that depends on indices alone."""
    return abs(row - key) < 9


def words(fields: tuple[Any, ...]) -> str:
    return " ".join(map(str, fields))


# Modifications


class Modified(NamedTuple):
    """A modification of cases.score_mods, forward or backward."""

    arch: str
    name: str
    dim: int
    mask: str
    direction: str = "forward"

    def __str__(self) -> str:
        return words(self)


def matched(variant: Modified) -> AttentionProblem:
    case = case_of(variant.name, DTYPES[variant.dim], dim=variant.dim)
    forward = variant.direction == "forward"
    return match_attention(forward_graph(case, MASKS[variant.mask]) if forward else backward_graph(case)).problem


def modified_plan(variant: Modified) -> Plan:
    kernels = FORWARD if variant.direction == "forward" else BACKWARD
    return plain_plan(dispatch_key(matched(variant), variant.arch), kernels[variant.arch])


MODIFIED = rows_of(
    "score_mod",
    [
        *(Modified(*each) for each in itertools.product(ARCHS, MODIFICATIONS, DTYPES, ("none", "causal"))),
        *(Modified(*each) for each in itertools.product(ARCHS, MODIFICATIONS, (64, 128), ("none",), ("backward",))),
    ],
    modified_plan,
    [
        Modified("sm_80", "tanh gating", 128, "none"),
        Modified("sm_90a", "natten 2d", 128, "causal"),
        Modified("sm_90a", "t5 relative bias", 64, "none"),
        Modified("sm_80", "tanh gating", 64, "none", "backward"),
        Modified("sm_90a", "natten 2d", 128, "none", "backward"),
    ],
)


# Angles: CUDA's own sinf keeps a table on the stack for large arguments


class Angles(NamedTuple):
    arch: str

    def __str__(self) -> str:
        return words(self)


def angles_plan(variant: Angles) -> Plan:
    graph = OperationGraph()
    q, k, v = (graph.tensor(uid=uid, dims=(1, 2, 256, 64), dtype="float16") for uid in (1, 2, 3))
    scores = graph.matmul(q, graph.transpose(k))
    scores = graph.sin(scores) + graph.cos(scores * 0.5) - graph.tan(scores * 0.1)
    graph.output(graph.matmul(graph.softmax(scores), v), uid=4, dtype="float16")
    return plain_plan(dispatch_key(match_attention(graph).problem, variant.arch), FORWARD[variant.arch])


ANGLES = rows_of("angles", map(Angles, ARCHS), angles_plan, [])


# Block masks of dense batches


class Masked(NamedTuple):
    arch: str
    dim: int
    part: str

    def __str__(self) -> str:
        return words(self)


def masked_plan(variant: Masked) -> Plan:
    """Lists that all heads share. part: "turns" is a deterministic backward, which adds in a fixed order."""
    graph = OperationGraph()
    q, k, v = (graph.tensor(uid=uid, dims=(1, 2, 256, variant.dim), dtype="float16") for uid in (1, 2, 3))
    rows = {"q_num_blocks": (1, 1, 2), "q_indices": (1, 1, 2, 2)}
    lists = {name.replace("q", "kv", 1): dims for name, dims in rows.items()} | rows
    listed = {name: graph.tensor(uid=10 + n, dims=dims, dtype="int32") for n, (name, dims) in enumerate(lists.items())}
    scores = graph.mask_mod(graph.matmul(q, graph.transpose(k)), near)
    out = graph.matmul(graph.softmax(graph.block_mask(scores, **listed)), v)
    if variant.part == "forward":
        graph.output(out, uid=4, dtype="float16")
    else:
        given, dout = (graph.tensor(uid=uid, dims=out.dims, dtype="float16") for uid in (4, 6))
        stats = graph.tensor(uid=5, dims=(1, 2, 256, 1), dtype="float32")
        turns = variant.part == "turns"
        found = graph.gradient(out, dout, (q, k, v), (given, stats), deterministic=turns)
        for uid, gradient in zip((7, 8, 9), found, strict=True):
            graph.output(gradient, uid=uid, dtype="float16")
    kernel = FORWARD[variant.arch] if variant.part == "forward" else "backward_mma"
    return plain_plan(dispatch_key(match_attention(graph).problem, variant.arch), kernel)


PARTS = ("forward", "backward", "turns")
MASKED = rows_of(
    "block_mask", [Masked(*each) for each in itertools.product(ARCHS, (64, 128, 192, 256), PARTS)], masked_plan, []
)


# Block masks of packed sequences


class Packed(NamedTuple):
    arch: str
    dim: int
    mask: str
    part: str

    def __str__(self) -> str:
        return words(self)


def blocks_of(lists: dict[str, tuple[int, ...]]) -> ga.BlockMask:
    return ga.BlockMask(**{name: np.zeros(dims, np.int32) for name, dims in lists.items()}, mask_mod=near)


def mask_request(request: Any, mask: str, lists: dict[str, tuple[int, ...]]) -> None:
    request.causal, request.window_size = mask == "causal", (9, 9) if mask == "window" else (-1, -1)
    request.block_mask = blocks_of(lists)


def packed_plan(variant: Packed) -> Plan:
    x, ends = np.zeros((512, 4, variant.dim), ml_dtypes.bfloat16), np.array([0, 256, 512], np.int32)
    request = ga.FlashForward(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends)
    mask_request(request, variant.mask, LISTS | {name.replace("kv", "q"): dims for name, dims in LISTS.items()})
    problem = forward_problem(request)
    if variant.part != "forward":
        problem = dataclasses.replace(problem, direction="backward", deterministic=variant.part == "turns")
    kernel = FORWARD[variant.arch] if variant.part == "forward" else "backward_mma"
    return plain_plan(dispatch_key(masked_problem(request, problem), variant.arch), kernel)


PACKED = rows_of(
    "packed_block_mask",
    [Packed(*each) for each in itertools.product(ARCHS, WIDTHS, MASKS, PARTS)],
    packed_plan,
    [Packed("sm_90a", 128, "causal", "forward")],
)


# Block masks over caches


class Cached(NamedTuple):
    """page_size: 0 for a cache without pages."""

    dim: int
    page_size: int
    mask: str
    packed: bool

    @property
    def arch(self) -> str:
        return "sm_90a"

    def __str__(self) -> str:
        return words(self)


def cached_plan(variant: Cached) -> Plan:
    dim, page_size, mask, packed = variant
    q = np.zeros((512, 4, dim) if packed else (2, 256, 4, dim), ml_dtypes.bfloat16)
    cache = np.zeros((2 * 256 // (page_size or 256), page_size or 256, 4, dim), q.dtype)
    request = ga.PagedForward(q=q, k_cache=cache, v_cache=cache, cache_seqlens=np.full(2, 256, np.int32))
    if page_size:
        request.block_table = np.zeros((2, 256 // page_size), np.int32)
    if packed:
        request.cu_seqlens_q = np.array([0, 256, 512], np.int32)
    mask_request(request, mask, LISTS)
    problem = cached_problem(request, DeviceInfo("emulated", "", variant.arch))
    return plain_plan(dispatch_key(problem, variant.arch), "forward_sm90")


CACHED = rows_of(
    "cached_block_mask",
    [Cached(*each) for each in itertools.product(WIDTHS, (0, 16, 128), MASKS, (False, True))],
    cached_plan,
    [Cached(128, 16, "causal", True)],
)


# Lists in Hopper's registers


class Listed(NamedTuple):
    """modified: the kind of modification besides the lists."""

    dim: int
    dtype: str
    mask: str
    modified: str

    @property
    def arch(self) -> str:
        return "sm_90a"

    def __str__(self) -> str:
        return words(self)


def listed_plan(variant: Listed) -> Plan:
    dim, dtype, mask, modified = variant
    graph = OperationGraph()
    q, k, v = (graph.tensor(uid=uid, dims=(2, 4, 256, dim), dtype=dtype) for uid in (1, 2, 3))
    scores = graph.matmul(q, graph.transpose(k)) * 0.125
    if modified == "indices":
        scores = graph.mask_mod(scores, near)
    if modified == "documents":
        rows, keys = (graph.tensor(uid=50 + n, dims=d, dtype="int32") for n, d in enumerate(DOCUMENTS))
        scores = graph.select(graph.eq(rows, keys), scores, float("-inf"))
    lists = {name: graph.tensor(uid=10 + n, dims=d, dtype="int32") for n, (name, d) in enumerate(LISTS.items())}
    scores = graph.block_mask(scores, **lists)
    scores = scores if mask == "none" else graph.mask(scores, MASKS[mask])
    weights, stats = graph.softmax_with_stats(scores)
    out = "bfloat16" if dtype.startswith("float8") else dtype
    graph.output(graph.matmul(weights, v), uid=4, dtype=out)
    graph.output(stats, uid=5, dtype="float32")
    key = dispatch_key(match_attention(graph).problem, variant.arch)
    registers = 65536 // (tile_of(key).warps * 32) // 8 * 8
    return plain_plan(key, "forward_sm90")._replace(
        limits={"registers": exactly(registers)}, read=lambda code: {"registers": code.resources.registers}
    )


SHAPES = [(64, "float16"), (96, "bfloat16"), (128, "bfloat16"), (192, "bfloat16"), (256, "float16")]
SHAPES += [(dim, "float8_e4m3fn") for dim in (64, 128, 192, 256)]
LISTED = rows_of(
    "block_lists",
    [
        Listed(*shape, mask, modified)
        for shape, mask, modified in itertools.product(SHAPES, MASKS, ("nothing", "indices", "documents"))
    ],
    listed_plan,
    [Listed(128, "bfloat16", "causal", "documents")],
)

SCORE_MODS = Family("score_mods", (*MODIFIED, *ANGLES, *MASKED, *PACKED, *CACHED, *LISTED))
