"""What tests of other rooms take from inside `serving`."""

from gpu_actors.serving.protocol import Protocol
from gpu_actors.serving.traffic import OUTCOMES
from gpu_actors.serving.verdict import Verdict, verdict_of_workers
