"""Engine: generates many texts at once. They share every step, whatever their arrival and length.

    submit() -> waiting -> running -> step: embed, for each layer [NumPy in a thread, attend in the service], sample
                              ^_______________________________________________________________________|

Keys and values of all texts and layers lie in one paged cache; a text has a sequence a layer. One request a layer and
step appends the new rows, rotates them and q, and attends, for all texts together.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import ml_dtypes
import numpy as np

import gpu_actors as ga
from llama.batch import Batcher, Rows, Text
from llama.model import Heads, Llama
from llama.weights import Matrix

__all__ = ["Engine", "EngineStats", "Generation", "Settings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """rows: at most in a step. blocks: pages of the cache, for all layers together.

    dtype: of attention's operands, "float16" or "bfloat16". cache_dtype: of the cache, the same (None) or an fp8.
    """

    rows: int = 256
    page_size: int = 16
    blocks: int = 1024
    dtype: str = "float16"
    cache_dtype: str | None = None


@dataclass(slots=True)
class EngineStats:
    """steps, rows, tokens: done so far. most_texts: that shared a step."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    most_texts: int = 0


class Generation:
    """A text that is being generated: iterate over it for its tokens, as they come, from the first on.

    reason: why it ended: "stop" (the model's end of text), "length" or "cancelled"; "" until then. logits: of every
    token, where they were asked for. Iterating raises the `GpuActorsError` that ended it, if one did.
    """

    def __init__(self, engine: Engine, text: Text, max_new_tokens: int, temperature: float, seed: int) -> None:
        self.prompt = tuple(text.tokens)
        self.reason = ""
        self.logits: list[Matrix] = []
        self._engine = engine
        self._text = text
        self._left = max_new_tokens
        self._temperature = temperature
        self._random = np.random.default_rng(seed)
        self._error: ga.GpuActorsError | None = None
        self._tokens: list[int] = []
        self._news = anyio.Event()

    def cancel(self) -> None:
        """End the text before the next step."""
        self._text.cancelled = True
        self._engine._bell.set()

    async def __aiter__(self) -> AsyncIterator[int]:
        seen = 0
        while seen < len(self._tokens) or not self.reason:
            if seen == len(self._tokens):
                await self._news.wait()
                continue
            yield self._tokens[seen]
            seen += 1
        if self._error is not None:
            raise self._error

    async def tokens(self) -> list[int]:
        """All of them, once it has ended."""
        return [token async for token in self]

    def _next(self, logits: Matrix) -> int:
        if self._temperature == 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self._temperature
        weights = np.exp(scaled - scaled.max())
        return int(self._random.choice(len(weights), p=weights / weights.sum()))

    def _take(self, token: int, stop_tokens: tuple[int, ...]) -> bool:
        """Pass a token on. False where it was the last."""
        self._left -= 1
        self._tokens.append(token)
        self._tell()
        if token in stop_tokens:
            self._end("stop")
        elif self._left == 0:
            self._end("length")
        return not self.reason

    def _end(self, reason: str, error: ga.GpuActorsError | None = None) -> None:
        self.reason, self._error = reason, error
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class Engine:
    """Made by `Engine.open`. keep_logits: generations keep theirs, to be looked at."""

    def __init__(self, cache: Any, model: Llama, settings: Settings, keep_logits: bool = False) -> None:
        self.stats = EngineStats()
        self._cache = cache
        self._model = model
        self._settings = settings
        self._keep_logits = keep_logits
        self._dtype = np.dtype(getattr(ml_dtypes, settings.dtype, settings.dtype))
        self._rope = ga.Rope(dim=model.config.head_dim, inv_freq=model.config.inv_freq)
        self._batcher = Batcher(settings.rows, settings.blocks)
        self._generations: dict[Text, Generation] = {}
        self._bell = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, context: ga.GpuContext, model: Llama, settings: Settings, *, keep_logits: bool = False
    ) -> AsyncIterator[Engine]:
        """Generate texts as long as this is entered. Leaving cancels what has not ended."""
        config = model.config
        pool = context.kv_cache(
            num_blocks=settings.blocks,
            page_size=settings.page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=settings.cache_dtype or settings.dtype,
        )
        async with pool as cache, anyio.create_task_group() as group:
            engine = cls(cache, model, settings, keep_logits)
            group.start_soon(engine._run)
            try:
                yield engine
            finally:
                group.cancel_scope.cancel()
                for generation in engine._generations.values():
                    generation._end("cancelled")

    def submit(self, prompt: list[int], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> Generation:
        """Begin a text. prompt: its tokens, at least one. temperature: 0 takes the likeliest token every time.

        Raises `InvalidRequest` for a text that can never be generated.
        """
        config, settings = self._model.config, self._settings
        if not prompt or not all(0 <= token < config.vocab for token in prompt):
            raise ga.InvalidRequest("prompt", prompt, f"must be token ids from 0 to {config.vocab - 1}, at least one")
        if max_new_tokens < 1:
            raise ga.InvalidRequest("max_new_tokens", max_new_tokens, "must be at least 1")
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise ga.InvalidRequest("temperature", temperature, "must be a finite number >= 0")
        length = len(prompt) + max_new_tokens
        pages = config.layers * -(-(length - 1) // settings.page_size)  # the last token is never computed
        if length > config.positions:
            raise ga.InvalidRequest("prompt", length, f"makes a text of more than {config.positions} tokens")
        if pages > settings.blocks:
            raise ga.InvalidRequest("prompt", length, f"takes {pages} pages of a cache that has {settings.blocks}")
        text = Text(list(prompt), pages)
        generation = Generation(self, text, max_new_tokens, temperature, seed)
        self._generations[text] = generation
        self._batcher.add(text)
        self._bell.set()
        return generation

    async def _run(self) -> None:
        while True:
            await self._end(self._batcher.take_cancelled(), "cancelled")
            for text in self._batcher.admit():
                await self._begin(text)
            rows = self._batcher.next_rows()
            if rows is None:
                self._bell = anyio.Event()
                await self._bell.wait()
                continue
            try:
                await self._step(rows)
            except ga.GpuActorsError as error:
                # The layers of these texts no longer hold the same rows.
                await self._end(rows.texts, "error", error)

    async def _begin(self, text: Text) -> None:
        try:
            for _ in range(self._model.config.layers):
                text.sequences.append(await self._cache.create())
        except ga.GpuActorsError as error:
            await self._end([text], "error", error)

    async def _step(self, rows: Rows) -> None:
        """Compute the rows, and give a next token to each text whose prompt is computed."""
        model, in_thread = self._model, anyio.to_thread.run_sync
        x, heads = await in_thread(self._first, rows)
        layer = 0
        while heads is not None:
            attended = await self._attend(layer, rows, heads)
            x, heads = await in_thread(self._between, layer, x, attended)
            layer += 1
        finished = rows.finished
        last = rows.ends[1:][finished] - 1
        logits = await in_thread(model.logits, x[last])
        for text, count in zip(rows.texts, rows.counts, strict=True):
            text.computed += count
        stats = self.stats
        stats.steps += 1
        stats.rows += len(rows.tokens)
        stats.most_texts = max(stats.most_texts, len(rows.texts))
        await self._sample([rows.texts[index] for index in finished], logits)

    def _first(self, rows: Rows) -> tuple[Matrix, Heads | None]:
        x = self._model.embed(rows.tokens)
        return x, self._model.before_attention(0, x)

    def _between(self, layer: int, x: Matrix, attended: Matrix) -> tuple[Matrix, Heads | None]:
        """From one layer's attention to the next one's, where there is one."""
        x = self._model.after_attention(layer, x, attended.astype(np.float32))
        more = layer + 1 < self._model.config.layers
        return x, self._model.before_attention(layer + 1, x) if more else None

    async def _attend(self, layer: int, rows: Rows, heads: Heads) -> Any:
        q, k, v = (part.astype(self._dtype) for part in heads)
        sequences = [text.sequences[layer] for text in rows.texts]
        reply = self._cache.attend(q, sequences, k=k, v=v, cu_seqlens_q=rows.ends, rope=self._rope)
        return (await reply).out

    async def _sample(self, texts: list[Text], logits: Matrix) -> None:
        ended = []
        for text, row in zip(texts, logits, strict=True):
            generation = self._generations[text]
            token = generation._next(row)
            if self._keep_logits:
                generation.logits.append(row)
            text.tokens.append(token)
            self.stats.tokens += 1
            if not generation._take(token, self._model.config.stop_tokens):
                ended.append(text)
        await self._end(ended, "")

    async def _end(self, texts: Any, reason: str, error: ga.GpuActorsError | None = None) -> None:
        """Forget texts, and give their pages back."""
        self._batcher.remove(texts)
        for text in texts:
            generation = self._generations.pop(text)
            if reason:
                generation._end(reason, error)
            for sequence in text.sequences:
                try:
                    await self._cache.free(sequence)
                except ga.GpuActorsError:
                    break  # the cache is gone, and the pages with it
