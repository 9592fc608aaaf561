"""The service's other entrances on a GPU: cuDNN's layouts, torch's autograd, and a loop with many awaits.

GPU_ACTORS_TEST_DEVICE=mock or =emulated rehearses these tests where there is no GPU.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.reference import attention_forward
from gpu_actors.testing import check_gradients, check_output

pytestmark = pytest.mark.gpu

SHAPE, KV_SHAPE = (2, 130, 4, 64), (2, 130, 2, 64)
DEVICE = os.environ.get("GPU_ACTORS_TEST_DEVICE", "cuda")
PLACE = os.environ.get("GPU_ACTORS_TEST_TENSORS", "cuda" if DEVICE.startswith("cuda") else "cpu")


def operands(seed: int = 0) -> tuple[Any, ...]:
    """dout, q, k, v."""
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(s).astype(np.float16) for s in (SHAPE, SHAPE, KV_SHAPE, KV_SHAPE))


def turned(array: Any) -> Any:
    """(batch, seq, heads, dim) as (batch, heads, seq, dim), or back."""
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3))


@pytest.mark.parametrize("causal", [False, True])
def test_cudnns_layout_forward_and_backward(context: Any, causal: bool) -> None:
    dout, q, k, v = operands()
    mask = ga.Mask.causal() if causal else ga.Mask.none()
    params = ga.AttentionParams(2, 130, 130, 4, 2, 64, mask)
    o, stats = context.cudnn.mha_forward(params, turned(q), turned(k), turned(v), return_stats=True).result(120)
    check_output(turned(o), stats[..., 0], q, k, v, causal=causal)
    reply = context.cudnn.mha_backward(params, turned(q), turned(k), turned(v), o, turned(dout), stats)
    gradients = reply.result(120)
    found = ga.AttentionGradients(*(None if x is None else turned(x) for x in gradients))
    check_gradients(found, dout, q, k, v, out=turned(o), lse=stats[..., 0], causal=causal)


def test_torchs_autograd_goes_through_the_kernels(context: Any) -> None:
    torch = pytest.importorskip("torch")
    from gpu_actors.interop.torch import attention

    dout, q, k, v = operands(1)
    leaves = [torch.from_numpy(x).to(PLACE).requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, context=context, causal=True)
    assert out.device.type == PLACE
    check_output(out.detach().cpu().numpy(), None, q, k, v, causal=True)
    out.backward(torch.from_numpy(dout).to(PLACE))
    gradients = ga.AttentionGradients(*(leaf.grad.cpu().numpy() for leaf in leaves))
    check_gradients(gradients, dout, q, k, v, causal=True)


def test_bfloat16_gradients_of_torch_tensors_keep_their_dtype(context: Any) -> None:
    torch = pytest.importorskip("torch")
    from gpu_actors.interop.torch import attention

    host = [x.astype(ml_dtypes.bfloat16) for x in operands(2)]
    dout, *leaves = (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(PLACE) for x in host)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    attention(*leaves, context=context).backward(dout)
    found = [leaf.grad.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16) for leaf in leaves]
    check_gradients(ga.AttentionGradients(*found), *host)


def test_a_loop_with_many_awaits_stays_awake(context: Any) -> None:
    _, q, k, v = operands(3)
    expected = attention_forward(q, k, v, causal=True).out
    beats = []

    async def beat() -> None:
        while True:
            beats.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.002)

    async def one() -> Any:
        return (await context.flash_attn.forward(q, k, v, causal=True)).out

    async def main() -> list[Any]:
        heart = asyncio.create_task(beat())
        answers = await asyncio.gather(*(one() for _ in range(200)))
        heart.cancel()
        return answers

    context.flash_attn.forward(q, k, v, causal=True).result(120)  # compiles the kernel before the loop is timed
    answers = asyncio.run(main())
    for answer in answers:
        np.testing.assert_array_equal(answer, answers[0])
    np.testing.assert_allclose(answers[0].astype(np.float32), expected, atol=0.02)
    pauses = np.diff(beats)
    assert pauses.size == 0 or np.median(pauses) < 0.05
