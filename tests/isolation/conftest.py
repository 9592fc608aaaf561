"""Contexts in child processes, shared by tests that leave them unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.fault_injector import FailingActor, FaultInjector

import gpu_actors as ga

ACTORS = (FaultInjector, FailingActor)


@pytest.fixture(scope="module")
def isolated() -> Iterator[ga.GpuContext]:
    """A mock context in a child process, for tests that leave it usable."""
    with ga.open_context("mock", ga.ContextOptions(actors=ACTORS), isolation="process") as ctx:
        yield ctx


@pytest.fixture(scope="module")
def direct() -> Iterator[ga.GpuContext]:
    """The same context in this process."""
    with ga.open_context("mock", ga.ContextOptions(actors=ACTORS)) as ctx:
        yield ctx
