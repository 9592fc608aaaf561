"""Problems: errors as HTTP answers, by RFC 9457 (application/problem+json)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from gpu_actors.errors import (
    ActorFailed,
    ActorStopped,
    CacheFull,
    ContextLost,
    DeadlineExceeded,
    GpuActorsError,
    InvalidRequest,
    MockModeError,
    OutOfDeviceMemory,
    Overloaded,
    RequestCancelled,
    RequestError,
    StaleBuffer,
    Unsupported,
)
from gpu_actors.server.http.access import Unauthorized
from gpu_actors.server.http.bodies import BodyTooLarge, BodyTooSlow, WrongContentType
from gpu_actors.values import cut, show

__all__ = ["CONTENT_TYPE", "NotFound", "Problem", "package_error", "problem"]

CONTENT_TYPE = "application/problem+json"

_LONGEST_TEXT = 320
_HIDDEN = "an unexpected error; see the server's log"
_STOPPED = "the service takes no requests: it is stopping, or has failed"


class NotFound(InvalidRequest):
    """The thing that a request names does not exist. Applications raise it; it is answered with 404."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """retry_after: seconds, or None if a retry would not help. detail: a text in place of the error's own."""

    status: int
    retry_after: float | None = None
    detail: str | None = None


# The first match counts. ActorFailed and ActorStopped may quote an unexpected error of an actor, so get other texts.
_ANSWERS: tuple[tuple[type[GpuActorsError], _Answer], ...] = (
    (NotFound, _Answer(404)),
    (RequestError, _Answer(400)),
    (Unauthorized, _Answer(401)),
    (BodyTooSlow, _Answer(408)),
    (StaleBuffer, _Answer(409)),
    (BodyTooLarge, _Answer(413)),
    (WrongContentType, _Answer(415)),
    (Overloaded, _Answer(429)),
    (MockModeError, _Answer(501)),
    (CacheFull, _Answer(503, 1.0)),
    (OutOfDeviceMemory, _Answer(503, 1.0)),
    (RequestCancelled, _Answer(503, 1.0)),
    (ContextLost, _Answer(503, 5.0)),
    (ActorFailed, _Answer(500, None, _HIDDEN)),
    (ActorStopped, _Answer(503, 5.0, _STOPPED)),
    (DeadlineExceeded, _Answer(504)),
    (GpuActorsError, _Answer(500, None, _HIDDEN)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The answer to an error.

    status: the HTTP status.
    type: a URI that ends in the error's name, or "about:blank".
    title: the error's name in words.
    detail: what happened this time; for a 500 only the log says it.
    retry_after: whole seconds >= 1, or None.
    members: field, value and accepted for a `RequestError`, and nearest for an `Unsupported` that has one.
    """

    status: int
    type: str
    title: str
    detail: str
    retry_after: int | None = None
    members: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The error's name, empty for an error that is not of this package."""
        return self.type.rpartition(":")[2] if self.type.startswith("urn:") else ""

    def body(self, **members: Any) -> bytes:
        """The JSON. ``members`` adds to it: ``instance`` of RFC 9457, or members of your own."""
        standard = {"type": self.type, "title": self.title, "status": self.status, "detail": self.detail}
        return json.dumps(standard | dict(self.members) | members, separators=(",", ":")).encode()

    @property
    def headers(self) -> dict[str, str]:
        """Content-Type, Retry-After if a retry may help, and WWW-Authenticate if a key is missing."""
        headers = {"Content-Type": CONTENT_TYPE}
        if self.status == 401:
            headers["WWW-Authenticate"] = 'Bearer, Basic realm="gpu-actors", charset="UTF-8"'
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        return headers


def package_error(error: BaseException) -> GpuActorsError | None:
    """The exception itself if it is an error of this package; of a group of such errors the gravest one; else None."""
    if isinstance(error, GpuActorsError):
        return error
    if not isinstance(error, BaseExceptionGroup):
        return None
    inner_errors = [package_error(inner) for inner in error.exceptions]
    errors = [inner for inner in inner_errors if inner is not None]
    return max(errors, key=lambda inner: _answer(inner).status) if len(errors) == len(inner_errors) else None


def problem(error: BaseException) -> Problem:
    """The answer to a request that raises ``error``. Errors that are not this package's are a 500 without details."""
    known = package_error(error)
    if known is None:
        return Problem(status=500, type="about:blank", title=HTTPStatus(500).phrase, detail=_HIDDEN)
    answer, name = _answer(known), type(known).__name__
    retry_after = known.retry_after if isinstance(known, Overloaded) else answer.retry_after
    return Problem(
        status=answer.status,
        type=f"urn:gpu-actors:error:{name}",
        title=re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).capitalize(),
        detail=_short(str(known)) if answer.detail is None else answer.detail,
        retry_after=None if retry_after is None else _whole(retry_after),
        members=_members(known) if isinstance(known, RequestError) else {},
    )


def _answer(error: GpuActorsError) -> _Answer:
    return next(answer for kind, answer in _ANSWERS if isinstance(error, kind))


def _whole(seconds: float) -> int:
    """Round up to whole seconds, at least 1: a retry at once would meet the same state."""
    return max(1, math.ceil(seconds)) if math.isfinite(seconds) else 1


def _members(error: RequestError) -> dict[str, Any]:
    members = {"field": _short(error.field), "value": _plain(error.value), "accepted": _short(error.reason)}
    if isinstance(error, Unsupported) and error.nearest is not None:
        members["nearest"] = _plain(error.nearest)
    return members


def _plain(value: object) -> Any:
    """Return a plain value for JSON, a long text cut, and any other value as messages show it."""
    if value is None or isinstance(value, bool):
        return value
    if (type(value) is int and abs(value) < 1 << 53) or (type(value) is float and math.isfinite(value)):
        return value
    return _short(value) if isinstance(value, str) else show(value)


def _short(text: str) -> str:
    return cut(text, _LONGEST_TEXT)
