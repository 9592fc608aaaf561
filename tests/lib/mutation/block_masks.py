"""Runs a bug of block_mask_mutants.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from mutation.block_mask_mutants import BlockMutant

import gpu_actors as ga
from gpu_actors.compiling.source import KernelSource
from gpu_actors.devices.emulation import EmulationFault
from gpu_actors.kernels import variants

__all__ = ["assert_caught"]


def assert_caught(mutant: BlockMutant, checks: Mapping[str, Callable[..., None]], patch: pytest.MonkeyPatch) -> None:
    """Seeds a bug into the kernels, and wants its check to fail.

    checks: by probe, of a context on Hopper or on sm_80.
    """
    found: list[str] = []

    def seeded(name: str, text: str) -> str:
        if name != mutant.file or mutant.old not in text:
            return text
        found.append(name)
        return text.replace(mutant.old, mutant.new)

    def changed(key: Any) -> KernelSource:
        source = kernel_source(key)
        headers = {name: seeded(name, text) for name, text in source.headers.items()}
        return dataclasses.replace(source, source=seeded("", source.source), headers=headers)

    kernel_source = variants.kernel_source
    patch.setattr("gpu_actors.actors.nvrtc.kernel_source", changed)
    caught = False
    try:
        arch = "sm_90a" if "hopper" in mutant.probe else "sm_80"
        with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
            checks[mutant.probe](ctx, patch)
    except (AssertionError, EmulationFault, ga.LaunchError):
        caught = True
    assert found, f"{mutant.file} has no {mutant.old!r}"
    assert caught
