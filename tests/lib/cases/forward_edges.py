"""Forward problems at the edges: rows that see nothing or one key, sequences that are empty, sinks that take all."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulated.forward import gaussian

from gpu_actors.testing import ForwardCase

__all__ = ["EDGES", "edge_case"]

_ENDS = {"cu_seqlens_q": np.array([0, 5, 5, 8, 41], np.int32), "cu_seqlens_k": np.array([0, 0, 7, 9, 12], np.int32)}
# (rows, keys) and options. _ENDS has five rows without keys, keys without rows, and 30 rows that lie before key 0.
_PROBLEMS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "empty sequences": (41, 12, {"causal": True, **_ENDS}),
    "empty sequences with sinks": (41, 12, {"causal": True, "sinks": np.array([0.5, -3.0], np.float32), **_ENDS}),
    "extreme sinks": (3, 40, {"sinks": np.array([-np.inf, 300.0], np.float32)}),
    "own key": (200, 200, {"window_size": (0, 0)}),
}
EDGES = tuple(_PROBLEMS)


def edge_case(name: str, dtype: str, dim: int) -> ForwardCase:
    rows, keys, options = _PROBLEMS[name]
    shape = () if "cu_seqlens_q" in options else (1,)
    q, k, v = (gaussian(n, (*shape, count, 2, dim), dtype) for n, count in enumerate((rows, keys, keys)))
    seqlens = (
        ((rows, keys),) if shape else tuple(zip(*(np.diff(ends).tolist() for ends in _ENDS.values()), strict=True))
    )
    repro = f"edge_case({name!r}, {dtype!r}, {dim})"
    return ForwardCase(q=q, k=k, v=v, options=dict(options), kind="gaussian", seqlens=seqlens, repro=repro)
