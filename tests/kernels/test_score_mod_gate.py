"""What ptxas makes of the kernels with the ten score modifications compiled in, which needs no GPU.

Nothing spilled, no stack, no C75xx note, no access to local memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.score_mod_gradients import backward_graph
from cases.score_mods import MODIFICATIONS, case_of, forward_graph
from support.gate import code_faults, code_of, register_limit

import gpu_actors as ga
from gpu_actors import KernelSource
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.graph.match import match_attention
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.params import forward_layout
from gpu_actors.kernels.score_params import score_layout
from gpu_actors.kernels.tiles import tile_of
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.planning.block_masks import masked_problem
from gpu_actors.planning.cached import cached_problem
from gpu_actors.validation.forward import forward_problem

ARCHS = ("sm_80", "sm_90a")
DTYPES = {64: "float16", 128: "bfloat16", 256: "float16"}
SAMPLE = {
    ("tanh gating", "sm_80", 128, "none"),
    ("natten 2d", "sm_90a", 128, "causal"),
    ("t5 relative bias", "sm_90a", 64, "none"),
}
BACKWARD_SAMPLE = {("tanh gating", "sm_80", 64), ("natten 2d", "sm_90a", 128)}
BACKWARD_VARIANTS = tuple(itertools.product(MODIFICATIONS, ARCHS, (64, 128)))
MASKS = {"none": ga.Mask.none(), "causal": ga.Mask.causal()}
VARIANTS = tuple(itertools.product(MODIFICATIONS, ARCHS, DTYPES, MASKS))


def source_of(name: str, arch: str, dim: int, mask: str) -> KernelSource:
    problem = match_attention(forward_graph(case_of(name, DTYPES[dim], dim=dim), MASKS[mask])).problem
    key = dispatch_key(problem, arch)
    assert key.kernel == ("forward_sm90" if arch == "sm_90a" else "forward_mma")
    return kernel_source(key)


@pytest.mark.parametrize(
    "variant",
    [v if v in SAMPLE else pytest.param(v, marks=pytest.mark.sweep) for v in VARIANTS],
    ids=lambda variant: " ".join(map(str, variant)),
)
def test_nothing_is_spilled(variant: tuple[Any, ...]) -> None:
    source = source_of(*variant)
    assert code_faults(code_of(source, *source.entry_points), register_limit(32)) == []


@pytest.mark.parametrize(
    "variant",
    [v if v in BACKWARD_SAMPLE else pytest.param(v, marks=pytest.mark.sweep) for v in BACKWARD_VARIANTS],
    ids=lambda variant: " ".join(map(str, variant)),
)
def test_backward_spills_nothing(variant: tuple[Any, ...]) -> None:
    name, arch, dim = variant
    problem = match_attention(backward_graph(case_of(name, DTYPES[dim], dim=dim))).problem
    key = dispatch_key(problem, arch)
    assert key.kernel == ("backward_sm90" if arch == "sm_90a" else "backward_mma")
    assert code_faults(code_of(kernel_source(key), key.kernel), register_limit(32)) == []


def test_the_modification_is_in_the_kernel() -> None:
    """Its header takes the place of the empty one, and its parameters follow the kernel's own."""
    source = source_of("tanh gating", "sm_80", 64, "none")
    assert "tanh_of" in source.headers["common/score_mod.cuh"]
    plain = source_of("t5 relative bias", "sm_80", 64, "none")
    assert "#define SCORE_MOD 0" in plain.headers["common/score_mod.cuh"]
    assert source.source == plain.source


def test_the_compiler_lays_the_parameters_out_as_they_are_packed() -> None:
    source = source_of("document mask", "sm_80", 64, "none")
    mod = match_attention(forward_graph(case_of("document mask", "float16", dim=64))).problem.score_mod
    layout, own = score_layout(mod), forward_layout().size
    checks = [
        f'static_assert(sizeof(ScoreParams) == {layout.size}, "what is read");',
        f'static_assert(sizeof(LaunchParams) == {own + -(-layout.size // 8) * 8}, "what a launch passes");',
        f'static_assert(__builtin_offsetof(LaunchParams, score) == {own}, "where it begins");',
    ]
    checks += [
        f'static_assert(__builtin_offsetof(ScoreParams, {field.name}) == {field.offset}, "{field.name}");'
        for field in layout.fields
    ]
    Compiler().compile(dataclasses.replace(source, source=source.source + "\n".join(checks)))


