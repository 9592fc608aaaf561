"""What tests of other rooms take from inside `testing`."""

from gpu_actors.testing.problems import DTYPES, FEATURES, HEADS, INPUT_KINDS, SEQLENS, cast
