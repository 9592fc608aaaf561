"""Engines: several workers generate with one model, each with an engine and a cache of its own.

One engine generates a text from its first token to its last. Prompts that begin alike go to the same engine, so that
they share the pages of that beginning, unless the engine is overloaded. If a worker is lost, its texts end with an
error, and its engine is opened again over the worker's next generation.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskStatus

from gpu_actors.distributed.routing import Homes
from gpu_actors.errors import ActorStopped, GpuActorsError, InvalidRequest, Overloaded
from gpu_actors.generation.engine import Engine, Settings
from gpu_actors.generation.generation import Generation
from gpu_actors.generation.interface import EngineStats
from gpu_actors.generation.meter import EngineMeter
from gpu_actors.generation.model import Llama
from gpu_actors.generation.sampling import Sampling
from gpu_actors.kv.prefix import prompt_digests

if TYPE_CHECKING:
    from gpu_actors.distributed import ContextPool
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["Engines", "PoolAttention"]

logger: logging.Logger = logging.getLogger("gpu_actors")

# Seconds between two reads of a worker's generation, and until an engine that failed to open is tried again.
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.5


class Engines:
    """Several engines with the interface of one `Engine`. stats, meter: of all engines together."""

    def __init__(self, pool: ContextPool, model: Llama, settings: Settings, slots: int) -> None:
        self.stats = EngineStats()
        self.meter = EngineMeter()
        self.longest: int = 0
        self._pool = pool
        self._model = model
        self._settings = settings
        self._homes = Homes(random.Random(), slots=slots)
        self._engines: dict[str, Engine] = {}
        self._generations: dict[str, int] = {}  # the worker's generation of each engine
        self._stopped = ""

    @classmethod
    @asynccontextmanager
    async def open(cls, pool: ContextPool, model: Llama, settings: Settings, slots: int) -> AsyncIterator[Engines]:
        """Run an engine on each worker of the pool while this is entered. slots: texts per engine, as for `Homes`.

        Raises what `Engine.open` raises.
        """
        engines = cls(pool, model, settings, slots)
        async with anyio.create_task_group() as group:
            try:
                for name, context in pool.workers.items():
                    engines._homes.ring.add(name)
                    await group.start(engines._supervise, name, context)
                yield engines
            finally:
                group.cancel_scope.cancel()

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    @property
    def running(self) -> int:
        return sum(engine.running for engine in self)

    @property
    def waiting(self) -> int:
        return sum(engine.waiting for engine in self)

    @property
    def failure(self) -> str:
        failures = [engine.failure for engine in self]
        return failures[0] if failures and all(failures) else ""

    def pages(self) -> tuple[int, int, int]:
        counts = []
        for engine in self:
            try:
                counts.append(engine.pages())
            except GpuActorsError:  # its worker is being replaced
                continue
        blocks, free, shared = (sum(column) for column in zip((0, 0, 0), *counts, strict=True))
        return blocks, free, shared

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        asked: float | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Begin a text on one engine, as `Engine.submit`. Raises `Overloaded` while all workers are being replaced."""
        if self._stopped:
            raise ActorStopped(self._stopped)
        workers = self._pool.workers
        # An engine may not have noticed yet that its worker was replaced.
        engines = {
            name: engine
            for name, engine in self._engines.items()
            if not engine.failure and workers[name].generation == self._generations[name]
        }
        if not engines:
            raise Overloaded("every worker is being replaced", 1.0)
        health = {name: context.health() for name, context in workers.items()}
        ready = {name: engine for name, engine in engines.items() if health[name].ready} or engines
        try:
            digests = prompt_digests(prompt, self._settings.page_size)
        except InvalidRequest:
            digests = []  # the engine refuses the prompt
        loads = {name: float(engine.running + engine.waiting) for name, engine in ready.items()}
        return ready[self._homes.choose(digests, loads)].submit(
            prompt, max_new_tokens=max_new_tokens, sampling=sampling, asked=asked, deadline=deadline
        )

    def stop(self, why: str) -> None:
        self._stopped = why
        for engine in self:
            engine.stop(why)

    async def _supervise(
        self, name: str, context: GpuContext, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Run an engine on a worker, and another one for each later generation of the worker."""
        started = False
        while True:
            generation = context.generation
            try:
                async with Engine.open(context, self._model, self._settings) as engine:
                    engine.stats, engine.meter, self.longest = self.stats, self.meter, engine.longest
                    if self._stopped:
                        engine.stop(self._stopped)
                    self._engines[name], self._generations[name] = engine, generation
                    if not started:
                        task_status.started()
                        started = True
                    try:
                        while context.generation == generation:  # noqa: ASYNC110  there is no event for it
                            await anyio.sleep(_POLL_SECONDS)
                    finally:
                        del self._engines[name]
                    self._homes.forget(name)
                    engine.stop(f"{name} was lost, and this text with it")
            except GpuActorsError as error:
                if not started:
                    raise
                if context.health().state in ("failed", "stopped"):
                    logger.error("%s generates no more texts: %s", name, error)
                    return
                logger.warning("%s does not generate yet: %s", name, error)
                await anyio.sleep(_RETRY_SECONDS)


class PoolAttention:
    """The part of a context that an `Embedder` uses, for a pool: the less loaded of two workers takes each request."""

    def __init__(self, pool: ContextPool) -> None:
        self._pool = pool
        self.info = next(iter(pool.workers.values())).info

    @property
    def flash_attn(self) -> PoolAttention:
        return self

    async def forward(self, *operands: Any, **options: Any) -> Any:
        return await self._pool.ask(lambda context: context.flash_attn.forward(*operands, **options))
