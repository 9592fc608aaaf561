"""Guard: ASGI middleware that bounds each request and answers each error.

    app = Guard(app)

A handler inside it awaits requests of a context and lets their errors through. The guard cancels the handler, and with
it those requests, at the client's deadline or when the client hangs up. It needs only an ASGI server on asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import quote

import anyio

from gpu_actors.errors import DeadlineExceeded, GpuActorsError, InvalidRequest
from gpu_actors.fields import duration
from gpu_actors.server.http.bodies import Bodies, BodyTooLarge, BodyTooSlow, TooManyBodies
from gpu_actors.server.http.problems import Problem, package_error, problem
from gpu_actors.server.http.scopes import KEY as KEY
from gpu_actors.server.http.scopes import address_of, header
from gpu_actors.server.http.traffic import Traffic, route_of, traffic_of
from gpu_actors.tracing.events import log_record
from gpu_actors.tracing.work import Work, active, begin_work, under

__all__ = ["Exchange", "Guard", "quieten"]

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Spelling: TypeAlias = Callable[["Problem", "Exchange"], "tuple[bytes, str] | None"]

logger: logging.Logger = logging.getLogger("gpu_actors")
access: logging.Logger = logging.getLogger("gpu_actors.access")

DEADLINE = "X-Deadline-Ms"

LINGER = 1.0
"""Seconds for which the guard still reads the body of a request that it answers before the body has arrived."""

_AHEAD = 1 << 16

_GONE = 499


class Guard:
    """Middleware for any ASGI application: ``app.add_middleware(Guard)`` in Starlette and FastAPI, or ``Guard(app)``.

    - The header X-Deadline-Ms, milliseconds from now as a plain decimal number, sets a deadline for the whole answer,
      streams included. At the deadline the handler is cancelled: 504. A malformed header is a 400.
    - If the client hangs up, the handler is cancelled. Work that runs after the answer, such as Starlette's background
      tasks, is not. The guard does not notice a hang-up while the handler leaves over 64 KiB of the body unread.
    - ``bodies`` bounds each body (413, or 408 if it is slow) and all bodies together (429).
    - Each error of this package that reaches the guard, alone or in an exception group, is answered as `problem` says,
      in application/problem+json (RFC 9457). Any other exception is answered with a 500 without details, and raised
      for the server to log. If the application is in debug mode or has a handler for it, the exception is only raised.
      An error after the first byte of the answer is raised, so that the server closes the connection.
    - Answers are counted by route, except answers of probes and of the page.
    - Each request is a span in open trace files and in OpenTelemetry, a child of the client's traceparent. The requests
      that the handler makes are its children.
    - Each answer has an X-Request-Id, the client's own if it is a plain name. The logger "gpu_actors.access" gets a
      line for each answer, at level INFO, or DEBUG for probes and for refusals with 429. The record has request_id,
      method, path, status, milliseconds, trace_id if there is a trace, and notes. The handler may add notes; the
      note ``error`` names the error that was answered, and ``gone`` says that the client hung up before the end.

    default_timeout: seconds for a request without the header. None: no limit.
    longest_timeout: the most seconds that a client may ask for.
    bodies: the bounds on bodies. Default: ``Bodies()``.
    spell: a function that writes the body of an error in another form, from its `Problem` and the `Exchange`. It
        returns the bytes and their media type, or None for problem+json.
    traffic: where answers are counted. None: in the `Traffic` of `gpu_actors.asgi.lifespan`, which shows it.

    Scopes other than HTTP pass through unchanged, and so does HTTP inside another guard. Raises `InvalidRequest` for a
    timeout that is not above 0.
    """

    def __init__(
        self,
        app: App,
        *,
        default_timeout: float | None = None,
        longest_timeout: float = 300.0,
        bodies: Bodies | None = None,
        spell: Spelling | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.app = app
        self.spell = spell
        self.traffic = traffic
        self.default_timeout = default_timeout
        if default_timeout is not None:
            self.default_timeout = duration("default_timeout", default_timeout, above_0=True)
        self.longest_timeout = duration("longest_timeout", longest_timeout, above_0=True)
        self.bodies: Bodies = bodies if bodies is not None else Bodies()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or KEY in scope:
            await self.app(scope, receive, send)
        else:
            await Exchange(self, scope, receive, send).run()


class Exchange:
    """One request and its answer. Found in the ASGI scope under ``gpu_actors.exchange``.

    started: absolute ``time.monotonic()`` seconds.
    deadline: absolute ``time.monotonic()`` seconds, or None.
    request_id: the answer's X-Request-Id.
    trace_id: 32 hexadecimal digits, of OpenTelemetry's trace or of the client's traceparent, or empty.
    path: the request's path.
    client: the client's name for an `Admission`: its address, or `client_of` once a `Doors` has checked its key.
    quiet: whether the answer is not counted, and is logged at level DEBUG in place of INFO.
    notes: values that a handler adds to the log line, by name.
    """

    def __init__(self, guard: Guard, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.request_id: str = _request_id(scope)
        self.deadline: float | None = None
        self.client: str = address_of(scope)
        self.quiet: bool = False
        self.notes: dict[str, Any] = {}
        self._guard = guard
        scope[KEY] = self
        self._scope = scope
        self._receive = receive
        self._send = send
        self.started: float = time.monotonic()
        self._work = self._begin_work()
        self.trace_id: str = (self._work.trace_id if self._work is not None else "") or _trace_id(scope)
        self._run = anyio.CancelScope()
        self._ahead: deque[Message] = deque()
        self._ahead_bytes = self._held_bytes = 0
        self._arrived, self._room = asyncio.Event(), asyncio.Event()
        self._read_begun = self._complete = False
        self._status = 0
        self._answered = self._gone = False
        self._ended: float | None = None
        self._refusal: GpuActorsError | None = None

    @property
    def _method(self) -> str:
        return str(self._scope.get("method", ""))

    @property
    def path(self) -> str:
        return str(self._scope.get("path", ""))

    def stretch(self, seconds: float) -> None:
        """Cancel the handler ``seconds`` after the deadline, or never for ``math.inf``.

        Streams use it: they end at the deadline themselves and tell the client why. Does nothing without a deadline.
        """
        if self.deadline is not None and not self._answered:
            left = self.deadline + seconds - time.monotonic()
            self._run.deadline = anyio.current_time() + left

    async def run(self) -> None:
        try:
            await self._handle()
        except Exception as error:
            await self._settle(error)
        finally:
            self._guard.bodies.let_go(self._held_bytes)
            self._count()
            self._log()

    async def _handle(self) -> None:
        guard, scope = self._guard, self._scope
        timeout = _timeout(scope, guard)
        announced = b"".join(header(scope, b"content-length"))
        if announced.isdigit():
            guard.bodies.check(int(announced[:20]))
        if timeout is not None:
            self.deadline = self.started + timeout
            self._run.deadline = anyio.current_time() + timeout
        watcher = asyncio.create_task(self._watch())
        try:
            with self._run, under(self._work):
                await guard.app(scope, self._receive_ahead, self._send_on)
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
        if self._refusal is not None and not self._answered:
            raise self._refusal
        if self._run.cancelled_caught and not self._gone:
            raise self._late()

    def _late(self) -> GpuActorsError:
        # If the guard reads no further, the body waits for the handler, not for the client.
        if self._complete or self._ahead_bytes > _AHEAD:
            return DeadlineExceeded("the deadline passed before the answer")
        return BodyTooSlow("the body did not arrive by the deadline")

    # The body

    async def _watch(self) -> None:
        """Read a little ahead of the handler, to notice the end of the body and of the connection."""
        try:
            refusal = await self._read()
            if refusal is not None:
                self._refusal = refusal
                self._run.cancel()
                return
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except _HungUp:
            pass
        except Exception:
            logger.debug("%s: the server's receive() raised", self.request_id, exc_info=True)
        self._gone = True
        if not self._answered:  # a server sends "disconnect" after the answer, too
            self._run.cancel()  # before the handler wakes, or its framework would raise an error of its own
        self._arrived.set()

    async def _read(self) -> GpuActorsError | None:
        """Read the whole body. Returns the error that refuses it, or None."""
        self._read_begun = True
        bodies = self._guard.bodies
        left = bodies.seconds
        while not self._complete:
            began, message = time.monotonic(), None
            with anyio.move_on_after(left):
                message = await self._receive()
            left -= time.monotonic() - began
            if message is None:
                return BodyTooSlow(f"the body did not arrive within {bodies.seconds:g} s")
            if message["type"] == "http.disconnect":
                raise _HungUp
            size = len(message.get("body", b""))
            try:
                bodies.hold(self._held_bytes, size)
            except GpuActorsError as refusal:
                return refusal
            self._held_bytes += size
            self._ahead_bytes += size
            self._complete = not message.get("more_body", False)
            self._ahead.append(message)
            self._arrived.set()
            while self._ahead_bytes > _AHEAD and not self._complete:
                self._room.clear()
                await self._room.wait()
        return None

    async def _receive_ahead(self) -> Message:
        while not self._ahead:
            if self._gone:
                return {"type": "http.disconnect"}
            self._arrived.clear()
            await self._arrived.wait()
        message = self._ahead.popleft()
        self._ahead_bytes -= len(message.get("body", b""))
        self._room.set()
        return message

    # The answer

    async def _send_on(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self._status = message["status"]
            headers = list(message.get("headers", ()))
            names = {bytes(name).lower() for name, _ in headers}
            if b"x-request-id" not in names:
                headers.append((b"x-request-id", self.request_id.encode()))
            if b"connection" not in names and self._status >= 400 and await self._left_unread():
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        elif kind == "http.response.pathsend" or (kind == "http.response.body" and not message.get("more_body", False)):
            self._answered = True
            self._ended = time.monotonic()
        await self._send(message)
        if self._answered:  # after the send: a server waits there for a client that does not read
            self._run.deadline = math.inf

    async def _left_unread(self) -> bool:
        """Whether the server would read the rest of the body as the next request."""
        if self._complete or not self._scope.get("http_version", "1.1").startswith("1"):
            return False
        if not header(self._scope, b"content-length") and not header(self._scope, b"transfer-encoding"):
            return False
        await asyncio.sleep(0)  # the end of a short body may have arrived
        return not self._complete

    async def _settle(self, error: Exception) -> None:
        """Answer an error, or raise it if the application or the server has to handle it."""
        known = package_error(error)
        if self._gone and known is not None and not self._answered:
            return
        if self._gone or self._status or (known is None and _handles_errors(self._scope.get("app"))):
            if known is not None:
                # `_outcome` goes by this name, not by the clock: a loop's timer may fire a little before the deadline.
                self.notes.setdefault("error", problem(error).name)
            raise error
        answer = problem(error)
        if known is not None and answer.status == 500:
            logger.error("%s failed", self.request_id, exc_info=error)
        headers = dict(answer.headers)
        refused = isinstance(error, BodyTooLarge | BodyTooSlow | TooManyBodies)
        if not await self._drained() or refused:
            # Otherwise the server would read the rest of the body as the next request.
            headers["Connection"] = "close"
        if not self._scope.get("http_version", "1.1").startswith("1"):
            headers.pop("Connection", None)
        spelled = None if self._guard.spell is None else self._guard.spell(answer, self)
        if spelled is None:
            instance = f"{quote(self.path)}#{self.request_id}"
            body = answer.body(instance=instance, request_id=self.request_id)
        else:
            body, headers["Content-Type"] = spelled
        self.notes.setdefault("error", answer.name or "InternalError")
        headers["Content-Length"] = str(len(body))
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send_on({"type": "http.response.start", "status": answer.status, "headers": raw})
        await self._send_on({"type": "http.response.body", "body": body})
        if known is None:
            raise error

    async def _drained(self) -> bool:
        """Read on for a moment. Returns whether the body has ended. A client that still sends when a connection closes
        would be reset before it has read the answer. A client that waits for "100 Continue" has not begun to send."""
        if not self._read_begun and header(self._scope, b"expect"):
            return False
        with anyio.move_on_after(LINGER):
            while not self._complete:
                message = await self._receive()
                self._complete = not message.get("more_body", False)
        return self._complete

    def _begin_work(self) -> Work | None:
        if not active():
            return None
        fields = {"request_id": self.request_id, "http.request.method": self._method, "url.path": self.path[:200]}
        headers: dict[str, list[str]] = {}
        for name, value in self._scope.get("headers", ()):
            headers.setdefault(bytes(name).decode("latin-1").lower(), []).append(bytes(value).decode("latin-1"))
        return begin_work(
            "requests",
            self._method,
            label=self.request_id,
            started=self.started,
            headers=headers,
            server=True,
            fields=fields,
        )

    def _count(self) -> None:
        """Count the answer, and end its span."""
        traffic = self._guard.traffic or traffic_of(self._scope)
        if self.quiet or (traffic is None and self._work is None):
            return
        ended = self._ended or time.monotonic()
        # If no status was sent, the server itself answers with a 500 or closes the connection.
        status = self._status or (_GONE if self._gone else 500)
        route, outcome = route_of(self._scope), self._outcome(status, ended)
        if traffic is not None:
            traffic.count(route, status, outcome, ended - self.started)
        if self._work is not None:
            failed = outcome in ("failed", "deadline")
            self._work.end(
                {"http.route": route, "http.response.status_code": status, "outcome": outcome},
                name=f"{self._method} {route}",
                error=str(self.notes.get("error", outcome)) if failed else None,
            )

    def _outcome(self, status: int, ended: float) -> str:
        late = self.deadline is not None and ended >= self.deadline and status != 408
        error = self.notes.get("error", "")
        if late or status == 504 or error == DeadlineExceeded.__name__:
            return "deadline"
        if self._gone and not self._answered:
            return "gone"
        if status == 429:
            return "refused"
        if 400 <= status < 500:
            return "invalid"
        return "failed" if status >= 500 or error or not self._answered else "answered"

    def _log(self) -> None:
        status = self._status or (_GONE if self._gone else 0)
        if not status:
            return  # the server itself answers, or the task was cancelled
        if self._gone and not self._answered:
            self.notes["gone"] = True
        milliseconds = (time.monotonic() - self.started) * 1e3
        # /metrics counts refusals; a log line for each would be a large part of their cost.
        level = logging.DEBUG if self.quiet or status == 429 else logging.INFO
        if access.isEnabledFor(level):
            method, path = self._method, quote(self.path)[:200]
            attributes = {
                "request_id": self.request_id,
                "method": method,
                "path": path,
                "status": status,
                "milliseconds": milliseconds,
                "notes": self.notes,
            }
            line = "%s %s %s %d %.1f ms%s"
            notes = "".join(f" {name}={value}" for name, value in self.notes.items())
            if self.trace_id:
                attributes["trace_id"] = self.trace_id
                notes = f" trace_id={self.trace_id}{notes}"
            values = (self.request_id, method, path, status, milliseconds, notes)
            log_record(access, level, line, values, attributes)


def quieten(scope: MutableMapping[str, Any]) -> Exchange | None:
    """Do not count a request's answer, and log it at level DEBUG. Returns the request's exchange, or None."""
    exchange: Exchange | None = scope.get(KEY)
    if exchange is not None:
        exchange.quiet = True
    return exchange


class _HungUp(Exception):
    """The client hung up before its body had arrived."""


def _trace_id(scope: MutableMapping[str, Any]) -> str:
    """The id of the client's trace, as in W3C Trace Context, or an empty string."""
    value = b",".join(header(scope, b"traceparent")).decode("latin-1")
    match = re.fullmatch(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", value)
    return "" if match is None or (value.startswith("00") and match[2]) else match[1]


def _request_id(scope: MutableMapping[str, Any]) -> str:
    value = b"".join(header(scope, b"x-request-id")).decode("latin-1")
    # The client's own id is kept, since its logs have it too, unless it could forge a line of our log.
    return value if re.fullmatch(r"[\w.-]{1,64}", value, re.ASCII) else uuid.uuid4().hex


def _timeout(scope: MutableMapping[str, Any], guard: Guard) -> float | None:
    values = header(scope, DEADLINE.lower().encode())
    if not values:
        return guard.default_timeout
    value, longest = b", ".join(values).decode("latin-1"), guard.longest_timeout * 1e3
    # Stricter than float(): 1e5, 1_000 and infinity are probably mistakes.
    plain = re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", value)
    if plain is None or not 0 < float(value) <= longest:
        reason = f"must be milliseconds from now as a plain decimal number, over 0 and up to {longest:.0f}"
        raise InvalidRequest(DEADLINE, value, reason)
    return float(value) / 1e3


def _handles_errors(app: Any) -> bool:
    """Whether a Starlette application shows or answers unexpected errors itself."""
    handlers = getattr(app, "exception_handlers", None) or {}
    return bool(getattr(app, "debug", False)) or 500 in handlers or Exception in handlers
