"""The process of ``gpu-actors serve``: sockets, signals, the end of the streams, and the log."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import anyio

from gpu_actors.errors import InvalidRequest
from gpu_actors.extras import missing
from gpu_actors.server.http.problems import package_error
from gpu_actors.server.openai.app import create_app
from gpu_actors.server.openai.models import names
from gpu_actors.server.openai.settings import ServeSettings
from gpu_actors.server.openai.state import State

try:
    import uvicorn

    from gpu_actors.server.http.protocol import Protocol
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing(error, "serve"), name=error.name) from None

__all__ = ["JsonLines", "Server", "Tls", "serve"]

logger: logging.Logger = logging.getLogger("gpu_actors")

_LAST_EVENTS = 5.0
"""Seconds for the last events of streams to go out, before their connections are closed."""

_BACKLOG = 2048
"""The most connections that wait to be accepted."""

_SWITCH = 0.0005
"""Seconds after which Python switches from the loop to another thread. A step of the engine changes threads many times.
With the default, 5 ms, it would wait each time while the loop reads requests."""

_KEEP_ALIVE = 75
"""Seconds for which an idle connection stays open: longer than clients and proxies keep theirs, because a request is
lost if the server closes its connection at that moment."""


def serve(
    settings: ServeSettings,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    log_json: bool = True,
    tls: Tls | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then end every answer, and return.

    The port is bound at once, and opened when the models answer. The log goes to standard error, as JSON lines (see
    `JsonLines`) or as text. port: 0 takes a free port, which the log names. On a loopback address without keys and
    ``allowed_hosts``, ``allowed_hosts`` is "localhost".

    Raises `InvalidRequest` if it cannot listen, and the errors of opening the models.
    """
    _start_log(log_json)
    _raise_open_files()
    sys.setswitchinterval(_SWITCH)
    listener = _bind(host, port)
    if not settings.allowed_hosts and not settings.api_keys and _is_loopback(listener):
        settings = dataclasses.replace(settings, allowed_hosts=("localhost",))
    try:
        app = create_app(settings)
        server = Server(app.state.openai_api, app, tls)
        _run(server, listener)
    finally:
        listener.close()


def _run(server: Server, listener: socket.socket) -> None:
    # uvicorn raises the signals that ended it again. Without these handlers the process would end by the signal.
    former = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run([listener])
    except SystemExit:
        if server.failure is None and not server.should_exit:
            raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if server.failure is not None:
        raise server.failure


class Tls(NamedTuple):
    """PEM files, as uvicorn takes them. ca_certs: if given, clients need a certificate of one of these authorities."""

    certfile: Path
    keyfile: Path | None = None
    password: str | None = None
    ca_certs: Path | None = None


class Server(uvicorn.Server):
    """uvicorn's server. When it stops listening, texts go on for ``drain_seconds``; then they end with an error.

    A second signal ends the texts at once. After that, SIGINT stops the server without waiting for connections. A
    signal while the models load ends the loading. failure: the error that the startup raised.
    """

    def __init__(self, state: State, app: Any, tls: Tls | None = None) -> None:
        self.failure: Exception | None = None
        self._state = state
        self._opening: asyncio.Task[Any] | None = None
        self._sockets: list[socket.socket] = []
        self._hurry: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        drain = state.settings.drain_seconds
        config = uvicorn.Config(
            self._watch_startup(app),
            log_config=None,
            access_log=False,  # the guard logs each request
            lifespan="on",
            http=Protocol,
            ws="none",
            # A client that names its own address could name another one each time.
            proxy_headers="FORWARDED_ALLOW_IPS" in os.environ,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=int(drain + _LAST_EVENTS) + 1,
            server_header=False,
            ssl_certfile=tls and tls.certfile,
            ssl_keyfile=tls and tls.keyfile,
            ssl_keyfile_password=tls and tls.password,
            ssl_ca_certs=tls and tls.ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.ca_certs else ssl.CERT_NONE,
        )
        try:
            config.load()
        except OSError as error:  # this includes ssl.SSLError
            files = ", ".join(str(part) for part in (tls or ())[:2] if part is not None)
            raise InvalidRequest("ssl_certfile", files, f"cannot be used: {error}") from error
        super().__init__(config)

    def _watch_startup(self, app: Any) -> Any:
        """Wrap the application. An error of its startup is kept in `failure`, since uvicorn only logs it and exits."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                self._opening = asyncio.current_task()
                if self.should_exit:
                    self._stop_opening()

            async def send_and_listen(message: Any) -> None:
                if message["type"] == "lifespan.startup.complete":
                    self._listen()
                await send(message)

            try:
                await app(scope, receive, send_and_listen if scope["type"] == "lifespan" else send)
            except Exception as error:
                stopped = self.should_exit and not self.started
                if scope["type"] == "lifespan" and not stopped:
                    self.failure = package_error(error) or error
                raise

        return watched

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        began = time.monotonic()
        self._hurry, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._sockets = sockets or []
        uvicorn_log = logging.getLogger("uvicorn.error")
        uvicorn_log.disabled = True  # it would log the traceback of the startup's error
        try:
            await super().startup(sockets)
        finally:
            uvicorn_log.disabled = False
        address = "{}:{}".format(*sockets[0].getsockname()[:2]) if sockets else ""
        scheme, seconds = "https" if self.config.is_ssl else "http", time.monotonic() - began
        logger.info("serving %s on %s://%s after %.1f s", names(self._state.models.cards()), scheme, address, seconds)

    def _listen(self) -> None:
        """Listen on the ports. Raises here if another process has taken one, since uvloop does not report it."""
        for one in self._sockets:
            try:
                one.listen(_BACKLOG)
            except OSError as error:
                raise _not_listening("{}:{}".format(*one.getsockname()[:2]), error) from error

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.farewell.leave()
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
        if not self.started and self._opening is not None:
            self._opening.get_loop().call_soon_threadsafe(self._stop_opening)

    def _stop_opening(self) -> None:
        assert self._opening is not None
        logger.info("the server stops before it has opened")
        self._opening.cancel()

    async def _end_texts(self) -> None:
        assert self._hurry is not None
        with anyio.move_on_after(self._state.settings.drain_seconds):
            await self._hurry.wait()
        generator = self._state.models.generator
        if generator is not None:
            generator.engine.stop("the server is stopping")


class JsonLines(logging.Formatter):
    """Formats a log record as a line of JSON: time (seconds since 1970), level, logger, message, and exception if any.

    A line of the access log has, in place of message, request_id, trace_id if there is a trace, method, path, status,
    milliseconds, and the notes of the request.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "logger": record.name,
        }
        fields = record.__dict__
        if "request_id" in fields:
            named = ("request_id", "trace_id", "method", "path", "status")
            line |= {name: fields[name] for name in named if name in fields}
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
    logging.captureWarnings(True)  # such as the warning that there is no GPU


def _raise_open_files() -> None:
    """Raise the limit of open files: each connection is an open file, and 1,024 is a usual limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            logger.warning("the limit of %d open files could not be raised", soft)


def _bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet: the port refuses connections until the server can answer."""
    listener = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise _not_listening(f"{host}:{port}", error) from error
    return listener


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _not_listening(address: str, error: Exception) -> InvalidRequest:
    return InvalidRequest("port", address, f"cannot be listened on: {error}")
