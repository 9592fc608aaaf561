"""The public names of `gpu_actors.server.asgi`."""

from gpu_actors.server import asgi as _room
from gpu_actors.server.asgi import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
