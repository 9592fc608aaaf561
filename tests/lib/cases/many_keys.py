"""Attention over so many keys that a sum of 14 bits loses a third of them, for tests of forward_sm90 on e4m3."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulated.forward import gaussian, ml_dtype

from gpu_actors.reference import attention_forward
from gpu_actors.testing import check_output

__all__ = ["E4M3", "check_many_keys", "loss", "many_keys"]

E4M3 = "float8_e4m3fn"
ROWS = 4


def many_keys(keys: int, head_dim: int, rows: int = ROWS) -> tuple[Any, Any, Any]:
    """q, k and v of one head: a few rows, and values whose mean is 0.5, so that their sum grows with every key."""
    q, k, v = (gaussian(n, (1, rows if n == 0 else keys, 1, head_dim)) for n in range(3))
    return q.astype(ml_dtype(E4M3)), k.astype(ml_dtype(E4M3)), (0.5 + 0.25 * v).astype(ml_dtype(E4M3))


def loss(out: Any, q: Any, k: Any, v: Any) -> float:
    """The mean of the exact output minus ``out``, as a share of the exact mean."""
    exact = attention_forward(q, k, v).out
    return float(np.mean(exact - out.astype(np.float64)) / np.mean(exact))


def check_many_keys(out: Any, lse: Any, q: Any, k: Any, v: Any) -> None:
    """Check the tolerance rule, and that errors of one sign do not add up to a loss."""
    check_output(out, lse, q, k, v, weights_dtype=E4M3)
    assert abs(loss(out, q, k, v)) < 2**-8, "out differs"
