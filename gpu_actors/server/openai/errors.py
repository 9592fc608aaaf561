"""Errors in the form that OpenAI's clients expect: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gpu_actors.server import asgi
from gpu_actors.server.http.problems import Problem, problem

if TYPE_CHECKING:
    from gpu_actors.server.http.guard import Exchange

__all__ = ["error_object", "not_routed", "spell"]

_CODES = {401: "invalid_api_key"}
_TYPES = {408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}


def error_object(failure: Problem | BaseException, request_id: str) -> dict[str, Any]:
    """The object for a problem, or for an error that `problem` turns into one.

    Beside OpenAI's four members it has request_id and, if the request is at fault, value, accepted and nearest.
    """
    if isinstance(failure, BaseException):
        failure = problem(failure)
    fallback = "invalid_request_error" if failure.status < 500 else "server_error"
    members = dict(failure.members)
    return {
        "error": {
            "message": failure.detail,
            "type": _TYPES.get(failure.status, fallback),
            "param": members.pop("field", None),
            "code": _CODES.get(failure.status, failure.name or "InternalError"),
            **members,
            "request_id": request_id,
        }
    }


def spell(failure: Problem, exchange: Exchange) -> tuple[bytes, str] | None:
    """The ``spell`` of `Guard`: OpenAI's form for errors under /v1, /tokenize and /detokenize; None for all others."""
    if not exchange.path.startswith(("/v1/", "/tokenize", "/detokenize")):
        return None
    return _bytes(error_object(failure, exchange.request_id)), "application/json"


async def not_routed(request: Request, error: Exception) -> Response:
    """Starlette's handler for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    content = {"message": text, "type": "invalid_request_error", "param": None, "code": error.detail.replace(" ", "")}
    body = _bytes({"error": content | {"request_id": asgi.request_id(request)}})
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


def _bytes(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
