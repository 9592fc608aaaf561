"""Protocol: uvicorn's HTTP on httptools, with bounds and ends of connections that uvicorn lacks.

    uvicorn.run(app, http=Protocol)        # or uvicorn module:app --http gpu_actors.server.http.protocol:Protocol

A middleware sees a request only after its head has arrived, so only a protocol can end a head that takes hours.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

from gpu_actors.extras import missing

try:
    import httptools
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing(error, "serve"), name=error.name) from None

__all__ = ["Protocol"]

_LINGER = 1.0
"""Seconds for the rest of a body to arrive after its answer."""

_PROBE_DELAYS = (0.25, 0.25, 2.0)
"""Seconds between probes of whether a client that sends nothing more still reads; the last delay repeats."""


class Protocol(HttpToolsProtocol):
    """Speaks HTTP/1 on one connection. Pass it as uvicorn's ``http``.

    head_bytes, head_seconds: bounds on a head, from its first byte (for the first head, from the connection) to its
        end. A head over either bound is answered with 400 or 408, and the connection closes. Before the first byte of a
        head, and while an earlier answer goes out, it closes without that answer. The first of several pieces of a head
        is not counted.

    A client of HTTP/1.0 gets an answer without chunks. A client that shuts down only its own half of the connection
    gets its answer. An interim "100 Continue" probes whether such a client still reads: if it has hung up, its system
    refuses the bytes. TLS cannot shut down half of a connection, so the end of its data is the end of the connection.

    A request with "Upgrade" is answered in HTTP/1.1, except for WebSocket if uvicorn has it. CONNECT is answered with
    400.
    """

    head_bytes: int = 64 << 10
    head_seconds: float = 10.0

    _head = -1  # bytes of the current head; -1 between heads
    _requests = 0  # requests so far
    _whole = True  # whether the latest request has arrived whole
    _ended = False  # whether further data is dropped: the answers that still go out are the last ones
    _late: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit(self.head_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    # The head

    def data_received(self, data: bytes) -> None:
        if self._ended or self.transport.is_closing():
            return
        before = self._requests
        super().data_received(data)
        if self._ended or self.transport.is_closing():
            return
        if self._head >= 0 and self._requests == before:  # the first piece may hold an earlier body
            self._head += len(data)
            if self._head > self.head_bytes:
                self.send_400_response("The headers are too long.")
                return
        if self._whole and self._requests == before:
            self._limit(self.head_seconds, self._head_is_late)  # uvicorn waits after empty lines before a head

    def on_message_begin(self) -> None:
        self._head, self._whole = 0, False
        self._requests += 1
        self._limit(self.head_seconds, self._head_is_late)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("a tunnel")  # uvicorn answers it with 400; otherwise the target would be taken for a path
        if self.ignores_upgrade():
            return  # the parser reads the head again
        super().on_headers_complete()
        self._head = -1
        self._in_time()
        if self.cycle is not None and self.scope["http_version"] != "1.1":
            self.cycle.__class__ = _Unchunked
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        if self.ignores_upgrade():
            return
        self._whole = True
        self._in_time()
        super().on_message_complete()

    def ignores_upgrade(self) -> bool:
        """Whether the head has an Upgrade that is ignored."""
        return bool(self.parser.should_upgrade()) and not self._should_upgrade()

    def head_without_upgrade(self) -> bytes:
        """The latest head without its Upgrade, so that the parser reads the body, too."""
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join((line, *fields, b"\r\n"))

    def _limit(self, seconds: float, end: Callable[[], None]) -> None:
        if self._late is None:
            self._late = self.loop.call_later(seconds, end)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_is_late(self) -> None:
        self._late = None
        if self._answers():
            self._end()
        elif self._head < 0:
            self.transport.close()  # an idle client would take an answer here for the one to its next request
        elif not self.transport.is_closing():
            body = b"The headers did not arrive in time."
            head = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            self.transport.write(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
            self.transport.close()

    # The end

    def send_400_response(self, msg: str) -> None:
        if not self._answers():
            super().send_400_response(msg)
        elif self._head >= 0 or self._whole:
            self._end()
        elif self.pipeline or self.cycle.response_started:
            self.transport.close()  # a body is malformed while its own answer or another one goes out
        else:
            super().send_400_response(msg)

    def _end(self) -> None:
        self.cycle.keep_alive = False
        self._ended = self._whole = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._whole and not self._answers() and not self.transport.is_closing():
            # A body that arrives slowly after its answer would hold the connection.
            self._limit(_LINGER, self.transport.close)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        if not self._whole or not self._answers() or self.transport.get_extra_info("sslcontext") is not None:
            return None
        self.cycle.keep_alive = False
        if self.scope["http_version"] == "1.1":  # other versions know no interim answer
            self._schedule_probe(0)
        return True

    def _answers(self) -> bool:
        """Whether a request is not answered yet. uvicorn's ``cycle`` belongs to the latest request."""
        return self.cycle is not None and not self.cycle.response_complete

    def _schedule_probe(self, number: int) -> None:
        delay = _PROBE_DELAYS[min(number, len(_PROBE_DELAYS) - 1)]
        self._probe_timer = self.loop.call_later(delay, self._probe_client, number)

    def _probe_client(self, number: int) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return  # if the client has hung up, sending the answer fails
        if not self.pipeline:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._schedule_probe(number + 1)


class _Parser(httptools.HttpRequestParser):
    """Reads the body of a request whose Upgrade is ignored (RFC 9110, section 7.8).

    httptools ends such a request after its head, and would read its body as the next request.
    """

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        parser, rest = self, memoryview(data)
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, rest)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.ignores_upgrade():
                    raise
                rest = rest[upgrade.args[0] :]
                head = self._protocol.head_without_upgrade()
                parser = self._protocol.parser = _Parser(self._protocol)
                httptools.HttpRequestParser.feed_data(parser, head)
            else:
                return


class _Unchunked(RequestResponseCycle):
    """One answer to a client of HTTP/1.0. An answer without a length ends with the connection."""

    endless = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.endless = all(bytes(name).lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self.endless:
                self.chunked_encoding = False
        elif self.endless:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
