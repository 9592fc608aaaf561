"""The public names of `gpu_actors.server.openai`."""

from gpu_actors.server import openai as _room
from gpu_actors.server.openai import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
