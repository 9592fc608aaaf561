"""The largest score of a row and the sum of its exponentials, as outputs of graphs: NumPy's, and the kernels'."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.finite_differences import differences
from emulated import forward as emulated_forward
from emulated.contraction import arithmetic, fused_products, like_hardware
from inside.kernels import (
    FAMILIES,
    dispatch_key,
    example_problem,
    forward_layout,
    option_cell,
    row_stats_layout,
    variants,
)
from inside.reference import evaluate_graph
from support.gate import code_faults, code_of, kernel_source, register_limit

import gpu_actors as ga
from gpu_actors.graph.match import match_attention

BATCH, HEADS, HEADS_KV, ROWS, KEYS, DIM = 2, 4, 2, 340, 140, 32
Q, K, V, TABLE, OUT, STATS, MAX, SUM = 1, 2, 3, 4, 5, 6, 7, 8
ROW = {"stats": STATS, "score_max": MAX, "score_sum_exp": SUM}
SCALE = 0.7
HEADS_LAST = (HEADS * ROWS, 1, HEADS, 1)  # strides of (batch, rows, heads) in memory


def graph_of(
    dtype: str = "float16",
    rows: tuple[str, ...] = ("score_sum_exp", "stats", "score_max"),
    modified: bool = True,
    causal: bool = True,
    dropout: float = 0.0,
) -> ga.OperationGraph:
    """Causal masks are aligned bottom right, so that the first ROWS - KEYS rows see no key."""
    graph = ga.OperationGraph()
    q = graph.tensor(uid=Q, dims=(BATCH, HEADS, ROWS, DIM), dtype=dtype)
    k, v = (graph.tensor(uid=uid, dims=(BATCH, HEADS_KV, KEYS, DIM), dtype=dtype) for uid in (K, V))
    scores = graph.matmul(q, graph.transpose(k)) * SCALE
    if modified:
        table = graph.tensor(uid=TABLE, dims=(1, HEADS, 1, 1), dtype="float32")
        scores = graph.tanh(scores / 9.0) * 9.0 + table
    if causal:
        scores = graph.mask(scores, ga.Mask.causal(), "bottom_right")
    weights, *stats = graph.softmax_with_rows(scores, *rows)
    if dropout:
        weights = graph.dropout(weights, dropout, 7)
    element = "bfloat16" if dtype.startswith("float8") else dtype
    graph.output(graph.matmul(weights, v), uid=OUT, dtype=element)
    for name, stat in zip(rows, stats, strict=True):
        strides = HEADS_LAST if name == "score_max" else None
        graph.output(stat, uid=ROW[name], dtype="float32", strides=strides)
    return graph


def arrays_of(dtype: str = "float16", modified: bool = True, std: float = 1.0) -> dict[int, Any]:
    rng = np.random.default_rng(0)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    shapes = {Q: (BATCH, HEADS, ROWS, DIM), K: (BATCH, HEADS_KV, KEYS, DIM), V: (BATCH, HEADS_KV, KEYS, DIM)}
    arrays = {uid: (std * rng.standard_normal(shape)).astype(kind) for uid, shape in shapes.items()}
    if modified:
        arrays[TABLE] = np.linspace(-4, 5, HEADS, dtype=np.float32).reshape(1, HEADS, 1, 1)
    return arrays


def explicit(arrays: dict[int, Any], causal: bool = True) -> dict[int, Any]:
    """Each row's stats in float64, from their definition."""
    q, k = (arrays[uid].astype(np.float64) for uid in (Q, K))
    scores = SCALE * q @ np.repeat(k, HEADS // HEADS_KV, axis=1).swapaxes(-1, -2)
    if TABLE in arrays:
        scores = np.tanh(scores / 9) * 9 + arrays[TABLE]
    if causal:
        seen = np.arange(KEYS) <= np.arange(ROWS)[:, None] + KEYS - ROWS
        scores = np.where(seen, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    total = np.exp(scores - np.where(np.isneginf(largest), 0, largest)).sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return {MAX: largest, SUM: total, STATS: largest + np.log(total)}


def check(found: dict[int, Any], wanted: dict[int, Any], limit: float = 3e-5) -> None:
    """Compare finite stats within ``limit``, infinities and NaN exactly, and the stats with each other."""
    for uid in found.keys() & wanted.keys():
        assert found[uid].dtype == np.float32
        assert found[uid].shape == wanted[uid].shape
        finite = np.isfinite(wanted[uid])
        np.testing.assert_array_equal(found[uid][~finite], wanted[uid][~finite])
        np.testing.assert_allclose(found[uid][finite], wanted[uid][finite], rtol=limit, atol=limit)
    if {MAX, SUM, STATS} <= found.keys():
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(found[STATS], found[MAX] + np.log(found[SUM]), rtol=1e-6, atol=1e-5)


def answered(arch: str, graph: ga.OperationGraph, arrays: dict[int, Any], kernel: str) -> dict[int, Any]:
    options = ga.ContextOptions(arch=arch, emulation=ga.EmulationOptions(arithmetic=arithmetic()))
    with ga.open_context("emulated", options) as ctx:
        key = ctx.cudnn.inspect_plan(graph).key
        assert (key.kernel, key.row_stats) == (kernel, True)
        return ctx.cudnn.execute(graph, arrays).result(100.0)


# NumPy


def test_the_mock_device_gives_them() -> None:
    arrays = arrays_of()
    with ga.open_context("mock") as ctx:
        result = ctx.cudnn.execute(graph_of(), arrays).result(10.0)
    expected = explicit(arrays)
    check(result, expected)
    hidden = np.s_[:, :, : ROWS - KEYS]
    assert np.isneginf(result[MAX][hidden]).all()
    assert not result[SUM][hidden].any()
    assert result[MAX].strides[:3] == tuple(4 * step for step in HEADS_LAST[:3])


def test_dropout_comes_behind_them() -> None:
    arrays = arrays_of()
    result = evaluate_graph(graph_of(dropout=0.4), arrays)
    for uid, expected in explicit(arrays).items():
        np.testing.assert_allclose(result[uid], expected, rtol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_score_that_is_no_number_makes_them_nan(value: float) -> None:
    graph = ga.OperationGraph()
    scores = graph.tensor(uid=1, dims=(1, 1, 3, 4), dtype="float32")
    for uid, tensor in enumerate(graph.softmax_with_rows(scores, *ROW), 2):
        graph.output(tensor, uid=uid)
    score_values = np.zeros((1, 1, 3, 4), np.float32)
    score_values[0, 0, 1, 2] = value
    score_values[0, 0, 2] = -np.inf
    result = evaluate_graph(graph, {1: score_values})
    assert all(np.isnan(result[uid][0, 0, 1]).all() for uid in (2, 3, 4, 5))
    assert [result[uid][0, 0, 0, 0] for uid in (3, 4, 5)] == [np.log(4), 0, 4]
    assert [result[uid][0, 0, 2, 0] for uid in (3, 4, 5)] == [-np.inf, -np.inf, 0]


def test_they_have_gradients() -> None:
    """A graph with a loss of the stats has the gradients of finite differences, on NumPy."""
    rows = ("score_sum_exp", "stats", "score_max")
    graph = ga.OperationGraph()
    scores = graph.tensor(uid=1, dims=(1, 2, 3, 5), dtype="float64")
    weights, *stats = graph.softmax_with_rows(scores * 1.5, *rows)
    loss = weights * weights
    for n, stat in enumerate(stats):
        loss = loss + stat * float(n + 2)
    dloss = graph.tensor(uid=2, dims=(1, 2, 3, 5), dtype="float64")
    graph.output(loss, uid=3)
    graph.output(graph.gradient(loss, dloss, (scores,))[0], uid=4)
    rng = np.random.default_rng(3)
    score_values, direction = rng.standard_normal((1, 2, 3, 5)), rng.standard_normal((1, 2, 3, 5))

    def of(values: Any) -> float:
        return float((evaluate_graph(graph, {1: values["scores"], 2: direction})[3] * direction).sum())

    result = evaluate_graph(graph, {1: score_values, 2: direction})[4]
    np.testing.assert_allclose(result, differences(of, {"scores": score_values})["scores"], rtol=1e-6, atol=1e-7)


# Requested stats


def test_names_are_known_and_differ() -> None:
    graph = ga.OperationGraph()
    scores = graph.tensor(uid=1, dims=(1, 1, 3, 4), dtype="float32")
    for rows in (("max",), ("stats", "stats"), (3,), (["stats"],)):
        with pytest.raises(ga.InvalidRequest, match="score_max") as caught:
            graph.softmax_with_rows(scores, *rows)  # type: ignore[arg-type]
        assert caught.value.field == "softmax_0"
    made = ga.OperationGraph()
    made.tensor(uid=1, dims=(1, 1, 3, 4), dtype="float32")
    for uid, extent in ((2, 4), (3, 1)):
        made.tensor(uid=uid, dims=(1, 1, 3, extent), dtype="float32")
    made.node("softmax", (1,), (2, 3), rows=["score_max", "stats"])
    with pytest.raises(ga.InvalidRequest, match="writes 3"):
        made.validate()


def test_they_are_fp32_and_leave_the_chip_as_they_are() -> None:
    graph = graph_of()
    graph.tensors[MAX].dtype = "float16"
    with pytest.raises(ga.Unsupported, match="score_max must be float32"):
        match_attention(graph)
    read = ga.OperationGraph()
    q, k, v = (read.tensor(uid=uid, dims=(1, 1, 64, 32), dtype="float16") for uid in (Q, K, V))
    weights, largest = read.softmax_with_rows(read.matmul(q, read.transpose(k)), "score_max")
    read.output(read.matmul(weights, v), uid=OUT, dtype="float16")
    read.output(largest * 2.0, uid=MAX)
    with pytest.raises(ga.Unsupported, match="no part of the graph's attention"):
        match_attention(read)


def test_what_is_asked_for_decides_the_signature_and_stats_alone_are_as_before() -> None:
    signatures = {graph_of(rows=rows).signature() for rows in (("stats",), ("score_max",), ("score_sum_exp",))}
    assert len(signatures) == 3
    graph = ga.OperationGraph()
    scores = graph.tensor(uid=1, dims=(1, 1, 3, 4), dtype="float32")
    graph.softmax_with_stats(scores)
    graph.softmax_with_rows(scores, "stats")
    assert graph.nodes[0].attributes == graph.nodes[1].attributes == ()


def test_tables_say_which_kernels_store_them() -> None:
    for option in ("`score_max`", "`score_sum_exp`"):
        taken = {family.name for family in FAMILIES if option_cell(option, family, "sm_90a").taken}
        assert taken == {"forward_sm90", "forward_mma", "forward_wide", "forward_simple"}
    decode = next(family for family in FAMILIES if family.name == "decode_mma")
    assert "no stats of rows but the LSE" in option_cell("`score_sum_exp`", decode, "sm_80").reason


def test_a_problem_without_keys_has_them_all_the_same() -> None:
    problem = example_problem("float16", 64, seqlen_k=0, total_k=0)
    assert problem.vacuous
    assert not dataclasses.replace(problem, score_max=True).vacuous


# Kernels


def check_kernels(arch: str, dtype: str, kernel: str, modified: bool = True, causal: bool = True) -> None:
    arrays = arrays_of(dtype, modified)
    graph = graph_of(dtype, modified=modified, causal=causal)
    result = answered(arch, graph, arrays, kernel)
    # Tensor cores keep some 14 bits of sums of 8-bit products.
    check(result, explicit(arrays, causal), 2e-3 if dtype.startswith("float8") else 3e-5)
    out, limit = evaluate_graph(graph, arrays)[OUT], 0.1 if dtype.startswith("float8") else 2e-2
    np.testing.assert_allclose(result[OUT].astype(np.float64), out, atol=limit, rtol=limit)


CASES = (
    ("sm_80", "float16", "forward_mma", True, True),
    ("sm_90a", "bfloat16", "forward_sm90", False, True),
    ("sm_80", "float64", "forward_simple", True, True),
    ("sm_90a", "float8_e4m3fn", "forward_sm90", False, True),
    ("sm_80", "bfloat16", "forward_mma", False, False),
    ("sm_80", "float32", "forward_simple", False, True),
    ("sm_90a", "float16", "forward_sm90", True, True),
    ("sm_90a", "float8_e5m2", "forward_sm90", True, False),
)


@pytest.mark.parametrize(
    "case", [*CASES[:2], *(pytest.param(case, marks=pytest.mark.sweep) for case in CASES[2:])], ids=str
)
def test_kernels_store_them(case: tuple[Any, ...]) -> None:
    arch, dtype, kernel, modified, causal = case
    check_kernels(arch, dtype, kernel, modified, causal)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_kernels_of_wide_heads_store_them(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DIM", 264)
    check_kernels(arch, "bfloat16", "forward_wide")


@pytest.mark.parametrize("name", ["score_max", pytest.param("score_sum_exp", marks=pytest.mark.sweep)])
def test_one_of_them_may_be_asked_for_alone(name: str) -> None:
    arrays = arrays_of(modified=True)
    result = answered("sm_80", graph_of(rows=(name,)), arrays, "forward_mma")
    assert result.keys() == {OUT, ROW[name]}
    check(result, explicit(arrays))


NAN_KERNELS = ("forward_mma", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("forward_simple", "forward_sm90")))


@pytest.mark.parametrize("kernel", NAN_KERNELS)
def test_scores_that_are_no_numbers_are_nan_in_kernels(kernel: str) -> None:
    """A NaN in q makes its own row's stats NaN and no other row's."""
    dtype = "float64" if kernel == "forward_simple" else "float16"
    arrays = arrays_of(dtype)
    arrays[Q][1, 2, 200, 5] = np.nan
    result = answered("sm_90a" if kernel == "forward_sm90" else "sm_80", graph_of(dtype), arrays, kernel)
    for uid in (STATS, MAX, SUM):
        assert np.argwhere(np.isnan(result[uid])).tolist() == [[1, 2, 200, 0]]


LAUNCHES = (("late", "greedy", 0), ("random", "random", 2))


def check_sinks(kernel: str, dtype: str) -> None:
    """Sinks count in the stats as in the LSE. Some rows see no key; one sink is -inf, one above every score."""
    q, k, v = (array * 0.5 for array in emulated_forward.qkv(260, 66, heads=4, dim=32))
    q, k, v = (emulated_forward.gaussian(n, a.shape, dtype) for n, a in enumerate((q, k, v)))
    sinks = np.array([0.5, -np.inf, 40.0, -3.0], np.float32)
    problem = emulated_forward.problem_of(q, k, v, causal=True, sinks=sinks)
    problem = dataclasses.replace(problem, score_max=True, score_sum_exp=True)
    arrays = {name: np.full((1, 4, 260), np.nan, np.float32) for name in ("score_max", "score_sum_exp")}
    scores = np.einsum("bihd,bjgd->bhij", q.astype(float), k.astype(float)) * 32**-0.5
    scores = np.where(np.arange(66) <= np.arange(260)[:, None] - 194, scores, -np.inf)
    scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (1, 4, 260, 1))], axis=-1)
    largest = scores.max(axis=-1)
    total = np.exp(scores - np.where(np.isneginf(largest), 0, largest)[..., None]).sum(axis=-1)
    limit = 2e-3 if dtype.startswith("float8") else 3e-5
    for delivery, schedule, seed in LAUNCHES:
        inputs = {"q": q, "k": k, "v": v, "sinks": sinks, **arrays}
        launch = {"delivery": delivery, "schedule": schedule, "seed": seed}
        _, lse = emulated_forward.run(problem, inputs, kernel=kernel, arch="sm_90a", **launch)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse, largest + np.log(total), rtol=limit, atol=limit)
        np.testing.assert_allclose(arrays["score_max"], largest, rtol=limit, atol=limit)
        np.testing.assert_allclose(arrays["score_sum_exp"], total, rtol=limit)


