"""Block masks of graphs: blocks that are not listed are hidden, and kernels neither load nor multiply them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cases.block_lists import BLOCK, kinds_of, near, ordered, usually
from emulated.forward import ml_dtype
from inside.kernels import dispatch_key, explain
from inside.reference import evaluate_graph
from support.counting import counting
from support.gate import kernel_source

import gpu_actors as ga
from gpu_actors.graph.match import match_attention

BATCH, HEADS, HEADS_KV, ROWS, KEYS, DIM = 2, 4, 2, 300, 520, 32
R, C = -(-ROWS // BLOCK), -(-KEYS // BLOCK)
Q, K, V, OUT, STATS, DOUT, DQ, DK, DV, LISTS, SHIFTS = 1, 2, 3, 4, 5, 6, 11, 12, 13, 20, 30

KINDS = kinds_of(BATCH, HEADS, R, C)


def lists_of(kinds: Any, full: bool = True, seed: int = 4) -> list[Any]:
    rng = np.random.default_rng(seed)
    result: list[Any] = []
    for turned in (kinds, kinds.swapaxes(2, 3)):
        for listed in (turned == 1, turned == 2) if full else (turned > 0,):
            result += ordered(listed, rng)
    return result


def declared(graph: ga.OperationGraph, lists: list[Any]) -> dict[str, ga.GraphTensor]:
    names = [
        full + name for full in ("", "full_")[: max(1, len(lists) // 4)] for name in ("kv_num_blocks", "kv_indices")
    ]
    names += [name.replace("kv", "q") for name in names]
    return {
        name: graph.tensor(uid=LISTS + n, dims=array.shape, dtype="int32")
        for n, (name, array) in enumerate(zip(names, lists, strict=False))
    }


Modify = Callable[[ga.OperationGraph, ga.GraphTensor], ga.GraphTensor]


def soft_and_near(graph: ga.OperationGraph, scores: ga.GraphTensor) -> ga.GraphTensor:
    return graph.mask_mod(graph.tanh(scores) * 2.0, near)


def scores_of(
    graph: ga.OperationGraph, lists: list[Any], causal: bool, modified: bool | str | Modify, dtype: str
) -> Any:
    """modified: False, no function; True, one of indices; "keys", one that also reads a number of each key; or one."""
    q = graph.tensor(uid=Q, dims=(BATCH, HEADS, ROWS, DIM), dtype=dtype)
    k, v = (graph.tensor(uid=uid, dims=(BATCH, HEADS_KV, KEYS, DIM), dtype=dtype) for uid in (K, V))
    scores = graph.matmul(q, graph.transpose(k)) * 0.2
    if callable(modified):
        scores = modified(graph, scores)
    elif modified:
        scores = soft_and_near(graph, scores)
    if modified == "keys":
        scores = scores + graph.tensor(uid=SHIFTS, dims=(1, 1, 1, KEYS), dtype="float32")
    scores = graph.block_mask(scores, **declared(graph, lists), block_size=(BLOCK, BLOCK))
    if causal:
        scores = graph.mask(scores, ga.Mask.causal(), "bottom_right")
    return (q, k, v), scores


def forward_graph(
    lists: list[Any], causal: bool = False, modified: bool | str | Modify = True, dtype: str = "float16"
) -> ga.OperationGraph:
    graph = ga.OperationGraph()
    (_, _, v), scores = scores_of(graph, lists, causal, modified, dtype)
    weights, stats = graph.softmax_with_stats(scores)
    graph.output(graph.matmul(weights, v), uid=OUT, dtype="bfloat16" if dtype.startswith("float8") else dtype)
    graph.output(stats, uid=STATS, dtype="float32")
    return graph


def backward_graph(
    lists: list[Any], causal: bool = False, modified: bool = True, dtype: str = "float16", deterministic: bool = False
) -> ga.OperationGraph:
    graph = ga.OperationGraph()
    operands, scores = scores_of(graph, lists, causal, modified, dtype)
    out = graph.matmul(graph.softmax(scores), operands[2])
    forward_out, dout = (graph.tensor(uid=uid, dims=out.dims, dtype=dtype) for uid in (OUT, DOUT))
    stats = graph.tensor(uid=STATS, dims=(*out.dims[:3], 1), dtype="float32")
    result = graph.gradient(out, dout, operands, (forward_out, stats), deterministic=deterministic)
    for uid, gradient in zip((DQ, DK, DV), result, strict=True):
        graph.output(gradient, uid=uid, dtype=dtype)
    return graph


def arrays_of(lists: list[Any], dtype: str = "float16") -> dict[int, Any]:
    rng = np.random.default_rng(0)
    arrays: dict[int, Any] = {Q: rng.standard_normal((BATCH, HEADS, ROWS, DIM)).astype(ml_dtype(dtype))}
    arrays |= {uid: rng.standard_normal((BATCH, HEADS_KV, KEYS, DIM)).astype(ml_dtype(dtype)) for uid in (K, V)}
    return arrays | {LISTS + n: array for n, array in enumerate(lists)}


def explicit(arrays: dict[int, Any], kinds: Any, causal: bool, modified: bool | str) -> tuple[Any, Any]:
    """Output and LSE in float64, from the formula alone."""
    q, k, v = (arrays[uid].astype(np.float64) for uid in (Q, K, V))
    k, v = (np.repeat(array, HEADS // HEADS_KV, axis=1) for array in (k, v))
    scores = 0.2 * q @ k.swapaxes(-1, -2)
    seen = (kinds > 0).repeat(BLOCK, 2).repeat(BLOCK, 3)[:, :, :ROWS, :KEYS]
    i, j = np.arange(ROWS)[:, None], np.arange(KEYS)[None, :]
    if modified:
        scores = np.tanh(scores) * 2 + (arrays[SHIFTS] if modified == "keys" else 0)
        b, h = np.arange(BATCH)[:, None, None, None], np.arange(HEADS)[:, None, None]
        seen = seen & (abs(i - j) * (1 + h) < 900 + 100 * b)
    if causal:
        seen = seen & (j <= i + KEYS - ROWS)
    exponentials = np.where(seen, np.exp(scores), 0)
    total = exponentials.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return exponentials / np.where(total == 0, 1, total) @ v, np.log(total)


def backward_arrays(lists: list[Any], causal: bool, modified: bool, kinds: Any = KINDS) -> dict[int, Any]:
    arrays = arrays_of(lists)
    out, lse = explicit(arrays, kinds, causal, modified)
    dout = np.random.default_rng(1).standard_normal(out.shape).astype(np.float16)
    return arrays | {OUT: out.astype(np.float16), STATS: lse.astype(np.float32), DOUT: dout}


@pytest.fixture(scope="module")
def emulated() -> Any:
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        yield ctx


@pytest.fixture(scope="module")
def hopper() -> Any:
    with few_blocks(), ga.open_context("emulated", ga.ContextOptions(arch="sm_90a")) as ctx:
        yield ctx


@contextlib.contextmanager
def few_blocks() -> Any:
    """A persistent block takes several tiles of rows, some of which see no key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_actors.kernels.forward_sm90.MULTIPROCESSORS", 3)
        yield


