"""attention() as torch programs use it: differentiated, compiled, exported, from any thread."""

from __future__ import annotations

import asyncio
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.testing import check_gradients, check_output

torch = pytest.importorskip("torch")
torch_attention = pytest.importorskip("gpu_actors.interop.torch")
attention = torch_attention.attention
forward_ad = torch.autograd.forward_ad
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.float64, grad: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def operands(rows: int = 3, keys: int = 4, heads: int = 2, heads_kv: int = 1, dim: int = 2, **how: Any) -> list[Any]:
    shapes = ((2, rows, heads, dim), (2, keys, heads_kv, dim), (2, keys, heads_kv, dim))
    return [drawn(*shape, seed=seed, **how) for seed, shape in enumerate(shapes)]


# Gradients

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "alignment": "top_left"},
    "window": {"window_size": (1, 0)},
    "sink tokens": {"window_size": (1, 0), "sink_tokens": 1},
    "scale": {"softmax_scale": 0.9},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": (1 << 64) - 5},
    "chunks": {"causal": True, "attention_chunk": 2},
    "signed alibi": {"alibi_slopes": torch.tensor([0.5, 0.25]), "alibi_signed": True},
    "positions": {
        "causal": True,
        "window_size": (3, 0),
        "q_positions": torch.tensor([[1, 2], [0, 1]], dtype=torch.int32),
        "k_positions": torch.tensor([[0, 2], [3, 1]], dtype=torch.int32),
    },
    "padded": {
        "causal": True,
        "seqused_q": torch.tensor([2, 3], dtype=torch.int32),
        "seqused_k": torch.tensor([4, 1], dtype=torch.int32),
    },
    "deterministic": {"deterministic": True},
    "together": {
        "causal": True,
        "window_size": (2, -1),
        "softcap": 2.0,
        "alibi_slopes": torch.tensor([0.5, 0.25]),
        "dropout_p": 0.2,
        "dropout_seed": 3,
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_gradcheck_in_double_precision(ctx: ga.GpuContext, option: str) -> None:
    function = lambda q, k, v: attention(q, k, v, context=ctx, **OPTIONS[option])  # noqa: E731
    assert torch.autograd.gradcheck(function, operands())


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (1, 1)])
def test_gradcheck_of_bias_and_sinks(ctx: ga.GpuContext, shape: tuple[int, int]) -> None:
    def function(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        return attention(q, k, v, context=ctx, causal=True, softcap=2.0, bias=bias, sinks=sinks)

    bias, sinks = drawn(*shape, 3, 4, seed=5), drawn(2, seed=6)
    assert torch.autograd.gradcheck(function, (*operands(), bias, sinks))


def test_gradcheck_of_packed_sequences(ctx: ga.GpuContext) -> None:
    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    packed = drawn(5, 2, 2), drawn(6, 1, 2, seed=1), drawn(6, 1, 3, seed=2)

    def function(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, context=ctx, causal=True, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])

    assert torch.autograd.gradcheck(function, packed)


# Parity with torch


def by_torch(q: Any, k: Any, v: Any, **options: Any) -> Any:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(*heads_first, enable_gqa=True, **options).transpose(1, 2)


def gradients_of(function: Any, inputs: list[Any], dout: Any) -> list[Any]:
    return list(torch.autograd.grad(function(*inputs), inputs, dout))


def band(rows: int, keys: int, left: int, right: int) -> Any:
    ahead = torch.arange(keys)[None, :] - (torch.arange(rows)[:, None] + keys - rows)
    return (ahead >= -left) & (ahead <= right)


SDPA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"causal": True, "alignment": "top_left"}, {"is_causal": True}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "window": ({"window_size": (9, 4)}, {"attn_mask": band(30, 40, 9, 4)}),
    "bottom-right": ({"causal": True}, {"attn_mask": band(30, 40, 100, 0)}),
}


@pytest.mark.parametrize("case", SDPA)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_outputs_and_gradients_are_those_of_sdpa(ctx: ga.GpuContext, case: str, dtype: Any, heads_kv: int) -> None:
    ours, theirs = SDPA[case]
    inputs = operands(30, 40, 4, heads_kv, 16, dtype=dtype)
    dout = drawn(2, 30, 4, 16, seed=9, dtype=dtype, grad=False)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    mine = lambda q, k, v: attention(q, k, v, context=ctx, **ours)  # noqa: E731
    torch.testing.assert_close(mine(*inputs), by_torch(*inputs, **theirs), **tolerance)
    expected = gradients_of(lambda *given: by_torch(*given, **theirs), inputs, dout)
    for gradient, wanted in zip(gradients_of(mine, inputs, dout), expected, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, wanted, **tolerance)


