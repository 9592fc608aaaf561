"""The models that a server has: found by name, loaded from folders."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread

from gpu_actors.distributed import ContextPool
from gpu_actors.embedding.embedder import Embedder
from gpu_actors.embedding.weights import find_weights
from gpu_actors.errors import InvalidRequest
from gpu_actors.generation.chat import Chat, PlainChat, chat_template_of
from gpu_actors.generation.config import LlamaConfig
from gpu_actors.generation.engine import Engine, Settings
from gpu_actors.generation.model import Llama
from gpu_actors.generation.tokenizer import ByteTokenizer, Tokenizer, ended_by, load_tokenizer
from gpu_actors.generation.weights import load_weights, random_weights
from gpu_actors.openai_api.engines import Engines, PoolAttention
from gpu_actors.openai_api.responses import ModelCard
from gpu_actors.openai_api.settings import ServeSettings
from gpu_actors.serving.problems import NotFound

if TYPE_CHECKING:
    from gpu_actors.context import GpuContext

__all__ = ["Encoder", "Generator", "Models", "open_models"]

logger: logging.Logger = logging.getLogger("gpu_actors")

TINY = "tiny"
MINILM = "minilm"
_MINILM_NAME = "all-MiniLM-L6-v2"

_TINY_MIB = 32
"""Of the tiny model's cache: room for 65,536 tokens, made in no time."""


class Generator(NamedTuple):
    """A model that generates text. template: None for a model that knows no conversations."""

    name: str
    engine: Engine | Engines
    tokenizer: Tokenizer
    template: Chat | None
    config: LlamaConfig


class Encoder(NamedTuple):
    """A model that embeds text."""

    name: str
    embedder: Embedder


@dataclass(slots=True)
class Models:
    """At most one of each kind. created: when they were loaded, in seconds since 1970."""

    generator: Generator | None = None
    encoder: Encoder | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def generator_of(self, name: str | None) -> Generator:
        """The generator of this name, whatever it is for None. Raises `NotFound`."""
        if self.generator is None or name not in (None, self.generator.name):
            raise self._not_found(name, self.generator)
        return self.generator

    def encoder_of(self, name: str) -> Encoder:
        """The encoder of this name. Raises `NotFound`."""
        if self.encoder is None or self.encoder.name != name:
            raise self._not_found(name, self.encoder)
        return self.encoder

    def cards(self) -> list[ModelCard]:
        """What /v1/models lists."""
        cards = []
        if self.generator is not None:
            name, longest = self.generator.name, self.generator.engine.longest
            cards.append(ModelCard(id=name, created=self.created, max_model_len=longest, kind="generation"))
        if self.encoder is not None:
            longest = self.encoder.embedder.tokenizer.max_tokens
            card = ModelCard(id=self.encoder.name, created=self.created, max_model_len=longest, kind="embedding")
            cards.append(card)
        return cards

    def _not_found(self, name: str | None, found: Generator | Encoder | None) -> NotFound:
        there = "this server has none for this endpoint" if found is None else f"must be {found.name}"
        return NotFound("model", name, there)


class _Parts(NamedTuple):
    """A generator before it has an engine."""

    name: str
    model: Llama
    tokenizer: Tokenizer
    template: Chat | None
    cache_mib: int


