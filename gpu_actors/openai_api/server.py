"""The process of ``gpu-actors serve``: sockets, signals, the end of the streams, and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import anyio

from gpu_actors.errors import InvalidRequest
from gpu_actors.extras import missing
from gpu_actors.openai_api.app import create_app
from gpu_actors.openai_api.models import names
from gpu_actors.openai_api.settings import ServeSettings
from gpu_actors.openai_api.state import State

try:
    import uvicorn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing(error, "serve"), name=error.name) from None

__all__ = ["JsonLines", "Server", "serve"]

logger: logging.Logger = logging.getLogger("gpu_actors")

_LAST_EVENTS = 5.0
"""Seconds for the last events of streams to go out, before their connections are closed."""

_LONGEST_HEAD = 64 << 10
"""Bytes of headers that have not ended."""

_SWITCH = 0.0005
"""Seconds after which the loop lets another thread go on. A step of the engine changes threads many times. With
Python's 5 ms it would wait for the loop each time while that reads and refuses requests."""

_KEEP_ALIVE = 75
"""Seconds for which an idle connection stays open: longer than clients and proxies keep theirs, because a request that
meets the server's own end of a connection is lost."""


def serve(settings: ServeSettings, host: str = "127.0.0.1", port: int = 8000, *, log_json: bool = True) -> None:
    """Serve until SIGTERM or Ctrl-C, then end every answer, and return.

    Writes its log to standard error, as JSON lines (see `JsonLines`) or as text. port: 0 takes a free one, which the
    log names. Raises `InvalidRequest` where it cannot listen, and what opening the models raises.
    """
    _start_log(log_json)
    _raise_open_files()
    sys.setswitchinterval(_SWITCH)
    app = create_app(settings)
    listener = _listen(host, port)
    server = Server(app.state.openai_api, app)
    # uvicorn raises the signals again that have ended it; the process would end by the signal, not well.
    former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run([listener])
    except SystemExit:
        if server.failure is None:
            raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        listener.close()
    if server.failure is not None:
        raise server.failure


class Server(uvicorn.Server):
    """uvicorn's server. When it stops to listen, texts go on for ``drain_seconds``; then they end with an error.

    A second signal ends them at once, a third one the process without more ado. failure: what the startup raised.
    """

    def __init__(self, state: State, app: Any) -> None:
        self.failure: Exception | None = None
        self._state = state
        self._hurry: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        drain = state.settings.drain_seconds
        config = uvicorn.Config(
            self._noting(app),
            log_config=None,
            access_log=False,  # the guard logs each request
            lifespan="on",
            http=_bounded_protocol(),
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(drain + _LAST_EVENTS) + 1,
            server_header=False,
        )
        super().__init__(config)

    def _noting(self, app: Any) -> Any:
        """The application; what its startup raises is kept, for uvicorn logs it and exits."""

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except Exception as error:
                if scope["type"] == "lifespan":
                    self.failure = error
                raise

        return noted

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        began = time.monotonic()
        self._hurry, self._loop = asyncio.Event(), asyncio.get_running_loop()
        theirs = logging.getLogger("uvicorn.error")
        theirs.disabled = True  # it would log the traceback of what is raised
        await super().startup(sockets)
        theirs.disabled = False
        address = "{}:{}".format(*sockets[0].getsockname()[:2]) if sockets else ""
        took = time.monotonic() - began
        logger.info("serving %s on http://%s after %.1f s", names(self._state.models.cards()), address, took)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_texts())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and self._hurry is not None and not self._hurry.is_set():
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._hurry.set)
            return
        super().handle_exit(sig, frame)

    async def _end_texts(self) -> None:
        assert self._hurry is not None
        with anyio.move_on_after(self._state.settings.drain_seconds):
            await self._hurry.wait()
        generator = self._state.models.generator
        if generator is not None:
            generator.engine.stop("the server is stopping")


def _bounded_protocol() -> Any:
    """httptools' protocol with a bound on headers, which h11 has itself."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ModuleNotFoundError:
        return "h11"

    class Bounded(HttpToolsProtocol):
        head = -1  # bytes of headers; -1 between those

        def on_message_begin(self) -> None:
            self.head = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self.head = -1
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.head >= 0:
                self.head += len(data)
            if self.head > _LONGEST_HEAD and not self.transport.is_closing():
                self.send_400_response("The headers are too long.")

    return Bounded


class JsonLines(logging.Formatter):
    """A log record as a line of JSON: time (seconds since 1970), level, logger, message, and the fields of the record.

    A line of the access log has request_id, method, path, status, milliseconds, and the counts of the request.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
        }
        fields = record.__dict__
        if "request_id" in fields:
            line |= {name: fields[name] for name in ("request_id", "method", "path", "status") if name in fields}
            line["milliseconds"] = round(fields.get("milliseconds", 0.0), 1)
            line |= fields.get("notes", {})
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _start_log(log_json: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_json else logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.captureWarnings(True)  # such as the one of a machine without a GPU


def _raise_open_files() -> None:
    """Every connection is an open file, and 1,024 of them is a usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            logger.warning("the limit of %d open files could not be raised", soft)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InvalidRequest("port", f"{host}:{port}", f"cannot be listened on: {error}") from error
