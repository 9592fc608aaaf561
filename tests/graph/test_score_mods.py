"""Ten score modifications as graphs: on the mock device, and compiled into the kernels on the emulated one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.random_graphs import DIMS, RandomGraph
from cases.score_mod_gradients import (
    backward_arrays,
    backward_graph,
    check_forward,
    check_gradients,
    expected_gradients,
)
from cases.score_mods import (
    FIRST,
    MODIFICATIONS,
    OUT,
    STATS,
    Modification,
    Q,
    case_of,
    expected,
    forward_graph,
    no_extras,
)
from emulated.contraction import arithmetic
from inside.kernels import dispatch_key
from inside.reference import evaluate_graph
from support.gate import kernel_source

import gpu_actors as ga
from gpu_actors.graph.match import match_attention

NAMES = tuple(MODIFICATIONS)


@pytest.fixture(scope="module", params=["sm_90a"])
def emulated(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    options = ga.ContextOptions(arch=request.param, emulation=ga.EmulationOptions(arithmetic=arithmetic()))
    with ga.open_context("emulated", options) as ctx:
        yield ctx
        assert ctx.cudnn.restarts == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_mock_device_computes_them(mock: ga.GpuContext, name: str) -> None:
    for dtype in ("float16", "float64"):
        case = case_of(name, dtype)
        graph = forward_graph(case)
        result = mock.cudnn.execute(graph, case.arrays).result(10.0)
        reference = expected(case)
        tolerance = 1e-12 if dtype == "float64" else 2.0**-10
        np.testing.assert_allclose(result[OUT].astype(np.float64), reference.out, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(result[STATS], reference.stats, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_mock_device_differentiates_them(mock: ga.GpuContext, name: str) -> None:
    case = case_of(name, "float64")
    arrays = backward_arrays(case)
    result = mock.cudnn.execute(backward_graph(case), arrays).result(10.0)
    reference = expected_gradients(case, arrays)
    assert set(result) == set(reference.values)
    for uid, gradient in reference.values.items():
        np.testing.assert_allclose(result[uid], gradient, rtol=1e-6, atol=1e-7, err_msg=str(uid))


@pytest.mark.parametrize("name", NAMES)
def test_they_become_part_of_the_kernel(name: str) -> None:
    """A plain bias becomes the kernel's bias operand, which has a gradient; everything else is compiled in."""
    match = match_attention(forward_graph(case_of(name)))
    assert match.problem.softmax_scale == 0.25
    if name == "t5 relative bias":
        assert (match.modification, match.bias) == (None, FIRST)
        assert match.problem.bias == ("float32", True, False)
    else:
        assert match.modification is not None
        assert match.problem.score_mod is match.modification.mod
        assert match.bias is None


@pytest.mark.parametrize("emulated", ["sm_80"], indirect=True)
@pytest.mark.parametrize(
    "name", [n if n == "document mask" else pytest.param(n, marks=pytest.mark.sweep) for n in NAMES]
)
def test_kernels_compute_every_score_modification(emulated: ga.GpuContext, name: str) -> None:
    """In float16 on tensor cores. forward_sm90 has its rows in tests/lib/matrix."""
    case = case_of(name)
    graph = forward_graph(case)
    assert emulated.cudnn.inspect_plan(graph).key.kernel == "forward_mma"
    check_forward(case, emulated.cudnn.execute(graph, case.arrays).result(60.0))


@pytest.mark.parametrize("name", [n if n == "tanh gating" else pytest.param(n, marks=pytest.mark.sweep) for n in NAMES])
def test_kernels_differentiate_every_score_modification(emulated: ga.GpuContext, name: str) -> None:
    case = case_of(name)
    arrays = backward_arrays(case)
    graph = backward_graph(case)
    assert emulated.cudnn.inspect_plan(graph).key.kernel == "backward_sm90"
    check_gradients(case, arrays, emulated.cudnn.execute(graph, arrays).result(60.0))


@pytest.mark.parametrize("emulated", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.sweep)], indirect=True)
def test_float16_has_room_for_a_steep_derivative(emulated: ga.GpuContext) -> None:
    """dS is scaled by a bound that leaves out the modification's derivative: a derivative of 128 still fits."""
    steep = Modification(lambda graph, s, tensor: s * 128.0, lambda s, extras: s * 128.0, no_extras)
    case = case_of("checkerboard")._replace(modification=steep)
    case.arrays[Q] /= np.float16(128.0)
    arrays = backward_arrays(case)
    check_gradients(case, arrays, emulated.cudnn.execute(backward_graph(case), arrays).result(60.0))


def test_equal_modifications_are_one_header_and_different_ones_are_not() -> None:
    mods = {}
    for name in NAMES:
        mod = match_attention(forward_graph(case_of(name))).problem.score_mod
        again = match_attention(forward_graph(case_of(name, "bfloat16", 7))).problem.score_mod
        assert again == mod
        mods[name] = mod
    del mods["t5 relative bias"]
    assert len(set(mods.values())) == len(mods)
    assert len({str(mod) for mod in mods.values()}) == len(mods)


def test_numbers_are_passed_and_not_compiled_in() -> None:
    def mod(cap: float) -> Any:
        graph = ga.OperationGraph()
        q, k, v = (graph.tensor(uid=n, dims=(1, 1, 8, 32), dtype="float16") for n in (1, 2, 3))
        scores = graph.tanh(graph.matmul(q, graph.transpose(k)) * 0.5 / cap) * cap
        graph.output(graph.matmul(graph.softmax(scores), v), uid=4, dtype="float16")
        return match_attention(graph).problem.score_mod

    assert mod(2.0) == mod(30.0)
    assert "30" not in mod(30.0).header


def test_equal_modifications_share_a_cubin_and_others_do_not() -> None:
    keys = {}
    for name in ("alibi", "distance decay"):
        for dtype, seed in (("float16", 0), ("float16", 9)):
            problem = match_attention(forward_graph(case_of(name, dtype, seed))).problem
            keys.setdefault(name, set()).add(dispatch_key(problem, "sm_80"))
    assert [len(result) for result in keys.values()] == [1, 1]
    sources = [kernel_source(key) for result in keys.values() for key in result]
    assert sources[0] != sources[1]
    assert sources[0].macros == sources[1].macros, "nothing but the header tells them apart"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in range(1, 25))])
def test_random_modifications_are_right_in_the_plain_kernel(emulated: ga.GpuContext, seed: int) -> None:
    """Random graphs of all operations, tensors and scalars, through plan, packing and kernel, in float64."""
    graph = ga.OperationGraph()
    batch, heads, rows, keys = DIMS
    shapes = {101: (batch, heads, rows, 24), 102: (batch, heads, keys, 24), 103: (batch, heads, keys, 24)}
    q, k, v = (graph.tensor(uid=uid, dims=shape, dtype="float64") for uid, shape in shapes.items())
    random = RandomGraph(seed, 20, graph, graph.matmul(q, graph.transpose(k)) * 0.4)
    graph.output(graph.matmul(graph.softmax(random.result), v), uid=OUT)
    rng = np.random.default_rng(seed)
    arrays = {uid: rng.standard_normal(shape) for uid, shape in shapes.items()} | random.values
    assert emulated.cudnn.inspect_plan(graph).match.modification is not None
    result = emulated.cudnn.execute(graph, arrays).result(60.0)[OUT]
    np.testing.assert_allclose(result, evaluate_graph(graph, arrays)[OUT], rtol=1e-11, atol=1e-11)
