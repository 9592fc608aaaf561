"""Attention of a few new rows to a paged cache on a GPU: ``gpu-actors bench decode``."""

from __future__ import annotations

from functools import partial

from gpu_actors.bench.cases import decode_cases
from gpu_actors.bench.stage import run_suite

__all__ = ["run"]

run = partial(run_suite, "decode", decode_cases)
