"""What tests of other rooms take from inside `bench`."""

from gpu_actors.bench import bridge, imports, peers, plan
from gpu_actors.bench.arrays import HostArrays
from gpu_actors.bench.cases import Case, first_cases
from gpu_actors.bench.ceilings import Ceilings
from gpu_actors.bench.peers import Peer, Prepared, Refuses, agrees
from gpu_actors.bench.plan import problem_of
from gpu_actors.bench.recorder import RecordingContext, RecordingDevice
from gpu_actors.bench.serve import measure
from gpu_actors.bench.suite import KERNEL, Row, Stage
from gpu_actors.bench.timing import Plan, quantiles
