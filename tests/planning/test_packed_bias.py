"""Biases of packed sequences, whose gradients are summed in a fixed order."""

from __future__ import annotations

import numpy as np

import gpu_actors as ga


def test_a_bias_of_all_sequences_is_summed_in_a_fixed_order_by_cuda_cores_alone() -> None:
    """A kernel whose blocks wait for other sequences' blocks would wait forever for a sequence without such a tile."""
    q, ends = np.zeros((5, 2, 64), np.float16), np.array([0, 3, 5], np.int32)
    given = {"q": q, "k": q, "v": q, "dout": q, "out": q, "lse": np.zeros((2, 5), np.float32)}
    one, own = np.zeros((1, 1, 3, 3), np.float32), np.zeros((2, 1, 3, 3), np.float32)
    with ga.open_context("mock") as ctx:
        kernels = [
            ctx.flash_attn.inspect_key(
                ga.FlashBackward(**given, cu_seqlens_q=ends, cu_seqlens_k=ends, bias=bias, deterministic=fixed)
            ).kernel
            for bias, fixed in ((one, False), (one, True), (own, True))
        ]
    assert kernels == ["backward_sm90", "backward_simple", "backward_sm90"]
