"""Scopes: what this package's middlewares read in an ASGI scope, and what they store there."""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping
from typing import Any

__all__ = ["KEY", "address_of", "client_of", "header"]

KEY = "gpu_actors.exchange"
"""Where a `Guard` leaves its `Exchange`."""


def header(scope: MutableMapping[str, Any], name: bytes) -> list[bytes]:
    """The values of all headers of this name, which is given in lower case."""
    return [bytes(value) for key, value in scope.get("headers", ()) if bytes(key).lower() == name]


def address_of(scope: MutableMapping[str, Any]) -> str:
    """The address of a request's client, empty if the server does not know it."""
    peer = scope.get("client")
    return str(peer[0]) if peer else ""


def client_of(scope: MutableMapping[str, Any]) -> str:
    """What to call the client of a request whose key was checked: the digest of its bearer's key, or its address.

    A `Doors` calls it so for an `Exchange`. A key that nothing has checked may be made up, and another each time.
    """
    scheme, _, key = b"".join(header(scope, b"authorization")).partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return hashlib.sha256(key.strip()).hexdigest()[:16]
    return address_of(scope)
