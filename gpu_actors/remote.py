"""The public names of `gpu_actors.distributed.remote`."""

from gpu_actors.distributed import remote as _room
from gpu_actors.distributed.remote import *  # noqa: F403

__all__ = []
__all__ += _room.__all__
