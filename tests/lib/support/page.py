"""An application with the status page, and readers of its stream."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from inside.runtime import SECONDS, Histogram
from inside.server import SLOT
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from support.served import Served
from support.service import Scripted, eventually

import gpu_actors as ga
from gpu_actors import asgi
from gpu_actors.remote import RemoteContext

TIMES = {"time in the queue": Histogram(SECONDS), "first token": Histogram(SECONDS)}
ERRORS = {"refused": ga.Overloaded("full", 1.0), "late": ga.DeadlineExceeded("late"), "failed": ga.LaunchError("torn")}


async def answer(request: Request) -> Response:
    """Answers /answer/ok. Other paths raise the error that they name."""
    if request.path_params["kind"] != "ok":
        raise ERRORS[request.path_params["kind"]]
    return PlainTextResponse("ok")


def page_application(device: str = "mock", guard: bool = True, **options: Any) -> Starlette:
    """An application with the page. options: of its context, which has a `Scripted` too."""
    context_options = ga.ContextOptions(actors=(Scripted,), **options)
    timed = {name: functools.partial(TIMES.get, name) for name in TIMES}
    routes = [*asgi.routes(), Route("/answer/{kind}", answer)]
    app = Starlette(lifespan=asgi.lifespan(device, context_options, timed=timed), routes=routes)
    if guard:
        app.add_middleware(asgi.Guard)
    return app


def lived(app: Any, minutes: float = 5.0) -> None:
    """Fill the records as if clients had been answered for so long: more and more of them, and in the end too many."""
    service, board = service_of(app), service_of(app).board
    clients = board._clients
    assert clients is not None
    with board._reading:
        clients._records.clear()
        slots, now = int(minutes * 60 / SLOT), time.monotonic()
        for slot in range(slots + 1):
            load = 40 + 2 * slot + 9 * (slot % 5)
            late, refused = max(0, slot - slots + 6), max(0, 30 * (slot - slots + 4))
            for status, outcome, count in ((200, "answered", load), (429, "refused", refused), (504, "deadline", late)):
                for _ in range(count):
                    service.traffic.count("/v1/chat/completions", status, outcome, 0.2 + slot / 40)
            for histogram, seconds in zip(TIMES.values(), (0.002 + 0.004 * slot, 0.04 + 0.01 * slot), strict=True):
                for _ in range(load):
                    histogram.observe(seconds)
            clients._records.append(clients._now()._replace(time=now - SLOT * (slots - slot)))


def pool_application(workers: int = 2, max_restarts: int = 100) -> Starlette:
    """An application over workers whose processes are replaced at once, up to ``max_restarts`` times."""
    policy = ga.RestartPolicy(max_restarts=max_restarts, backoff=0.0)
    options = ga.ContextOptions(mock=ga.MockOptions(dtype="float32"), restart=policy)
    return Starlette(lifespan=asgi.lifespan("mock", options, workers=workers), routes=asgi.routes())


def worker_of(app: Any, name: str) -> RemoteContext:
    """A worker of the application's pool."""
    pool = service_of(app).pool
    assert pool is not None
    context = pool.workers[name]
    assert isinstance(context, RemoteContext)
    return context


def kill(context: RemoteContext) -> None:
    """End the process of a worker, as an out-of-memory killer does."""
    eventually(lambda: context.pid is not None)
    assert context.pid is not None
    os.kill(context.pid, signal.SIGKILL)


def service_of(app: Any) -> asgi.Service:
    service: asgi.Service = app.state.gpu_actors
    return service


class Reader:
    """Reads a stream of events (event, data, id) one by one."""

    def __init__(self, reply: http.client.HTTPResponse) -> None:
        self.reply = reply
        self.boot = ""

    def next(self) -> tuple[str, Any, str]:
        event = data = number = ""
        while True:
            line = self.reply.readline().decode()
            if not line:
                raise EOFError
            name, _, value = line.rstrip("\n").partition(": ")
            if name == "event":
                event = value
            elif name == "data":
                data = value
            elif name == "id":
                number = value
            elif not name and event:
                return event, json.loads(data), number

    def until(self, holds: Callable[[str, Any], Any]) -> Any:
        """The data of the next event for which ``holds`` is true."""
        while True:
            event, data, _ = self.next()
            if holds(event, data):
                return data


@contextlib.contextmanager
def reading(served: Served, last: str = "", path: str = "/status/events") -> Iterator[Reader]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    try:
        connection.request("GET", path, headers={"Last-Event-ID": last} if last else {})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield Reader(reply)
    finally:
        connection.close()
