"""The models of a server: loads them from folders and finds them by name."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread

from gpu_actors.distributed import ContextPool
from gpu_actors.embedding.embedder import Embedder
from gpu_actors.embedding.weights import find_weights
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.extras import missing
from gpu_actors.generation.chat import Chat
from gpu_actors.generation.engine import Engine, Settings
from gpu_actors.generation.interface import TextEngine
from gpu_actors.generation.loading import RANDOM, LoadedModel, default_model, load_model, model_name, with_blocks
from gpu_actors.generation.tokenizer import Tokenizer
from gpu_actors.model_files import read_json
from gpu_actors.runtime.opening import start_thread
from gpu_actors.server.http.problems import NotFound
from gpu_actors.server.openai.engines import Engines, PoolAttention
from gpu_actors.server.openai.responses import ModelCard
from gpu_actors.server.openai.settings import ServeSettings

if TYPE_CHECKING:
    from gpu_actors.generation.torch_engine import TorchModel
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["Encoder", "Generator", "Models", "open_models"]

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("gpu_actors")

MINILM = "minilm"
_MINILM_NAME = "all-MiniLM-L6-v2"

# Rows of a step. A GPU reads the weights once per step, even for few rows.
_CPU_ROWS = 256
_GPU_ROWS = 2048

_TINY_MIB = 32
"""MiB of the tiny model's cache: room for 65,536 tokens, quickly allocated."""


class Generator(NamedTuple):
    """A model that generates text. template: None for a model that knows no conversations.

    vocab: how many tokens it has.
    stop_tokens: each of them ends a text.
    stored, dtype, cache_dtype: the types of the stored weights, of attention's operands and of the KV cache.
    """

    name: str
    engine: TextEngine
    tokenizer: Tokenizer
    template: Chat | None
    vocab: int
    stop_tokens: Sequence[int]
    stored: str
    dtype: str
    cache_dtype: str


class Encoder(NamedTuple):
    name: str
    embedder: Embedder


@dataclass(slots=True)
class Models:
    """At most one model of each kind. created: when the models were loaded, in seconds since 1970."""

    generator: Generator | None = None
    encoder: Encoder | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def generator_of(self, name: str | None) -> Generator:
        """The generator of this name, or of any name for None. Raises `NotFound`."""
        if self.generator is None or name not in (None, self.generator.name):
            raise self._not_found(name, self.generator)
        return self.generator

    def encoder_of(self, name: str) -> Encoder:
        """The encoder of this name. Raises `NotFound`."""
        if self.encoder is None or self.encoder.name != name:
            raise self._not_found(name, self.encoder)
        return self.encoder

    def cards(self) -> list[ModelCard]:
        """The models as /v1/models lists them."""
        cards = []
        if self.generator is not None:
            generator = self.generator
            cards.append(
                ModelCard(
                    id=generator.name,
                    created=self.created,
                    max_model_len=generator.engine.longest,
                    kind="generation",
                    weights=generator.stored,
                    dtype=generator.dtype,
                    cache_dtype=generator.cache_dtype,
                )
            )
        if self.encoder is not None:
            embedder = self.encoder.embedder
            cards.append(
                ModelCard(
                    id=self.encoder.name,
                    created=self.created,
                    max_model_len=embedder.tokenizer.max_tokens,
                    kind="embedding",
                    dtype=embedder.dtype,
                )
            )
        return cards

    def _not_found(self, name: str | None, model: Generator | Encoder | None) -> NotFound:
        reason = "this server has none for this endpoint" if model is None else f"must be {model.name}"
        return NotFound("model", name, reason)


@asynccontextmanager
async def open_models(context: GpuContext | ContextPool, settings: ServeSettings) -> AsyncIterator[Models]:
    """Load the models of the settings, let each answer once, and keep them open while this is entered.

    context: a context, or a pool whose workers all generate and embed.
    Raises `InvalidRequest` and `Unsupported` for a folder without a model that can be used.
    """
    sources = [_source(name) for name in settings.models] or [_source(default_model()), (_MINILM_NAME, "")]
    models = Models()
    loaded: list[tuple[str, LoadedModel | TorchModel]] = []
    attention: Any = PoolAttention(context) if isinstance(context, ContextPool) else context

    async def load(name: str, source: str) -> None:
        if source in ("", MINILM) or _kind(source) == "bert":
            embedder = await _embedder(attention, source)
            if embedder is not None:
                _expect_first(name, models.encoder)
                models.encoder = Encoder(name, embedder)
                await embedder.embed(["warm up"])
        else:
            model = await _in_thread(partial(_load, source, settings, context))
            _expect_first(name, loaded)
            loaded.append((name, model))

    try:
        async with anyio.create_task_group() as group:
            for name, source in sources:
                group.start_soon(load, name, source)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if not loaded:
        yield models
        return
    name, model = loaded[0]
    if isinstance(model, LoadedModel):
        opened = _open_numpy(context, settings, name, model)
    else:
        assert not isinstance(context, ContextPool)  # `_load` refuses it
        opened = _open_torch(context, settings, name, model)
    async with opened as models.generator:
        yield models


