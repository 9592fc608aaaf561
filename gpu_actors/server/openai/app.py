"""The application: a context, models and endpoints inside one guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from gpu_actors.extras import missing
from gpu_actors.server.http.access import Doors
from gpu_actors.server.http.admission import Admission
from gpu_actors.server.http.bodies import Bodies
from gpu_actors.server.http.guard import DEADLINE
from gpu_actors.server.http.probes import Probes
from gpu_actors.server.openai.settings import ServeSettings

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Route

    from gpu_actors.server import asgi
    from gpu_actors.server.openai.collector import ServerCollector
    from gpu_actors.server.openai.completions import chat_completions, completions
    from gpu_actors.server.openai.embeddings import embeddings, list_models, one_model
    from gpu_actors.server.openai.errors import not_routed, spell
    from gpu_actors.server.openai.models import Models, open_models
    from gpu_actors.server.openai.state import State
    from gpu_actors.server.openai.vllm import detokenize, health, tokenize, version
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing(error, "serve"), name=error.name) from None

if TYPE_CHECKING:
    from gpu_actors.distributed import ContextPool
    from gpu_actors.handles.gpu_context import GpuContext
    from gpu_actors.runtime.meter import Histogram

__all__ = ["create_app"]

_READERS = 4
"""How many bodies and prompts are read at once. Threads read them, so that a long one delays no step of the engine."""

_SLOW_READERS = 1
"""How many large ones are read at once, beside the others."""


def create_app(settings: ServeSettings | None = None) -> Starlette:
    """Make the application. It is ready once its models have answered, so no client waits for them to load.

    ``app.state.openai_api`` is its `State`.
    """
    settings = settings if settings is not None else ServeSettings()
    state = State(settings, _admission(settings, settings.max_running), _admission(settings, settings.max_embedding))
    probes = Probes(host=settings.probe_host, port=settings.probe_port, exit_when_dead=settings.exit_when_dead)

    @asynccontextmanager
    async def prepare(context: GpuContext | ContextPool) -> AsyncIterator[None]:
        state.readers = anyio.CapacityLimiter(_READERS)
        state.slow_readers = anyio.CapacityLimiter(_SLOW_READERS)
        loop = asyncio.get_running_loop()
        probes.when_leaving(lambda: loop.call_soon_threadsafe(state.farewell.leave))
        async with open_models(context, settings) as models:
            state.models = models
            probes.collect(ServerCollector(state))
            probes.dead_if(lambda: _failure(state))
            try:
                yield
            finally:
                state.models = Models()

    app = Starlette(
        lifespan=asgi.lifespan(
            settings.device,
            settings.options,
            prepare=prepare,
            admission=state.admission,
            probes=probes,
            leave_seconds=settings.leave_seconds,
            shown=[lambda: _texts(state)],
            timed={
                "time in the queue": lambda: _times(state, "queue"),
                "first token": lambda: _times(state, "first"),
            },
            workers=settings.workers,
        ),
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/health", health, methods=["GET"]),
            Route("/version", version, methods=["GET"]),
            Route("/v1/models", list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", one_model, methods=["GET"]),
            *asgi.routes("/" if settings.page else None),
        ],
        exception_handlers={HTTPException: not_routed},
    )
    app.state.openai_api = state
    app.add_middleware(Doors, keys=settings.api_keys, hosts=settings.allowed_hosts)
    app.add_middleware(
        asgi.Guard,
        default_timeout=settings.default_timeout,
        longest_timeout=settings.longest_timeout,
        bodies=Bodies(max_bytes=settings.max_body_bytes),
        spell=spell,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.lower() for origin in settings.cors_origins],
            allow_methods=("GET", "POST"),
            allow_headers=("Authorization", "Content-Type", DEADLINE, "X-Request-Id"),
            expose_headers=("Retry-After", "X-Request-Id"),
        )
    return app


def _admission(settings: ServeSettings, running: int) -> Admission:
    return Admission(
        running,
        waiting=settings.max_waiting,
        queue_seconds=settings.queue_seconds,
        per_client=settings.max_per_client,
        weights=settings.client_weights,
    )


def _texts(state: State) -> dict[str, float]:
    """The engine's numbers that the page shows."""
    generator = state.models.generator
    if generator is None:
        return {}
    engine = generator.engine
    return {
        "texts running": engine.running,
        "texts waiting": engine.waiting,
        "tokens": engine.stats.tokens,
        "prompt rows from the cache": engine.stats.cached,
    }


def _times(state: State, name: str) -> Histogram | None:
    generator = state.models.generator
    histogram: Histogram | None = None if generator is None else getattr(generator.engine.meter, name)
    return histogram


def _failure(state: State) -> str:
    generator = state.models.generator
    return "" if generator is None else generator.engine.failure
