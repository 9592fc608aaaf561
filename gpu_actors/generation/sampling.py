"""Sampling: how the next token is drawn from a model's logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import LaunchError
from gpu_actors.fields import expect, flag, integer, real

__all__ = ["Sampler", "Sampling", "TokenScores"]

_HIGHEST_TOP = 20


class TokenScores(NamedTuple):
    """Natural logarithms of probabilities before temperature and top_p.

    chosen: of the chosen token.
    top: the likeliest tokens with their logarithms.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    temperature: 0 takes the likeliest token every time.
    top_p: draws only from the likeliest tokens that together have at least this share of the probability (Holtzman et
        al., arXiv 1904.09751).
    seed: an int of 64 bits. None draws another text every time.
    top_logprobs: how many of the likeliest tokens `TokenScores` has. None: no scores are computed.
    score_prompt: whether the tokens of the prompt are scored too. All its rows are computed then, cached or not.

    Raises `InvalidRequest` for a value out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = 0
    top_logprobs: int | None = None
    score_prompt: bool = False

    def __post_init__(self) -> None:
        number = "a finite number >= 0"
        expect(real("temperature", self.temperature, number) >= 0, "temperature", self.temperature, f"must be {number}")
        number = "a number over 0 and up to 1"
        expect(0 < real("top_p", self.top_p, number) <= 1, "top_p", self.top_p, f"must be {number}")
        if self.seed is not None:
            integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.top_logprobs is not None:
            integer("top_logprobs", self.top_logprobs, 0, _HIGHEST_TOP)
        sound = not flag("score_prompt", self.score_prompt) or self.top_logprobs is not None
        expect(sound, "score_prompt", self.score_prompt, "must be false, or true beside top_logprobs")


class Sampler:
    """Draws the tokens of one text, one after another."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        seed = sampling.seed
        self._random = np.random.default_rng(None if seed is None else int(seed) % (1 << 64))

    def draw(self, logits: NDArray[np.float32]) -> tuple[int, TokenScores | None]:
        """A token from logits (vocab,), and its scores if the sampling requests them.

        Raises `LaunchError` for logits that are not finite.
        """
        _expect_finite(logits)
        token = self._choose(logits)
        top = self._sampling.top_logprobs
        return token, None if top is None else _scores(logits, token, top)

    def score(self, logits: NDArray[np.float32], token: int) -> TokenScores:
        """The scores of a given token. Raises what `draw` raises."""
        _expect_finite(logits)
        return _scores(logits, token, self._sampling.top_logprobs or 0)

    def _choose(self, logits: NDArray[np.float32]) -> int:
        temperature, top_p = self._sampling.temperature, self._sampling.top_p
        if temperature == 0:
            return int(logits.argmax())
        # Subtract the maximum first: logits divided by a temperature near 0 would be infinite.
        shifted = logits.astype(np.float64) - float(logits.max())
        with np.errstate(over="ignore"):
            weights = np.exp(shifted / temperature)
        weights /= weights.sum()
        if top_p < 1:
            order = np.argsort(-weights, kind="stable")
            # The first token always stays. Another one stays while those before it have less than top_p.
            mass_before = np.cumsum(weights[order]) - weights[order]
            weights[order[1:][mass_before[1:] >= top_p]] = 0.0
            weights /= weights.sum()
        return int(self._random.choice(len(weights), p=weights))


def _expect_finite(logits: NDArray[np.float32]) -> None:
    if not np.isfinite(logits).all():
        raise LaunchError("the logits of a token are not finite: the attention answered with NaN or infinity")


def _scores(logits: NDArray[np.float32], token: int, top: int) -> TokenScores:
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    scores = shifted - math.log(np.exp(shifted).sum())
    likeliest = _likeliest(scores, top)
    return TokenScores(float(scores[token]), tuple((int(each), float(scores[each])) for each in likeliest))


def _likeliest(scores: NDArray[np.float64], top: int) -> NDArray[np.intp]:
    """The indices of the highest scores in descending order, the first of equal ones first, without sorting all."""
    if top == 0:
        return np.array([], np.intp)
    top = min(top, len(scores))
    high = np.flatnonzero(scores >= np.partition(scores, -top)[-top])
    return high[np.argsort(-scores[high], kind="stable")[:top]]
