"""Parses bodies into requests. Pydantic's errors become errors of this package."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio.to_thread
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from gpu_actors.errors import InvalidRequest, RequestError, Unsupported
from gpu_actors.server.http.admission import Admission
from gpu_actors.server.http.bodies import check_json, expect_json
from gpu_actors.server.http.guard import KEY, Exchange
from gpu_actors.server.openai.requests import UNKNOWN
from gpu_actors.server.openai.state import State
from gpu_actors.server.openai.unsupported import hint_of
from gpu_actors.values import cut

__all__ = ["parse_body", "read_request"]

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")

_JSON = ("json_invalid", "json_type")

_LONGEST_NAME = 80

_SMALL = 1 << 12
"""Bytes. A body up to this size is read on the loop, since a thread would take longer to start if the loop is busy."""

_GRACE = 1.0
"""How long a body may take to arrive while the server shuts down, in seconds."""


async def read_request(request: Request, admission: Admission, read: Callable[[bytes], T]) -> T:
    """Receive the whole body of a JSON request, and return ``read(body)``. A thread reads a long body.

    admission: counts the request as one that is being read.

    Raises `WrongContentType`, the errors of ``read`` and of the admission, and `ActorStopped` for a body that does not
    arrive while the server shuts down. `Guard` answers all of them.
    """
    state: State = request.app.state.openai_api
    exchange: Exchange = request.scope[KEY]
    expect_json(request.headers.get("content-type"))
    with state.farewell.waiting(_GRACE):
        body = await request.body()
    with state.farewell.waiting():
        exchange.stretch(math.inf)  # while the request waits for its refusal
        async with admission.reading(exchange.deadline, client=exchange.client):
            exchange.stretch(0.0)
            if len(body) <= _SMALL:
                return read(body)
            return await anyio.to_thread.run_sync(read, body, limiter=state.readers_of(len(body)))
    raise AssertionError("a wait that was ended raises")


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse the request in a body.

    Raises `InvalidRequest`, or `Unsupported` for a request that other servers would take. The error names the field,
    its value and the accepted values.
    """
    check_json(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], body) from None


def _refusal(failure: Mapping[str, Any], body: bytes) -> RequestError:
    kind, value, place, context = failure["type"], failure["input"], failure["loc"], failure.get("ctx", {})
    if kind == UNKNOWN:
        place, value = (*place, context["field"]), context["value"]
    field, hint = _field(place), hint_of(place)
    # One of our own validators raised the error.
    error = context.get("error")
    if isinstance(error, RequestError):
        return error if error.field else type(error)(field, error.value, error.reason)
    if kind in _JSON:
        # A body that is not UTF-8 ends here, too.
        return InvalidRequest("body", f"{len(body)} bytes", f"must be JSON in UTF-8: {failure['msg']}")
    if not field:
        return InvalidRequest("body", f"{len(body)} bytes", "must be a JSON object")
    if kind == UNKNOWN:
        return Unsupported(field, value, f"is not a field that this server knows; {hint or 'leave it out'}")
    if kind == "missing":
        return InvalidRequest(field, None, "must be given")
    if kind == "int_parsing_size":
        return InvalidRequest(field, value, "must be an int of 64 bits")
    reason = _reason(failure["msg"]) + (f"; {hint}" if hint else "")
    return (Unsupported if kind == "literal_error" else InvalidRequest)(field, value, reason)


def _field(place: Sequence[int | str]) -> str:
    """Make messages[0].content of messages, 0, content. The name of a field is cut if a client made it too long."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{cut(part, _LONGEST_NAME)}" for part in place)
    return "".join(parts).lstrip(".")


def _reason(message: str) -> str:
    message = re.sub(r" after validation, not \d+$", "", message)
    return re.sub(r"^(Input|Value|Data|List|Dictionary) should ", "must ", message)