SINKS = (
    *(("forward_mma", "float16", ""), ("forward_simple", "float32", ""), ("forward_sm90", "float16", "")),
    *(("forward_wide", "bfloat16", "sweep"), ("forward_sm90", "float8_e4m3fn", "sweep")),
)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [pytest.param(*case, marks=[pytest.mark.sweep] * bool(sweep)) for *case, sweep in SINKS],
)
def test_a_sink_counts_as_a_key(kernel: str, dtype: str) -> None:
    check_sinks(kernel, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize(("kernel", "dtype"), [case[:2] for case in SINKS])
def test_it_does_with_products_fused_and_the_hardwares_errors(kernel: str, dtype: str) -> None:
    with fused_products(), like_hardware():
        check_sinks(kernel, dtype)


DIMS = (("float16", 64), ("bfloat16", 128), ("float16", 192), ("bfloat16", 256), ("bfloat16", 512), ("float32", 64))
GATE_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window_size": (64, 0)}, {"dropout_p": 0.1})
GATED = [
    *((arch, *dtype, options) for arch in ("sm_90a", "sm_80") for dtype in DIMS for options in GATE_OPTIONS),
    *(("sm_90a", dtype, dim, {}) for dtype in ("float8_e4m3fn", "float8_e5m2") for dim in (64, 128, 256)),
]


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if n == 1 else pytest.mark.sweep) for n, v in enumerate(GATED)], ids=str
)
def test_nothing_is_spilled_and_parameters_lie_as_they_are_packed(variant: tuple[Any, ...]) -> None:
    arch, dtype, dim, options = variant
    problem = example_problem(dtype, dim, score_max=True, score_sum_exp=True, return_lse=True, **options)
    key = dispatch_key(problem, arch)
    source = kernel_source(key)
    layout, own = row_stats_layout(), forward_layout().size
    places = {"sizeof(LaunchParams)": own + layout.size, "__builtin_offsetof(LaunchParams, row_stats)": own}
    places |= {f"__builtin_offsetof(RowStats, {field.name})": field.offset for field in layout.fields}
    checks = [f'static_assert({place} == {at}, "");' for place, at in places.items()]
    source = dataclasses.replace(source, source="\n".join([source.source, *checks]))
    assert code_faults(code_of(source, key.kernel), register_limit(variants.block_threads(key))) == []
