"""Operands of one sequence that stand for those of every sequence."""

from __future__ import annotations

import numpy as np
import pytest
from inside.arrays import DeviceArray

import gpu_actors as ga
from gpu_actors.planning.forward import broadcast_batch

Q, K, ONE = np.zeros((3, 33, 4, 64), np.float16), np.zeros((3, 40, 2, 64), np.float16), np.zeros((1, 40, 2, 64), "f2")


def test_nothing_is_copied() -> None:
    k = broadcast_batch(ga.FlashForward(Q, ONE, K)).k
    assert (k.shape, k.strides[0], np.shares_memory(k, ONE)) == ((3, 40, 2, 64), 0, True)
    array = DeviceArray(1 << 20, (1, 40, 2, 64), (10240, 256, 128, 2), np.dtype(np.float16), 0)
    q = DeviceArray(1 << 21, (3, 33, 4, 64), (16896, 512, 128, 2), np.dtype(np.float16), 0)
    request = broadcast_batch(ga.FlashForward(q, array, K))
    assert request.q is q, "which has every sequence"
    on_device = request.k
    assert (on_device.address, on_device.shape, on_device.strides) == (1 << 20, (3, 40, 2, 64), (0, 256, 128, 2))


def test_a_key_is_that_of_the_whole_batch_and_what_is_no_batch_of_one_is_refused() -> None:
    with ga.open_context("mock") as mock:
        assert mock.flash_attn.inspect_key(ga.FlashForward(Q, ONE, ONE)).layout == "dense"
        for name in ("k", "v"):
            with pytest.raises(ga.InvalidRequest, match="must have q's batch, 3") as refused:
                mock.flash_attn.forward(**{"q": Q, "k": K, "v": K, name: K[:2]}).result(10)
            assert refused.value.field == name
