"""Gradients of float64 are computed in float64 at every door, also for rows that a low finite mask hides.

The LSE between forward and backward is float64 too. In float32 the LSE of a row at -1e9 loses how many keys it sees; at
float64's own least number so does that of torch's kernel, and both have the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpu_actors as ga

torch = pytest.importorskip("torch")
interop = pytest.importorskip("gpu_actors.interop.torch")
by_torch = torch.nn.functional.scaled_dot_product_attention
sdpa_kernel, SDPBackend = torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend

LOWEST = [0.0, -1e4, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.float64).min]


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def drawn(seed: int) -> Any:
    """(batch, heads, rows, dim)"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, 7, 8, generator=generator, dtype=torch.float64).requires_grad_()


def masked(low: float) -> Any:
    """All keys are hidden from one row, some from another, and one key from all rows."""
    mask = torch.zeros(7, 7, dtype=torch.float64)
    mask[0], mask[3, :4], mask[:, 6] = low, low, low
    return mask


def by_attention(ctx: ga.GpuContext, q: Any, k: Any, v: Any, mask: Any) -> Any:
    given = (x.transpose(1, 2) for x in (q, k, v))
    return interop.attention(*given, bias=mask[None, None], context=ctx).transpose(1, 2)


def by_packed_rows(ctx: ga.GpuContext, q: Any, k: Any, v: Any, mask: Any) -> Any:
    given = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = torch.tensor([0, 7, 14], dtype=torch.int32)
    out = interop.attention(*given, bias=mask[None, None], cu_seqlens_q=ends, cu_seqlens_k=ends, context=ctx)
    return out.unflatten(0, (2, 7)).transpose(1, 2)


def by_padded_rows(ctx: ga.GpuContext, q: Any, k: Any, v: Any, mask: Any) -> Any:
    given = (x.transpose(1, 2) for x in (q, k, v))
    used = torch.tensor([7, 7], dtype=torch.int32)
    return interop.attention(*given, bias=mask[None, None], seqused_k=used, context=ctx).transpose(1, 2)


def by_sdpa(ctx: ga.GpuContext, q: Any, k: Any, v: Any, mask: Any) -> Any:
    return interop.scaled_dot_product_attention(q, k, v, mask, context=ctx)


def by_route(ctx: ga.GpuContext, q: Any, k: Any, v: Any, mask: Any) -> Any:
    with interop.routed(ctx):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


def by_flex(ctx: ga.GpuContext, q: Any, k: Any, v: Any, mask: Any) -> Any:
    return interop.flex_attention(q, k, v, lambda score, b, h, i, j: score + mask[i, j], context=ctx)


def by_transformers(ctx: ga.GpuContext, q: Any, k: Any, v: Any, mask: Any) -> Any:
    attend = pytest.importorskip("gpu_actors.interop.transformers")._attend
    return attend(ctx, torch.nn.Module(), q, k, v, mask.expand(2, 1, 7, 7), is_causal=False)[0].transpose(1, 2)


DOORS = [by_attention, by_packed_rows, by_padded_rows, by_sdpa, by_route, by_flex, by_transformers]


def gradients(function: Callable[..., Any]) -> list[Any]:
    q, k, v = map(drawn, range(3))
    return list(torch.autograd.grad(function(q, k, v).sin().sum(), (q, k, v)))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("low", LOWEST)
def test_gradients_are_torchs_own(ctx: ga.GpuContext, door: Any, low: float) -> None:
    mask = masked(low)
    found = gradients(lambda q, k, v: door(ctx, q, k, v, mask))
    # Without kernels a graph recomputes its softmax, as torch's math backend does.
    backend = SDPBackend.MATH if door is by_flex else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(backend):
        wanted = gradients(lambda q, k, v: by_torch(q, k, v, mask))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_kernels_read_a_float64_lse() -> None:
    mask = masked(-1e9)
    with ga.open_context("emulated") as emulated:
        found = gradients(lambda q, k, v: by_attention(emulated, q, k, v, mask))
    for one, other in zip(found, gradients(lambda q, k, v: by_torch(q, k, v, mask)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # scores at -1e9 are rounded by 1e-7


def test_the_lse_is_in_the_precision_of_its_inputs(ctx: ga.GpuContext) -> None:
    q, k, v = (drawn(seed).transpose(1, 2) for seed in range(3))
    _, lse = interop.attention(q, k, v, return_lse=True, context=ctx)
    wanted = torch.einsum("bihd,bjhd->bhij", q, k).div(8**0.5).logsumexp(-1)
    torch.testing.assert_close(lse, wanted.detach(), rtol=1e-12, atol=1e-12)
    _, narrow = interop.attention(q.float(), k.float(), v.float(), return_lse=True, context=ctx)
    assert narrow.dtype == torch.float32
