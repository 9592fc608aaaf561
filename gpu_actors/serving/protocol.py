"""The public names of `gpu_actors.server.http.protocol`."""

from gpu_actors.server.http import protocol as _room
from gpu_actors.server.http.protocol import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
