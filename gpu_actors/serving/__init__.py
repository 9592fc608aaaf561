"""The public names of `gpu_actors.server.http`."""

from gpu_actors.server import http as _room
from gpu_actors.server.http import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
