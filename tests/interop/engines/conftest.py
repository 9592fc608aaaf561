"""Contexts of the engines' doors. Each file has a fixture ``door``, the module of its engine."""

from __future__ import annotations

import importlib
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
    """A context for this test's engine alone."""
    yield from _used(door, opened)


@pytest.fixture
def mock(door: Any) -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield from _used(door, ctx)


def _used(door: Any, context: ga.GpuContext) -> Iterator[ga.GpuContext]:
    door.register(context)
    yield context
    importlib.import_module("gpu_actors.interop.paged").use_context(None)  # needs torch, as a door does
