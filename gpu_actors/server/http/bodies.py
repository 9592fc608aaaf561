"""Bodies: bounds on the size of each body and of all bodies together, and on the content of JSON bodies.

A parser may make an object of every byte or two, and a validator an error of every object. So the values of a body are
counted before it is parsed, in one pass that keeps no objects.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from gpu_actors.errors import GpuActorsError, InvalidRequest, Overloaded
from gpu_actors.fields import duration, integer

__all__ = [
    "MAX_DEPTH",
    "MAX_NESTS",
    "MAX_VALUES",
    "Bodies",
    "BodyTooLarge",
    "BodyTooSlow",
    "TooManyBodies",
    "WrongContentType",
    "check_json",
    "expect_json",
    "read_json",
]

MAX_NESTS = 1 << 16
"""The most keys, objects and lists of one body together."""

MAX_VALUES = 1 << 18
"""The most values of one body: more than any text has tokens."""

MAX_DEPTH = 32
"""The most objects and lists inside one another."""

# Strings are skipped without backtracking, so that nothing is read twice. The parser refuses an unterminated string.
_MARKS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}:,]', re.DOTALL)

_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]")

_JSON = re.compile(r"application/(json|[\w.-]+\+json)", re.ASCII | re.IGNORECASE)


class BodyTooLarge(GpuActorsError):
    """The body has more bytes than one request may have."""


class BodyTooSlow(GpuActorsError):
    """The body did not arrive in time."""


class TooManyBodies(Overloaded):
    """The bodies of all requests together are too large."""


class Bodies:
    """Bounds on the bodies of requests. Only the tasks of one event loop may use them.

    max_bytes: the most bytes of one body.
    max_held_bytes: the most bytes of all bodies that are being read or are not answered yet.
    seconds: how long a client may take to send its body, independent of its deadline. Time in which the server does
        not read is not counted.
    held_bytes: the bytes of all these bodies now.

    Raises `InvalidRequest` for a bound that is not above 0.
    """

    def __init__(self, *, max_bytes: int = 16 << 20, max_held_bytes: int = 256 << 20, seconds: float = 30.0) -> None:
        self.max_bytes: int = integer("max_bytes", max_bytes, 1)
        self.max_held_bytes: int = integer("max_held_bytes", max_held_bytes, 1)
        self.seconds: float = duration("seconds", seconds, above_0=True)
        self.held_bytes: int = 0

    def check(self, announced: int) -> None:
        """Raise `BodyTooLarge` if a body of ``announced`` bytes is too large."""
        if announced > self.max_bytes:
            raise BodyTooLarge(f"the body may have {self.max_bytes} bytes")

    def hold(self, held: int, more: int) -> None:
        """Count ``more`` bytes of a body that has ``held`` bytes already. Raises `BodyTooLarge` or `TooManyBodies`."""
        self.check(held + more)
        if self.held_bytes + more > self.max_held_bytes:
            raise TooManyBodies("the bodies under way are too large together")
        self.held_bytes += more

    def let_go(self, held: int) -> None:
        """Stop counting the bytes of a request's body."""
        self.held_bytes -= held


# JSON


class WrongContentType(GpuActorsError):
    """The header Content-Type does not say JSON."""


def expect_json(content_type: str | None) -> None:
    """Raise `WrongContentType` unless the header says JSON.

    A page of any site can make a browser send this server a body of another type, or of none, without asking it first.
    """
    kind = (content_type or "").partition(";")[0].strip()
    if not _JSON.fullmatch(kind):
        reason = f"not {kind[:80]!r}" if kind else "and is missing"
        raise WrongContentType(f"the header Content-Type must be application/json, {reason}")


def check_json(body: bytes) -> None:
    """Raise `InvalidRequest` for a body with more keys, objects, lists or values, or with deeper ones, than any
    request needs."""
    nests = body.count(b":") + body.count(b"{") + body.count(b"[")
    if nests <= MAX_DEPTH and body.count(b",") <= MAX_VALUES:
        return
    nests = values = depth = 0
    for mark in _MARKS.finditer(body):
        match mark.group():
            case b"{" | b"[":
                nests, depth = nests + 1, depth + 1
            case b":":
                nests += 1
            case b"}" | b"]":
                depth -= 1
            case b",":
                values += 1
        if nests > MAX_NESTS:
            limit = f"{MAX_NESTS} keys, objects and lists"
        elif values > MAX_VALUES:
            limit = f"{MAX_VALUES} values"
        elif depth > MAX_DEPTH:
            limit = f"{MAX_DEPTH} objects and lists in one another"
        elif depth < 0:
            return  # the parser refuses it
        else:
            continue
        raise InvalidRequest("body", f"{len(body)} bytes", f"must be JSON of at most {limit}")


def read_json(body: bytes) -> Any:
    """Parse a JSON body in which every number is finite, an int has 64 bits at most, every text is valid Unicode, and
    no key is repeated (I-JSON, RFC 7493).

    Raises `InvalidRequest` for any other body, and as `check_json` does.
    """
    check_json(body)
    reason = ""
    try:
        text = body.decode()
        hooks = {"parse_constant": _float, "parse_float": _float, "parse_int": _int, "object_pairs_hook": _object}
        content = json.loads(text, **hooks)  # type: ignore[arg-type]
        if _SURROGATES.search(body):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except UnicodeDecodeError as error:
        reason = f"must be in UTF-8, and byte {error.start} is not"
    except UnicodeEncodeError:
        reason = "must hold no half of a surrogate pair"
    except ValueError as error:
        reason = f"must be JSON: {error}"
    raise InvalidRequest("body", f"{len(body)} bytes", reason)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


def _int(text: str) -> int:
    number = int(text) if len(text) <= 20 else 1 << 64
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"{text[:40]} has more than 64 bits")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"{twice[:40]!r} is given twice")
    return content
