"""EventStream: a response of server-sent events. An error before the first event is answered with its own status."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Awaitable, Callable

import anyio
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpu_actors.errors import DeadlineExceeded
from gpu_actors.server.http.guard import KEY, Exchange
from gpu_actors.server.http.problems import problem
from gpu_actors.server.http.sent_events import STREAM_HEADERS, sent_event
from gpu_actors.server.openai.errors import error_object

__all__ = ["EventStream", "Writer"]

logger: logging.Logger = logging.getLogger("gpu_actors")

_GRACE = 15.0
"""Seconds that a client has to read the end of its stream, from the deadline or, if later, from the stream's end."""


class Writer:
    """Writes events. started: whether the status was sent."""

    def __init__(self, send: Send) -> None:
        self.started = False
        self._send = send

    async def write(self, content: BaseModel, exclude: set[str] | None = None) -> None:
        await self.write_text(content.model_dump_json(exclude=exclude))

    async def write_text(self, data: str) -> None:
        """Write one event, whose data is one line."""
        if not self.started:
            headers = [*STREAM_HEADERS, (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.started = True  # after the send: a deadline may pass while the connection sends an earlier answer
        await self._send({"type": "http.response.body", "body": sent_event(data), "more_body": True})

    async def close(self) -> None:
        await self.write_text("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """events: writes all events but the last. An error before the first event is answered as any other error; a later
    error is sent as an event that ends the stream.
    """

    def __init__(self, events: Callable[[Writer], Awaitable[None]]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = Writer(send)
        exchange: Exchange = scope[KEY]
        # The stream itself ends by the deadline. After a pause of the process the guard's limit would be due with it.
        exchange.stretch(math.inf)
        last: str | None = None
        try:
            await self._events(writer)
        except Exception as error:
            if not writer.started:
                raise
            failure = problem(error)
            if failure.status == 500:
                logger.error("%s failed", exchange.request_id, exc_info=error)
            exchange.notes["error"] = failure.name or "InternalError"
            last = json.dumps(error_object(failure, exchange.request_id), separators=(",", ":"))
        now = time.monotonic()
        left = math.inf if exchange.deadline is None else max(exchange.deadline, now) + _GRACE - now
        with anyio.move_on_after(left) as ending:
            if last is not None:
                await writer.write_text(last)
            await writer.close()
        if ending.cancelled_caught:
            raise DeadlineExceeded("the client did not read the end of its stream")
