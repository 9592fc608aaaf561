"""torch's own attention function through a context: the same answers and gradients, and modules that call it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.testing import check_gradients, check_output

torch = pytest.importorskip("torch")
interop = pytest.importorskip("gpu_actors.interop.torch")
functional = torch.nn.functional
by_torch = functional.scaled_dot_product_attention
causal_lower_right = torch.nn.attention.bias.causal_lower_right
causal_upper_left = torch.nn.attention.bias.causal_upper_left


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def as_numpy(tensor: Any) -> np.ndarray:
    """(batch, heads, rows, dim) as (batch, rows, heads, dim) in NumPy, the oracle's order."""
    tensor = tensor.detach().transpose(1, 2).contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def launches(ctx: ga.GpuContext) -> int:
    return ctx.stats()["flash_attn"].launched


def seen(*shape: int, seed: int = 3) -> Any:
    """A mask in which the last row sees no key and every other row sees some."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[..., :1] = True
    mask[..., -1, :] = False
    return mask


def shapes(*lead: int, heads: Any = (2, 2), rows: int = 5, keys: int = 7, dim: int = 4, dim_v: int = 4) -> list[Any]:
    return [(*lead, heads[0], rows, dim), (*lead, heads[1], keys, dim), (*lead, heads[1], keys, dim_v)]


CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (shapes(2), {}),
    "causal": (shapes(2), {"is_causal": True}),
    "causal with more rows than keys": (shapes(2, rows=7, keys=3), {"is_causal": True}),
    "scale": (shapes(2), {"scale": 0.7}),
    "negative scale": (shapes(2), {"scale": -0.7}),
    "grouped heads": (shapes(2, heads=(6, 2)), {"enable_gqa": True}),
    "one head of keys": (shapes(2, heads=(4, 1)), {}),
    "values of another width": (shapes(2, dim_v=3), {}),
    "without heads": ([(2, 5, 4), (2, 7, 4), (2, 7, 4)], {}),
    "without a batch": ([(5, 4), (7, 4), (7, 4)], {"is_causal": True}),
    "two batch axes": (shapes(2, 3), {}),
    "a batch that broadcasts": ([(2, 3, 2, 5, 4), (3, 2, 7, 4), (1, 1, 2, 7, 4)], {}),
    "bool mask": (shapes(2), {"attn_mask": seen(2, 2, 5, 7)}),
    "bool mask of rows and keys": (shapes(2), {"attn_mask": seen(5, 7)}),
    "bool mask of keys": (shapes(2), {"attn_mask": seen(2, 1, 1, 7).logical_or(torch.arange(7) == 2)}),
    "bool mask without heads": ([(2, 5, 4), (2, 7, 4), (2, 7, 4)], {"attn_mask": seen(5, 7)}),
    "bool mask without a batch": ([(5, 4), (7, 4), (7, 4)], {"attn_mask": seen(5, 7)}),
    "bool mask of two batch axes": (shapes(2, 3), {"attn_mask": seen(3, 1, 5, 7)}),
    "bool mask of every batch axis": (shapes(2, 3), {"attn_mask": seen(2, 1, 2, 5, 7)}),
    "grouped heads with a mask": (shapes(2, heads=(6, 2)), {"enable_gqa": True, "attn_mask": seen(2, 6, 5, 7)}),
    "number mask": (shapes(2), {"attn_mask": drawn(2, 2, 5, 7, seed=9)}),
    "number mask of heads": (shapes(2), {"attn_mask": drawn(1, 2, 5, 7, seed=9)}),
    "number mask of keys": (shapes(2), {"attn_mask": drawn(7, seed=9)}),
    "number mask of rows": (shapes(2), {"attn_mask": drawn(5, 1, seed=9)}),
    "no rows": (shapes(2, rows=0), {"is_causal": True}),
    "no keys": (shapes(2, keys=0), {"attn_mask": seen(5, 0)}),
    "no rows and no keys": (shapes(2, 3, rows=0, keys=0), {}),
    "no batch": (shapes(0), {"attn_mask": drawn(0, 1, 5, 7).detach()}),
    "no batch that broadcasts": ([(0, 3, 2, 5, 4), (3, 2, 7, 4), (1, 1, 2, 7, 4)], {"attn_mask": seen(3, 1, 5, 7)}),
    "no keys without heads": ([(5, 4), (0, 4), (0, 4)], {"scale": 0.7}),
    "lower right": (shapes(2), {"attn_mask": causal_lower_right(5, 7)}),
    "upper left": (shapes(2), {"attn_mask": causal_upper_left(5, 7)}),
}


def both(ctx: ga.GpuContext, inputs: list[Any], options: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """The output and the gradients, ours and torch's."""
    mask = options.get("attn_mask")
    by = [*inputs, mask] if isinstance(mask, torch.Tensor) and mask.requires_grad else inputs
    for function, more in ((interop.scaled_dot_product_attention, {"context": ctx}), (by_torch, {})):
        out = function(*inputs, **options, **more)
        yield out.detach(), list(torch.autograd.grad(out, by, torch.ones_like(out).cumsum(-1)))


