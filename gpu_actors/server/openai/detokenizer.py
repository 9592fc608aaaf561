"""Detokenizer: the tokens of a generation as text, in whole characters and without its stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from gpu_actors.errors import RequestCancelled
from gpu_actors.generation.generation import Generation
from gpu_actors.generation.sampling import TokenScores
from gpu_actors.generation.stops import StopStrings
from gpu_actors.generation.tokenizer import Tokenizer
from gpu_actors.server.openai.responses import Finish, PromptDetails, Usage

__all__ = ["Detokenizer", "Echo", "PromptText", "ScoredToken", "token_text"]


class ScoredToken(NamedTuple):
    """A token of the answer. scores: None for a prompt's first token. offset: characters of the answer before it."""

    token: int
    scores: TokenScores | None
    offset: int


class PromptText(NamedTuple):
    """A prompt as a text, and the number of characters before each of its tokens."""

    text: str
    offsets: list[int]


class Echo(NamedTuple):
    """A prompt at the beginning of its answer."""

    text: str
    scored: list[ScoredToken]


class Detokenizer:
    """Turns the tokens of a generation into text.

    finish: why the text ended, None until then.

    A stop string may contain special tokens, which the text does not show.
    """

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, stops: Sequence[str], stop_tokens: Sequence[int]
    ) -> None:
        self.finish: Finish | None = None
        self._generation = generation
        self._tokenizer = tokenizer
        self._special = tokenizer.special
        self._stream = tokenizer.stream()
        self._stops = StopStrings(stops)
        self._stop_tokens = stop_tokens
        self._count = 0
        self._offset = 0
        self._scored: list[ScoredToken] = []

    async def next_text(self) -> str:
        """The text since the last call, which may be empty. After it, ``finish`` is set if this was the last of it.

        Raises the error that ended the generation.
        """
        generation = self._generation
        if await generation.more(self._count):
            return "".join(self._new_pieces())
        if generation.reason not in ("stop", "length"):
            raise RequestCancelled("the text was cancelled")
        rest = self._stops.feed(self._stream.end())
        if not self._stops.found:
            rest += self._stops.end()
        self.finish = "stop" if self._stops.found or generation.reason == "stop" else "length"
        return rest

    def echo(self, prompt_text: PromptText | None) -> Echo:
        """The prompt, with scores if the sampling has them. Call it after the first token and before `take_scored`.

        prompt_text: the prompt as a text; None for a prompt of tokens, whose special tokens are not shown.
        """
        prompt = self._generation.prompt
        text, offsets = self._prompt_text(prompt) if prompt_text is None else prompt_text
        scores = [None, *self._generation.prompt_scores]
        scored = [ScoredToken(*one) for one in zip_longest(prompt, scores, offsets)]
        self._scored = [one._replace(offset=one.offset + len(text)) for one in self._scored]
        self._offset += len(text)
        return Echo(text, scored)

    def _prompt_text(self, prompt: Sequence[int]) -> PromptText:
        stream = self._tokenizer.stream(begins=True)
        text, offsets = "", []
        for token in prompt:
            offsets.append(len(text))
            if token not in self._special:
                text += stream.feed(token)
        return PromptText(text + stream.end(), offsets)

    def take_scored(self) -> list[ScoredToken]:
        """The tokens since the last call, or none if the sampling has no scores."""
        scored, self._scored = self._scored, []
        return scored

    @property
    def usage(self) -> Usage:
        """The number of tokens up to now, without tokens that were generated after a stop string."""
        prompt = len(self._generation.prompt)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._count,
            total_tokens=prompt + self._count,
            prompt_tokens_details=PromptDetails(cached_tokens=self._generation.cached),
        )

    def _new_pieces(self) -> Iterator[str]:
        generation = self._generation
        # There are several if the reader was slower than the engine.
        while self._count < len(generation.made):
            token = generation.made[self._count]
            if generation.scores:
                self._scored.append(ScoredToken(token, generation.scores[self._count], self._offset))
            self._count += 1
            if token in self._stop_tokens:
                continue
            if token in self._special:
                yield self._stops.feed(self._special[token], shown=False)
            else:
                piece = self._stream.feed(token)
                self._offset += len(piece)
                yield self._stops.feed(piece)
            if self._stops.found:
                self.finish = "stop"
                generation.cancel("stop")
                return


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token. U+FFFD stands for a part of a character."""
    return tokenizer.bytes_of(token).decode(errors="replace")
