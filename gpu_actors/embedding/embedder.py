"""Embedder: turns texts into vectors, with several batches in flight and every attention through the service."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpu_actors.embedding.minilm import MiniLM
from gpu_actors.embedding.tokens import MAX_TEXT_CHARS, TokenBatch, Tokenizer, token_batches
from gpu_actors.embedding.weights import find_weights, load_config
from gpu_actors.errors import LaunchError
from gpu_actors.fields import integer, one_of
from gpu_actors.tracing import host_span

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["Embedded", "Embedder"]

T = TypeVar("T")
Floats = NDArray[np.float32]
Operand = NDArray[Any]
Heads = tuple[Operand, Operand, Operand]
Progress = Callable[[int, int], None]

DTYPES: dict[str, DTypeLike] = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


class Embedded(NamedTuple):
    """The result of `Embedder.embed`, one row for each text.

    vectors: (texts, columns) float32, of length 1 if the model's folder normalises them, as MiniLM's does.
    tokens: (texts,) int32, the tokens of each text.
    truncated: (texts,) bool, whether each text was cut.
    """

    vectors: Floats
    tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]


class Embedder:
    """A sentence encoder over an open context.

    batch_tokens: the most tokens packed into one attention request. It bounds the memory.
    batches_in_flight: batches of one call that are processed at the same time, so that some multiply while others
        wait for attention. Default: one more than threads.
    dtype: of attention's operands, "bfloat16" or "float32"; all else is float32. Default: "bfloat16" if the device
        runs kernels, which multiply it on tensor cores, else "float32".
    threads: batches that may multiply at the same time, over all calls. Default: the number of CPUs, at most 8. Use one
        BLAS thread (`limit_blas_threads`) with it: BLAS threads spin while they wait for each other, which is expensive
        if other work shares the CPUs.
    """

    def __init__(
        self,
        context: GpuContext,
        model: MiniLM,
        tokenizer: Tokenizer,
        *,
        batch_tokens: int = 4096,
        batches_in_flight: int | None = None,
        threads: int | None = None,
        dtype: str | None = None,
    ) -> None:
        threads = integer("threads", min(8, os.cpu_count() or 1) if threads is None else threads, 1)
        batches_in_flight = threads + 1 if batches_in_flight is None else batches_in_flight
        dtype = dtype if dtype is not None else "bfloat16" if context.info.runs_kernels else "float32"
        one_of("dtype", dtype, tuple(DTYPES), f"must be {' or '.join(DTYPES)}")
        self.dtype = dtype
        self.model = model
        self.tokenizer = tokenizer
        self.batch_tokens: int = integer("batch_tokens", batch_tokens, 1)
        self.batches_in_flight: int = integer("batches_in_flight", batches_in_flight, 1)
        self._context = context
        self._scale = float(model.config.head_dim) ** -0.5
        self._limiter = anyio.CapacityLimiter(threads)

    @classmethod
    async def open(
        cls,
        context: GpuContext,
        folder: str | os.PathLike[str] | None = None,
        *,
        batch_tokens: int = 4096,
        batches_in_flight: int | None = None,
        threads: int | None = None,
        dtype: str | None = None,
        max_text_chars: int = MAX_TEXT_CHARS,
    ) -> Embedder:
        """Load weights and tokenizer on a thread. Raises `InvalidRequest`, and `Unsupported` as `MiniLM.load` does.

        folder: see `find_weights`. max_text_chars: see `Tokenizer`.
        """

        def load() -> tuple[MiniLM, Tokenizer]:
            path = find_weights(folder)
            return MiniLM.load(path), Tokenizer(path, load_config(path).max_tokens, max_text_chars)

        model, tokenizer = await anyio.to_thread.run_sync(load)
        return cls(
            context,
            model,
            tokenizer,
            batch_tokens=batch_tokens,
            batches_in_flight=batches_in_flight,
            threads=threads,
            dtype=dtype,
        )

    async def embed(
        self, texts: Iterable[str], *, deadline: float | None = None, progress: Progress | None = None
    ) -> Embedded:
        """Embed texts. A text of more than ``max_tokens`` tokens or ``max_text_chars`` characters is cut and flagged.

        deadline: absolute ``time.monotonic()`` seconds, for every attention request.
        progress: called on the loop with (texts, tokens) of each finished batch.
        Raises `InvalidRequest` for a text that is not valid Unicode, `LaunchError` for a result that is not finite, and
        the error of a failed request. An error cancels the other batches.
        """
        batches = token_batches(self.tokenizer, texts, self.batch_tokens)
        slots = asyncio.Semaphore(self.batches_in_flight)
        order: list[TokenBatch] = []
        vectors: dict[int, Floats] = {}

        async def run(number: int, batch: TokenBatch) -> None:
            try:
                vectors[number] = await self._forward(batch, deadline)
            finally:
                slots.release()
            if progress is not None:
                progress(len(batch), len(batch.ids))

        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    await slots.acquire()
                    batch = await anyio.to_thread.run_sync(_tokenize_next, batches)
                    if batch is None:
                        break
                    tasks.start_soon(run, len(order), batch)
                    order.append(batch)
        except BaseExceptionGroup as group:
            error = _first_error(group)
            raise error from error.__cause__
        # If a call is cancelled while a thread makes a batch, the group ends without an error and with batches missing.
        await anyio.lowlevel.checkpoint_if_cancelled()
        return self._collect(order, vectors)

    async def _forward(self, batch: TokenBatch, deadline: float | None) -> Floats:
        x, heads = await self._compute(partial(self._before_first_attention, batch))
        layer = 0
        while heads is not None:
            attended = await self._attend(heads, batch, deadline)
            x, heads = await self._compute(partial(self._between_attentions, layer, x, attended))
            layer += 1
        vectors = await self._compute(partial(self.model.head, x, batch))
        if not np.isfinite(vectors).all():
            raise LaunchError("an embedding is not finite: the attention answered with NaN or infinity")
        return vectors

    def _before_first_attention(self, batch: TokenBatch) -> tuple[Floats, Heads | None]:
        with host_span("matmul", rows=len(batch.ids), layer=0):
            x = self.model.embeddings(batch)
            return x, self._operands(0, x)

    def _between_attentions(self, layer: int, x: Floats, attended: Operand) -> tuple[Floats, Heads | None]:
        with host_span("matmul", rows=len(x), layer=layer + 1):
            x = self.model.layers[layer].finish(x, attended.astype(np.float32, copy=False))
            return x, self._operands(layer + 1, x) if layer + 1 < len(self.model.layers) else None

    def _operands(self, layer: int, x: Floats) -> Heads:
        q, k, v = (part.astype(DTYPES[self.dtype], copy=False) for part in self.model.layers[layer].heads(x))
        return q, k, v

    async def _attend(self, heads: Heads, batch: TokenBatch, deadline: float | None) -> Operand:
        output = await self._context.flash_attn.forward(
            *heads,
            softmax_scale=self._scale,
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_k=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_k=batch.max_seqlen,
            deadline=deadline,
        )
        attended: Operand = output.out
        return attended

    def _collect(self, order: list[TokenBatch], vectors: dict[int, Floats]) -> Embedded:
        columns = self.model.head.columns
        rows = [vectors[number] for number in range(len(order))]
        lengths = [np.diff(batch.cu_seqlens) for batch in order]
        flags = [np.array(batch.truncated, np.bool_) for batch in order]
        return Embedded(
            np.concatenate([np.empty((0, columns), np.float32), *rows]),
            np.concatenate([np.empty(0, np.int32), *lengths]),
            np.concatenate([np.empty(0, np.bool_), *flags]),
        )

    async def _compute(self, work: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(work, limiter=self._limiter)


def _tokenize_next(batches: Iterator[TokenBatch]) -> TokenBatch | None:
    with host_span("tokenise"):
        return next(batches, None)


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group. It has caused the others, by cancellation."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
