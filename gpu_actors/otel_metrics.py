"""The public names of `gpu_actors.server.otel_metrics`."""

from gpu_actors.server import otel_metrics as _room
from gpu_actors.server.otel_metrics import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