def as_numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


def test_bfloat16_agrees_by_the_rule_that_kernels_are_held_to(ctx: ga.GpuContext) -> None:
    inputs = operands(33, 47, 4, 2, 32, dtype=torch.bfloat16)
    dout = drawn(2, 33, 4, 32, seed=9, dtype=torch.bfloat16, grad=False)
    out, lse = attention(*inputs, context=ctx, causal=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad(out, inputs, dout)
    arrays = [as_numpy(tensor) for tensor in (dout, *inputs)]
    check_output(as_numpy(out), lse.numpy(), *arrays[1:], causal=True)
    check_gradients(ga.AttentionGradients(*map(as_numpy, gradients)), *arrays, causal=True)


def test_only_what_requires_a_gradient_gets_one(ctx: ga.GpuContext) -> None:
    q, k, v = operands(grad=False)
    assert not attention(q, k, v, context=ctx).requires_grad
    v.requires_grad_()
    bias = drawn(1, 1, 3, 4, seed=5, grad=False)
    out = attention(q, k, v, context=ctx, bias=bias)
    out.sum().backward()  # its gradient is one number, expanded
    assert v.grad is not None
    assert q.grad is None
    assert bias.grad is None
    torch.testing.assert_close(v.grad.sum(), torch.tensor(float(out.numel()), dtype=v.dtype), rtol=1e-6, atol=0)


def test_the_lse_has_no_gradient_and_a_second_derivative_is_refused(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    out, lse = attention(q, k, v, context=ctx, return_lse=True)
    assert not lse.requires_grad
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(ga.Unsupported, match="differentiable once") as caught:
        torch.autograd.grad(dq.sum(), q)
    assert caught.value.field == "create_graph"


def test_slopes_that_are_learnt_elsewhere_serve_where_no_gradient_is_wanted(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    slopes = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        out = attention(q, k, v, context=ctx, alibi_slopes=slopes)
    torch.testing.assert_close(out, attention(q, k, v, context=ctx, alibi_slopes=slopes.detach()))
    with pytest.raises(ga.Unsupported, match="slopes have no gradient"):
        attention(q, k, v, context=ctx, alibi_slopes=slopes)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_a_tangent_is_refused_and_not_dropped(ctx: ga.GpuContext, name: str) -> None:
    q, k, v = operands(grad=False)
    given = {"q": q, "k": k, "v": v, "bias": drawn(1, 1, 3, 4, grad=False), "sinks": drawn(2, grad=False)}

    def function(operand: Any) -> Any:
        return attention(**{**given, name: operand}, context=ctx)

    with pytest.raises(ga.Unsupported, match="forward-mode") as caught:
        torch.func.jvp(function, (given[name],), (torch.ones_like(given[name]),))
    assert caught.value.field == name


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
@pytest.mark.parametrize("traced", ["whole", "inside", "ahead"])
def test_a_compiled_function_refuses_tangents_too(ctx: ga.GpuContext, traced: str) -> None:
    """A compiler traces tensors without their tangents, which would give a derivative of 0."""
    q, k, v = operands(grad=False)

    def function(q: Any) -> Any:
        return attention(q, k, v, context=ctx)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager")

    def derivative(q: Any) -> Any:
        if traced == "whole":
            return torch.func.jvp(function, (q,), (torch.ones_like(q),))[1]
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(compiled(forward_ad.make_dual(q, torch.ones_like(q)))).tangent

    if traced == "whole":
        derivative = torch.compile(derivative, backend="aot_eager")
    elif traced == "ahead":
        compiled(q)
    with pytest.raises(ga.Unsupported, match="forward-mode"):
        derivative(q)
    torch.testing.assert_close(compiled(q), function(q))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_seed", -1),
        ("dropout_seed", 1 << 64),
        ("causal", 2),
        ("window_size", (1, 1, 5)),
        ("alibi_signed", 1),
        ("deterministic", 1),
    ],
)
def test_a_compiled_function_refuses_what_its_operator_would_lose(ctx: ga.GpuContext, name: str, value: Any) -> None:
    q, k, v = operands(grad=False)
    options = {"dropout_p": 0.5, name: value}
    torch.compiler.reset()
    compiled = torch.compile(lambda: attention(q, k, v, context=ctx, **options), backend="aot_eager")
    with pytest.raises(ga.InvalidRequest) as refused:
        compiled()
    assert refused.value.field == name


def test_a_module_of_torch_learns_through_the_service(ctx: ga.GpuContext) -> None:
    """The module learns to find the one key that is like each row."""
    torch.manual_seed(0)
    project = torch.nn.Linear(8, 8)
    optimiser = torch.optim.Adam(project.parameters(), lr=0.05)
    x = torch.nn.functional.one_hot(torch.arange(8)).float()[None, :, None, :]
    losses = []
    for _ in range(30):
        loss = (attention(project(x), x, x, context=ctx, softmax_scale=1.0) - x).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


# Tracing


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_is_one_graph_with_the_same_gradients(ctx: ga.GpuContext, backend: str) -> None:
    sinks = torch.ones(2, dtype=torch.float64)

    def function(q: Any, k: Any, v: Any) -> Any:
        return attention(q * 2, k, v, context=ctx, causal=True, sinks=sinks).square()

    inputs = operands()
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))
    dout = torch.ones_like(inputs[0])
    for mine, wanted in zip(gradients_of(compiled, inputs, dout), gradients_of(function, inputs, dout), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_another_seed_or_length_does_not_compile_again_and_again(ctx: ga.GpuContext) -> None:
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    function = lambda q, k, v, seed: attention(q, k, v, context=ctx, dropout_p=0.5, dropout_seed=seed)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=count)
    for seed in range(2, 10):
        inputs = operands(rows=seed, keys=2 * seed)
        torch.testing.assert_close(compiled(*inputs, seed), function(*inputs, seed))
    assert graphs <= 3


