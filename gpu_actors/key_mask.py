"""The public names of `gpu_actors.attention.key_mask`."""

from gpu_actors.attention import key_mask as _room
from gpu_actors.attention.key_mask import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
