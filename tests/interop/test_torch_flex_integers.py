"""FlexAttention's functions that compute with captured integers: every device answers or refuses the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpu_actors as ga

torch = pytest.importorskip("torch", reason="flex_attention is of torch's tensors")
interop = pytest.importorskip("gpu_actors.interop.torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")
shared = pytest.importorskip("support.torch_flex")
operands, explicit = shared.operands, shared.explicit
Mod = Callable[..., Any]


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


@pytest.fixture(scope="module")
def emulated() -> Iterator[ga.GpuContext]:
    with ga.open_context("emulated") as ctx:
        yield ctx


OFFSET = torch.tensor(8)
OFFSETS = torch.tensor([3, 11])
STEPS = torch.tensor([2, 3, 5, 7], dtype=torch.int32)
WIDEST = torch.tensor([4, (1 << 31) - 1, 0, 2])
COUNTS = torch.arange(shared.ROWS + shared.KEYS) - 5


def decoding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + OFFSET >= kv_idx


def decoding_each(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx - OFFSETS[b] <= q_idx) & (-OFFSETS[b] + 1 < kv_idx - 2 * q_idx)


def clamped(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx + OFFSETS[b]).clamp(max=9) >= kv_idx) & (torch.clamp(kv_idx - OFFSET, min=0) <= q_idx)


def in_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // STEPS[h] >= kv_idx // STEPS[h]) | (kv_idx % STEPS[h] == 0)


def widest(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx - q_idx).abs() <= WIDEST[h]


def beyond(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + WIDEST[h] >= kv_idx


def squares(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return WIDEST[h] * WIDEST[h] >= kv_idx


def by_zero(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx // COUNTS[kv_idx] > 0


def counted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + COUNTS[q_idx] * 0.125 - OFFSETS[b] / 16


def inexact(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + WIDEST[h]


def above_count(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(score * 4 > COUNTS[kv_idx], score, -1.0)


INTEGERS = [decoding, decoding_each, clamped, in_blocks, widest, counted, above_count]
REFUSED = [beyond, squares, by_zero, inexact]


@pytest.mark.parametrize("mod", [*INTEGERS, *REFUSED], ids=lambda mod: mod.__name__)
def test_every_device_has_the_same_verdict(ctx: ga.GpuContext, emulated: ga.GpuContext, mod: Mod) -> None:
    q, k, v = operands(torch.float16, grad=False)
    tolerance = 4 * torch.finfo(torch.float16).eps
    expected = explicit(q, k, v, *shared.split(mod))[0] if mod in INTEGERS else None
    verdicts = []
    for context in (ctx, emulated):
        try:
            out = interop.flex_attention(q, k, v, *shared.split(mod), context=context)
            torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
            verdicts.append("answered")
        except ga.Unsupported as error:
            verdicts.append(str(error))
    assert verdicts[0] == verdicts[1]
    assert (verdicts[0] == "answered") == (mod in INTEGERS)


def test_another_offset_is_another_plan_only_where_it_has_more_bits(
    ctx: ga.GpuContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    signatures = set()
    execute = type(ctx.cudnn).execute
    monkeypatch.setattr(
        type(ctx.cudnn),
        "execute",
        lambda self, graph, arrays: signatures.add(graph.signature()) or execute(self, graph, arrays),
    )
    q, k, v = operands(grad=False)
    for step in range(5, 17):
        offset = torch.tensor(step)
        interop.flex_attention(q, k, v, None, lambda b, h, i, j, o=offset: i + o >= j, context=ctx)
    assert len(signatures) == 2
