"""What tests of other rooms take from inside `handles`."""

from gpu_actors.handles import gpu_context
from gpu_actors.handles.gpu_context import start_context
