"""Scopes: the parts of an ASGI scope that this package's middlewares read and store."""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping
from typing import Any

__all__ = ["KEY", "address_of", "client_of", "header"]

KEY = "gpu_actors.exchange"
"""The key under which a `Guard` stores its `Exchange` in the scope."""


def header(scope: MutableMapping[str, Any], name: bytes) -> list[bytes]:
    """The values of all headers with this name, which must be in lower case."""
    return [bytes(value) for key, value in scope.get("headers", ()) if bytes(key).lower() == name]


def address_of(scope: MutableMapping[str, Any]) -> str:
    """The address of a request's client, empty if the server does not know it."""
    peer = scope.get("client")
    return str(peer[0]) if peer else ""


def client_of(scope: MutableMapping[str, Any]) -> str:
    """The name of the client of a request whose key was checked: a digest of its Bearer key, or its address.

    `Doors` sets `Exchange.client` to it. Check keys first: a client could make up another key for each request.
    """
    scheme, _, key = b"".join(header(scope, b"authorization")).partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return hashlib.sha256(key.strip()).hexdigest()[:16]
    return address_of(scope)
