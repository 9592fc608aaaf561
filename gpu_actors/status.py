"""The public names of `gpu_actors.server.status`."""

from gpu_actors.server import status as _room
from gpu_actors.server.status import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
