"""Bodies: bounds on what clients send, one by one and together."""

from __future__ import annotations

from gpu_actors.errors import GpuActorsError, Overloaded
from gpu_actors.fields import duration, integer

__all__ = ["Bodies", "BodyTooLarge", "BodyTooSlow", "TooManyBodies"]


class BodyTooLarge(GpuActorsError):
    """More bytes than one request may have."""


class BodyTooSlow(GpuActorsError):
    """The body did not arrive in time."""


class TooManyBodies(Overloaded):
    """The bodies of all requests together are too large."""


class Bodies:
    """Bounds on the bodies of requests. For the tasks of one event loop.

    max_bytes: of one body.
    max_held_bytes: of all bodies that are being read or are not answered yet.
    seconds: how long a client may take to send its body, whatever its deadline is. Time in which the server does not
        read is not counted.
    held_bytes: of all bodies now.

    Raises `InvalidRequest` for a bound that is not over 0.
    """

    def __init__(self, *, max_bytes: int = 16 << 20, max_held_bytes: int = 256 << 20, seconds: float = 30.0) -> None:
        self.max_bytes: int = integer("max_bytes", max_bytes, 1)
        self.max_held_bytes: int = integer("max_held_bytes", max_held_bytes, 1)
        self.seconds: float = duration("seconds", seconds, above_0=True)
        self.held_bytes: int = 0

    def check(self, announced: int) -> None:
        """Raise `BodyTooLarge` for a body of so many bytes that is too large."""
        if announced > self.max_bytes:
            raise BodyTooLarge(f"the body may have {self.max_bytes} bytes")

    def hold(self, held: int, more: int) -> None:
        """Hold more bytes of a body of which ``held`` bytes are held. Raises `BodyTooLarge` or `TooManyBodies`."""
        self.check(held + more)
        if self.held_bytes + more > self.max_held_bytes:
            raise TooManyBodies("the bodies under way are too large together")
        self.held_bytes += more

    def let_go(self, held: int) -> None:
        """Release the bytes that a request held."""
        self.held_bytes -= held
