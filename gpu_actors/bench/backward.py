"""Attention's gradients on a GPU: ``gpu-actors bench backward``."""

from __future__ import annotations

from functools import partial

from gpu_actors.bench.cases import backward_cases
from gpu_actors.bench.stage import run_suite

__all__ = ["run"]

run = partial(run_suite, "backward", backward_cases)
