"""Dense batches by seqused_q and seqused_k: each sequence as if it were alone, whatever lies in the padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.padded import PaddedCase, check_padded
from emulated.contraction import arithmetic
from inside.arrays import DeviceArray

import gpu_actors as ga
from gpu_actors.planning.padded import packed

SLOPES = np.array([0.1, 0.4, 0.02, 0.3], np.float32)
EACH = np.random.default_rng(1).uniform(0.01, 0.5, (4, 4)).astype(np.float32)
BIAS = np.random.default_rng(2).standard_normal((4, 4, 70, 90)).astype(np.float32)
PLACES: dict[str, Any] = {
    "causal": True,
    "q_positions": np.array([[50, 2], [7, 1], [9, 3], [(1 << 30) - 2, 1]], np.int32),
    "k_positions": np.array([3, 0, 8, 1], np.int32),
}


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def test_padding_stands_nowhere(mock: ga.GpuContext) -> None:
    """And so not beyond what a position can be."""
    check_padded(mock, PaddedCase(options=PLACES))


def test_arrays_that_are_no_views_of_packed_ones(mock: ga.GpuContext) -> None:
    """Inputs on the host are copied then; an output cannot be."""
    wide = np.random.default_rng(0).standard_normal((2, 9, 2, 16)).astype(np.float32)
    q, used = wide[:, :5], np.array([3, 5], np.int32)
    found, wanted = (mock.flash_attn.forward(one, one, one, seqused_k=used).result(10) for one in (q, q.copy()))
    np.testing.assert_array_equal(found.out, wanted.out)
    with pytest.raises(ga.InvalidRequest, match="without gaps") as refused:
        mock.flash_attn.forward(q, q, q, seqused_k=used, out=np.empty_like(wide)[:, :5]).result(10)
    assert refused.value.field == "out"


def test_explanations_and_keys_are_of_the_packed_batch(mock: ga.GpuContext) -> None:
    q = np.zeros((2, 5, 2, 64), np.float16)
    request = ga.FlashForward(q, q, q, seqused_q=np.array([3, 5], np.int32))
    assert mock.flash_attn.inspect_key(request).layout == "varlen"
    assert "forward_mma" in str(mock.flash_attn.explain(request))


def _request(**changes: Any) -> Any:
    q = np.zeros((2, 5, 2, 16), np.float32)
    return {"q": q, "k": q, "v": q, "seqused_q": np.array([3, 5], np.int32), **changes}


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"seqused_q": np.array([3, 6], np.int32)}, "seqused_q", "at most the rows that a sequence has, 5"),
        ({"seqused_q": np.array([-1, 5], np.int32)}, "seqused_q", "must not be negative"),
        ({"seqused_k": np.array([6, 5], np.int32)}, "seqused_k", "at most the rows that a sequence has, 5"),
        ({"seqused_k": np.array([1, -5], np.int32)}, "seqused_k", "must not be negative"),
        ({"seqused_q": np.array([3], np.int32)}, "seqused_q", r"shape \(2,\)"),
        ({"seqused_q": np.array([3, 5], np.int64)}, "seqused_q", "int32"),
        ({"seqused_q": 5}, "seqused_q", "must be an array"),
        ({"bias": np.zeros((1, 1, 3, 5), np.float32)}, "bias", r"shape \(2, 2, 5, 5\)"),
        ({"k": np.zeros((3, 5, 2, 16), np.float32)}, "k", "q.s batch, 2"),
        ({"softcap": -1.0}, "softcap", "must be >= 0"),
    ],
)
def test_what_cannot_be_is_refused(mock: ga.GpuContext, changes: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(ga.RequestError, match=reason) as refused:
        mock.flash_attn.forward(**_request(**changes)).result(10)
    assert refused.value.field == field


def test_packed_batches_have_ends_of_their_own(mock: ga.GpuContext) -> None:
    q, ends = np.zeros((5, 2, 16), np.float32), np.array([0, 3, 5], np.int32)
    with pytest.raises(ga.InvalidRequest, match="dense batches only") as refused:
        mock.flash_attn.forward(
            q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends, seqused_k=np.array([1, 2], np.int32)
        ).result(10)
    assert refused.value.field == "seqused_k"


def _device_array(*shape: int, gap: int = 0) -> DeviceArray:
    strides = np.zeros((shape[0], shape[1] + gap, *shape[2:]), np.float16)[:, : shape[1]].strides
    return DeviceArray(1 << 20, shape, strides, np.dtype(np.float16), 0)


def test_arrays_on_a_device_are_packed_where_they_lie() -> None:
    q, used = _device_array(2, 5, 2, 16), np.array([3, 5], np.int32)
    found = packed(ga.FlashForward(q, q, q, seqused_q=used))
    assert (found.q.address, found.q.shape, found.q.strides) == (q.address, (10, 2, 16), q.strides[1:])
    assert found.cu_seqlens_q.tolist() == [0, 3, 5, 5, 10, 10, 10]
    assert found.cu_seqlens_k.tolist() == [0, 5, 5, 5, 10, 10, 10]
    apart = _device_array(2, 5, 2, 16, gap=1)
    with pytest.raises(ga.InvalidRequest, match="without gaps"):
        packed(ga.FlashForward(q, apart, q, seqused_q=used))
    lengths = DeviceArray(1 << 20, (2,), (4,), np.dtype(np.int32), 0)
    with pytest.raises(ga.InvalidRequest, match="must lie on the host"):
        packed(ga.FlashForward(q, q, q, seqused_q=lengths))


EMULATED = {
    "float16": PaddedCase(dtype="float16", options={"causal": True}),
    "bfloat16": PaddedCase(dtype="bfloat16", dims=(128, 128), options={"window_size": (20, 5), "sinks": SLOPES}),
    "uneven": PaddedCase(dtype="float16", dims=(64, 96), rows=None, options={"alibi_slopes": EACH, "causal": True}),
    "long": PaddedCase((300, 5, 0), (0, 700, 129), (300, 700), dtype="bfloat16", options={"softcap": 5.0}),
    "fp32": PaddedCase(dims=(16, 16), options={"causal": True, "sinks": SLOPES}),
    "placed": PaddedCase(dtype="float16", options=PLACES),
    "biased": PaddedCase(dtype="float16", options={"bias": BIAS, "causal": True}),
    "biased by one": PaddedCase(dtype="bfloat16", options={"bias": BIAS[:1, :1]}),
    "masked": PaddedCase(dtype="float16", options={"bias": BIAS < 0.5}),
}


def _emulated(name: str, arch: str, seed: int) -> None:
    emulation = ga.EmulationOptions(delivery="random", schedule="greedy", seed=seed, arithmetic=arithmetic())
    with ga.open_context("emulated", ga.ContextOptions(arch=arch, emulation=emulation)) as ctx:
        check_padded(ctx, EMULATED[name], seed)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", EMULATED)
def test_kernels_leave_padding_alone(name: str, arch: str) -> None:
    for seed in range(3):
        _emulated(name, arch, seed)
