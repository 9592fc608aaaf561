"""Which graphs are valid: every refusal names the node or the tensor and says what would be accepted."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from inside.reference import evaluate_graph

import gpu_actors as ga


def tensors(graph: ga.OperationGraph, dims: tuple[int, ...] = (2, 4, 8, 16)) -> list[ga.GraphTensor]:
    return [graph.tensor(uid=n, dims=dims, dtype="float16") for n in (1, 2, 3)]


def attention(graph: ga.OperationGraph) -> ga.GraphTensor:
    q, k, v = tensors(graph)
    out = graph.matmul(graph.softmax(graph.matmul(q, graph.transpose(k)) * 0.25), v)
    return graph.output(out, uid=4, dtype="float16")


def refused(build: Callable[[], Any]) -> ga.InvalidRequest:
    with pytest.raises(ga.InvalidRequest) as caught:
        build()
    return caught.value


def test_a_sound_graph_passes_and_is_sorted() -> None:
    graph = ga.OperationGraph()
    attention(graph)
    graph.validate()
    assert [node.op for node in graph.order().nodes] == ["transpose", "matmul", "mul", "softmax", "matmul"]
    assert (graph.order().inputs, graph.order().outputs, graph.order().scalars) == ((1, 2, 3), (4,), ())


# Nodes by uid, as programs that generate graphs add them


def raw(**changes: Any) -> ga.OperationGraph:
    """A graph of nodes by uids, in no order. changes: other inputs or outputs of "matmul" and "softmax"."""
    graph = ga.OperationGraph()
    tensors(graph, (2, 4, 8, 8))
    graph.tensor(uid=5, dims=(2, 4, 8, 8), dtype="float16")
    nodes = {"last": ((11, 3), (5,)), "softmax": ((10,), (11,)), "matmul": ((1, 2), (10,))} | changes
    for uid in {10, 11} | {uid for _, outputs in nodes.values() for uid in outputs if uid != 5}:
        graph.tensor(uid=uid, dims=(2, 4, 8, 8), dtype="float32", virtual=True)
    for name, (inputs, outputs) in nodes.items():
        graph.node("softmax" if name == "softmax" else "matmul", inputs, outputs, name=name)
    return graph


def test_nodes_may_come_in_any_order() -> None:
    graph = raw()
    assert [node.name for node in graph.order().nodes] == ["matmul", "softmax", "last"]


RAW = {
    "a tensor that is not there": ({"softmax": ((99,), (11,))}, "softmax", "does not have"),
    "a tensor that is written twice": ({"softmax": ((10,), (10,))}, "matmul", "softmax writes already"),
    "a cycle": ({"softmax": ((12,), (11,)), "loop": ((10, 11), (12,))}, "softmax", "cycle"),
    "a tensor that depends on itself": ({"loop": ((12, 11), (12,)), "last": ((12, 3), (5,))}, "loop", "cycle"),
    "too many operands": ({"softmax": ((10, 2), (11,))}, "softmax", "reads 1 tensors"),
}


@pytest.mark.parametrize("name", RAW)
def test_nodes_that_do_not_fit_are_named(name: str) -> None:
    changes, field, reason = RAW[name]
    error = refused(raw(**changes).validate)
    assert error.field == field
    assert reason in str(error)


def test_unknown_operations_are_named_with_those_there_are() -> None:
    graph = raw()
    graph.nodes[0] = dataclasses.replace(graph.nodes[0], op="convolution")
    error = refused(graph.validate)
    assert (error.field, error.value) == ("last", "convolution")
    assert "matmul" in error.reason


ATTRIBUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "an index without an axis": ("index", {}, "axis"),
    "a reduction without axes": ("reduction", {"kind": "sum"}, "axes"),
    "a mask of no kind": ("mask", {"kind": "diagonal", "width": 0, "alignment": "top_left"}, "mask"),
    "a mask that hides nothing": ("mask", {"kind": "none", "width": 0, "alignment": "top_left"}, "hide something"),
    "a mask without a side": ("mask", {"kind": "causal", "width": 0, "alignment": "left"}, "top_left"),
    "a window of no keys": ("mask", {"kind": "sliding_window", "width": 0, "alignment": "top_left"}, "window"),
    "a probability of 2": ("dropout", {"probability": 2.0}, "[0, 1)"),
    "gradients by what is not read": ("gradient", {"wrt": (3,), "forward": ()}, "must read"),
    "gradients by a number": ("gradient", {"wrt": 3, "forward": ()}, "wrt must be a tuple"),
    "determinism that is no flag": ("gradient", {"wrt": (), "forward": (), "deterministic": 1}, "True or False"),
    "an attribute of nothing": ("tanh", {"axis": 2}, "is no attribute of tanh: it takes none"),
    "a misspelt attribute": (
        "gradient",
        {"wrt": (), "forward": (), "determinstic": True},
        "it takes wrt, forward, det",
    ),
    "axes that are one": ("reduction", {"kind": "sum", "axes": 3}, "axes must be ints"),
    "an axis twice": ("reduction", {"kind": "sum", "axes": (3, -1)}, "axes must differ"),
    "an axis that is true": ("reduction", {"kind": "sum", "axes": (True,)}, "axes must be ints"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_wrong_attribute_is_refused_by_name(name: str) -> None:
    op, attributes, reason = ATTRIBUTES[name]
    graph = raw()
    graph.node(op, (10, 1) if op == "gradient" else (10,), (20,), name="it", **attributes)
    graph.tensor(uid=20, dims=(2, 4, 8, 8), dtype="float32")
    assert reason in str(refused(graph.validate))


NO_NODES: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any], str]] = {
    "inputs that are one": (("exp", 1, (2,)), {}, "inputs must be a tuple of uids"),
    "outputs by name": (("exp", (1,), ("2",)), {}, "outputs must be a tuple of uids"),
    "an operation that is no name": ((3, (1,), (2,)), {}, "name of an operation"),
    "a name that is none": (("exp", (1,), (2,)), {"name": ["a"]}, "must be a str"),
    "a seed below 0": (("dropout", (1,), (2,)), {"probability": 0.5, "seed": -1}, "an int in"),
}


@pytest.mark.parametrize("name", NO_NODES)
def test_what_is_no_node_is_refused_at_once(name: str) -> None:
    arguments, named, reason = NO_NODES[name]
    assert reason in refused(lambda: ga.OperationGraph().node(*arguments, **named)).reason


def test_a_node_has_the_seed_that_it_is_given_and_its_signature_has_not() -> None:
    def graph(seed: int) -> ga.OperationGraph:
        built = ga.OperationGraph()
        built.tensor(uid=1, dims=(1, 1, 4, 64), dtype="float32")
        built.tensor(uid=2, dims=(1, 1, 4, 64), dtype="float32")
        built.node("dropout", (1,), (2,), probability=0.5, seed=seed)
        return built

    def method(seed: int) -> ga.OperationGraph:
        built = ga.OperationGraph()
        one = built.tensor(uid=1, dims=(1, 1, 4, 64), dtype="float32")
        built.output(built.dropout(one, 0.5, seed), uid=2)
        return built

    ones = {1: np.ones((1, 1, 4, 64), np.float32)}
    for seed in (0, 7):
        np.testing.assert_array_equal(evaluate_graph(graph(seed), ones)[2], evaluate_graph(method(seed), ones)[2])
    assert (evaluate_graph(graph(0), ones)[2] != evaluate_graph(graph(7), ones)[2]).any()
    assert graph(0).signature() == graph(7).signature() == method(7).signature()


def test_the_dims_and_dtype_of_a_tensor_are_those_that_its_node_writes() -> None:
    graph = ga.OperationGraph()
    q, _, _ = tensors(graph)
    graph.tensor(uid=7, dims=(2, 4, 8, 8), dtype="float32")
    graph.node("exp", (q.uid,), (7,), name="exp")
    del graph.tensors[2], graph.tensors[3]
    error = refused(graph.validate)
    assert (error.field, error.value) == ("exp", (2, 4, 8, 8))
    graph.tensors.pop(7)
    graph.tensor(uid=7, dims=(2, 4, 8, 16), dtype="bool")
    assert refused(graph.validate).value == "bool"
    graph.tensors.pop(7)
    graph.tensor(uid=7, dims=(2, 4, 8, 16), dtype="float16", virtual=True)
    graph.node("neg", (7,), (8,), name="neg")
    graph.tensor(uid=8, dims=(2, 4, 8, 16), dtype="float32")
    error = refused(graph.validate)
    assert (error.field, error.value) == ("exp", "float16"), "inside a graph nothing is rounded"


def test_what_leads_nowhere_is_refused() -> None:
    graph = ga.OperationGraph()
    attention(graph)
    unread = graph.tensors[1] + 1.0
    assert refused(graph.validate).field == f"tensor {unread.uid}"
    graph = ga.OperationGraph()
    attention(graph)
    graph.tensor(uid=9, dims=(1,), dtype="float32")
    assert refused(graph.validate).field == "tensor 9"
    graph = ga.OperationGraph()
    assert "nothing" in refused(graph.validate).reason
    graph = ga.OperationGraph()
    graph.tensor(uid=1, dims=(4,), dtype="float32", virtual=True)
    graph.output(graph.exp(graph.tensors[1]), uid=2)
    assert "no node writes it" in refused(graph.validate).reason


# Operands


Operands = Callable[[ga.OperationGraph, Any, Any, Any], Any]


def tensor8(graph: ga.OperationGraph, dims: Any, **layout: Any) -> ga.GraphTensor:
    return graph.tensor(uid=8, dims=dims, **{"dtype": "float16", **layout})


OPERANDS: dict[str, tuple[Operands, str, str]] = {
    "k as it lies": (lambda g, q, k, v: g.matmul(q, k), "matmul_0", "transpose the second"),
    "heads": (lambda g, q, k, v: g.matmul(q, tensor8(g, (2, 3, 16, 8))), "matmul_0", "fewer heads that divide"),
    "too few dims": (lambda g, q, k, v: g.matmul(q, tensor8(g, (16, 8))), "matmul_0", "same number of dims"),
    "no broadcast": (lambda g, q, k, v: q + tensor8(g, (2, 4, 7, 16)), "add_0", "1 to be broadcast"),
    "a condition as a number": (lambda g, q, k, v: (q > k) + 1.0, "add_1", "select"),
    "a number as a condition": (lambda g, q, k, v: g.select(q, k, v), "select_0", "condition"),
    "numbers as logic": (lambda g, q, k, v: q & k, "logical_and_0", "bool"),
    "an axis that is not there": (lambda g, q, k, v: g.index(q, 4), "index_0", "from -4 to 3"),
    "integers over 0": (lambda g, q, k, v: g.index(q, 2) // 0, "floordiv_1", "must not be 0"),
    "what integers leave over 0": (lambda g, q, k, v: g.index(q, 2) % 0, "mod_1", "must not be 0"),
    "a reduction that is not there": (lambda g, q, k, v: g.reduction(q, "median"), "reduction_0", "sum"),
    "an axis of a reduction": (lambda g, q, k, v: g.reduction(q, "sum", 7), "reduction_0", "axes"),
    "a probability of 1": (lambda g, q, k, v: g.dropout(q, 1.0), "dropout_p", "[0, 1)"),
    "a seed below 0": (lambda g, q, k, v: g.dropout(q, 0.5, -1), "dropout_seed", "an int in"),
    "an array as seed": (lambda g, q, k, v: g.dropout(q, 0.5, k), "dropout_0", "uint64"),
    "a mask that is none": (lambda g, q, k, v: g.mask(q, "causal"), "mask", "Mask.causal()"),
    "an alignment that is none": (lambda g, q, k, v: g.mask(q, ga.Mask.causal(), "middle"), "alignment", "top_left"),
    "a string": (lambda g, q, k, v: g.exp("q"), "exp_0", "numbers"),
    "another graph's": (lambda g, q, k, v: q + tensors(ga.OperationGraph())[0], "add_0", "this graph"),
    "a second use of a uid": (lambda g, q, k, v: g.output(g.exp(q), uid=1), "uid", "unique"),
    "a negative uid": (lambda g, q, k, v: g.output(g.exp(q), uid=-1), "uid", "int >= 0"),
    "an input as output": (lambda g, q, k, v: g.output(q, uid=9), "tensor 9", "virtual"),
    "an integer output of floats": (lambda g, q, k, v: g.output(g.exp(q), uid=9, dtype="int32"), "tensor 9", "kind"),
    "dims of 0": (lambda g, q, k, v: tensor8(g, (0,)), "tensor 8 dims", "int >= 1"),
    "no dims": (lambda g, q, k, v: tensor8(g, ()), "tensor 8", "1 to 4 dims"),
    "dims that are one": (lambda g, q, k, v: tensor8(g, 4), "tensor 8 dims", "tuple of ints"),
    "strides that are one": (lambda g, q, k, v: tensor8(g, (4,), strides=1), "tensor 8 strides", "tuple of ints"),
    "too few strides": (lambda g, q, k, v: tensor8(g, (4, 4), strides=(4,)), "tensor 8", "as many strides"),
    "no axis of a reduction": (lambda g, q, k, v: g.reduction(q, "sum", None), "reduction_0", "axes"),
    "gradients by one tensor": (lambda g, q, k, v: g.gradient(g.exp(q), k, q), "gradient", "tuple of tensors"),
    "gradients by a tensor twice": (lambda g, q, k, v: g.gradient(g.exp(q), k, (q, q)), "gradient_1", "once"),
    "half of forward": (lambda g, q, k, v: g.gradient(g.exp(q), k, (q,), (v,)), "gradient_1", "(output, stats)"),
    "stats without an axis": (
        lambda g, q, k, v: g.gradient(g.exp(q), k, (q,), (v, tensor8(g, (2, 4, 8), dtype="float32"))),
        "gradient_1",
        "dims (2, 4, 8, 16) and (2, 4, 8, 1)",
    ),
    "gradients by an index": (
        lambda g, q, k, v: g.gradient(g.exp(q), k, (g.index(q, 0),)), "gradient_2", "tensors of floats",
    ),
    "gradients of another shape": (
        lambda g, q, k, v: g.gradient(g.reduction(q, "sum"), k, (q,)), "gradient_1", "equal dims",
    ),
    "a number beyond float32": (lambda g, q, k, v: q * 1e300, "tensor -1", "float32 holds"),
    "a scalar of float16": (lambda g, q, k, v: g.scalar(uid=8, dtype="float16"), "tensor 8", "float32"),
    "a scalar that is nan": (lambda g, q, k, v: g.scalar(uid=8, value=float("nan")), "tensor 8", "a number"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_do_not_go_together_are_refused_at_once(name: str) -> None:
    build, field, reason = OPERANDS[name]
    graph = ga.OperationGraph()
    error = refused(lambda: build(graph, *tensors(graph)))
    assert error.field == field
    assert reason in error.reason


def test_dtypes_that_no_graph_has_are_unsupported() -> None:
    with pytest.raises(ga.Unsupported) as caught:
        ga.OperationGraph().tensor(uid=1, dims=(4,), dtype="int64")
    assert (caught.value.field, caught.value.nearest) == ("tensor 1", "int32")


def test_a_tensor_has_no_truth() -> None:
    graph = ga.OperationGraph()
    q, k, _ = tensors(graph)
    with pytest.raises(TypeError, match="select"):
        bool(q > k)


@pytest.mark.parametrize("number", [np.float32(2.5), np.float64(2.5), np.int64(3), np.uint8(3)])
def test_numbers_of_numpy_are_operands(number: Any) -> None:
    def graph(number: Any, reverse: bool) -> ga.OperationGraph:
        built = ga.OperationGraph()
        q = built.tensor(uid=1, dims=(2,), dtype="float32")
        built.output(number * q if reverse else q * number, uid=2)
        return built

    for reverse in (False, True):
        assert graph(number, reverse).signature() == graph(number.item(), reverse).signature()


def test_a_mask_that_hides_nothing_is_no_node() -> None:
    graph = ga.OperationGraph()
    q, _, _ = tensors(graph)
    assert graph.mask(q, ga.Mask.none()) is q


# Values of any kind, at every parameter of every method

ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 1 << 80, 2.5, math.nan, "x", b"x", "matmul", (), [], {}, [1], ("x",), (None,), [[]], {"a": 1},
    np.zeros(3), (np.zeros(2),), np.float32(1), object(), type,
)  # fmt: skip
USUAL: dict[str, Any] = {
    "uid": 9,
    "dims": (1, 2, 4, 4),
    "dtype": "float32",
    "op": "exp",
    "probability": 0.5,
    "value": 1.0,
}


def is_a_method(member: Any) -> bool:
    return inspect.isfunction(member) and not member.__name__.startswith("_")


@pytest.mark.parametrize("method", [name for name, _ in inspect.getmembers(ga.OperationGraph, is_a_method)])
def test_an_odd_value_raises_no_raw_error(method: str) -> None:
    function = getattr(ga.OperationGraph, method)
    signature = inspect.signature(function)
    parameters = list(signature.parameters.items())[1:]
    for (parameter, _), odd in itertools.product(parameters, ODD_VALUES):
        if parameter == "visible" and callable(odd):
            continue  # a user's function may raise anything
        graph = ga.OperationGraph()
        q = graph.tensor(uid=1, dims=(1, 2, 4, 8), dtype="float32")
        scores = graph.matmul(q, graph.tensor(uid=2, dims=(1, 2, 8, 4), dtype="float32"))
        usual = {**USUAL, "operands": (scores,), "mask": ga.Mask.none(), "wrt": (q,)}
        bound = signature.bind_partial(graph)
        for name, each in parameters:
            if name == parameter:
                packed = {each.VAR_POSITIONAL: (odd,), each.VAR_KEYWORD: {"odd": odd}}
                bound.arguments[name] = packed.get(each.kind, odd)
            elif each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                bound.arguments[name] = usual.get(name, scores)
        with contextlib.suppress(ga.GpuActorsError):
            function(*bound.args, **bound.kwargs)


def test_the_operation_at_fault_is_named() -> None:
    graph = ga.OperationGraph()
    scores = graph.tensor(uid=1, dims=(1, 2, 4, 8), dtype="float32")
    for call, field in (
        (lambda: graph.softmax_with_rows(scores, np.zeros(3)), "softmax_0"),  # type: ignore[arg-type]
        (lambda: graph.operate([], (scores,)), "op"),  # type: ignore[arg-type]
        (lambda: graph.operate("exp", 3), "exp"),  # type: ignore[arg-type]
        (lambda: graph.block_mask(scores, scores, scores, block_size=3), "block_mask_0"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ga.InvalidRequest) as caught:
            call()
        assert caught.value.field == field