@pytest.mark.parametrize("case", CASES)
def test_answers_and_gradients_are_torchs_own_in_double_precision(ctx: ga.GpuContext, case: str) -> None:
    sizes, options = CASES[case]
    inputs = [drawn(*size, seed=seed) for seed, size in enumerate(sizes)]
    (ours, our_gradients), (theirs, their_gradients) = both(ctx, inputs, options)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert len(our_gradients) == len(their_gradients)
    for mine, other in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_both_keep_the_projects_bounds_in_lower_precision(ctx: ga.GpuContext, dtype: Any, causal: bool) -> None:
    q, k, v = (drawn(2, heads, 24, 32, seed=seed, dtype=dtype) for seed, heads in enumerate((4, 2, 2)))
    out = interop.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, context=ctx)
    assert out.dtype == dtype
    dout = drawn(2, 4, 24, 32, seed=5, dtype=dtype).detach()
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    arrays = [as_numpy(x) for x in (dout, q, k, v)]
    check_output(as_numpy(out), None, *arrays[1:], causal=causal)
    check_gradients(ga.AttentionGradients(*map(as_numpy, gradients)), *arrays, causal=causal)


def test_gradcheck_with_a_mask_that_learns(ctx: ga.GpuContext) -> None:
    def function(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return interop.scaled_dot_product_attention(q, k, v, mask, context=ctx)

    inputs = [drawn(2, 2, 3, 2, seed=seed) for seed in range(3)]
    assert torch.autograd.gradcheck(function, (*inputs, drawn(2, 1, 3, 3, seed=4)))


@pytest.mark.parametrize(
    "case", ["causal", "grouped heads", "bool mask", "number mask of keys", "two batch axes", "no keys"]
)
def test_a_compiler_traces_through_it(ctx: ga.GpuContext, case: str) -> None:
    sizes, options = CASES[case]
    inputs = [drawn(*size, seed=seed) for seed, size in enumerate(sizes)]

    def function(*given: Any) -> Any:
        return interop.scaled_dot_product_attention(*given, **options, context=ctx)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), by_torch(*inputs, **options), rtol=1e-9, atol=1e-12)


