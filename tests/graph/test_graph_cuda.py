"""Graphs on a CUDA device over a fake driver: operands, outputs and a modification's numbers in packed parameters."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.cuda import FakeCuda, Geometry
from fakes.memory import FakeMemory
from fakes.service import KV_SHAPE, SHAPE, forward_on_host, operands, service
from inside.kernels import forward_layout, score_layout
from support.structs import fields_of

import gpu_actors as ga
from gpu_actors.reference import attention_forward


def strides_of(array: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return tuple(step // array.itemsize for step in array.strides)


def graph_of(arrays: list[np.ndarray[Any, Any]], out_strides: tuple[int, ...] | None, cap: float | None = None) -> Any:
    graph = ga.OperationGraph()
    q, k, v = (
        graph.tensor(uid=n + 1, dims=array.shape, dtype="bfloat16", strides=strides_of(array))
        for n, array in enumerate(arrays)
    )
    scores = graph.matmul(q, graph.transpose(k)) * 0.25
    if cap is not None:
        table = graph.tensor(uid=9, dims=(1, SHAPE[2], 1, 1), dtype="float32")
        scores = graph.tanh(scores / cap) * cap + table
    graph.output(graph.matmul(graph.softmax(scores), v), uid=4, dtype="bfloat16", strides=out_strides)
    return graph


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=["BHSD", "BSHD", "SBHD"])
def test_outputs_lie_as_the_graph_says(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    inputs = [array.transpose(0, 2, 1, 3) for array in (q, k, v)]
    shape = inputs[0].shape
    wanted_strides = strides_of(np.empty([shape[axis] for axis in order], np.int8).transpose(np.argsort(order)))
    cuda = FakeCuda({"forward_simple": forward_on_host, "forward_mma": forward_on_host})
    with service(cuda, monkeypatch) as ctx:
        result = ctx.cudnn.execute(graph_of(inputs, wanted_strides), dict(enumerate(inputs, 1))).result(20)[4]
    assert strides_of(result) == wanted_strides
    expected = attention_forward(q, k, v, softmax_scale=0.25).out.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(result, expected.transpose(0, 2, 1, 3))
    assert cuda.leaks() == {}


def test_a_modifications_operands_follow_the_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    inputs = [array.transpose(0, 2, 1, 3) for array in (q, k, v)]
    graph = graph_of(inputs, None, cap=3.5)
    table = np.arange(SHAPE[2], dtype=np.float32).reshape(1, -1, 1, 1)
    seen: dict[str, Any] = {}

    def kernel(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
        mod = plan.match.modification.mod
        layout = score_layout(mod)
        assert layout is not None
        assert len(params) == forward_layout().size + -(-layout.size // 8) * 8
        fields = fields_of(params[forward_layout().size :], layout)
        seen.update({name: fields[name] for name in fields.dtype.names or ()})
        seen["table"] = np.frombuffer(memory.at(int(fields["t0"]), table.nbytes), np.float32).copy()

    cuda = FakeCuda({"forward_simple": kernel})
    with service(cuda, monkeypatch) as ctx:
        plan = ctx.cudnn.inspect_plan(graph)
        ctx.cudnn.execute(graph, dict(enumerate(inputs, 1)) | {9: table}).result(20)
    np.testing.assert_array_equal(seen["table"], table.ravel())
    assert (seen["t0_h"], seen["v0"], seen["v1"]) == (1, 3.5, 3.5)
    assert KV_SHAPE[2] != SHAPE[2], "heads are those of q"
