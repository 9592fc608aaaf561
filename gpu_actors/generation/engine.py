"""Engine: generates many texts at the same time. Texts of any length and time of arrival share every step.

    submit() -> waiting -> running -> step: embed, for each layer [NumPy in a thread, attend in the service], sample
                              ^_______________________________________________________________________|

Keys and values of all texts and layers are in one paged cache. A text has a sequence for each layer. For each layer and
step one request appends the new rows, rotates them and q, and attends, for all texts together. A prompt with the same
beginning as an earlier one uses the pages of that beginning and computes only the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import anyio.to_thread
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import ActorFailed, ActorStopped, GpuActorsError, StaleBuffer
from gpu_actors.fields import expect, integer
from gpu_actors.generation.batch import Batcher, Rows, Text
from gpu_actors.generation.generation import Generation
from gpu_actors.generation.interface import EngineStats, checked_prompt
from gpu_actors.generation.meter import EngineMeter
from gpu_actors.generation.model import Heads, Llama
from gpu_actors.generation.sampling import Sampling, TokenScores
from gpu_actors.generation.weights import Matrix
from gpu_actors.kernels.append import Rope
from gpu_actors.tracing import host_span
from gpu_actors.tracing.work import under, working

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["Engine", "EngineStats", "Settings", "as_service_error"]

logger: logging.Logger = logging.getLogger("gpu_actors")

DTYPES = ("float16", "bfloat16", "float32")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")

_SCORED = 32

_Drawn: TypeAlias = tuple[int, TokenScores | None] | GpuActorsError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an engine.

    rows: the most rows of a step.
    page_size: tokens of a page.
    blocks: pages of the cache, for all layers together.
    dtype: of attention's operands, "float16", "bfloat16" or "float32".
    cache_dtype: of the cache, the same as dtype or an fp8. None takes the other one's value, or the weights' own
        (`Weights.dtype`) if that is None or fp8. Beside fp8 this is float16 for float32 weights.
    share_prefixes: whether prompts with the same beginning share its pages.
    """

    rows: int = 256
    page_size: int = 16
    blocks: int = 1024
    dtype: str | None = None
    cache_dtype: str | None = None
    share_prefixes: bool = True

    def dtypes(self, weights: str) -> tuple[str, str]:
        """The dtypes of attention's operands and of the cache. weights: `Weights.dtype`. Raises `InvalidRequest`."""
        eight_bits = self.cache_dtype in EIGHT_BITS
        # Only half precisions attend to a cache of 8 bits.
        native = "float16" if eight_bits and weights == "float32" else weights
        dtype = self.dtype or (native if eight_bits else self.cache_dtype) or native
        expect(dtype in DTYPES, "dtype", dtype, f"must be {', '.join(DTYPES)}")
        cache_dtype = self.cache_dtype or dtype
        fitting = (dtype,) if dtype == "float32" else (dtype, *EIGHT_BITS)
        expect(
            cache_dtype in fitting, "cache_dtype", cache_dtype, f"must be {' or '.join(fitting)}, with dtype {dtype}"
        )
        return dtype, cache_dtype


