"""Clients of OpenAI's API that have requested a text and still wait for it. For tests."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from support.openai_server import body_of
from support.served import until_closed

__all__ = ["Client", "asking"]


class Client:
    """A connection that has sent its request. read: the bytes received so far."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.read = b""

    def begin(self) -> None:
        """Wait for the first event of a stream."""
        while b"data: " not in self.read:
            piece = self._connection.recv(1 << 16)
            assert piece, self.read
            self.read += piece

    def answer(self) -> tuple[int, bytes]:
        """The status and the whole body."""
        self.read += until_closed(self._connection)
        return body_of(self.read)


@contextlib.contextmanager
def asking(port: int, path: str, content: Any, *headers: str, begun: bool = True) -> Iterator[Client]:
    """A client that has sent a request, and hangs up on exit. begun: wait until its stream has begun."""
    body = json.dumps(content).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json", *headers]
    with socket.create_connection(("127.0.0.1", port), timeout=150) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        client = Client(connection)
        if begun:
            client.begin()
        yield client
