"""Forward problems whose rows and keys have positions in a larger problem, or see one chunk of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulated.forward import gaussian

from gpu_actors.testing import ForwardCase

__all__ = ["ALL", "PLACED", "PLACES", "SLOPES", "placed_case"]

SLOPES = np.array([0.03, 0.1, 0.01, 0.0], np.float32)
ALL: dict[str, Any] = {
    "causal": True, "window_size": (90, 0), "sink_tokens": 20, "alibi_slopes": SLOPES, "dropout_p": 0.25,
    "dropout_seed": 5, "dropout_first_head": 4, "dropout_heads": 12,
}  # fmt: skip
PLACES: dict[str, dict[str, Any]] = {
    "steps": {
        "q_positions": np.array([[130, 3], [20, 1]], np.int32),
        "k_positions": np.array([[1, 4], [30, 2]], np.int32),
    },
    "one side": {"q_positions": np.array([70, 20], np.int32)},
    "apart": {"q_positions": np.array([500, 0], np.int32), "k_positions": np.array([0, 500], np.int32)},
}
_WINDOW = {"window_size": (40, 25)}
_PROBLEMS: dict[str, dict[str, Any]] = {
    "steps": {**ALL, **PLACES["steps"]},
    "one side": {**ALL, **PLACES["one side"]},
    "apart": {**ALL, **PLACES["apart"]},
    "steps in a window": {**_WINDOW, **PLACES["steps"]},
    "apart in a window": {**_WINDOW, **PLACES["apart"]},
    "chunks": {"causal": True, "attention_chunk": 50},
    "chunks in a window": {"attention_chunk": 37, "window_size": (30, 20), "sink_tokens": 5},
    "chunks from the top left": {"attention_chunk": 50, "alignment": "top_left"},
    "chunks of positions": {"causal": True, "attention_chunk": 50, **PLACES["one side"]},
}
PLACED = tuple(_PROBLEMS)


def placed_case(name: str, dtype: str, dim: int, rows: int, keys: int) -> ForwardCase:
    """Two sequences."""
    shapes = ((2, rows, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim))
    q, k, v = (gaussian(n, shape, dtype) for n, shape in enumerate(shapes))
    repro = f"placed_case({name!r}, {dtype!r}, {dim}, {rows}, {keys})"
    options = dict(_PROBLEMS[name])
    return ForwardCase(q=q, k=k, v=v, options=options, kind="gaussian", seqlens=((rows, keys),) * 2, repro=repro)
