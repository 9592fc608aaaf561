"""An ASGI application on a port of its own, served by uvicorn from a thread."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, Self

import uvicorn
from support.service import eventually


class Served:
    """While entered, the application is served at ``url``. Raises AssertionError if its startup fails."""

    def __init__(self, app: Any, *, lifespan: Any = "on", http: Any = "auto") -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_config=None, lifespan=lifespan, http=http, timeout_keep_alive=60)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):  # of a startup that failed
            self.server.run([self.socket])

    def __enter__(self) -> Self:
        self.thread.start()
        eventually(lambda: self.server.started or not self.thread.is_alive(), 60.0)
        if not self.server.started:
            self.__exit__()
        assert self.server.started, "the application's startup failed"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        self.socket.close()
        assert not self.thread.is_alive()

    def ask(self, path: str, method: str = "GET", **options: Any) -> Answered:
        """One request on a connection of its own, from this thread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, **options)
            reply = connection.getresponse()
            return Answered(reply.status, dict(reply.headers.items()), reply.read())
        finally:
            connection.close()

    @contextlib.contextmanager
    def raw(self, *lines: str, body: bytes = b"") -> Iterator[socket.socket]:
        """A connection on which a head of these lines and the body have been sent."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as client:
            client.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            yield client


class Answered:
    """A client's response. Names of headers are in lower case."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The name of the error in a problem+json body."""
        assert self.headers["content-type"] == "application/problem+json", self.body
        assert self.json["status"] == self.status
        kind: str = self.json["type"]
        return kind.removeprefix("urn:gpu-actors:error:")


def until(client: socket.socket, ending: bytes) -> bytes:
    """What a server sends, in any pieces, until it ends with ``ending``."""
    answer = b""
    while not answer.endswith(ending):
        piece = client.recv(1 << 16)
        assert piece, answer
        answer += piece
    return answer


def until_closed(client: socket.socket) -> bytes:
    """What a server sends until it closes the connection."""
    pieces = []
    while piece := client.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)
