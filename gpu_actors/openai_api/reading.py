"""A body to a request: what pydantic finds wrong, in this package's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gpu_actors.errors import InvalidRequest, RequestError, Unsupported

__all__ = ["read"]

Body = TypeVar("Body", bound=BaseModel)

_JSON = ("json_invalid", "json_type")


def read(kind: type[Body], body: bytes) -> Body:
    """The request that a body holds.

    Raises `InvalidRequest`, or `Unsupported` for what would be valid elsewhere, naming the field, its value and what is
    accepted.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], body) from None


def _refusal(found: Mapping[str, Any], body: bytes) -> RequestError:
    kind, given = found["type"], found["input"]
    field = _field(found["loc"])
    # What a validator of ours has found.
    own = found.get("ctx", {}).get("error")
    if isinstance(own, RequestError):
        return own if own.field else type(own)(field, own.value, own.reason)
    if kind in _JSON:
        # A body that is not UTF-8 is told here, too.
        return InvalidRequest("body", f"{len(body)} bytes", f"must be JSON in UTF-8: {found['msg']}")
    if not field:
        return InvalidRequest("body", f"{len(body)} bytes", "must be a JSON object")
    if kind == "missing":
        return InvalidRequest(field, None, "must be given")
    if kind == "extra_forbidden":
        return Unsupported(field, given, "is not a field that this server knows; leave it out")
    if kind == "int_parsing_size":
        return InvalidRequest(field, given, "must be an int of 64 bits")
    reason = _reason(found["msg"])
    if kind == "literal_error":
        return Unsupported(field, given, reason)
    return InvalidRequest(field, given, reason)


def _field(place: Sequence[int | str]) -> str:
    """messages, 0, content: messages[0].content"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def _reason(message: str) -> str:
    message = re.sub(r" after validation, not \d+$", "", message)
    return re.sub(r"^(Input|Value|Data|List|Dictionary) should ", "must ", message)
