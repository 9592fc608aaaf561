"""What tests of other rooms take from inside `server`."""

from gpu_actors.server.http.protocol import Protocol
from gpu_actors.server.http.readiness import Readiness, readiness_of_workers
from gpu_actors.server.http.traffic import OUTCOMES
from gpu_actors.server.openai.state import State
from gpu_actors.server.status import history
from gpu_actors.server.status.history import SLOT
