"""Server-sent events, as the HTML standard writes them."""

from __future__ import annotations

__all__ = ["STREAM_HEADERS", "sent_event"]

STREAM_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back until its buffer is full
)

_LINES = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""Characters that some clients take for the end of a line, with their escapes in JSON."""


def sent_event(data: str, fields: str = "") -> bytes:
    """One event. data: JSON on one line. fields: the lines of its other fields, such as "event: state"."""
    if not data.isascii():
        data = data.translate(_LINES)
    return f"{fields}data: {data}\n\n".encode()