def test_autocast_casts_as_for_torchs_own(ctx: ga.GpuContext) -> None:
    inputs = [drawn(*size, seed=seed, dtype=torch.float32) for seed, size in enumerate(shapes(2))]
    mask = seen(2, 2, 5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        ours = interop.scaled_dot_product_attention(*inputs, mask, context=ctx)
        theirs = by_torch(*inputs, mask)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


def test_dropout_is_torchs_to_seed(ctx: ga.GpuContext) -> None:
    q, k, v = (drawn(2, 2, 64, 8, seed=seed) for seed in range(3))

    def dropped(**more: Any) -> Any:
        return interop.scaled_dot_product_attention(q, k, v, dropout_p=0.5, context=ctx, **more)

    torch.manual_seed(5)
    first, other = dropped(), dropped()
    torch.manual_seed(5)
    assert torch.equal(first, dropped())
    assert not torch.equal(first, other)
    assert torch.equal(dropped(dropout_seed=3), dropped(dropout_seed=3))
    whole = interop.scaled_dot_product_attention(q, k, v, context=ctx)
    several = torch.stack([dropped() for _ in range(60)])
    error = (several.mean(0) - whole).abs().mean()
    assert error < 3 * several.std(0).mean() / 60**0.5, "the mean over many seeds is the answer without dropout"


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("is_causal", {"attn_mask": seen(5, 7), "is_causal": True}),
        ("is_causal", {"is_causal": 1}),
        ("attn_mask", {"attn_mask": seen(4, 7)}),
        ("attn_mask", {"attn_mask": seen(3, 2, 2, 5, 7)}),
        ("attn_mask", {"attn_mask": [[True]]}),
        ("key", {"key": drawn(3, 2, 7, 4)}),
        ("key", {"key": drawn(4)}),
        ("query", {"query": "q"}),
        ("enable_gqa", {"enable_gqa": True, "key": drawn(2, 3, 7, 4), "value": drawn(2, 3, 7, 4)}),
        ("query", {"query": drawn(2, 0, 5, 4)}),
        ("query", {"query": drawn(2, 2, 5, 0)}),
        ("key", {"key": drawn(2, 0, 7, 4), "enable_gqa": True}),
        ("value", {"value": drawn(2, 2, 7, 0)}),
        ("dropout_p", {"dropout_p": 1.5}),
        ("dropout_p", {"dropout_p": "x"}),
        ("context", {"context": None}),
    ],
)
def test_what_torch_would_refuse_is_refused_by_name(ctx: ga.GpuContext, field: str, changes: dict[str, Any]) -> None:
    tensors = dict(zip(("query", "key", "value"), (drawn(*size) for size in shapes(2)), strict=True))
    with pytest.raises(ga.InvalidRequest) as raised:
        interop.scaled_dot_product_attention(**{**tensors, "context": ctx, **changes})
    assert raised.value.field == field


# Routes


class Block(torch.nn.Module):  # type: ignore[name-defined]
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_a_route_takes_the_calls_of_its_thread_by_any_name(ctx: ga.GpuContext) -> None:
    q, k, v = (drawn(*size, seed=seed) for seed, size in enumerate(shapes(2)))
    expected = by_torch(q, k, v, is_causal=True)
    before = launches(ctx)
    elsewhere: list[Any] = []
    with interop.routed(ctx):
        torch.testing.assert_close(Block()(q, k, v), expected, rtol=1e-9, atol=1e-12)
        assert torch.equal(by_torch(q, k[:, :, :0], v[:, :, :0]), torch.zeros_like(expected))
        torch.testing.assert_close(by_torch(q, k, v, is_causal=True), expected, rtol=1e-9, atol=1e-12)
        assert launches(ctx) == before + 3
        thread = threading.Thread(target=lambda: elsewhere.append(Block()(q, k, v)))
        thread.start()
        thread.join()
    assert launches(ctx) == before + 3, "another thread is not routed"
    assert torch.equal(elsewhere[0], expected)
    assert functional.scaled_dot_product_attention is by_torch
    assert torch.equal(Block()(q, k, v), expected)


