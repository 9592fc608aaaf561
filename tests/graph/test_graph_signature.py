"""Signatures: they change with everything that changes a result or its code, and with nothing else, in any process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.service import run_python

import gpu_actors as ga

BASE: dict[str, Any] = {
    "dims": (2, 4, 8, 16),
    "heads_kv": 4,
    "dtype": "float16",
    "strides": None,
    "scale": 0.25,
    "passed_scale": False,
    "mask": ga.Mask.none(),
    "alignment": "top_left",
    "bias": None,
    "bias_dtype": "float32",
    "dropout": 0.0,
    "seed": 0,
    "stats": False,
    "cap": None,
    "op": "tanh",
    "out_strides": None,
    "out_dtype": "float16",
    "gradient": False,
}


def build(**changes: Any) -> ga.OperationGraph:
    o = BASE | changes
    graph = ga.OperationGraph()
    batch, _, rows, dim = o["dims"]
    q = graph.tensor(uid=1, dims=o["dims"], dtype=o["dtype"], strides=o["strides"])
    k, v = (graph.tensor(uid=n, dims=(batch, o["heads_kv"], rows, dim), dtype=o["dtype"]) for n in (2, 3))
    scale = graph.scalar(uid=9) if o["passed_scale"] else o["scale"]
    scores = graph.matmul(q, graph.transpose(k)) * scale
    if o["cap"]:
        scores = getattr(graph, o["op"])(scores / o["cap"]) * o["cap"]
    if o["bias"]:
        scores = scores + graph.tensor(uid=8, dims=o["bias"], dtype=o["bias_dtype"])
    scores = graph.mask(scores, o["mask"], o["alignment"])
    weights, stats = graph.softmax_with_stats(scores) if o["stats"] else (graph.softmax(scores), None)
    if o["dropout"]:
        weights = graph.dropout(weights, o["dropout"], o["seed"])
    out = graph.matmul(weights, v)
    if o["gradient"]:
        (dq,) = graph.gradient(out, graph.tensor(uid=7, dims=out.dims, dtype=o["dtype"]), (q,))
        graph.output(dq, uid=4, dtype=o["out_dtype"])
    else:
        graph.output(out, uid=4, dtype=o["out_dtype"], strides=o["out_strides"])
    if stats is not None:
        graph.output(stats, uid=5)
    return graph


CAUSAL = {"mask": ga.Mask.causal()}
# Pairs that differ in one field.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({}, {"scale": 0.5}),
    "scale, by one bit": ({}, {"scale": float(np.nextafter(0.25, 1))}),
    "scale kind": ({}, {"passed_scale": True}),
    "scale, int or float": ({"scale": 1}, {"scale": 1.0}),
    "dtype": ({}, {"dtype": "bfloat16"}),
    "output dtype": ({}, {"out_dtype": "float32"}),
    "dims": ({}, {"dims": (2, 4, 9, 16)}),
    "kv heads": ({}, {"heads_kv": 2}),
    "strides": ({}, {"strides": (512, 16, 64, 1)}),
    "output strides": ({}, {"out_strides": (512, 16, 64, 1)}),
    "mask": ({}, CAUSAL),
    "mask, kind of window": ({"mask": ga.Mask.sliding_window(3)}, {"mask": ga.Mask.causal_sliding_window(3)}),
    "window": ({"mask": ga.Mask.sliding_window(3)}, {"mask": ga.Mask.sliding_window(4)}),
    "alignment": (CAUSAL, CAUSAL | {"alignment": "bottom_right"}),
    "dropout": ({"dropout": 0.1}, {"dropout": 0.2}),
    "dropout or none": ({}, {"dropout": 0.1}),
    "bias or none": ({}, {"bias": (1, 1, 8, 8)}),
    "bias shape": ({"bias": (1, 1, 8, 8)}, {"bias": (1, 4, 8, 8)}),
    "bias dtype": ({"bias": (1, 1, 8, 8)}, {"bias": (1, 1, 8, 8), "bias_dtype": "float16"}),
    "stats": ({}, {"stats": True}),
    "operation": ({"cap": 2.0}, {"cap": 2.0, "op": "sigmoid"}),
    "constant": ({"cap": 2.0}, {"cap": 3.0}),
    "direction": ({}, {"gradient": True}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_graphs_that_differ_do_not_share_a_plan(name: str) -> None:
    one, other = (build(**changes) for changes in PAIRS[name])
    assert one.signature() != other.signature()
    assert one.signature() == build(**PAIRS[name][0]).signature()


def test_plans_are_found_by_signature() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, 8, 16)).astype(np.float16) for _ in range(3))
    with ga.open_context("mock") as ctx:
        result = {}
        for name, (one, other) in PAIRS.items():
            for which, changes in enumerate((one, other)):
                o = BASE | changes
                if o["dtype"] != "float16" or o["dims"] != BASE["dims"] or o["heads_kv"] != 4 or o["strides"]:
                    continue
                arrays: dict[int, Any] = {1: q, 2: k, 3: v}
                if o["bias"]:
                    arrays[8] = np.ones(o["bias"], o["bias_dtype"])
                if o["passed_scale"]:
                    arrays[9] = 0.25
                if o["gradient"]:
                    arrays[7] = v
                before = ctx.cudnn.plan_cache_stats()
                graph = build(**changes)
                known = graph.signature() in result.values()
                ctx.cudnn.execute(graph, arrays).result(10.0)
                after = ctx.cudnn.plan_cache_stats()
                assert (after.hits - before.hits, after.misses - before.misses) == ((1, 0) if known else (0, 1)), name
                result[name, which] = graph.signature()
        assert ctx.cudnn.plan_cache_stats().entries == len(set(result.values()))


def test_seeds_and_names_are_in_no_signature() -> None:
    assert build(dropout=0.1, seed=1).signature() == build(dropout=0.1, seed=2).signature()
    graph = build()
    graph.tensors[1].name = "queries"
    assert graph.signature() == build().signature()


def test_a_graph_that_grows_has_another_signature() -> None:
    graph = build()
    before = graph.signature()
    graph.output(graph.exp(graph.tensors[1]), uid=30)
    assert graph.signature() != before


def test_signatures_are_the_same_in_every_process() -> None:
    script = """
    import gpu_actors as ga
    graph = ga.OperationGraph()
    q, k, v = (graph.tensor(uid=n, dims=(2, 4, 8, 16), dtype="float16") for n in (1, 2, 3))
    scores = graph.mask(graph.matmul(q, graph.transpose(k)) * 0.25, ga.Mask.causal())
    graph.output(graph.matmul(graph.softmax(scores), v), uid=4, dtype="float16")
    print(graph.signature())
    """
    assert run_python(script).stdout.strip() == str(build(**CAUSAL).signature())
