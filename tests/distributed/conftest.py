"""Pools of workers over each kind of channel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

import gpu_actors as ga
from gpu_actors.distributed import ContextPool
from gpu_actors.remote import ChildProcess, Faults, Faulty, InProcess, RemoteContext, Workplace, open_remote

CHANNELS: dict[str, Callable[[], Workplace]] = {"process": ChildProcess, "faulty": lambda: Faulty(Faults(seed=3))}
"""Where a worker runs. Ray actors join in tests/on_ray/test_ray_sharded.py, with the same cases."""


@contextlib.contextmanager
def _workers(count: int, workplace: Callable[[], Workplace]) -> Iterator[dict[str, RemoteContext]]:
    with contextlib.ExitStack() as stack:
        names = ("one", "two", "three", "four")[:count]
        yield {name: stack.enter_context(open_remote("mock", workplace=workplace(), name=name)) for name in names}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.sweep if name == "faulty" else ()) for name in CHANNELS],
)
def three_workers(request: pytest.FixtureRequest) -> Iterator[dict[str, RemoteContext]]:
    """Three contexts over each channel. For tests that do not damage them."""
    with _workers(3, CHANNELS[request.param]) as workers:
        yield workers


@pytest.fixture
def pool_of_three(three_workers: dict[str, RemoteContext]) -> ContextPool:
    """A pool over `three_workers`."""
    return ContextPool(three_workers, seed=0)


@pytest.fixture(scope="module")
def in_threads() -> Iterator[dict[str, RemoteContext]]:
    """Four contexts in threads of this process. For tests that do not damage them."""
    with _workers(4, InProcess) as workers:
        yield workers


@pytest.fixture
def pool_of(in_threads: dict[str, RemoteContext]) -> Callable[[int], ContextPool]:
    """Returns a new pool over some of them."""
    return lambda count: ContextPool(dict(list(in_threads.items())[:count]), seed=0)


@pytest.fixture
def pool(pool_of: Callable[[int], ContextPool]) -> ContextPool:
    """A pool over three of them."""
    return pool_of(3)


@pytest.fixture(scope="module")
def whole() -> Iterator[ga.GpuContext]:
    """The single context with which answers are compared."""
    with ga.open_context("mock") as ctx:
        yield ctx