class Engine:
    """A `TextEngine`, made by `Engine.open`.

    keep_logits: whether generations store their logits, for tests.
    failure: why the engine's loop has ended, "" while it runs. Every text then ends with `ActorStopped`.
    """

    def __init__(self, cache: Any, model: Llama, settings: Settings, keep_logits: bool = False) -> None:
        self.stats = EngineStats()
        self.meter = EngineMeter()
        self._cache = cache
        self._model = model
        self._settings = settings
        self._keep_logits = keep_logits
        dtype, _ = settings.dtypes(model.weights.dtype)
        self._dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        self._rope = Rope(dim=model.config.head_dim, inv_freq=model.config.inv_freq)
        self._batcher = Batcher(settings.rows, settings.blocks)
        self._generations: dict[Text, Generation] = {}
        self._wake_up = anyio.Event()
        self._stopped = ""
        self.failure: str = ""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, context: GpuContext, model: Llama, settings: Settings, *, keep_logits: bool = False
    ) -> AsyncIterator[Engine]:
        """A context manager with a running engine. Leaving it cancels the texts that have not ended."""
        config = model.config
        _, cache_dtype = settings.dtypes(model.weights.dtype)
        pool = context.kv_cache(
            num_blocks=settings.blocks,
            page_size=settings.page_size,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=cache_dtype,
        )
        async with pool as cache, anyio.create_task_group() as group:
            engine = cls(cache, model, settings, keep_logits)
            group.start_soon(engine._run)
            try:
                yield engine
            finally:
                group.cancel_scope.cancel()
                for generation in engine._generations.values():
                    generation.end("cancelled")

    @property
    def longest(self) -> int:
        """How many tokens a text may have, prompt included. The model's positions and the cache's pages limit it."""
        pages_a_layer = self._settings.blocks // self._model.config.layers
        # A prompt that is scored computes its last token too, so each token has a row.
        return min(self._model.config.positions, pages_a_layer * self._settings.page_size)

    @property
    def running(self) -> int:
        """Texts that share the steps now."""
        return self._batcher.running

    @property
    def waiting(self) -> int:
        """Texts that wait for pages or rows."""
        return self._batcher.waiting

    def pages(self) -> tuple[int, int, int]:
        """Pages of the cache: all, free and shared ones. Raises `StaleBuffer` once the engine is left."""
        stats = self._cache.stats()
        return stats.blocks, stats.free_blocks, stats.shared_blocks

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        asked: float | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Begin a text.

        prompt: its tokens, at least one.
        max_new_tokens: may be 0 if the prompt is scored.
        sampling: None takes the likeliest token every time.
        asked: when it was requested, in ``time.monotonic()`` seconds, if it has waited elsewhere before. Its times
            count from then. None: now.
        deadline: on the same clock. A text that has not been admitted by then ends with `DeadlineExceeded`, and no row
            of it is computed.

        Raises `InvalidRequest` for a text that can never be generated, and `ActorStopped` after `stop`.
        """
        if self._stopped:
            raise ActorStopped(self._stopped)
        config, settings = self._model.config, self._settings
        tokens = checked_prompt(prompt, config.vocab)
        max_new_tokens = integer("max_new_tokens", max_new_tokens, 0 if sampling and sampling.score_prompt else 1)
        length = len(tokens) + max_new_tokens
        pages = config.layers * -(-max(length - 1, len(tokens)) // settings.page_size)
        expect(length <= config.positions, "prompt", length, f"makes a text of more than {config.positions} tokens")
        reason = f"takes {pages} pages of a cache that has {settings.blocks}"
        expect(pages <= settings.blocks, "prompt", length, reason)
        text = Text(tokens, pages, max_new_tokens)
        generation = Generation(
            text,
            max_new_tokens,
            sampling or Sampling(),
            config.stop_tokens,
            self.meter,
            asked,
            deadline,
            on_cancel=self._wake,
        )
        self._generations[text] = generation
        self._batcher.add(text)
        self._wake()
        return generation

    def stop(self, why: str) -> None:
        """End every text with `ActorStopped`, and refuse new ones."""
        self._stopped = why
        for text, generation in self._generations.items():
            text.cancelled = True
            generation.end("error", ActorStopped(why))
        self._wake()

    def _wake(self) -> None:
        self._wake_up.set()

    async def _run(self) -> None:
        try:
            await self._loop()
        except Exception as error:
            # The program goes on without the engine: a server tells its clients why it generates nothing.
            logger.critical("the engine's loop failed, and it generates no more texts", exc_info=error)
            self.failure = f"the engine has failed: {type(error).__name__}: {error}"
            self.stop(self.failure)

    async def _loop(self) -> None:
        while True:
            await self._remove(self._batcher.cancelled(), "cancelled")
            for text in self._batcher.admit():
                with under(self._generations[text].work):
                    await self._start(text)
            rows = self._batcher.next_rows()
            if rows is None:
                self._wake_up = anyio.Event()
                await self._wake_up.wait()
                continue
            works = [work for text in rows.texts if (work := self._generations[text].work) is not None]
            try:
                with working("step", links=works, fields={"rows": len(rows.tokens), "texts": len(rows.texts)}):
                    await self._step(rows)
            except Exception as error:
                # The layers of these texts no longer hold the same rows.
                await self._remove(rows.texts, "error", as_service_error(error))

    async def _start(self, text: Text) -> None:
        layers = self._model.config.layers
        prompts = [self._layer_tokens(np.array(text.tokens), layer) for layer in range(layers)]
        try:
            generation = self._generations[text]
            generation.begin()
            shares = self._settings.share_prefixes and not generation.scores_prompt
            replies = [self._cache.create(prompt if shares else None) for prompt in prompts]
            for reply in replies:
                text.sequences.append(await reply)
            # One layer's page may be evicted while another layer's page is still cached.
            shared = min(sequence.cached for sequence in text.sequences)
            for sequence in text.sequences:
                if sequence.cached > shared:
                    await self._cache.truncate(sequence, shared)
        except Exception as error:
            await self._remove([text], "error", as_service_error(error))
            return
        text.computed = text.cached = shared
        self.stats.cached += shared

    def _layer_tokens(self, tokens: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        """The tokens as ids of one layer's rows, which differ from other layers' rows of the same tokens."""
        return tokens * self._model.config.layers + layer

    async def _step(self, rows: Rows) -> None:
        start = time.monotonic()
        run_sync = anyio.to_thread.run_sync
        x, heads = await run_sync(self._before_first_attention, rows)
        layer = 0
        while heads is not None:
            attended = await self._attend(layer, rows, heads)
            x, heads = await run_sync(self._between_attentions, layer, x, attended)
            layer += 1
        finished = rows.finished
        last = rows.ends[1:][finished] - 1
        texts = [rows.texts[index] for index in finished]
        scores = any(self._generations[text].scores_prompt for text in rows.texts)
        failed = await run_sync(self._score, rows, x) if scores else {}
        drawn = await run_sync(self._draw, texts, x[last])
        for text, count in zip(rows.texts, rows.counts, strict=True):
            text.computed += count
        self.stats.step(len(rows.tokens), len(rows.texts))
        self.meter.step(len(rows.tokens), len(rows.texts), time.monotonic() - start)
        for text, error in failed.items():
            self._generations[text].end("error", error)
            text.cancelled = True
        await self._append_tokens(texts, drawn)

    def _score(self, rows: Rows, x: Matrix) -> dict[Text, GpuActorsError]:
        """Score the prompts that request it. Returns the errors of those that could not be scored."""
        failed = {}
        for text, begin, count in zip(rows.texts, rows.ends, rows.counts, strict=False):
            generation = self._generations[text]
            scored = min(count, len(generation.prompt) - 1 - text.computed)
            try:
                # A few at a time: a row of logits is as long as the vocabulary.
                for first in range(0, scored if generation.scores_prompt else 0, _SCORED):
                    part = x[begin + first : begin + min(first + _SCORED, scored)]
                    generation.score(list(self._model.logits(part)), text.computed + first)
            except GpuActorsError as error:
                failed[text] = error
        return failed

    def _before_first_attention(self, rows: Rows) -> tuple[Matrix, Heads | None]:
        with host_span("matmul", rows=len(rows.tokens), layer=0):
            x = self._model.embed(rows.tokens)
            return x, self._model.before_attention(0, x)

    def _between_attentions(self, layer: int, x: Matrix, attended: Matrix) -> tuple[Matrix, Heads | None]:
        with host_span("matmul", rows=len(x), layer=layer + 1):
            x = self._model.after_attention(layer, x, attended.astype(np.float32))
            more = layer + 1 < self._model.config.layers
            return x, self._model.before_attention(layer + 1, x) if more else None

    def _draw(self, texts: list[Text], x: Matrix) -> list[_Drawn]:
        """The next token of each text; None if it needs no more, or the error why it has none."""
        with host_span("sample", texts=len(texts)):
            drawn: list[_Drawn] = []
            for text, row in zip(texts, self._model.logits(x), strict=True):
                generation = self._generations[text]
                if self._keep_logits:
                    generation.logits.append(row)
                try:
                    drawn.append(generation.draw(row))
                except GpuActorsError as error:
                    drawn.append(error)
            return drawn

    async def _attend(self, layer: int, rows: Rows, heads: Heads) -> Any:
        q, k, v = (part.astype(self._dtype) for part in heads)
        sequences = [text.sequences[layer] for text in rows.texts]
        names = self._layer_tokens(rows.tokens, layer) if self._settings.share_prefixes else None
        reply = self._cache.attend(q, sequences, k=k, v=v, cu_seqlens_q=rows.ends, rope=self._rope, tokens=names)
        return (await reply).out

    async def _append_tokens(self, texts: list[Text], drawn: list[_Drawn]) -> None:
        finished = []
        for text, outcome in zip(texts, drawn, strict=True):
            generation = self._generations[text]
            if isinstance(outcome, GpuActorsError):
                generation.end("error", outcome)
            elif outcome is None:
                generation.end("length")
            else:
                text.tokens.append(outcome[0])
                self.stats.tokens += not generation.reason
                generation.take(*outcome)
            if generation.reason:
                finished.append(text)
        await self._remove(finished)

    async def _remove(self, texts: Sequence[Text], reason: str = "", error: GpuActorsError | None = None) -> None:
        generations = [self._generations.pop(text) for text in texts]
        for generation in generations:
            generation.end(reason, error)
            self.stats.end(generation)
        for text, generation in zip(texts, generations, strict=True):
            with under(generation.work):
                freed = [self._cache.free(sequence) for sequence in text.sequences]
            for reply in freed:
                try:
                    await reply
                except GpuActorsError as failure:
                    # The cache is lost with its context, and so are its pages.
                    logger.debug("a sequence was not freed: %s", failure)
        # Last: only now are the pages free for others.
        self._batcher.remove(texts)


def as_service_error(error: Exception) -> GpuActorsError:
    """The exception as an error of this package. An exception that is none is a fault of the engine."""
    if isinstance(error, StaleBuffer):
        # The cache belongs to the engine: a client has no buffer that could be stale.
        return ActorStopped(f"the engine has lost its cache: {error}")
    if isinstance(error, GpuActorsError):
        return error
    logger.error("a step of the engine failed", exc_info=error)
    failed = ActorFailed(f"the engine raised {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
