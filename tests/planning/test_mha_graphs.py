"""The graphs that mha_forward and mha_backward stand for: matched, they are the problems of their requests."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from inside.arrays import dtype_of
from inside.graph import MhaUid, TensorLayout, match_attention, mha_backward_graph, mha_forward_graph
from inside.validation import backward_problem, forward_problem

import gpu_actors as ga
from gpu_actors.planning.mha import backward_request, forward_request

MASKS = st.one_of(
    st.just(ga.Mask.none()),
    st.just(ga.Mask.causal()),
    st.integers(1, 9).map(ga.Mask.sliding_window),
    st.integers(1, 9).map(ga.Mask.causal_sliding_window),
)
SCALES = st.one_of(st.none(), st.floats(-4, 4, allow_subnormal=False))


@st.composite
def params_of(draw: st.DrawFn) -> ga.AttentionParams:
    heads_kv, ratio = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 9)) for _ in range(3)]
    return ga.AttentionParams(
        sizes[0],
        sizes[1],
        sizes[2],
        heads_kv * ratio,
        heads_kv,
        draw(st.sampled_from((8, 24, 64))),
        mask=draw(MASKS),
        scale=draw(SCALES),
        dropout_p=draw(st.sampled_from((0.0, 0.1, 0.75))),
        dropout_seed=draw(st.integers(0, (1 << 64) - 1)),
        alignment=draw(st.sampled_from(("top_left", "bottom_right"))),
    )


def arrays_of(params: ga.AttentionParams, dtype: str) -> dict[str, Any]:
    rows = (params.batch, params.heads_q, params.seq_q, params.head_dim)
    keys = (params.batch, params.heads_kv, params.seq_kv, params.head_dim)
    shapes = {"q": rows, "k": keys, "v": keys}
    return {name: np.zeros(shape, dtype_of(dtype)) for name, shape in shapes.items()}


def layouts_of(**arrays: Any) -> dict[MhaUid, TensorLayout]:
    layouts = {}
    for name, array in arrays.items():
        if array is not None:
            strides = tuple(step // array.itemsize for step in array.strides)
            layouts[MhaUid[name.upper()]] = TensorLayout(array.shape, array.dtype.name, strides)
    return layouts


def without_idle_alignment(problem: ga.AttentionProblem) -> ga.AttentionProblem:
    """Where nothing is masked, alignment means nothing, and graphs do not say it."""
    return dataclasses.replace(problem, alignment="bottom_right") if problem.mask == "full" else problem


@settings(max_examples=40, deadline=None)
@given(params_of(), st.sampled_from(("float16", "bfloat16", "float32", "float64")), st.booleans(), st.data())
def test_a_forward_request_is_its_graph(params: ga.AttentionParams, dtype: str, stats: bool, data: Any) -> None:
    bias = None
    if data.draw(st.booleans()):
        outer = [data.draw(st.sampled_from((1, size))) for size in (params.batch, params.heads_q)]
        bias = np.zeros(
            (*outer, params.seq_q, params.seq_kv), data.draw(st.sampled_from((dtype_of(dtype), np.float32)))
        )
    message = ga.MhaForward(params=params, **arrays_of(params, dtype), bias=bias, return_stats=stats)
    request = forward_request(message)
    problem = forward_problem(request)
    layouts = layouts_of(q=message.q, k=message.k, v=message.v, bias=bias)
    graph = mha_forward_graph(params, layouts, return_stats=stats)
    assert match_attention(graph).problem == without_idle_alignment(problem)
    assert problem.softmax_scale == (1 / math.sqrt(params.head_dim) if params.scale is None else params.scale)


@settings(max_examples=30, deadline=None)
@given(params_of(), st.sampled_from(("float16", "bfloat16", "float32")), st.booleans(), st.booleans())
def test_a_backward_request_is_its_graph(
    params: ga.AttentionParams, dtype: str, with_bias: bool, deterministic: bool
) -> None:
    arrays = arrays_of(params, dtype)
    bias = np.zeros((1, params.heads_q, params.seq_q, params.seq_kv), np.float32) if with_bias else None
    stats = np.zeros((*arrays["q"].shape[:-1], 1), np.float32)
    message = ga.MhaBackward(
        params=params, **arrays, o=arrays["q"], do=arrays["q"], stats=stats, bias=bias, deterministic=deterministic
    )
    request = backward_request(message)
    problem = backward_problem(request)
    layouts = layouts_of(**arrays, bias=bias, out=arrays["q"], stats=stats, dout=arrays["q"])
    matched = match_attention(mha_backward_graph(params, layouts, deterministic=deterministic))
    assert matched.problem == without_idle_alignment(problem)
    assert matched.gradients is not None
    assert set(matched.gradients.written) == {"q", "k", "v", *(("bias",) if with_bias else ())}
