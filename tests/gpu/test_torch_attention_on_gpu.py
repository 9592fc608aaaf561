"""attention() on torch's CUDA tensors: gradients, streams, the autograd engine's threads, compiled steps.

GPU_ACTORS_TEST_DEVICE=mock rehearses these tests where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.testing import check_gradients, check_output

torch = pytest.importorskip("torch")
attention = pytest.importorskip("gpu_actors.interop.torch").attention

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("GPU_ACTORS_TEST_DEVICE", "cuda")
PLACE = os.environ.get("GPU_ACTORS_TEST_TENSORS", "cuda" if DEVICE.startswith("cuda") else "cpu")


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with ga.open_context(DEVICE) as ctx:
        yield ctx


def drawn(*shape: int, dtype: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(PLACE, dtype)


def operands(
    dtype: Any, rows: int = 130, keys: int = 200, heads: int = 4, heads_kv: int = 2, dim: int = 64
) -> list[Any]:
    shapes = ((2, rows, heads, dim), (2, keys, heads_kv, dim), (2, keys, heads_kv, dim))
    return [drawn(*shape, dtype=dtype, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]


def as_numpy(tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window_size": (40, 10)},
    {"softcap": 5.0},
    {"dropout_p": 0.2, "dropout_seed": 7},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_gradients_agree_with_the_oracle(context: Any, dtype: Any, options: dict[str, Any]) -> None:
    inputs = operands(dtype)
    dout = drawn(*inputs[0].shape, dtype=dtype, seed=9)
    out, lse = attention(*inputs, context=context, return_lse=True, **options)
    assert (out.device.type, out.dtype) == (PLACE, dtype)
    gradients = torch.autograd.grad(out, inputs, dout)
    assert {gradient.device for gradient in gradients} == {inputs[0].device}
    arrays = [as_numpy(tensor) for tensor in (dout, *inputs)]
    check_output(as_numpy(out), as_numpy(lse), *arrays[1:], **options)
    given = {"out": as_numpy(out), "lse": as_numpy(lse)}
    check_gradients(ga.AttentionGradients(*map(as_numpy, gradients)), *arrays, **given, **options)


def test_bias_and_sinks_have_gradients(context: Any) -> None:
    inputs = operands(torch.bfloat16, 70, 90)
    bias = drawn(1, 4, 70, 90, dtype=torch.bfloat16, seed=5).requires_grad_()
    sinks = drawn(4, dtype=torch.float32, seed=6).requires_grad_()
    dout = drawn(*inputs[0].shape, dtype=torch.bfloat16, seed=9)
    out, lse = attention(*inputs, context=context, bias=bias, sinks=sinks, return_lse=True)
    gradients = torch.autograd.grad(out, [*inputs, bias, sinks], dout)
    arrays = [as_numpy(tensor) for tensor in (dout, *inputs)]
    options = {"bias": as_numpy(bias), "sinks": as_numpy(sinks), "out": as_numpy(out), "lse": as_numpy(lse)}
    check_gradients(ga.AttentionGradients(*map(as_numpy, gradients)), *arrays, **options)


def test_work_that_the_callers_stream_has_not_done_yet_is_waited_for(context: Any) -> None:
    """A long chain on the caller's stream computes q; nothing synchronises before the request."""
    inputs = operands(torch.float16)
    expected = attention(*inputs, context=context, causal=True).detach()
    if PLACE == "cuda":
        torch.cuda.synchronize()
    stream = torch.cuda.stream(torch.cuda.Stream()) if PLACE == "cuda" else nullcontext()
    for _ in range(5):
        with stream:
            slow = torch.ones(1024, 1024, device=PLACE)
            for _ in range(20):
                slow = slow @ slow / 1024
            late = (inputs[0].detach() * slow[0, 0]).to(torch.float16).requires_grad_()
            out = attention(late, *inputs[1:], context=context, causal=True)
            torch.testing.assert_close(out, expected)
            out.sum().backward()
            assert torch.isfinite(late.grad).all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_has_the_same_gradients(context: Any, backend: str) -> None:
    def step(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, context=context, causal=True, deterministic=True).float().square().mean()

    inputs = operands(torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for mine, wanted in zip(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(step(*inputs), inputs), strict=True
    ):
        assert torch.equal(mine, wanted)
