"""Ranking of passages by cosine similarity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_actors.fields import integer

__all__ = ["Hit", "rank"]


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage's row and its cosine with the query, in [-1, 1]."""

    index: int
    score: float


def rank(query: NDArray[np.float32], passages: NDArray[np.float32], top: int) -> list[Hit]:
    """The ``top`` best passages, best first. Passages with equal scores keep their order.

    query: (dim,) and passages: (n, dim), of any length. Raises `InvalidRequest` unless top >= 1.
    """
    integer("top", top, 1)
    lengths = np.linalg.norm(passages, axis=1) * np.linalg.norm(query)
    scores = np.clip(passages @ query / np.maximum(lengths, np.float32(1e-12)), -1.0, 1.0)
    order = np.argsort(-scores, kind="stable")[:top]
    return [Hit(int(index), float(scores[index])) for index in order]
