"""What tests of other rooms take from inside `isolation`."""

from gpu_actors.isolation.context import IsolatedContext
from gpu_actors.isolation.launcher import Received
from gpu_actors.isolation.pipe import PipeChannel