@asynccontextmanager
async def open_models(context: GpuContext | ContextPool, settings: ServeSettings) -> AsyncIterator[Models]:
    """Load the models of the settings, and have them answer once, as long as this is entered.

    context: or a pool, whose workers all generate and embed.
    Raises `InvalidRequest` and `Unsupported` for a folder that is not one of a model.
    """
    sources = [_named(given) for given in settings.models] or [(TINY, TINY), (_MINILM_NAME, "")]
    found = Models()
    parts: list[_Parts] = []
    attention: Any = PoolAttention(context) if isinstance(context, ContextPool) else context

    async def load(name: str, source: str) -> None:
        if source in ("", MINILM) or (source != TINY and _kind(source) == "bert"):
            embedder = await _embedder(attention, source)
            if embedder is not None:
                _expect_first(name, found.encoder)
                found.encoder = Encoder(name, embedder)
                await embedder.embed(["warm up"])
        else:
            loaded = await _aside(_load, name, source, settings.cache_mib)
            _expect_first(name, parts)
            parts.append(loaded)

    try:
        async with anyio.create_task_group() as group:
            for name, source in sources:
                group.start_soon(load, name, source)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if not parts:
        yield found
        return
    name, model, tokenizer, template, cache_mib = parts[0]
    sizes = _sizes(model.config, settings, cache_mib)
    opened: AbstractAsyncContextManager[Engine | Engines]
    if isinstance(context, ContextPool):
        opened = Engines.open(context, model, sizes, max(2, settings.max_running // len(context.workers)))
    else:
        opened = Engine.open(context, model, sizes)
    async with opened as engine:
        found.generator = Generator(name, engine, tokenizer, template, model.config)
        # Compiles the kernels of the first requests, and imports what they need.
        for each in engine if isinstance(engine, Engines) else [engine]:
            await each.submit([0], max_new_tokens=2).tokens()
        yield found


async def _aside(load: Callable[..., _Parts], *arguments: Any) -> _Parts:
    """What a thread loads, for which neither a cancellation nor the end of the process waits."""
    found: Future[_Parts] = Future()

    def run() -> None:
        if not found.set_running_or_notify_cancel():
            return
        try:
            found.set_result(load(*arguments))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="gpu-actors-loading", daemon=True).start()
    return await asyncio.wrap_future(found)


def _named(given: str) -> tuple[str, str]:
    """NAME=DIR to both; a folder alone has its own name."""
    name, equals, folder = given.partition("=")
    if not equals:
        folder = given
        name = {TINY: TINY, MINILM: _MINILM_NAME}.get(given) or Path(given).resolve().name
    if not name or not folder:
        raise InvalidRequest("model", given, "must be DIR, NAME=DIR, tiny or minilm")
    return name, folder


def _expect_first(name: str, others: object) -> None:
    if others:
        raise InvalidRequest("model", name, "must be the only one of its kind: one generates, one embeds")


def _kind(folder: str) -> str:
    try:
        kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return ""  # the loader of the other kind says what is wrong with it
    return kind if isinstance(kind, str) else ""


async def _embedder(context: GpuContext, source: str) -> Embedder | None:
    """source: a folder, or "minilm" for the installed weights; "" where it does not matter if they are."""
    if source == "":
        try:
            await anyio.to_thread.run_sync(find_weights, None)
        except InvalidRequest as error:
            logger.warning("no embeddings: %s", error.reason)
            return None
    return await Embedder.open(context, None if source in ("", MINILM) else source)


def _load(name: str, source: str, cache_mib: int) -> _Parts:
    if source == TINY:
        config = LlamaConfig.tiny()
        cache_mib = min(cache_mib, _TINY_MIB)
        return _Parts(name, Llama(config, random_weights(config)), ByteTokenizer(), PlainChat(), cache_mib)
    folder = Path(source)
    config = LlamaConfig.load(folder)
    weights = load_weights(folder, config)
    tokenizer = load_tokenizer(folder)
    model = Llama(ended_by(config, tokenizer), weights)
    return _Parts(name, model, tokenizer, chat_template_of(tokenizer), cache_mib)


def _sizes(config: LlamaConfig, settings: ServeSettings, cache_mib: int) -> Settings:
    page = 2 * 2 * config.kv_heads * config.head_dim * settings.page_size  # bytes: keys and values of two bytes each
    blocks = max(config.layers, cache_mib * (1 << 20) // page)
    # More pages than all texts at their longest can fill would only be memory.
    most = config.layers * settings.max_running * -(-config.positions // settings.page_size)
    rows = max(256, settings.max_running)
    return Settings(rows=rows, page_size=settings.page_size, blocks=min(blocks, most), dtype=settings.dtype)


def names(models: Sequence[ModelCard]) -> str:
    """For a line of the log."""
    return ", ".join(f"{card.id} ({card.kind})" for card in models) or "no model"
