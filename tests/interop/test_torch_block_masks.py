"""BlockMasks of torch's FlexAttention through a context, in blocks of 128; kernels follow their lists."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import gpu_actors as ga

torch = pytest.importorskip("torch", reason="flex_attention is of torch's tensors")
interop = pytest.importorskip("gpu_actors.interop.torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


@pytest.fixture(scope="module")
def emulated() -> Iterator[ga.GpuContext]:
    with ga.open_context("emulated") as ctx:
        yield ctx


def drawn(*shape: int, seed: int, dtype: Any = torch.float64, grad: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def explicit(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
    """The softmax in fp64, with both functions evaluated at all indices at once. Rows that see no key are 0."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    places = [torch.arange(n).reshape([-1 if i == a else 1 for i in range(4)]) for a, n in enumerate(scores.shape)]
    scores = scores if score_mod is None else score_mod(scores, *places)
    weights = torch.where(mask_mod(*places), scores.exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total) @ v


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * 0.1 * (kv_idx - q_idx)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


ROWS, KEYS = 160, 300
IDS = torch.arange(KEYS) // 77
OFFSETS = torch.tensor([0, 40])


def sliding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= 20


def far_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= 260


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return IDS[q_idx] == IDS[kv_idx]


def with_sinks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 4) | ((q_idx >= kv_idx) & (q_idx - kv_idx < 16))


def chunks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 64 == kv_idx // 64) & (q_idx >= kv_idx)


def strided(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx) % 7 == 0


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx // 128 == h % 3


def by_sequence(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + OFFSETS[b] >= kv_idx


def late_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= 128) & (kv_idx < 128)


def prefixes(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 30) | (q_idx >= kv_idx)


def checkered(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // 128 + kv_idx // 128 + h) % 2 == 0


def image(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx // 20 - kv_idx // 20).abs() <= 2) & ((q_idx % 20 - kv_idx % 20).abs() <= 2)


def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= 0


BLOCK_MASKS = [
    causal,
    sliding,
    far_keys,
    documents,
    with_sinks,
    chunks,
    strided,
    by_head,
    by_sequence,
    late_rows,
    prefixes,
    checkered,
    image,
    everything,
]


def long_operands(dtype: Any = torch.float64, dim: int = 8) -> Any:
    return tuple(
        drawn(2, heads, length, dim, seed=n, dtype=dtype)
        for n, (heads, length) in enumerate(((4, ROWS), (2, KEYS), (2, KEYS)))
    )


def block_mask_of(mask_mod: Any) -> Any:
    return flex.create_block_mask(mask_mod, 2, 4, ROWS, KEYS, device="cpu", BLOCK_SIZE=128)


@pytest.mark.parametrize("mask_mod", BLOCK_MASKS, ids=lambda mask: mask.__name__)
def test_block_masks_answer_as_torchs_own_function_with_gradients(ctx: ga.GpuContext, mask_mod: Any) -> None:
    """Gradients are compared with those of the explicit softmax, because torch has none on the CPU."""
    q, k, v = long_operands()
    block_mask = block_mask_of(mask_mod)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        wanted = flex.flex_attention(q.detach(), k.detach(), v.detach(), alibi, block_mask, enable_gqa=True)
    found = interop.flex_attention(q, k, v, alibi, block_mask, enable_gqa=True, context=ctx)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    expected = explicit(q, k, v, alibi, mask_mod)
    upstream = drawn(*wanted.shape, seed=5, grad=False)
    gradients = (torch.autograd.grad(out, (q, k, v), upstream) for out in (found, expected))
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask_mod", [sliding, checkered], ids=lambda mask: mask.__name__)
def test_kernels_walk_along_the_lists_of_a_block_mask(emulated: ga.GpuContext, mask_mod: Any) -> None:
    """NaN in keys of blocks that no row sees reaches no output."""
    q, k, v = long_operands(torch.float16, 32)
    out = interop.flex_attention(q, k, v, None, block_mask_of(mask_mod), enable_gqa=True, context=emulated)
    expected = explicit(q, k, v, None, mask_mod)
    torch.testing.assert_close(out.double(), expected, rtol=4e-3, atol=4e-3)
    upstream = drawn(*out.shape, seed=5, dtype=torch.float16, grad=False)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream.double())
    for gradient, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), other.double(), rtol=2e-2, atol=2e-2)
    if mask_mod is sliding:
        with torch.no_grad():
            k[:, :, 256:] = v[:, :, 256:] = torch.nan
            again = interop.flex_attention(q, k, v, None, block_mask_of(sliding), enable_gqa=True, context=emulated)
        torch.testing.assert_close(again, out.detach(), rtol=0, atol=0)


def test_hopper_walks_along_the_lists_of_a_block_mask() -> None:
    q, k, v = long_operands(torch.bfloat16, 32)
    k.data[:, :, 256:] = v.data[:, :, 256:] = torch.nan
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_90a")) as ctx:
        out = interop.flex_attention(q, k, v, None, block_mask_of(sliding), enable_gqa=True, context=ctx)
    k, v = (x.detach().nan_to_num() for x in (k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = (x.detach().double() for x in (q, k, v))
        wanted = flex.flex_attention(*given, None, block_mask_of(sliding), enable_gqa=True)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


def test_lists_without_a_mask_mod_are_taken(ctx: ga.GpuContext) -> None:
    q, k, v = long_operands()
    made = block_mask_of(checkered)
    blocks = flex.BlockMask.from_kv_blocks(
        made.kv_num_blocks,
        made.kv_indices,
        made.full_kv_num_blocks,
        made.full_kv_indices,
        BLOCK_SIZE=128,
        seq_lengths=(ROWS, KEYS),
    )
    assert blocks.mask_mod is flex.noop_mask
    found = interop.flex_attention(q, k, v, None, blocks, enable_gqa=True, context=ctx)
    expected = explicit(q, k, v, None, checkered)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
