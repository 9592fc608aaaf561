"""Contexts that stay open for all examples of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import gpu_actors as ga


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    """A function that returns the one context of a device and an architecture."""
    known: dict[tuple[str, str], ga.GpuContext] = {}
    with contextlib.ExitStack() as stack:

        def find(device: str, arch: str) -> ga.GpuContext:
            if (device, arch) not in known:
                known[device, arch] = stack.enter_context(ga.open_context(device, ga.ContextOptions(arch=arch)))
            return known[device, arch]

        yield find
        for ctx in known.values():
            assert ctx.flash_attn.restarts == ctx.cudnn.restarts == 0