def test_a_route_of_a_module_takes_no_other_calls(ctx: ga.GpuContext) -> None:
    q, k, v = (drawn(*size, seed=seed) for seed, size in enumerate(shapes(2)))
    routed, other = Block(), Block()
    before = launches(ctx)
    with interop.routed(ctx, routed):
        other(q, k, v)
        functional.scaled_dot_product_attention(q, k, v)
        assert launches(ctx) == before
        out = routed(q, k, v)
        assert launches(ctx) == before + 1
        with pytest.raises(ga.InvalidRequest):
            routed(q, drawn(9, 9, 9, 9), v)
    routed(q, k, v)
    assert launches(ctx) == before + 1
    assert "forward" not in routed.__dict__
    torch.testing.assert_close(out, other(q, k, v), rtol=1e-9, atol=1e-12)


def test_routes_nest_and_end_with_an_error(ctx: ga.GpuContext) -> None:
    q, k, v = (drawn(*size, seed=seed) for seed, size in enumerate(shapes(2)))
    with ga.open_context("mock") as inner:

        def fail() -> None:
            with interop.routed(ctx):
                with interop.routed(inner):
                    Block()(q, k, v)
                Block()(q, k, v)
                raise ZeroDivisionError

        before = launches(ctx)
        with pytest.raises(ZeroDivisionError):
            fail()
        assert (launches(inner), launches(ctx)) == (1, before + 1)
        assert functional.scaled_dot_product_attention is by_torch
    for context, module in ((None, None), (ctx, "a module")):
        with pytest.raises(ga.InvalidRequest), interop.routed(context, module):
            pass


@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_modules_train_through_a_route(ctx: ga.GpuContext, training: bool) -> None:
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.train(training)
    x = drawn(2, 6, 16)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    expected = layer(x, src_mask=mask, is_causal=True)
    gradients = torch.autograd.grad(expected.sum(), [x, *layer.parameters()])
    before = launches(ctx)
    with interop.routed(ctx, layer):
        found = layer(x, src_mask=mask, is_causal=True)
        ours = torch.autograd.grad(found.sum(), [x, *layer.parameters()])
    assert launches(ctx) == before + 2, "one forwards and one backwards"
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    for mine, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


# Modules


def test_a_module_projects_attends_and_learns(ctx: ga.GpuContext) -> None:
    torch.manual_seed(2)
    module = interop.Attention(16, 4, kv_heads=2, causal=True, context=ctx, dtype=torch.float64)
    x = drawn(2, 6, 16)

    def plain(x: Any) -> Any:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (module.q, module.k, module.v))
        return module.out(by_torch(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2))

    torch.testing.assert_close(module(x), plain(x), rtol=1e-9, atol=1e-12)
    inputs = [x, *module.parameters()]
    pairs = (torch.autograd.grad(function(x).square().sum(), inputs) for function in (module, plain))
    for mine, other in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    memory = drawn(2, 9, 16, seed=7)
    assert module(x, memory).shape == x.shape
    assert [name for name, _ in module.named_parameters()][::2] == ["q.weight", "k.weight", "v.weight", "out.weight"]
    twin = copy.deepcopy(module)
    assert torch.equal(twin(x), module(x))
    optimiser = torch.optim.SGD(module.parameters(), 0.05)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = (module(x.detach()) - 1).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_a_module_drops_only_while_it_trains(ctx: ga.GpuContext) -> None:
    module = interop.Attention(8, 2, dropout_p=0.5, context=ctx, dtype=torch.float64)
    x = drawn(1, 16, 8)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_a_module_refuses_what_does_not_divide_and_a_context_that_is_closed(ctx: ga.GpuContext) -> None:
    for wrong in ({"dim": 9}, {"kv_heads": 3}, {"heads": 0}, {"context": None}, {"causal": 1}):
        with pytest.raises(ga.InvalidRequest):
            interop.Attention(**{"dim": 8, "heads": 4, "context": ctx, **wrong})
    with ga.open_context("mock") as closing:
        module = interop.Attention(8, 2, context=closing)
    with pytest.raises(ga.ActorStopped, match="not open"):
        module(torch.zeros(1, 2, 8))
