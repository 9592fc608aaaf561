"""What tests of other rooms take from inside `cli`."""

from gpu_actors.cli.bench import _suites
