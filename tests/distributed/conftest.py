"""Pools of workers over each kind of channel."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, open_pool
from gpu_actors.remote import ChildProcess, InProcess

CHANNELS: dict[str, Callable[..., AbstractAsyncContextManager[ContextPool]]] = {
    "direct": lambda **options: open_pool("mock", workplace=InProcess, seed=0, **options),
    "process": lambda **options: open_pool("mock", workplace=ChildProcess, seed=0, **options),
}
"""Each opens a pool of so many ``workers`` on the mock device. A channel of another package joins by one more entry."""


@pytest.fixture(params=CHANNELS)
async def pool_of_three(request: pytest.FixtureRequest) -> AsyncIterator[ContextPool]:
    """Three workers over each channel."""
    options: dict[str, Any] = {"workers": 3}
    async with CHANNELS[request.param](**options) as pool:
        yield pool


@pytest.fixture
async def whole() -> AsyncIterator[ga.GpuContext]:
    """The one context that answers are compared with."""
    async with ga.open_context("mock") as ctx:
        yield ctx
