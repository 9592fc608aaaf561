"""examples/model_step.py: its tokens are those of the same model with attention in plain NumPy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import model_step
import numpy as np
import pytest


def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
    """Causal attention of a whole sequence."""
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(model_step.HEAD_DIM)
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def plain(model: model_step.Model, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model.next_token(tokens, 0, attend))
    return tokens[len(prompt) :]


def test_it_prints_the_tokens_of_the_plain_model(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(model_step.main())
    printed = [int(token) for token in capsys.readouterr().out.split()]
    assert printed == plain(model_step.Model(), model_step.PROMPT, 12)
    assert len(set(printed)) > 3
