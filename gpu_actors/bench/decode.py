"""Attention of a few new rows to a paged cache on a GPU: ``gpu-actors bench decode``."""

from __future__ import annotations

from typing import Any

from gpu_actors.bench.cases import decode_cases
from gpu_actors.bench.stage import Keep, run_suite

__all__ = ["run"]


def run(
    device: str = "auto", quick: bool = False, minutes: float | None = None, keep: Keep | None = None
) -> dict[str, Any]:
    """See `run_suite`."""
    return run_suite("decode", decode_cases, device, quick, minutes, keep)
