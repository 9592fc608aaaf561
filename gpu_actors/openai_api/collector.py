"""The public names of `gpu_actors.server.openai.collector`."""

from gpu_actors.server.openai import collector as _room
from gpu_actors.server.openai.collector import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
