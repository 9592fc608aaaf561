"""Contexts that an engine's door computes with. Each file has a fixture ``door``, the module of its engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import gpu_actors as ga


@pytest.fixture(params=["mock", "emulated"], scope="module")
def opened(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    with ga.open_context(request.param) as ctx:
        yield ctx


@pytest.fixture
def ctx(opened: ga.GpuContext, door: Any) -> Iterator[ga.GpuContext]:
    """A context that the engine of this test uses, and no other test's."""
    door.register(opened)
    yield opened
    door.register(None)


@pytest.fixture
def mock(door: Any) -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        door.register(ctx)
        yield ctx
        door.register(None)
