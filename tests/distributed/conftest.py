"""Pools of workers over each kind of channel."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

import gpu_actors as ga
from gpu_actors.distributed import ContextPool
from gpu_actors.remote import ChildProcess, Faults, Faulty, InProcess, RemoteContext, Workplace, open_remote

CHANNELS: dict[str, Callable[[], Workplace]] = {
    "direct": InProcess,
    "process": ChildProcess,
    "faulty": lambda: Faulty(Faults(seed=3)),
}
"""Where a worker runs. Ray actors join in tests/on_ray/test_ray_sharded.py, with the same cases."""


_PARAMS = [pytest.param(name, marks=pytest.mark.sweep if name == "faulty" else ()) for name in CHANNELS]


@pytest.fixture(scope="module", params=_PARAMS)
def three_workers(request: pytest.FixtureRequest) -> Iterator[dict[str, RemoteContext]]:
    """Three contexts over each channel. For tests that do them no harm."""
    with contextlib.ExitStack() as stack:
        names = ("one", "two", "three")
        workplace = CHANNELS[request.param]
        yield {name: stack.enter_context(open_remote("mock", workplace=workplace(), name=name)) for name in names}


@pytest.fixture
def pool_of_three(three_workers: dict[str, RemoteContext]) -> ContextPool:
    """A pool over them."""
    return ContextPool(three_workers, seed=0)


@pytest.fixture
async def whole() -> AsyncIterator[ga.GpuContext]:
    """The one context that answers are compared with."""
    async with ga.open_context("mock") as ctx:
        yield ctx
