"""A context in a Starlette or FastAPI application.

    app = Starlette(lifespan=asgi.lifespan("cuda"), routes=[*asgi.routes(), Route("/attend", attend)])
    app.add_middleware(asgi.Guard)

`Guard` bounds and answers each request; `lifespan` opens the context and closes it; `routes` answers /livez, /readyz
and /metrics, and has a page at / that shows the context. A handler gets its context by ``asgi.context(request)``.
Needs the ``asgi`` extra; `Guard` and `lifespan` work with any ASGI application.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from gpu_actors.context import open_context
from gpu_actors.distributed.pool import ContextPool, open_pool
from gpu_actors.errors import ActorStopped
from gpu_actors.extras import missing
from gpu_actors.fields import duration, expect, integer
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.options import ContextOptions
from gpu_actors.process import handling
from gpu_actors.server.http.admission import Admission
from gpu_actors.server.http.bodies import Bodies, expect_json, read_json
from gpu_actors.server.http.guard import KEY, Exchange, Guard, quieten
from gpu_actors.server.http.probes import Answer, Probes
from gpu_actors.server.http.problems import problem
from gpu_actors.server.http.readiness import contexts_by_name
from gpu_actors.server.http.shutdown import leave_slowly
from gpu_actors.server.http.traffic import STATE, Traffic
from gpu_actors.server.status.board import StatusBoard

try:
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Route

    from gpu_actors.server.status.endpoints import page_routes
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing(error, "asgi"), name=error.name) from None

if TYPE_CHECKING:
    from gpu_actors.runtime.meter import Histogram

__all__ = [
    "Bodies",
    "Guard",
    "Service",
    "client",
    "context",
    "deadline",
    "error_response",
    "json_body",
    "lifespan",
    "request_id",
    "routes",
    "service",
]

logger: logging.Logger = logging.getLogger("gpu_actors")

_SHORT = 1 << 15
"""Bytes. The loop itself parses a body up to this size, in about a millisecond."""

_NOT_OPEN = "the application's lifespan has not opened a context: give the application lifespan=asgi.lifespan(...)"

Prepared = Mapping[str, Any] | None
Prepare = Callable[[Any], Awaitable[Prepared] | AbstractAsyncContextManager[Prepared]]
Lifespan = Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Service:
    """What an application's `lifespan` has opened.

    context: the context of the application, or of the pool's first worker.
    admission: the `Admission` given to `lifespan`, or None.
    board: the status that the page shows.
    pool: the pool of workers, or None without ``workers``.
    traffic: the answers that `Guard` counts.
    """

    context: GpuContext
    probes: Probes
    admission: Admission | None
    board: StatusBoard
    pool: ContextPool | None = None
    traffic: Traffic = field(default_factory=Traffic)


def lifespan(
    device: str = "auto",
    options: ContextOptions | None = None,
    *,
    prepare: Prepare | None = None,
    admission: Admission | None = None,
    probes: Probes | None = None,
    leave_seconds: float = 2.0,
    shown: Sequence[Callable[[], Mapping[str, float]]] = (),
    timed: Mapping[str, Callable[[], Histogram | None]] = MappingProxyType({}),
    workers: int = 0,
) -> Lifespan:
    """The lifespan of an application that owns a context: ``Starlette(lifespan=lifespan("cuda"))``, FastAPI too.

    Startup opens the context, waits for ``prepare``, and makes a launch if ``prepare`` made none. Then the application
    is ready. Shutdown waits until accepted requests are answered, at most ``drain_timeout`` seconds, and closes the
    context. An error during startup closes everything that is open.

    device, options: as for `open_context`.
    prepare: a coroutine function that takes the context, to load a model and to warm it up. The mapping that it returns
        is added to the state of every request, as ``request.state.model``. It may also be an async context manager
        (``contextlib.asynccontextmanager``), which is left before the context is closed.
    admission: shown in /metrics, and available as ``service(request).admission``.
    probes: `Probes` with a port of their own, which answer while the application starts, stops or is busy. Default:
        probes without a port, for `routes`.
    leave_seconds: how long /readyz is "draining" after SIGTERM before the server gets the signal (see `leave_slowly`).
    workers: 0 for one context in this process; else the number of child processes, each with a context. They form a
        `ContextPool`, available as ``service(request).pool``, and ``prepare`` takes the pool in place of a context. The
        application is ready while at least one worker is. The page shows all workers.
    shown: functions that return numbers by name, for the page. A thread calls them twice a second.
    timed: functions that return histograms of seconds, such as the time until a first token, or None while there is no
        histogram. The page shows them over time, under their names here. The same thread calls them.

    Call it once for each application. Raises `InvalidRequest` for a ``leave_seconds`` that is not >= 0; entering
    raises what `open_context`, `GpuContext.probe` and ``prepare`` raise.
    """
    workers = integer("workers", workers, 0)
    leave_seconds = duration("leave_seconds", leave_seconds)

    @asynccontextmanager
    async def opened(app: Any) -> AsyncIterator[dict[str, Any]]:
        # The probes are entered first and left last, since they answer while the context opens and drains.
        answering = probes if probes is not None else Probes()
        async with answering, AsyncExitStack() as stack:
            pool: ContextPool | None = None
            watched: GpuContext | Mapping[str, GpuContext]
            if workers:
                pool = await stack.enter_async_context(open_pool(device, workers=workers, options=options))
                watched = pool.workers
            else:
                watched = await stack.enter_async_context(open_context(device, options))
            contexts = list(contexts_by_name(watched).values())
            context = contexts[0]
            preparation = prepare(pool or context) if prepare is not None else None
            if isinstance(preparation, AbstractAsyncContextManager):
                prepared = await stack.enter_async_context(preparation)
            else:
                prepared = await preparation if preparation is not None else None
            for one in contexts:
                if not any(stats.launched for stats in one.stats().values()):
                    await one.probe()
            traffic = Traffic()
            answering.watch(watched, admission, traffic)
            board = StatusBoard()
            board.show_traffic(traffic, timed)
            if admission is not None:
                board.show(lambda: _places(admission))
            for numbers in shown:
                board.show(numbers)
            await anyio.to_thread.run_sync(board.watch, watched, answering.readiness)
            stack.callback(board.close)
            running = Service(context, answering, admission, board, pool, traffic)
            logger.info("ready on %s, probes on port %s", context.info.name, answering.port)
            app_state = getattr(app, "state", None)
            with leave_slowly(answering, leave_seconds), _end_streams_on_interrupt(board):
                if app_state is not None:
                    setattr(app_state, STATE, running)
                try:
                    yield {**(prepared or {}), STATE: running}
                finally:
                    if app_state is not None:
                        delattr(app_state, STATE)

    return opened


def routes(page: str | None = "/") -> list[BaseRoute]:
    """The routes /livez, /readyz and /metrics of the context that the application's `lifespan` has opened (see
    `Probes`), and a page that shows it.

    If no lifespan has run, /livez is 200, the others are 503, and /readyz says why. Routes that are mounted under a
    prefix answer there. Only probes with their own port (``lifespan(probes=Probes(port=8001))``) answer while the loop
    is busy.

    page: the path of the page, which ends in "/"; status.json and status/ are beside it. None: there is no page. The
        page shows errors in full, so keep it, like /metrics, from people who should not see them.

    Raises `InvalidRequest` for any other page.
    """
    probes: list[BaseRoute] = [
        Route(f"/{name}", _probe(name), methods=["GET"], name=f"gpu_actors_{name}", include_in_schema=False)
        for name in ("livez", "readyz", "metrics")
    ]
    if page is None:
        return probes
    value: object = page
    sound = isinstance(value, str) and page.startswith("/") and page.endswith("/") and "{" not in page
    expect(sound, "page", page, 'must be a path that begins and ends with "/", or None')
    return [*probes, *page_routes(page, _board)]


def _board(request: Request) -> StatusBoard | str:
    running = _find_service(request)
    return _NOT_OPEN if running is None else running.board


def _places(admission: Admission) -> dict[str, float]:
    stats = admission.stats()
    return {"requests running": stats.running, "requests waiting": stats.waiting, "requests refused": stats.refused}


@contextmanager
def _end_streams_on_interrupt(board: StatusBoard) -> Iterator[None]:
    """End the page's streams on Ctrl-C before the server's own handler runs, which waits for every connection."""
    previous: Any = signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        board.end_streams()
        previous(number, frame)

    with handling(signal.SIGINT, end):
        yield


def _probe(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        quieten(request.scope)
        running = _find_service(request)
        if running is None:
            status, body, content_type = _without_context(name)
        elif name == "metrics":
            # Reading the cubin cache's folder may block.
            status, body, content_type = await anyio.to_thread.run_sync(running.probes.metrics)
        else:
            status, body, content_type = getattr(running.probes, name)()
        return Response(body, status, headers={"Cache-Control": "no-store"}, media_type=content_type)

    return answer


def _without_context(name: str) -> Answer:
    # `Probes` that were never entered cannot answer: they get no beats of the loop, so they would count as stalled.
    if name == "livez":
        return Answer(200, b'{"alive": true, "reason": ""}')
    return Answer(503, b'{"ready": false, "state": "starting", "reason": "%s"}' % _NOT_OPEN.encode())


def error_response(error: BaseException, *, instance: str | None = None) -> Response:
    """The response for an error of this package: its status, Retry-After and problem+json (RFC 9457).

    Use it in handlers and exception handlers of your own; `Guard` answers all other errors. An error that is not of
    this package becomes a 500 without details.

    instance: a URI of this occurrence, such as the request's path.
    """
    answer = problem(error)
    body = answer.body(**({} if instance is None else {"instance": instance}))
    return Response(body, answer.status, headers=answer.headers)


def service(request: HTTPConnection) -> Service:
    """What the application's `lifespan` has opened. Raises `ActorStopped` if no lifespan has run."""
    running = _find_service(request)
    if running is None:
        raise ActorStopped(_NOT_OPEN)
    return running


