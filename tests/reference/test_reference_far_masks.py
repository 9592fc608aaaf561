"""Gradients of rows that a far number hides wholly: their float32 LSE has no digits for what scores add to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_actors as ga


@pytest.mark.parametrize("sinks", [None, np.full(2, -1e10, np.float32)])
@pytest.mark.parametrize("low", [-1e9, -1e10, -1e30, float(np.finfo(np.float32).min)])
def test_their_gradients_are_finite(low: float, sinks: Any) -> None:
    rng = np.random.default_rng(0)
    dout, q, k, v = (rng.standard_normal((1, 16, 2, 64)).astype(np.float16) for _ in range(4))
    q, k = 10 * q, 10 * k  # scores of hundreds: far more than the LSE of the hidden row can tell apart
    bias = np.zeros((1, 1, 16, 16), np.float32)
    bias[:, :, 5] = low
    with ga.open_context("mock") as ctx:
        answer = ctx.flash_attn.forward(q, k, v, bias=bias, sinks=sinks, return_lse=True).result(30.0)
        gradients = ctx.flash_attn.backward(dout, q, k, v, answer.out, answer.lse, bias=bias, sinks=sinks).result(30.0)
        weights = np.abs(dout).sum(1, dtype=np.float64)  # of dV, were each weight 1
    for name in ("dq", "dk", "dv", "dbias"):
        assert np.isfinite(getattr(gradients, name)).all(), name
    assert (np.abs(gradients.dv) <= 3.0 * weights[:, None]).all(), "no weight is above e"
