"""Runs a bug of block_mask_mutants.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from mutation.block_mask_mutants import BlockMutant
from mutation.seeding import caught

import gpu_actors as ga

__all__ = ["assert_caught"]


def assert_caught(mutant: BlockMutant, checks: Mapping[str, Callable[..., None]], patch: pytest.MonkeyPatch) -> None:
    """Seeds a bug into the kernels, and wants its check to fail.

    checks: by probe, of a context on Hopper or on sm_80.
    """
    arch = "sm_90a" if "hopper" in mutant.probe else "sm_80"
    with caught(mutant, patch), ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        checks[mutant.probe](ctx, patch)
