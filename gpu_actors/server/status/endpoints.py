"""The page, its files, the state as JSON and the stream of events, as routes of Starlette."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from gpu_actors.server.http.guard import quieten
from gpu_actors.server.http.sent_events import STREAM_HEADERS, sent_event
from gpu_actors.server.status.board import StatusBoard, Viewer
from gpu_actors.server.status.files import POLICY, page_file

__all__ = ["page_routes"]

Find = Callable[[Request], StatusBoard | str]

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": POLICY,
}
_FILES = {"page.css": "text/css", "page.mjs": "text/javascript"}

STREAM_SECONDS = 15.0
"""Seconds that a stream lasts. Its reader connects again at once. A server that stops waits no longer than this."""

READER_TIMEOUT = 5.0
"""Seconds that a reader has to read the sent data, before its stream ends."""


def page_routes(path: str, find: Find) -> list[BaseRoute]:
    """The routes of a page at ``path``, which ends in "/". find: returns a request's board, or why there is none."""

    async def page(request: Request) -> Response:
        quieten(request.scope)
        return Response(page_file("index.html"), headers=_HEADERS, media_type="text/html")

    async def file(request: Request) -> Response:
        quieten(request.scope)
        name = request.url.path.rpartition("/")[2]
        return Response(page_file(name), headers=_HEADERS, media_type=_FILES[name])

    async def state(request: Request) -> Response:
        quieten(request.scope)
        board = find(request)
        if isinstance(board, str):
            return _refused(board)
        snapshot = await anyio.to_thread.run_sync(board.snapshot)
        text = json.dumps(snapshot, separators=(",", ":"))
        return Response(text, headers=_HEADERS, media_type="application/json")

    async def events(request: Request) -> Response:
        exchange = quieten(request.scope)
        board = find(request)
        if isinstance(board, str):
            return _refused(board)
        if request.method == "HEAD":
            return Response(headers=_HEADERS, media_type="text/event-stream")
        last = _last(request, board.event_log.boot)
        return _Stream(board, last, None if exchange is None else exchange.deadline)

    routes: list[BaseRoute] = [Route(path, page, include_in_schema=False)]
    routes += [Route(f"{path}status/{name}", file, include_in_schema=False) for name in _FILES]
    routes.append(Route(f"{path}status.json", state, include_in_schema=False))
    routes.append(Route(f"{path}status/events", events, include_in_schema=False))
    return routes


def _refused(reason: str) -> Response:
    body = json.dumps({"reason": reason})
    return Response(body, 503, headers=_HEADERS | {"Retry-After": "1"}, media_type="application/json")


def _last(request: Request, boot: str) -> int:
    """The number of the last event that the reader has. Numbers of another process count as 0."""
    value = request.headers.get("last-event-id") or request.query_params.get("last", "")
    reader_boot, _, number = value.partition(".")
    return int(number) if reader_boot == boot and re.fullmatch(r"[0-9]{1,15}", number) else 0


class _Stream(Response):
    """Server-sent events: "state", the latest snapshot, and "happened", the events that the reader has not got yet.

    A reader that does not read gets no further snapshot until it does. Its stream ends after `READER_TIMEOUT`.
    """

    def __init__(self, board: StatusBoard, last: int, deadline: float | None) -> None:
        self._board = board
        self._last = last
        # The stream ends itself before the deadline, since ending by the deadline would count as an error.
        limit = time.monotonic() + STREAM_SECONDS
        self._end = limit if deadline is None else min(limit, deadline - 1.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._board.viewer() as viewer:
            if viewer is None:
                await _refused(f"{self._board.max_viewers} viewers look already")(scope, receive, send)
                return
            async with anyio.create_task_group() as group:

                async def until_gone() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                group.start_soon(until_gone)
                await self._send(send, viewer)
                group.cancel_scope.cancel()

    async def _send(self, send: Send, viewer: Viewer) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *STREAM_HEADERS]})
        async for text in self._texts(viewer):
            with anyio.move_on_after(READER_TIMEOUT) as waited:
                await send({"type": "http.response.body", "body": text, "more_body": True})
            if waited.cancelled_caught:
                break
        with anyio.move_on_after(READER_TIMEOUT):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _texts(self, viewer: Viewer) -> AsyncIterator[bytes]:
        board = self._board
        # The latest snapshot may be some seconds old, and a new viewer makes the board take another one. Only a server
        # that shuts down sends the old one, since the stream then ends too early.
        last_number = board.latest[0] - board.draining
        yield b"retry: 500\n\n"
        while True:
            parts: list[bytes] = []
            number, latest = board.latest
            events = board.event_log.since(self._last)
            if events.items or events.missed:
                boot = board.event_log.boot
                content = {"boot": boot, "items": events.items, "missed": events.missed}
                data = json.dumps(content, separators=(",", ":"))
                parts.append(sent_event(data, f"id: {boot}.{events.newest}\nevent: happened\n"))
            self._last = events.newest
            if number != last_number:
                last_number = number
                parts.append(sent_event(latest.decode(), "event: state\n"))
            if parts:
                yield b"".join(parts)
            left = self._end - time.monotonic()
            if board.ending or board.draining or left <= 0:
                return
            with anyio.move_on_after(left):
                await viewer.woken.wait()
            viewer.woken.clear()
