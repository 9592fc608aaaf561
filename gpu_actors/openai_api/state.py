"""State: what the endpoints of one application share."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from gpu_actors.openai_api.models import Models
from gpu_actors.openai_api.settings import ServeSettings
from gpu_actors.serving.admission import Admission
from gpu_actors.serving.leaving import Farewell

__all__ = ["State"]


@dataclass(slots=True)
class State:
    """admission: of texts. embedding: of requests for embeddings. readers: bodies and prompts that are read at once.

    farewell: the waits of both, which end once the server leaves.
    """

    settings: ServeSettings
    admission: Admission
    embedding: Admission
    models: Models = field(default_factory=Models)
    readers: anyio.CapacityLimiter | None = None
    farewell: Farewell = field(default_factory=Farewell)
