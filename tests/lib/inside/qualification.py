"""What tests of other rooms take from inside `qualification`."""

from gpu_actors.qualification.experiment import ProofFailed
from gpu_actors.qualification.experiments import experiments_of, is_proved
