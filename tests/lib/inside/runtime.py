"""What tests of other rooms take from inside `runtime`."""

from gpu_actors.runtime.completion import Completion
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.meter import SECONDS, Histogram
from gpu_actors.runtime.progress import Progress
from gpu_actors.runtime.waking import Outbox