@pytest.mark.sweep
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("arch", ARCHS)
def test_block_masks_spill_nothing(arch: str, dim: int) -> None:
    rows = {"q_num_blocks": (1, 1, 2), "q_indices": (1, 1, 2, 2)}
    for forward, deterministic in ((True, False), (False, False), (False, True)):
        graph = ga.OperationGraph()
        q, k, v = (graph.tensor(uid=uid, dims=(1, 2, 256, dim), dtype="float16") for uid in (1, 2, 3))
        lists = {name.replace("q", "kv", 1): dims for name, dims in rows.items()} | rows
        listed = {
            name: graph.tensor(uid=10 + n, dims=dims, dtype="int32") for n, (name, dims) in enumerate(lists.items())
        }
        scores = graph.mask_mod(graph.matmul(q, graph.transpose(k)), lambda b, h, row, key: abs(row - key) < 9)
        out = graph.matmul(graph.softmax(graph.block_mask(scores, **listed)), v)
        if forward:
            graph.output(out, uid=4, dtype="float16")
        else:
            given, dout = (graph.tensor(uid=uid, dims=out.dims, dtype="float16") for uid in (4, 6))
            stats = graph.tensor(uid=5, dims=(1, 2, 256, 1), dtype="float32")
            found = graph.gradient(out, dout, (q, k, v), (given, stats), deterministic=deterministic)
            for uid, gradient in zip((7, 8, 9), found, strict=True):
                graph.output(gradient, uid=uid, dtype="float16")
        key = dispatch_key(match_attention(graph).problem, arch)
        forward_kernel = "forward_sm90" if arch == "sm_90a" else "forward_mma"
        assert key.kernel == (forward_kernel if forward else "backward_mma")
        assert code_faults(code_of(kernel_source(key), key.kernel), register_limit(32)) == []


PACKED_VARIANTS = tuple(
    itertools.product(ARCHS, (64, 96, 128, 192, 256), ("none", "causal", "window"), ("forward", "backward", "turns"))
)
PACKED_SAMPLE = {("sm_90a", 128, "causal", "forward")}


@pytest.mark.parametrize(
    "variant",
    [v if v in PACKED_SAMPLE else pytest.param(v, marks=pytest.mark.sweep) for v in PACKED_VARIANTS],
    ids=lambda variant: " ".join(map(str, variant)),
)
def test_block_masks_of_packed_sequences_spill_nothing(variant: tuple[Any, ...]) -> None:
    arch, dim, mask, part = variant
    lists = dict(LISTS) | {name.replace("kv", "q"): dims for name, dims in LISTS.items()}
    blocks = {name: np.zeros(dims, np.int32) for name, dims in lists.items()}
    x, ends = np.zeros((512, 4, dim), ml_dtypes.bfloat16), np.array([0, 256, 512], np.int32)
    request = ga.FlashForward(x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends)
    request.causal, request.window_size = mask == "causal", (9, 9) if mask == "window" else (-1, -1)
    request.block_mask = ga.BlockMask(**blocks, mask_mod=lambda b, h, row, key: abs(row - key) < 9)
    problem = forward_problem(request)
    if part != "forward":
        problem = dataclasses.replace(problem, direction="backward", deterministic=part == "turns")
    key = dispatch_key(masked_problem(request, problem), arch)
    forward_kernel = "forward_sm90" if arch == "sm_90a" else "forward_mma"
    assert key.kernel == (forward_kernel if part == "forward" else "backward_mma")
    assert code_faults(code_of(kernel_source(key), key.kernel), register_limit(32)) == []


PAGED_VARIANTS = tuple(
    itertools.product((64, 96, 128, 192, 256), (0, 16, 128), ("none", "causal", "window"), (False, True))
)
PAGED_SAMPLE = {(128, 16, "causal", True)}


