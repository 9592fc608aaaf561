"""What tests of other rooms take from inside `validation`."""

from gpu_actors.validation.forward import forward_problem
from gpu_actors.validation.paged import check_bias, own_positions, paged_problem