class Layer(torch.nn.Module):  # type: ignore[name-defined]
    def __init__(self, context: ga.GpuContext) -> None:
        super().__init__()
        self.context = context

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, context=self.context, window_size=(1, 1)) + 1


def test_a_module_is_exported_with_the_operator_in_it(ctx: ga.GpuContext) -> None:
    inputs = tuple(operands(grad=False))
    layer = Layer(ctx)
    program = torch.export.export(layer, inputs)
    assert "gpu_actors.attention" in str(program.graph)
    torch.testing.assert_close(program.module()(*inputs), layer(*inputs))


def test_an_exported_module_says_that_its_context_is_closed() -> None:
    inputs = tuple(operands(grad=False))
    with ga.open_context("mock") as ctx:
        program = torch.export.export(Layer(ctx), inputs)
    with pytest.raises(ga.ActorStopped, match=rf"context {ctx.number}, which this call was made or traced for"):
        program.module()(*inputs)


# Threads and loops


def test_the_thread_of_a_running_loop_is_refused_in_either_direction(ctx: ga.GpuContext) -> None:
    inputs = operands()
    out = attention(*inputs, context=ctx)
    before = ctx.stats()["flash_attn"].submitted

    async def call() -> None:
        with pytest.raises(ga.WouldBlock, match=r"worker thread, as with asyncio\.to_thread"):
            attention(*inputs, context=ctx)
        with pytest.raises(ga.WouldBlock, match="would block the running event loop"):
            out.sum().backward()
        assert ctx.stats()["flash_attn"].submitted == before, "nothing was asked"

    asyncio.run(call())


