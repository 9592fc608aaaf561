"""torch as the benchmark's peer, on the CPU: the same layouts, masks and gradients as ours."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from inside.bench import Case, HostArrays, Refuses, agrees, peers

from gpu_actors.reference import attention_backward, attention_forward

torch = pytest.importorskip("torch")

FORWARD = [
    Case(batch=2, rows=70, keys=70, heads=4, kv_heads=4, head_dim=32, dtype="float16"),
    Case(batch=2, rows=70, keys=70, heads=4, kv_heads=2, head_dim=32, dtype="float16", causal=True),
    Case(batch=1, rows=40, keys=70, heads=2, kv_heads=2, head_dim=32, dtype="float16"),
]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's plainest backend as a peer, without a stream."""
    monkeypatch.setattr(peers, "_on_stream", lambda handle, call: call)
    monkeypatch.setattr(peers, "_tensor", torch.from_numpy)
    monkeypatch.setattr(peers, "_host", lambda tensor: tensor.detach().float().numpy())
    return functools.partial(peers._sdpa, "MATH")


def operands(case: Case) -> dict[str, Any]:
    arrays = HostArrays()
    shapes = {"q": case.q_shape, "k": case.kv_shape, "v": case.kv_shape, "dout": case.q_shape}
    return {name: arrays.random(shape, case.dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.name)
def test_a_peer_gives_the_answer_of_our_kernels(prepare: Any, case: Case) -> None:
    sets = [operands(case) for _ in range(2)]
    prepared = prepare(case, sets, 0)
    assert len(prepared.calls) == 2
    reference = attention_forward(sets[0]["q"], sets[0]["k"], sets[0]["v"], **case.options()).out
    assert agrees(case, reference, prepared.outputs()["out"])
    assert not agrees(case, reference[:, ::-1], prepared.outputs()["out"])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_peer_gives_the_gradients_of_our_kernels(prepare: Any, kv_heads: int) -> None:
    case = Case(
        kind="backward",
        batch=2,
        rows=70,
        keys=70,
        heads=4,
        kv_heads=kv_heads,
        head_dim=32,
        dtype="float16",
        causal=True,
    )
    one = operands(case)
    outputs = prepare(case, [one], 0).outputs()
    reference = attention_backward(one["dout"], one["q"], one["k"], one["v"], causal=True)
    for name in ("dq", "dk", "dv"):
        assert agrees(case, getattr(reference, name), outputs[name]), name


def test_what_it_has_no_call_for_is_refused_in_a_sentence(prepare: Any) -> None:
    base = FORWARD[1]
    for case in (
        Case(**{**fields(base), "window": 5}),
        Case(**{**fields(base), "keys": 90}),
        Case(**{**fields(base), "dtype": "float8_e4m3fn"}),
    ):
        with pytest.raises(Refuses, match="it"):
            prepare(case, [{name: np.zeros(1, np.float16) for name in "qkv"}], 0)


def fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__slots__}
