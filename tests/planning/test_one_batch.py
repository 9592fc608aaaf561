"""Operands of one sequence that stand for those of every sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from inside.arrays import DeviceArray

import gpu_actors as ga
from gpu_actors.planning.forward import broadcast_batch

SHARED = (("q",), ("k", "v"), ("k",), ("q", "v"))


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def operands(shared: tuple[str, ...], dtype: Any = np.float16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": (33, 4, 64), "k": (40, 2, 64), "v": (40, 2, 64)}
    return {name: rng.standard_normal((1 if name in shared else 3, *own)).astype(dtype) for name, own in shapes.items()}


def check(ctx: ga.GpuContext, shared: tuple[str, ...]) -> None:
    """The bits of a request that repeats them."""
    given = operands(shared)
    whole = {name: np.ascontiguousarray(np.broadcast_to(one, (3, *one.shape[1:]))) for name, one in given.items()}
    for _ in range(2):  # the second finds the plan of the first
        found = ctx.flash_attn.forward(**given, causal=True, return_lse=True).result(120)
        wanted = ctx.flash_attn.forward(**whole, causal=True, return_lse=True).result(120)
        assert found.out.shape == (3, 33, 4, 64)
        np.testing.assert_allclose(found.out.astype(np.float32), wanted.out.astype(np.float32), atol=2e-3)
        np.testing.assert_allclose(found.lse, wanted.lse, atol=1e-4)


def test_nothing_is_copied() -> None:
    given = operands(("k",))
    k = broadcast_batch(ga.FlashForward(**given)).k
    assert (k.shape, k.strides[0], np.shares_memory(k, given["k"])) == ((3, 40, 2, 64), 0, True)
    array = DeviceArray(1 << 20, (1, 40, 2, 64), (10240, 256, 128, 2), np.dtype(np.float16), 0)
    q = DeviceArray(1 << 21, (3, 33, 4, 64), (16896, 512, 128, 2), np.dtype(np.float16), 0)
    request = broadcast_batch(ga.FlashForward(q, array, given["v"]))
    assert request.q is q, "which has every sequence"
    on_device = request.k
    assert (on_device.address, on_device.shape, on_device.strides) == (1 << 20, (3, 40, 2, 64), (0, 256, 128, 2))


def test_a_key_is_that_of_the_whole_batch(mock: ga.GpuContext) -> None:
    assert mock.flash_attn.inspect_key(ga.FlashForward(**operands(("k", "v")))).layout == "dense"


def test_what_is_no_batch_of_one_is_refused(mock: ga.GpuContext) -> None:
    given = operands(())
    for name in ("k", "v"):
        with pytest.raises(ga.InvalidRequest, match="must have q's batch, 3") as refused:
            mock.flash_attn.forward(**{**given, name: given[name][:2]}).result(10)
        assert refused.value.field == name


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("shared", SHARED, ids="".join)
def test_kernels_read_one_for_all(shared: tuple[str, ...], arch: str) -> None:
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        check(ctx, shared)
