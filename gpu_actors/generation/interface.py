"""TextEngine: the part of an engine that a server uses to generate texts.

`Engine` computes a Llama in NumPy. `TorchEngine` runs a model of Transformers with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gpu_actors.errors import InvalidRequest
from gpu_actors.generation.generation import Generation
from gpu_actors.generation.meter import EngineMeter
from gpu_actors.generation.sampling import Sampling
from gpu_actors.values import show

__all__ = ["EngineStats", "TextEngine", "checked_prompt"]


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was opened.

    steps, rows: how many were computed.
    tokens: how many were generated.
    cached: rows of prompts that were cached and not computed.
    most_texts: the most texts of one step.
    ended: texts by the reason of their end (`Generation.reason`).
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    cached: int = 0
    most_texts: int = 0
    ended: dict[str, int] = field(default_factory=dict)

    def step(self, rows: int, texts: int) -> None:
        self.steps += 1
        self.rows += rows
        self.most_texts = max(self.most_texts, texts)

    def end(self, generation: Generation) -> None:
        self.ended[generation.reason] = self.ended.get(generation.reason, 0) + 1


class TextEngine(Protocol):
    """Generates many texts at the same time. The tasks of one event loop may use it."""

    @property
    def stats(self) -> EngineStats:
        """Counts since the engine was opened."""

    @property
    def meter(self) -> EngineMeter:
        """How long texts wait and how large steps are."""

    @property
    def longest(self) -> int:
        """How many tokens a text may have, prompt included."""

    @property
    def running(self) -> int:
        """Texts that share the steps now."""

    @property
    def waiting(self) -> int:
        """Texts that wait for pages or rows."""

    @property
    def failure(self) -> str:
        """Why the engine no longer generates texts, "" while it does."""

    def pages(self) -> tuple[int, int, int]:
        """Pages of the cache: all, free and shared ones. Raises `StaleBuffer` once the engine is left."""

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        asked: float | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Begin a text, as `Engine.submit` does. Raises `Unsupported` for a sampling that the engine does not do."""

    def stop(self, why: str) -> None:
        """End every text with `ActorStopped`, and refuse new ones."""


def checked_prompt(prompt: Sequence[int], vocab: int) -> list[int]:
    """The tokens of a prompt. Raises `InvalidRequest` if it is empty or has a token that the vocabulary lacks."""
    reason = f"must be token ids from 0 to {vocab - 1}, at least one"
    try:
        ids = np.array(prompt)
        sound = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu"
        sound = sound and 0 <= int(ids.min()) <= int(ids.max()) < vocab
    except (ValueError, TypeError, OverflowError):
        sound = False
    if not sound:
        raise InvalidRequest("prompt", show(prompt), reason)
    tokens: list[int] = ids.tolist()
    return tokens
