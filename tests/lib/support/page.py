"""An application with the page, and readers of its stream."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from support.served import Served
from support.service import Scripted

import gpu_actors as ga
from gpu_actors import asgi


def page_application(device: str = "mock", guard: bool = True, **options: Any) -> Starlette:
    """options: of the context, which has a `Scripted` too."""
    made = ga.ContextOptions(actors=(Scripted,), **options)
    app = Starlette(lifespan=asgi.lifespan(device, made), routes=asgi.routes())
    if guard:
        app.add_middleware(asgi.Guard)
    return app


def service_of(app: Any) -> asgi.Service:
    found: asgi.Service = app.state.gpu_actors
    return found


class Reader:
    """Reads a stream of events: (event, data, id), one after the other."""

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
        """The data of the first event for which this holds."""
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