def context(request: HTTPConnection) -> GpuContext:
    """The context of a request or WebSocket; ``Depends(asgi.context)`` in FastAPI. Raises as `service` does."""
    return service(request).context


def deadline(request: HTTPConnection) -> float | None:
    """The request's deadline as absolute ``time.monotonic()`` seconds, to pass on to the context. None: no limit."""
    exchange = _exchange(request)
    return None if exchange is None else exchange.deadline


def client(request: HTTPConnection) -> str:
    """The name of the client, for an `Admission` (see `Exchange.client`). Empty without a `Guard`."""
    exchange = _exchange(request)
    return "" if exchange is None else exchange.client


async def json_body(request: Request) -> Any:
    """Parse the JSON of a request's body; ``Depends(asgi.json_body)`` in FastAPI.

    Raises `InvalidRequest` as `gpu_actors.serving.read_json` does, and `WrongContentType` if the header Content-Type
    does not say JSON. `Guard` answers them with 400 and 415.
    """
    expect_json(request.headers.get("content-type"))
    body = await request.body()
    return read_json(body) if len(body) <= _SHORT else await anyio.to_thread.run_sync(read_json, body)


def request_id(request: HTTPConnection) -> str:
    """The request's id, as in the answer's X-Request-Id and in the log. Empty without a `Guard`."""
    exchange = _exchange(request)
    return "" if exchange is None else exchange.request_id


def _exchange(request: HTTPConnection) -> Exchange | None:
    exchange: Exchange | None = request.scope.get(KEY)
    return exchange


def _find_service(request: HTTPConnection) -> Service | None:
    running = getattr(getattr(request.scope.get("app"), "state", None), STATE, None)
    if running is None:
        # A mounted application has no lifespan of its own. The scope holds the state of the outer one.
        running = (request.scope.get("state") or {}).get(STATE)
    return running if isinstance(running, Service) else None
