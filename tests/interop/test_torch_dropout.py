"""Dropout of torch's doors: its seed is torch's, in compiled and exported graphs, gradients and checkpoints too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpu_actors as ga

torch = pytest.importorskip("torch")
interop = pytest.importorskip("gpu_actors.interop.torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def by_function(ctx: ga.GpuContext) -> Callable[[Any], Any]:
    return lambda x: interop.scaled_dot_product_attention(x, x, x, dropout_p=0.5, context=ctx)


def by_module(ctx: ga.GpuContext) -> Callable[[Any], Any]:
    torch.manual_seed(3)
    layer = interop.Attention(8, 2, dropout_p=0.5, context=ctx)
    return lambda x: layer(x[:, 0])


def by_transformers(ctx: ga.GpuContext) -> Callable[[Any], Any]:
    attend = pytest.importorskip("gpu_actors.interop.transformers")._attend
    return lambda x: attend(ctx, torch.nn.Module(), x, x, x, dropout=0.5, is_causal=False)[0]


DOORS = [by_function, by_module, by_transformers]


def with_gradient(function: Callable[[Any], Any], seed: int) -> list[Any]:
    x = drawn(2, 2, 16, 8)
    torch.manual_seed(seed)
    out = function(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("door", DOORS)
def test_a_compiled_graph_draws_the_seeds_that_torch_draws(ctx: ga.GpuContext, door: Any) -> None:
    function = door(ctx)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for seed in (5, 6, 5):
        assert same(with_gradient(compiled, seed), with_gradient(function, seed))
    assert not same(with_gradient(compiled, 5), with_gradient(compiled, 6))
    x = drawn(2, 2, 16, 8)
    torch.manual_seed(5)
    first, second = compiled(x), compiled(x)
    assert not torch.allclose(first, second)
    torch.manual_seed(5)
    assert torch.equal(first, compiled(x))


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch's own use of it
@pytest.mark.timeout(240)
def test_inductor_draws_a_seed_for_each_call(ctx: ga.GpuContext) -> None:
    torch.compiler.reset()
    with torch._inductor.utils.fresh_cache():
        compiled = torch.compile(by_function(ctx), fullgraph=True)
        results = [with_gradient(compiled, seed) for seed in (5, 6, 5)]
    assert same(results[0], results[2])
    assert not same(results[0], results[1])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_checkpoint_drops_again_what_it_dropped(ctx: ga.GpuContext, compiled: bool) -> None:
    function = by_function(ctx)

    def kept(x: Any) -> Any:
        return checkpoint(lambda x: function(x.sin()), x, use_reentrant=False)

    torch.compiler.reset()
    called = torch.compile(kept, backend="aot_eager", fullgraph=True) if compiled else kept
    assert same(with_gradient(called, 5), with_gradient(lambda x: function(x.sin()), 5))


def test_an_exported_program_draws(ctx: ga.GpuContext) -> None:
    class Module(torch.nn.Module):  # type: ignore[name-defined]
        def forward(self, x: Any) -> Any:
            return by_function(ctx)(x)

    x = drawn(2, 2, 16, 8).detach()
    module = torch.export.export(Module(), (x,)).module()
    torch.manual_seed(5)
    found = [module(x), module(x)]
    torch.manual_seed(5)
    assert torch.equal(found[0], by_function(ctx)(x))
    assert not torch.equal(*found)


def test_a_seed_may_be_a_tensor(ctx: ga.GpuContext) -> None:
    q = drawn(1, 8, 2, 8)

    def attend(seed: Any) -> Any:
        return interop.attention(q, q, q, dropout_p=0.5, dropout_seed=seed, context=ctx)

    for seed in (7, (1 << 63) - 1):
        assert torch.equal(attend(torch.tensor(seed)), attend(seed))
    assert torch.equal(attend(torch.tensor(-1)), attend((1 << 64) - 1)), "as operators of torch have integers"
    for wrong in (torch.tensor(1.0), torch.tensor([1]), torch.tensor(True), "7"):
        with pytest.raises(ga.InvalidRequest) as refused:
            attend(wrong)
        assert refused.value.field == "dropout_seed"
