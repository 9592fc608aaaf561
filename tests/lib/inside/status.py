"""What tests of other rooms take from inside `status`."""

from gpu_actors.status import clients
from gpu_actors.status.history import SLOT
