"""Doors: ASGI middleware that checks the keys of clients and the Host header.

app.add_middleware(Doors, keys=("a-key",), hosts=("api.example.com",))
app.add_middleware(Guard)  # outside of it: it answers what this raises
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.server.http.scopes import KEY, client_of, header

__all__ = ["OPEN", "Doors", "Unauthorized", "checked_hosts", "checked_keys", "checked_texts"]

OPEN = ("/livez", "/readyz", "/health")
"""The paths of probes. They need no key by default, since they reveal only whether the server works."""


class Unauthorized(GpuActorsError):
    """The request carries no key of this server."""


class Doors:
    """Middleware for any ASGI application, inside of a `Guard`.

    keys: a request needs one of these as ``Authorization: Bearer KEY``. A GET or HEAD may have it as the password of
        Basic, which browsers ask for. Without keys every client is allowed. Keys are compared in constant time. A
        client with a Bearer key is named after it (`Exchange.client`).
    hosts: the names with a dot that the header Host may have; "*.example.com" means all names below example.com.
        Without hosts, or with "*", all names are allowed. The check stops web pages that resolve their own name to
        this machine (DNS rebinding). Addresses and names without a dot are always allowed.
    open_paths: paths that need no key.

    Raises `InvalidRequest` for a key or a host that no request could have, and for one str in place of several.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        keys: Sequence[str] = (),
        hosts: Sequence[str] = (),
        open_paths: Iterable[str] = OPEN,
    ) -> None:
        self.app = app
        self._keys = [_digest(key.encode()) for key in checked_keys("keys", keys)]
        self._hosts = checked_hosts("hosts", hosts)
        self._open = frozenset(checked_texts("open_paths", open_paths))

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket"):
            if self._hosts and "*" not in self._hosts:
                self._check_host(header(scope, b"host"))
            if self._keys and scope["path"] not in self._open:
                self._check_key(header(scope, b"authorization"), scope.get("method") in ("GET", "HEAD"))
                if (exchange := scope.get(KEY)) is not None:
                    exchange.client = client_of(scope)
        await self.app(scope, receive, send)

    def _check_key(self, values: Sequence[bytes], basic: bool) -> None:
        kind, _, secret = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        secret = secret.strip()
        if basic and kind.lower() == b"basic":
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except binascii.Error:
                secret = b""
        elif kind.lower() != b"bearer":
            raise Unauthorized("this server needs a key: Authorization: Bearer KEY")
        digest = _digest(secret)
        # All keys are compared, so that the time does not reveal which one is similar.
        if not sum([hmac.compare_digest(digest, key) for key in self._keys]):
            raise Unauthorized("the key in the header Authorization is none of this server's")

    def _check_host(self, values: Sequence[bytes]) -> None:
        if not values:
            return  # HTTP/1.0 has no Host; browsers always send it
        text = values[0].decode("latin-1")
        name = re.sub(r":\d*$", "", text).rstrip(".").lower()
        if len(values) > 1 or not (_is_plain(name) or any(_fits(name, host) for host in self._hosts)):
            allowed = ", ".join(self._hosts)
            raise InvalidRequest("Host", text, f"must be an address, a name without a dot, or one of {allowed}")


def checked_texts(field: str, texts: Iterable[str]) -> tuple[str, ...]:
    """Return the texts. Raises `InvalidRequest`, which does not show them, also for one str in place of several."""
    value: object = texts
    if isinstance(value, Iterable) and not isinstance(value, str):
        several = tuple(texts)
        if all(isinstance(text, str) for text in several):
            return several
    raise InvalidRequest(field, type(value).__name__, 'must be several texts, not one, as ("a text",)')


def checked_keys(field: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys, each of at least 8 visible ASCII characters. Raises `InvalidRequest`, which hides them."""
    keys = checked_texts(field, keys)
    for number, key in enumerate(keys, 1):
        if not re.fullmatch(r"[!-~]{8,}", key):
            reason = "must have at least 8 characters, of ASCII, visible and without spaces"
            raise InvalidRequest(field, f"key {number} of {len(keys)}", reason)
    return keys


def checked_hosts(field: str, hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the names in lower case. Raises `InvalidRequest` for any that is no name, no "*.NAME" and no "*"."""
    hosts = checked_texts(field, hosts)
    for host in hosts:
        if host != "*" and not re.fullmatch(r"(\*\.)?[\w-]+(\.[\w-]+)*", host):
            raise InvalidRequest(field, host, 'must be a name without a port, "*.NAME" or "*"')
    return tuple(host.lower() for host in hosts)


def _fits(name: str, host: str) -> bool:
    return name.endswith(host[1:]) if host.startswith("*.") else name == host


def _is_plain(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return re.fullmatch(r"[\w-]+", name) is not None
    return True


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
