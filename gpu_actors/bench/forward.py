"""Forward attention on a GPU: ``gpu-actors bench forward``."""

from __future__ import annotations

from functools import partial

from gpu_actors.bench.cases import forward_cases
from gpu_actors.bench.stage import run_suite

__all__ = ["run"]

run = partial(run_suite, "forward", forward_cases)
