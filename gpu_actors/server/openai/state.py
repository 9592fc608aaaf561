"""State: what the endpoints of one application share."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from gpu_actors.server.http.admission import Admission
from gpu_actors.server.http.shutdown import Farewell
from gpu_actors.server.openai.models import Models
from gpu_actors.server.openai.settings import ServeSettings

__all__ = ["State"]

_LARGE = 1 << 16
"""Bytes or characters. A body or a prompt up to this size is read in a few milliseconds."""


@dataclass(slots=True)
class State:
    """What the endpoints share.

    admission: the admission of texts.
    embedding: the admission of requests for embeddings.
    readers: bounds how many bodies and prompts are read at once.
    slow_readers: the same for large ones, so that no small one waits for them.
    farewell: the waits that end when the server shuts down.
    """

    settings: ServeSettings
    admission: Admission
    embedding: Admission
    models: Models = field(default_factory=Models)
    readers: anyio.CapacityLimiter | None = None
    slow_readers: anyio.CapacityLimiter | None = None
    farewell: Farewell = field(default_factory=Farewell)

    def readers_of(self, size: int) -> anyio.CapacityLimiter | None:
        """The limiter for a body or a prompt of this size, in bytes or characters."""
        return self.readers if size <= _LARGE else self.slow_readers
