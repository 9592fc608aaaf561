"""The public names of `gpu_actors.server.metrics`."""

from gpu_actors.server import metrics as _room
from gpu_actors.server.metrics import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
