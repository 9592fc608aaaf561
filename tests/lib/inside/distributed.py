"""What tests of other rooms take from inside `distributed`."""

from gpu_actors.distributed.parts import host_operands