@pytest.mark.parametrize(("causal", "full"), [(True, True), (False, False)])
def test_the_oracle_hides_what_is_not_listed(causal: bool, full: bool) -> None:
    lists = lists_of(KINDS, full)
    arrays = arrays_of(lists)
    result = evaluate_graph(forward_graph(lists, causal), arrays)
    out, lse = explicit(arrays, KINDS, causal, modified=True)
    np.testing.assert_allclose(result[OUT], out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result[STATS], lse, rtol=1e-12, atol=1e-12)
    assert np.isneginf(lse).any()
    assert not out[np.isneginf(lse[..., 0])].any()


NOT_HIDDEN = 2 * BLOCK - 1  # the key before those that no row of KV head 0 sees


DETERMINISTIC_LAUNCHES = (
    ga.EmulationOptions(delivery="late", schedule="greedy"),
    ga.EmulationOptions(delivery="random", schedule="random", seed=5),
    ga.EmulationOptions(delivery="eager", schedule="round_robin", seed=9),
)


@pytest.mark.parametrize(
    ("causal", "dim", "arch"),
    [
        (False, 32, "sm_80"),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in ((True, 136, "sm_80"), (False, 136, "sm_80"), (True, 64, "sm_90a"), (False, 256, "sm_90a"))
        ),
    ],
)
def test_blocks_take_turns_at_listed_rows(causal: bool, dim: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients have the same bits in every order of blocks, and dQ has them in every order of the lists, too.

    From head dim 136 on a block of keys has two tiles.
    """
    for name, value in (("DIM", dim), ("BATCH", 1)):
        monkeypatch.setattr(sys.modules[__name__], name, value)
    lists = lists_of(KINDS[:1])
    graph = backward_graph(lists, causal, deterministic=True)
    arrays = backward_arrays(lists, causal, True, KINDS[:1])
    expected = evaluate_graph(graph, arrays)
    answers = []
    for number, launch in enumerate(DETERMINISTIC_LAUNCHES):
        inputs = dict(arrays)
        if number == 2:
            inputs |= {LISTS + n: array for n, array in enumerate(lists_of(KINDS[:1], seed=11))}
        with ga.open_context("emulated", ga.ContextOptions(arch=arch, emulation=launch)) as ctx:
            assert ctx.cudnn.inspect_plan(graph).key.kernel == "backward_mma"
            answers.append(ctx.cudnn.execute(graph, inputs).result(100.0))
    for uid in (DQ, DK, DV):
        np.testing.assert_allclose(answers[0][uid].astype(np.float64), expected[uid], atol=8e-3, rtol=8e-3)
        np.testing.assert_array_equal(answers[1][uid], answers[0][uid])
    np.testing.assert_array_equal(answers[2][DQ], answers[0][DQ])


def poisoned(arrays: dict[int, Any]) -> dict[int, Any]:
    """The same, with NaN in keys and values that no row of KV head 0 sees."""
    arrays = dict(arrays)
    for uid in (K, V):
        arrays[uid] = arrays[uid].copy()
        arrays[uid][0, 0, 2 * BLOCK : 3 * BLOCK] = np.nan
    return arrays


WITHIN = {"float16": 4e-3, "bfloat16": 2e-2, "float8_e4m3fn": 8e-2, "float8_e5m2": 8e-2}


def check_forward(
    ctx: ga.GpuContext,
    causal: bool,
    modified: bool | str,
    full: bool,
    kernel: str = "forward_mma",
    dtype: str = "float16",
) -> None:
    lists = lists_of(KINDS, full)
    arrays = arrays_of(lists, dtype)
    if modified == "keys":
        arrays[SHIFTS] = np.random.default_rng(2).standard_normal((1, 1, 1, KEYS)).astype(np.float32)
    graph = forward_graph(lists, causal, modified, dtype)
    assert ctx.cudnn.inspect_plan(graph).key.kernel == kernel
    result = ctx.cudnn.execute(graph, poisoned(arrays)).result(100.0)
    out, lse = explicit(arrays, KINDS, causal, modified)
    np.testing.assert_allclose(result[OUT].astype(np.float64), out, atol=WITHIN[dtype])
    np.testing.assert_allclose(result[STATS], lse, atol=1e-3)


def check_backward(ctx: ga.GpuContext, causal: bool, modified: bool, full: bool) -> None:
    lists = lists_of(KINDS, full)
    arrays = backward_arrays(lists, causal, modified)
    graph = backward_graph(lists, causal, modified)
    assert ctx.cudnn.inspect_plan(graph).key.kernel == "backward_mma"
    inputs = dict(arrays)
    for uid in (Q, DOUT):  # the first rows of head 1, which see no key
        inputs[uid] = arrays[uid].copy()
        inputs[uid][:, 1, :BLOCK] = np.nan
    result = ctx.cudnn.execute(graph, poisoned(inputs)).result(100.0)
    expected = evaluate_graph(graph, arrays)
    for uid in (DQ, DK, DV):
        np.testing.assert_allclose(result[uid].astype(np.float64), expected[uid], atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize(("causal", "modified", "full"), usually((True, True, True)))
def test_kernels_attend_to_listed_blocks(emulated: ga.GpuContext, causal: bool, modified: bool, full: bool) -> None:
    check_forward(emulated, causal, modified, full)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_heads_of_512_columns_attend_to_listed_blocks(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DIM", 512)
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        check_forward(ctx, causal=True, modified=True, full=True, kernel="forward_wide")


def test_hopper_attends_to_listed_blocks(hopper: ga.GpuContext) -> None:
    """The last key lies inside a tile; the modification's tensor of keys is not read beyond it."""
    check_forward(hopper, True, "keys", True, "forward_sm90")


def test_nonfinite_values_reach_the_rows_that_see_them(hopper: ga.GpuContext) -> None:
    """A value that is not finite reaches the rows that see its key, and no others."""
    lists = lists_of(KINDS)
    arrays = arrays_of(lists)
    graph = forward_graph(lists, modified=False)
    expected, _ = explicit(arrays, KINDS, False, False)
    inputs = poisoned(arrays)
    inputs[V][:, :, NOT_HIDDEN, 3] = np.nan
    result = hopper.cudnn.execute(graph, inputs).result(100.0)[OUT].astype(np.float64)
    seen = (KINDS[:, :, :, NOT_HIDDEN // BLOCK] > 0).repeat(BLOCK, 2)[:, :, :ROWS]
    expected[..., 3][seen] = np.nan
    assert 0.2 < seen.mean() < 0.8
    np.testing.assert_allclose(result, expected, atol=4e-3)


TILES = [("float16", 64), ("bfloat16", 96), ("bfloat16", 128), ("float16", 192), ("bfloat16", 256)]
TILES += [("float8_e4m3fn", 64), ("float8_e5m2", 128), ("float8_e4m3fn", 256)]


@pytest.mark.sweep
@pytest.mark.parametrize("modified", [True, "keys"], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "dim"), TILES)
def test_every_tile_of_hopper(
    dtype: str, dim: int, causal: bool, modified: bool | str, hopper: ga.GpuContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DIM", dim)
    check_forward(hopper, causal, modified, True, "forward_sm90", dtype)


def test_hopper_computes_no_mask_in_full_blocks(hopper: ga.GpuContext) -> None:
    """A mask_mod hides no keys of full blocks, because it is not computed there."""

    def sparse(graph: ga.OperationGraph, scores: ga.GraphTensor) -> ga.GraphTensor:
        distance = graph.index(scores, 3) - graph.index(scores, 2)
        scores = scores + distance * 0.01 + graph.tensor(uid=SHIFTS, dims=(1, 1, 1, KEYS), dtype="float32")
        scores = graph.mask_mod(scores, lambda b, h, row, key: (row + key) % 3 < 1)
        return graph.mask_mod(scores, lambda b, h, row, key: abs(key - row - 3) > 0)

    lists = lists_of(KINDS)
    arrays = arrays_of(lists)
    arrays[SHIFTS] = np.random.default_rng(2).standard_normal((1, 1, 1, KEYS)).astype(np.float32)
    result = hopper.cudnn.execute(forward_graph(lists, modified=sparse), arrays).result(100.0)[OUT]
    rows, keys = np.arange(ROWS)[:, None], np.arange(KEYS)[None, :]
    kinds = KINDS.repeat(BLOCK, 2).repeat(BLOCK, 3)[:, :, :ROWS, :KEYS]
    seen = (kinds == 2) | ((kinds == 1) & ((rows + keys) % 3 == 0) & (keys != rows + 3))
    q, k, v = (arrays[uid].astype(np.float64) for uid in (Q, K, V))
    k, v = (np.repeat(array, HEADS // HEADS_KV, axis=1) for array in (k, v))
    weights = np.where(seen, np.exp(0.2 * q @ k.swapaxes(-1, -2) + (keys - rows) * 0.01 + arrays[SHIFTS]), 0)
    total = weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(result.astype(np.float64), weights / np.where(total == 0, 1, total) @ v, atol=4e-3)


@pytest.mark.parametrize("dependent", [False, True])
def test_a_mask_that_depends_on_the_score_is_computed_in_full_blocks(dependent: bool) -> None:
    def masked(graph: ga.OperationGraph, scores: ga.GraphTensor) -> ga.GraphTensor:
        shown = scores > 0.0 if dependent else graph.index(scores, 2) > 5
        return graph.mask_mod(scores, lambda *_: shown)

    mod = match_attention(forward_graph(lists_of(KINDS), modified=masked)).problem.score_mod
    assert mod is not None
    assert f"#define BLOCK_MASK_SHOWS {int(not dependent)}" in mod.header


def test_what_a_score_mod_hides_is_hidden_in_full_blocks_too(hopper: ga.GpuContext) -> None:
    """Only mask_mods right before the lists promise to show every key of full blocks."""

    def hidden(graph: ga.OperationGraph, scores: ga.GraphTensor) -> ga.GraphTensor:
        scores = graph.select(graph.index(scores, 3) > 40, scores, -math.inf)
        return graph.mask_mod(graph.mask(scores, ga.Mask.causal()), lambda b, h, q, kv: q >= 0)

    lists = lists_of(np.full_like(KINDS, 2))
    graph = forward_graph(lists, modified=hidden)
    assert hopper.cudnn.inspect_plan(graph).key.kernel == "forward_sm90"
    arrays = arrays_of(lists)
    result = hopper.cudnn.execute(graph, arrays).result(100.0)[OUT]
    np.testing.assert_allclose(result.astype(np.float64), evaluate_graph(graph, arrays)[OUT], atol=4e-3)


def test_only_a_select_of_minus_infinity_is_a_mask_mod() -> None:
    graph = ga.OperationGraph()
    q = graph.tensor(uid=Q, dims=(1, 1, 4, 8), dtype="float16")
    condition = graph.index(q, 2) > 1
    zero, out = graph.scalar(uid=9, value=0.0), graph.tensor(uid=OUT, dims=q.dims, dtype="float16")
    graph.node("select", [condition.uid, q.uid, zero.uid], [out.uid], mask_mod=True)
    with pytest.raises(ga.InvalidRequest, match="must hide by -inf"):
        graph.validate()


def wrong_lists(lists: list[Any]) -> Iterator[list[Any]]:
    """Lists of rows with a block missing, one added, one twice, and one that does not exist."""
    half = len(lists) // 2
    place = next(place for place in np.ndindex(lists[half].shape) if 2 <= lists[half][place] < R)
    count, first = lists[half][place], lists[half + 1][place]
    unlisted = min({*range(R)} - {int(index) for index in first[:count]})
    for more, at, block in ((-1, 0, first[0]), (1, count, unlisted), (0, 0, first[1]), (0, 0, R)):
        counts, indices = (array.copy() for array in lists[half:][:2])
        counts[place] += more
        indices[place][at] = block
        yield [*lists[:half], counts, indices, *lists[half + 2 :]]


@pytest.mark.parametrize("full", [True, False])
def test_lists_that_would_wait_for_ever_are_refused(full: bool) -> None:
    lists = lists_of(KINDS, full)
    arrays = backward_arrays(lists, False, True)
    half = len(lists) // 2
    with ga.open_context("mock") as ctx:
        graph = backward_graph(lists, deterministic=True)
        ctx.cudnn.execute(graph, arrays).result(100.0)
        for wrong in wrong_lists(lists):
            with pytest.raises(ga.InvalidRequest, match="wait by both") as refused:
                ctx.cudnn.execute(graph, arrays | dict(enumerate(wrong, LISTS))).result(100.0)
            assert refused.value.field == f"tensor {LISTS + half + 1}"
        ctx.cudnn.execute(backward_graph(lists), arrays | dict(enumerate(wrong[:half], LISTS))).result(100.0)


HOPPER_LAUNCHES = [("eager", "lane", True), ("random", "random", False), ("late", "round_robin", True)]


@pytest.mark.sweep
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("delivery", "schedule", "fused"), HOPPER_LAUNCHES)
def test_hopper_in_every_delivery(delivery: Any, schedule: Any, fused: bool, causal: bool) -> None:
    emulation = ga.EmulationOptions(delivery=delivery, schedule=schedule, seed=7, contraction=fused)
    with few_blocks(), ga.open_context("emulated", ga.ContextOptions(arch="sm_90a", emulation=emulation)) as ctx:
        check_forward(ctx, causal, "keys", True, "forward_sm90")


@pytest.mark.sweep
@pytest.mark.parametrize(("causal", "modified", "full"), usually((True, True, True)))
def test_kernels_differentiate_listed_blocks(emulated: ga.GpuContext, causal: bool, modified: bool, full: bool) -> None:
    check_backward(emulated, causal, modified, full)


@pytest.mark.sweep
def test_cuda_cores_attend_to_listed_blocks(emulated: ga.GpuContext) -> None:
    lists = lists_of(KINDS)
    arrays = arrays_of(lists, "float64")
    graph = forward_graph(lists, causal=True, dtype="float64")
    assert emulated.cudnn.inspect_plan(graph).key.kernel == "forward_simple"
    result = emulated.cudnn.execute(graph, poisoned(arrays)).result(100.0)
    out, _ = explicit(arrays, KINDS, causal=True, modified=True)
    np.testing.assert_allclose(result[OUT], out, rtol=1e-10, atol=1e-10)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 256])
def test_every_tile_divides_blocks(emulated: ga.GpuContext, dtype: str, dim: int) -> None:
    """Forward's tiles divide blocks on every architecture, also on that with the least shared memory."""
    lists = lists_of(KINDS)
    for arch in ("sm_80", "sm_86", "sm_90a"):
        graph = forward_graph(lists)
        problem = dataclasses.replace(match_attention(graph).problem, head_dim=dim, head_dim_v=dim)
        compute = "tf32" if dtype == "float32" else "bf16"
        problem = dataclasses.replace(problem, dtype=dtype, kv_dtype=dtype, out_dtype=dtype, compute=compute)
        key = dispatch_key(problem, arch)
        assert key.kernel == ("forward_sm90" if arch == "sm_90a" and dtype == "bfloat16" else "forward_mma")
        macros = kernel_source(key).macros
        assert BLOCK % int(macros["BLOCK_M"]) == BLOCK % int(macros["BLOCK_N"]) == 0


# Where tiles are loaded and multiplied: architecture, file, line, counting thread, and counts a tile.
COUNTED: dict[str, tuple[str, str, str, int, int]] = {
    "forward loads": ("sm_80", "", "copy_rows<THREADS>(k_tile(n),", 0, 1),
    "forward products": ("sm_80", "", "multiply_rows<QTile, KTile, 2>(s, q,", 0, 1),
    "backward loads": ("sm_80", "backward/ring.cuh", "copy_rows<THREADS>(q_tile(now),", 0, 1),
    "backward products": ("sm_80", "", "multiply_queries(p, ring.k_tile(), q_tile, warp);  // line 10", 0, 1),
    "hopper loads": ("sm_90a", "forward_sm90/producer.cuh", "ptx::mbarrier_arrive_expect_tx(full, Tile::BYTES);", 0, 2),
    "hopper products": (
        "sm_90a", "forward_sm90/consumer.cuh", "const uint64_t q = QBoxes::rows(shared.q(number)), k = ", 128, 1,
    ),
}  # fmt: skip
USUALLY_COUNTED = (("forward loads", False), ("hopper loads", True))


@pytest.mark.parametrize(
    ("what", "causal"),
    [
        pytest.param(what, causal, marks=[] if (what, causal) in USUALLY_COUNTED else pytest.mark.sweep)
        for what in COUNTED
        for causal in (False, True)[: 1 + what.startswith("hopper")]
    ],
)
def test_hidden_tiles_are_neither_loaded_nor_multiplied(
    what: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only tiles of listed blocks count, without those behind the last row or key and those that no row sees."""
    arch, file, place, thread, times = COUNTED[what]
    count = counting(monkeypatch, file, place, thread)
    lists = lists_of(KINDS)
    backward = what.startswith("backward")
    graph = (backward_graph if backward else forward_graph)(lists, causal, False)
    arrays = backward_arrays(lists, False, False) if backward else arrays_of(lists)
    with few_blocks(), ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        key = ctx.cudnn.inspect_plan(graph).key
        ctx.cudnn.execute(graph, arrays).result(100.0)
    macros = kernel_source(key).macros
    rows, keys = (np.arange(0, n, int(macros[side])) for n, side in ((ROWS, "BLOCK_M"), (KEYS, "BLOCK_N")))
    seen = (KINDS > 0)[:, :, rows // BLOCK][:, :, :, keys // BLOCK]
    assert 0 < seen.sum() < 0.7 * seen.size
    if causal:
        last_rows = np.minimum(rows + int(macros["BLOCK_M"]), ROWS) - 1
        seen = seen & (keys <= last_rows[:, None] + KEYS - ROWS)
    assert count.value == times * seen.sum()


# Refusals


def test_a_mask_mod_need_not_read_every_index() -> None:
    graph = ga.OperationGraph()
    scores = graph.tensor(uid=1, dims=(1, 2, 8, 8), dtype="float32")
    seen = graph.mask_mod(scores, lambda b, h, q, kv: kv < 3)
    graph.output(graph.mask_mod(seen, lambda b, h, q, kv: h < q), uid=2)
    assert len({node.name for node in graph.nodes}) == len(graph.nodes)
    score_values = np.random.default_rng(0).standard_normal((1, 2, 8, 8)).astype(np.float32)
    expected = np.where(
        (np.arange(8) < 3) & (np.arange(8)[:, None] > np.arange(2)[:, None, None]), score_values, -np.inf
    )
    np.testing.assert_array_equal(evaluate_graph(graph, {1: score_values})[2], expected)


def test_a_mask_mod_is_a_function_that_gives_a_bool() -> None:
    graph = ga.OperationGraph()
    scores = graph.tensor(uid=1, dims=(1, 2, 8, 8), dtype="float32")
    with pytest.raises(ga.InvalidRequest, match="must return a bool"):
        graph.mask_mod(scores, lambda b, h, q, kv: q - kv)
    with pytest.raises(ga.InvalidRequest, match="must be a function"):
        graph.mask_mod(scores, 3)  # type: ignore[arg-type]
    with pytest.raises(ga.InvalidRequest, match="four dims"):
        graph.mask_mod(graph.tensor(uid=2, dims=(8, 8), dtype="float32"), near)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_indices": None}, "kv_indices"),
        ({"full_kv_num_blocks": None}, "full_kv_indices"),
        ({"full_q_num_blocks": None, "full_q_indices": None}, "full_q_indices"),
        ({"q_num_blocks": None, "q_indices": None}, "full_q_indices"),
        ({"block_size": (64, 128)}, "block_mask_2"),
        ({"block_size": (0, 128)}, "block_mask_2"),
    ],
    ids=str,
)
def test_lists_that_do_not_fit_are_refused(change: dict[str, Any], field: str) -> None:
    lists = lists_of(KINDS)
    graph = ga.OperationGraph()
    q = graph.tensor(uid=Q, dims=(BATCH, HEADS, ROWS, DIM), dtype="float16")
    k = graph.tensor(uid=K, dims=(BATCH, HEADS_KV, KEYS, DIM), dtype="float16")
    scores = graph.matmul(q, graph.transpose(k))
    with pytest.raises(ga.InvalidRequest) as caught:
        graph.block_mask(scores, **(declared(graph, lists) | change))
    assert caught.value.field == field


def test_kernels_say_what_they_do_not_take() -> None:
    """backward_sm90 leaves block masks to backward_mma, and gradients need lists of rows."""
    lists = lists_of(KINDS)
    forward = match_attention(forward_graph(lists)).problem
    backward = match_attention(backward_graph(lists)).problem
    assert dispatch_key(backward, "sm_90a").kernel == "backward_mma"
    reasons = {verdict.family: verdict.reason for verdict in explain(backward, "sm_90a")}
    assert "score modifications" in reasons["backward_sm90"] or "no lists of blocks" in reasons["backward_sm90"]
    biased = dataclasses.replace(backward, deterministic=True, bias=("float16", False, False))
    with pytest.raises(ga.Unsupported, match="turns at a bias"):
        dispatch_key(biased, "sm_80")
    with pytest.raises(ga.Unsupported, match="q_num_blocks and q_indices"):
        match_attention(backward_graph(lists_of(KINDS, full=False)[:2]))
    assert forward.score_mod is not None
    small = dataclasses.replace(forward.score_mod, block_size=(64, 128))
    with pytest.raises(ga.Unsupported, match="multiples of 128"):
        dispatch_key(dataclasses.replace(forward, score_mod=small), "sm_80")
    wide = dataclasses.replace(backward, head_dim=256, head_dim_v=256)
    with pytest.raises(ga.Unsupported, match="tiles of 48 keys"):
        dispatch_key(wide, "sm_86")
