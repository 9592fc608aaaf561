"""Generation: a text while the engine generates it."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

import anyio
import numpy as np
from numpy.typing import NDArray

from gpu_actors.clock import TIMER_SLACK
from gpu_actors.errors import DeadlineExceeded, GpuActorsError
from gpu_actors.generation.batch import Text
from gpu_actors.generation.meter import EngineMeter
from gpu_actors.generation.sampling import Sampler, Sampling, TokenScores
from gpu_actors.tracing.work import Work, begin_work

__all__ = ["Generation"]


class Generation:
    """A text that is being generated: iterate over it for its tokens, from the first on.

    prompt: its tokens.
    made: the tokens generated so far.
    scores: of each generated token, if the sampling requests them.
    prompt_scores: of the prompt's tokens from the second on, if requested. Complete with the first token or the end.
    logits: of each generated token, float32 (vocab,), if the engine stores them.
    reason: why it ended: "stop" (the model's end of text), "length", "deadline", "cancelled" or "error"; "" until then.
    cached: rows of the prompt that other texts had computed.
    asked, begun, first: ``time.monotonic()`` when it was requested, was admitted, and had its first token. None before.
    deadline: on the same clock. The text is not admitted from then on.
    work: its span, if a trace is recorded.
    on_token: called after each token.

    Iterating raises the `GpuActorsError` that ended it, if one did. Any number of tasks of the engine's loop may wait
    for one text.
    """

    def __init__(
        self,
        text: Text,
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: Sequence[int],
        meter: EngineMeter,
        asked: float | None,
        deadline: float | None,
        on_cancel: Callable[[], None],
    ) -> None:
        self.prompt = tuple(text.tokens)
        self.made: list[int] = []
        self.scores: list[TokenScores] = []
        self.prompt_scores: list[TokenScores] = []
        self.logits: list[NDArray[np.float32]] = []
        self.reason = ""
        self.asked: float = time.monotonic() if asked is None else asked
        self.deadline: float = math.inf if deadline is None else deadline
        self.begun: float | None = None
        self.first: float | None = None
        self.on_token: Callable[[], None] | None = None
        self._text = text
        self._tokens_left = max_new_tokens
        self._sampler = Sampler(sampling)
        self.scores_prompt = sampling.score_prompt
        self._stop_tokens = stop_tokens
        self._meter = meter
        self._last: float | None = None
        self._on_cancel = on_cancel
        self._error: GpuActorsError | None = None
        self._changed = anyio.Event()
        self.work: Work | None = begin_work(
            "texts", "text", started=self.asked, fields={"prompt_tokens": len(self.prompt)}
        )

    @property
    def cached(self) -> int:
        return self._text.cached

    def cancel(self, reason: str = "") -> None:
        """End the text, and free its pages before the next step. Does nothing if it has ended.

        reason: "stop" for a reader that needs no more, as after a stop string. By default "deadline" once that has
        passed, and "cancelled" before.
        """
        self._text.cancelled = True
        late = time.monotonic() >= self.deadline - TIMER_SLACK
        self.end(reason or ("deadline" if late else "cancelled"))
        self._on_cancel()

    async def more(self, seen: int) -> bool:
        """Wait for more than ``seen`` tokens. False if the text has ended. Raises the error that ended it."""
        while len(self.made) <= seen:
            if self.reason:
                if self._error is not None:
                    raise self._error
                return False
            await self._changed.wait()
        return True

    async def let_in(self) -> None:
        """Wait until the text has pages and a row of the steps, or has ended."""
        while self.begun is None and not self.reason:
            await self._changed.wait()

    async def __aiter__(self) -> AsyncIterator[int]:
        count = 0
        while await self.more(count):
            yield self.made[count]
            count += 1

    async def tokens(self) -> list[int]:
        """All tokens, once the text has ended."""
        return [token async for token in self]

    # For the engine

    def begin(self) -> None:
        """Admit the text. Raises `DeadlineExceeded` if the deadline has passed."""
        now = time.monotonic()
        if now >= self.deadline:
            raise DeadlineExceeded("the deadline passed in the queue")
        self.begun = now
        self._meter.queue.observe(self.begun - self.asked)
        self._notify()

    def draw(self, logits: NDArray[np.float32]) -> tuple[int, TokenScores | None] | None:
        """The next token from its logits. None for a text with no token left. One thread at a time may call it."""
        return self._sampler.draw(logits) if self._tokens_left else None

    def score(self, logits: Sequence[NDArray[np.float32]], begin: int) -> None:
        """Score the prompt's tokens from ``begin + 1`` on, from the logits of their predecessors."""
        following = self.prompt[begin + 1 : begin + 1 + len(logits)]
        self.prompt_scores += [self._sampler.score(row, token) for row, token in zip(logits, following, strict=False)]

    def take(self, token: int, scores: TokenScores | None) -> None:
        """Append a token, and end the text if it was the last."""
        if self.reason:
            return
        now = time.monotonic()
        if self._last is None:
            self.first = now
            self._meter.first.observe(now - self.asked)
        else:
            self._meter.between.observe(now - self._last)
        self._last = now
        self.made.append(token)
        if scores is not None:
            self.scores.append(scores)
        if self.on_token is not None:
            self.on_token()
        self._tokens_left -= 1
        if token in self._stop_tokens:
            self.end("stop")
        elif self._tokens_left == 0:
            self.end("length")
        else:
            self._notify()

    def end(self, reason: str, error: GpuActorsError | None = None) -> None:
        """End the text. Only the first call counts."""
        if not self.reason:
            self.reason = "deadline" if isinstance(error, DeadlineExceeded) else reason
            self._error = error
            self._notify()
            if self.work is not None:
                self._end_work(self.work)

    def _end_work(self, work: Work) -> None:
        now = time.monotonic()
        work.part("queue", self.asked, self.begun or now)
        if self.begun is not None:
            work.part("prefill", self.begun, self.first or now, {"rows": len(self.prompt) - self.cached})
        if self.first is not None:
            work.part("decode", self.first, now, {"tokens": len(self.made)})
        counts = {"cached_tokens": self.cached, "completion_tokens": len(self.made), "reason": self.reason}
        work.end(counts, error=self._error or (self.reason if self.reason == "deadline" else None))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
