"""Contexts that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gpu_actors as ga


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == ctx.cudnn.restarts == 0, "a request cost an actor its life"


@pytest.fixture(scope="module")
def emulated() -> Iterator[ga.GpuContext]:
    with ga.open_context("emulated") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == ctx.cudnn.restarts == 0, "a request cost an actor its life"
