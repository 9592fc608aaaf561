"""Forward attention on a GPU: ``gpu-actors bench forward``."""

from __future__ import annotations

from typing import Any

from gpu_actors.bench.cases import forward_cases
from gpu_actors.bench.stage import Keep, run_suite

__all__ = ["run"]


def run(
    device: str = "auto", quick: bool = False, minutes: float | None = None, keep: Keep | None = None
) -> dict[str, Any]:
    """See `run_suite`."""
    return run_suite("forward", forward_cases, device, quick, minutes, keep)
