from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import gpu_actors as ga

DEVICE = os.environ.get("GPU_ACTORS_TEST_DEVICE", "cuda")
"""GPU_ACTORS_TEST_DEVICE=emulated rehearses the tests that need no memory or streams of a GPU."""


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    # The tests compare each answer with the oracle themselves.
    with ga.open_context(DEVICE, ga.ContextOptions(qualify="off")) as ctx:
        yield ctx
