"""Dense batches by seqused_q and seqused_k, packed in place. `tests/properties` checks their answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inside.arrays import DeviceArray

import gpu_actors as ga
from gpu_actors.planning.seqused import to_varlen


def test_arrays_that_are_no_views_of_packed_ones(mock: ga.GpuContext) -> None:
    """Such inputs on the host are copied; an output cannot be."""
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


@pytest.mark.parametrize(
    ("changes", "field", "reason"),
    [
        ({"seqused_q": np.array([3, 6], np.int32)}, "seqused_q", "at most the rows that a sequence has, 5"),
        ({"seqused_q": np.array([-1, 5], np.int32)}, "seqused_q", "must not be negative"),
        ({"seqused_k": np.array([1, -5], np.int32)}, "seqused_k", "must not be negative"),
        ({"seqused_q": np.array([3, 5], np.int64)}, "seqused_q", "int32"),
        ({"k": np.zeros((3, 5, 2, 16), np.float32)}, "k", "q.s batch, 2"),
    ],
)
def test_what_cannot_be_is_refused(mock: ga.GpuContext, changes: dict[str, Any], field: str, reason: str) -> None:
    q = np.zeros((2, 5, 2, 16), np.float32)
    with pytest.raises(ga.RequestError, match=reason) as refused:
        mock.flash_attn.forward(**{"q": q, "k": q, "v": q, "seqused_q": np.array([3, 5], np.int32), **changes}).result(
            10
        )
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
    found = to_varlen(ga.FlashForward(q, q, q, seqused_q=used))
    assert (found.q.address, found.q.shape, found.q.strides) == (q.address, (10, 2, 16), q.strides[1:])
    assert found.cu_seqlens_q.tolist() == [0, 3, 5, 5, 10, 10, 10]
    assert found.cu_seqlens_k.tolist() == [0, 5, 5, 5, 10, 10, 10]
    apart = _device_array(2, 5, 2, 16, gap=1)
    with pytest.raises(ga.InvalidRequest, match="without gaps"):
        to_varlen(ga.FlashForward(q, apart, q, seqused_q=used))
    lengths = DeviceArray(1 << 20, (2,), (4,), np.dtype(np.int32), 0)
    with pytest.raises(ga.InvalidRequest, match="must lie on the host"):
        to_varlen(ga.FlashForward(q, q, q, seqused_q=lengths))
