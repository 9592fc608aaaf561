"""The public names of `gpu_actors.server.http.collector`."""

from gpu_actors.server.http import collector as _room
from gpu_actors.server.http.collector import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