def test_a_worker_thread_of_the_services_own_loop_may_train(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    expected = gradients_of(lambda *given: attention(*given, context=ctx), [q, k, v], torch.ones_like(q))

    async def train() -> list[Any]:
        async with ga.open_context("mock") as own:

            def step() -> list[Any]:
                return gradients_of(lambda *given: attention(*given, context=own), [q, k, v], torch.ones_like(q))

            return await asyncio.to_thread(step)

    for mine, wanted in zip(asyncio.run(train()), expected, strict=True):
        assert torch.equal(mine, wanted)


def test_many_threads_get_their_own_answers_and_gradients(ctx: ga.GpuContext) -> None:
    barrier = threading.Barrier(8)

    def work(seed: int) -> bool:
        inputs = [drawn(2, 9, 2, 8, seed=3 * seed + i) for i in range(3)]
        barrier.wait(10)
        mine = gradients_of(lambda *given: attention(*given, context=ctx), inputs, torch.ones_like(inputs[0]))
        wanted = gradients_of(by_torch, inputs, torch.ones_like(inputs[0]))
        return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(mine, wanted, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


# Refusals


def test_what_is_wrong_is_refused_by_name(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("context", {"context": None}),
        ("causal", {"causal": 1}),
        ("alignment", {"alignment": "middle"}),
        ("window_size", {"window_size": (1,)}),
        ("window_size", {"window_size": (-2, 0)}),
        ("softmax_scale", {"softmax_scale": "1"}),
        ("softcap", {"softcap": -1.0}),
        ("sink_tokens", {"sink_tokens": 1.0}),
        ("attention_chunk", {"attention_chunk": -1}),
        ("attention_chunk", {"attention_chunk": True}),
        ("alibi_signed", {"alibi_signed": 1}),
        ("q_positions", {"q_positions": torch.zeros(3, dtype=torch.int32)}),
        ("seqused_k", {"seqused_k": torch.tensor([5, 1], dtype=torch.int32)}),
        ("k_positions", {"k_positions": torch.zeros(2)}),
        ("dropout_p", {"dropout_p": 1.0}),
        ("dropout_seed", {"dropout_seed": -1}),
        ("dropout_seed", {"dropout_seed": 1 << 64}),
        ("max_seqlen_q", {"max_seqlen_q": 0}),
        ("compute", {"compute": "f8"}),
        ("deterministic", {"deterministic": 1}),
        ("alibi_slopes", {"alibi_slopes": torch.ones(2, requires_grad=True)}),
        ("alibi_slopes", {"alibi_slopes": torch.ones(3)}),
        ("bias", {"bias": torch.ones(3, 1, 3, 4, dtype=torch.float64)}),
    ]
    for field, options in wrong:
        with pytest.raises(ga.RequestError) as refusal:
            attention(q, k, v, **{"context": ctx, **options})
        assert refusal.value.field == field
    with pytest.raises(ga.InvalidRequest, match="must have q's head_dim"):
        attention(q, drawn(2, 4, 1, 3), v, context=ctx)


def test_torch_is_in_no_extra_but_that_which_runs_its_models() -> None:
    project = tomllib.loads((Path(ga.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    assert [extra for extra, names in extras.items() if any(name.startswith("torch") for name in names)] == [
        "serve-torch"
    ]


# Autocast


def in_16_bits(*tensors: Any, dtype: Any = torch.bfloat16) -> list[Any]:
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_operands_as_it_does_for_torchs_own_attention(
    ctx: ga.GpuContext, dtype: Any, compiled: bool
) -> None:
    given = operands(rows=3, keys=3, heads=2, heads_kv=2, dim=8, dtype=torch.float32)
    bias = drawn(1, 2, 3, 3, dtype=torch.float32)

    def function(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return attention(q, k, v, context=ctx, bias=bias)

    torch.compiler.reset()
    called = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    with torch.autocast("cpu", dtype=dtype):
        out = called(*given, bias)
        assert out.dtype == by_torch(*given, attn_mask=bias).dtype == dtype
    cast = in_16_bits(*given, bias, dtype=dtype)
    expected = function(*cast)
    assert torch.equal(out, expected)
    gradients = torch.autograd.grad(out.float().square().sum(), [*given, bias])
    wanted = torch.autograd.grad(expected.float().square().sum(), cast)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, other.float())


def test_autocast_joins_operands_of_several_dtypes(ctx: ga.GpuContext) -> None:
    q, k, v = operands(heads_kv=2, dim=8, dtype=torch.float32, grad=False)
    expected = attention(*(x.bfloat16() for x in (q, k, v)), context=ctx)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q.bfloat16(), k, v, context=ctx), expected)


def test_autocast_leaves_float64_fp8_and_float32_sinks(ctx: ga.GpuContext) -> None:
    q, k, v = operands(dim=8, grad=False)
    sinks = drawn(2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v, context=ctx).dtype == torch.float64
        narrow = [x.float().to(torch.float8_e4m3fn) for x in (q, k, v)]
        out = attention(*narrow, context=ctx)
        single = attention(q.float(), k.float(), v.float(), context=ctx, sinks=sinks)
        half = attention(q.half(), k.half(), v.half(), context=ctx, sinks=sinks.half())
    assert torch.equal(out, attention(*narrow, context=ctx))
    assert torch.equal(single, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), context=ctx, sinks=sinks))
    assert half.dtype == torch.bfloat16


def test_autocast_that_is_off_changes_nothing(ctx: ga.GpuContext) -> None:
    q, k, v = operands(dim=8, dtype=torch.float32, grad=False)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert attention(q, k, v, context=ctx).dtype == torch.float32