@pytest.mark.parametrize(
    "variant",
    [v if v in PAGED_SAMPLE else pytest.param(v, marks=pytest.mark.sweep) for v in PAGED_VARIANTS],
    ids=lambda variant: " ".join(map(str, variant)),
)
def test_block_masks_over_caches_spill_nothing(variant: tuple[Any, ...]) -> None:
    dim, page_size, mask, packed = variant
    blocks = {name: np.zeros(dims, np.int32) for name, dims in LISTS.items()}
    q = np.zeros((512, 4, dim) if packed else (2, 256, 4, dim), ml_dtypes.bfloat16)
    cache = np.zeros((2 * 256 // (page_size or 256), page_size or 256, 4, dim), q.dtype)
    request = ga.PagedForward(q=q, k_cache=cache, v_cache=cache, cache_seqlens=np.full(2, 256, np.int32))
    if page_size:
        request.block_table = np.zeros((2, 256 // page_size), np.int32)
    if packed:
        request.cu_seqlens_q = np.array([0, 256, 512], np.int32)
    request.causal, request.window_size = mask == "causal", (9, 9) if mask == "window" else (-1, -1)
    request.block_mask = ga.BlockMask(**blocks, mask_mod=lambda b, h, row, key: abs(row - key) < 9)
    key = dispatch_key(cached_problem(request), "sm_90a")
    assert key.kernel == "forward_sm90"
    assert code_faults(code_of(kernel_source(key), key.kernel), register_limit(32)) == []


DOCUMENTS = ((2, 1, 256, 1), (2, 1, 1, 256))
LISTS = {
    full + name: dims
    for full in ("", "full_")
    for name, dims in {"kv_num_blocks": (2, 4, 2), "kv_indices": (2, 4, 2, 2)}.items()
}
DISTANCES = {"none": ga.Mask.none(), "causal": ga.Mask.causal(), "window": ga.Mask.sliding_window(9)}
BLOCK_SHAPES = [(64, "float16"), (96, "bfloat16"), (128, "bfloat16"), (192, "bfloat16"), (256, "float16")]
BLOCK_SHAPES += [(dim, "float8_e4m3fn") for dim in (64, 128, 192, 256)]
BLOCK_VARIANTS = tuple(itertools.product(BLOCK_SHAPES, DISTANCES, ("nothing", "indices", "documents")))
BLOCK_SAMPLE = {((128, "bfloat16"), "causal", "documents")}


@pytest.mark.parametrize(
    ("shape", "mask", "modified"),
    [v if v in BLOCK_SAMPLE else pytest.param(*v, marks=pytest.mark.sweep) for v in BLOCK_VARIANTS],
    ids=str,
)
def test_hopper_keeps_lists_in_registers(shape: tuple[int, str], mask: str, modified: str) -> None:
    dim, dtype = shape
    graph = ga.OperationGraph()
    q, k, v = (graph.tensor(uid=uid, dims=(2, 4, 256, dim), dtype=dtype) for uid in (1, 2, 3))
    scores = graph.matmul(q, graph.transpose(k)) * 0.125
    if modified == "indices":
        scores = graph.mask_mod(scores, lambda b, h, row, key: abs(row - key) < 9)
    if modified == "documents":
        rows, keys = (graph.tensor(uid=50 + n, dims=d, dtype="int32") for n, d in enumerate(DOCUMENTS))
        scores = graph.select(graph.eq(rows, keys), scores, float("-inf"))
    lists = {name: graph.tensor(uid=10 + n, dims=d, dtype="int32") for n, (name, d) in enumerate(LISTS.items())}
    scores = graph.block_mask(scores, **lists)
    scores = scores if mask == "none" else graph.mask(scores, DISTANCES[mask])
    weights, stats = graph.softmax_with_stats(scores)
    out = "bfloat16" if dtype.startswith("float8") else dtype
    graph.output(graph.matmul(weights, v), uid=4, dtype=out)
    graph.output(stats, uid=5, dtype="float32")
    key = dispatch_key(match_attention(graph).problem, "sm_90a")
    source = kernel_source(key)
    assert key.kernel == "forward_sm90"
    found = code_of(source, key.kernel)
    assert code_faults(found, register_limit(32)) == []
    assert found.resources.registers == 65536 // (tile_of(key).warps * 32) // 8 * 8


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ARCHS)
def test_angles_need_no_table_in_local_memory(arch: str) -> None:
    """CUDA's own sinf keeps one on the stack for large arguments."""
    graph = ga.OperationGraph()
    q, k, v = (graph.tensor(uid=uid, dims=(1, 2, 256, 64), dtype="float16") for uid in (1, 2, 3))
    scores = graph.matmul(q, graph.transpose(k))
    scores = graph.sin(scores) + graph.cos(scores * 0.5) - graph.tan(scores * 0.1)
    graph.output(graph.matmul(graph.softmax(scores), v), uid=4, dtype="float16")
    key = dispatch_key(match_attention(graph).problem, arch)
    assert code_faults(code_of(kernel_source(key), key.kernel), register_limit(32)) == []
