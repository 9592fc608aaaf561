"""What tests of other rooms take from inside `embedding`."""

from gpu_actors.embedding import passages