def _load(source: str, settings: ServeSettings, context: GpuContext | ContextPool) -> LoadedModel | TorchModel:
    """Load a model for the engine of the settings. "auto" is torch for a folder that the NumPy engine refuses."""
    why = "--engine names it"
    if settings.engine != "torch":
        try:
            model = load_model(source, threads=settings.threads)
        except Unsupported as error:
            if settings.engine == "numpy" or not Path(source).is_dir():
                raise
            why = f"the numpy engine does not compute this model: {error}"
            refused = error
        else:
            if settings.engine == "auto":
                why = "it computes this model, and --engine does not name torch"
            logger.info("%s is generated by the numpy engine: %s", source, why)
            return model
    try:
        from gpu_actors.generation.torch_engine import LOGGERS, load_torch_model
    except ModuleNotFoundError as error:
        hint = f"the torch engine runs what Transformers runs, and {missing(error, 'serve-torch')}"
        if settings.engine == "torch":
            raise InvalidRequest("engine", "torch", hint) from None
        raise Unsupported(refused.field, refused.value, f"{refused.reason}; {hint}", refused.nearest) from error
    if isinstance(context, ContextPool):
        reason = "runs in the server's own process, so --workers must be 0; the numpy engine has workers"
        raise Unsupported("engine", "torch", reason, "numpy")
    for each in map(logging.getLogger, LOGGERS):
        # These loggers write to standard error in their own formats, between the lines of the server's log.
        each.handlers.clear()
        each.propagate = True
    loaded = load_torch_model(source, context, dtype=settings.dtype, cache_dtype=settings.cache_dtype)
    logger.info("%s is generated by the torch engine, in %s on %s: %s", source, loaded.dtype, loaded.device, why)
    return loaded


@asynccontextmanager
async def _open_numpy(
    context: GpuContext | ContextPool, settings: ServeSettings, name: str, loaded: LoadedModel
) -> AsyncIterator[Generator]:
    _, model, tokenizer, template = loaded
    random = model.weights.stored == "random"
    if random:
        logger.info(RANDOM)
    sizes = Settings(
        rows=max(_CPU_ROWS, settings.max_running),
        page_size=settings.page_size,
        dtype=settings.dtype,
        cache_dtype=settings.cache_dtype,
    )
    mib = min(settings.cache_mib, _TINY_MIB) if random else settings.cache_mib
    sizes = with_blocks(sizes, model, mib, settings.max_running)
    opened: AbstractAsyncContextManager[Engine | Engines]
    if isinstance(context, ContextPool):
        opened = Engines.open(context, model, sizes, max(2, settings.max_running // len(context.workers)))
    else:
        opened = Engine.open(context, model, sizes)
    async with opened as engine:
        # This compiles the kernels of the first requests, and imports the modules that they need.
        for each in engine if isinstance(engine, Engines) else [engine]:
            await each.submit([0], max_new_tokens=2).tokens()
        config, dtypes = model.config, sizes.dtypes(model.weights.dtype)
        stored = model.weights.stored
        yield Generator(name, engine, tokenizer, template, config.vocab, config.stop_tokens, stored, *dtypes)


@asynccontextmanager
async def _open_torch(
    context: GpuContext, settings: ServeSettings, name: str, loaded: TorchModel
) -> AsyncIterator[Generator]:
    from gpu_actors.generation.torch_engine import TorchEngine

    opened = TorchEngine.open(
        context,
        loaded,
        texts=settings.max_running,
        rows=max(_CPU_ROWS if loaded.device == "cpu" else _GPU_ROWS, settings.max_running),
        page_size=settings.page_size,
        cache_mib=settings.cache_mib,
    )
    async with opened as engine:
        tokens, dtype = loaded.stop_tokens, loaded.dtype
        yield Generator(
            name, engine, loaded.tokenizer, loaded.template, loaded.vocab, tokens, loaded.stored, dtype, dtype
        )


async def _in_thread(load: Callable[[], T]) -> T:
    """Load on a thread. Neither a cancellation nor the end of the process waits for it."""
    return await asyncio.wrap_future(start_thread(load, "gpu-actors-loading"))


def _source(argument: str) -> tuple[str, str]:
    """Split NAME=DIR into both. A folder alone gets its own name."""
    name, equals, folder = argument.partition("=")
    if not equals:
        folder = argument
        name = _MINILM_NAME if argument == MINILM else model_name(argument)
    if not name or not folder:
        raise InvalidRequest(
            "model", argument, "must be smollm2, tiny, minilm, FILE.gguf or DIR, or NAME= and one of these"
        )
    return name, folder


def _expect_first(name: str, others: object) -> None:
    if others:
        raise InvalidRequest("model", name, "must be the only one of its kind: one generates, one embeds")


def _kind(folder: str) -> str:
    try:
        kind = read_json(Path(folder) / "config.json", dict).get("model_type")
    except InvalidRequest:
        return ""  # the loader of generating models says what is wrong with the folder
    return kind if isinstance(kind, str) else ""


async def _embedder(context: GpuContext, source: str) -> Embedder | None:
    """Open an embedder. source: a folder, or "minilm" for the installed weights; "" returns None if there are none."""
    if source == "":
        try:
            await anyio.to_thread.run_sync(find_weights, None)
        except InvalidRequest as error:
            logger.warning("no embeddings: %s", error.reason)
            return None
    return await Embedder.open(context, None if source in ("", MINILM) else source)


def names(models: Sequence[ModelCard]) -> str:
    """The models' names and kinds, for a line of the log."""
    return ", ".join(f"{card.id} ({card.kind})" for card in models) or "no model"
