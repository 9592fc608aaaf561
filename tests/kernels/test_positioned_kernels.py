"""Gradients of rows and keys with positions in a larger problem, and which of them take no turns."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.positions import ALL, PLACES, SLOPES

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.testing import check_gradients

OPTIONS: dict[str, dict[str, Any]] = {
    "all": ALL,
    "window": {"window_size": (40, 25)},
    "causal": {"causal": True},
    "no dropout": {name: value for name, value in ALL.items() if not name.startswith("dropout")},
    "softcap": {"causal": True, "softcap": 3.0, "alibi_slopes": SLOPES},
}
USUAL = (("sm_80", "all"), ("sm_90a", "no dropout"))


def operands(dtype: Any, rows: int = 70, keys: int = 90, dim: int = 32) -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(0)
    shapes = [(2, rows, 4), (2, keys, 2), (2, keys, 2), (2, rows, 4)]
    return [rng.standard_normal((*shape, dim)).astype(dtype) for shape in shapes]


def check(ctx: ga.GpuContext, q: Any, k: Any, v: Any, dout: Any, deterministic: bool = False, **options: Any) -> str:
    """The kernel, once its gradients agree with the oracle's. The matrix's rows PLACED check forward kernels."""
    with ga.open_context("mock") as mock:
        answer = mock.flash_attn.forward(q, k, v, return_lse=True, **options).result(60)
    given = {"out": answer.out, "lse": answer.lse, **options}
    request = ga.FlashBackward(q=q, k=k, v=v, dout=dout, deterministic=deterministic, **given)
    check_gradients(ctx.flash_attn.submit(request).result(300), dout, q, k, v, **given)
    return ctx.flash_attn.inspect_key(request).kernel


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        pytest.param(*case, marks=[pytest.mark.sweep] * (case not in USUAL))
        for case in itertools.product(("sm_80", "sm_90a"), OPTIONS)
    ],
)
def test_gradients_are_the_oracles(arch: str, name: str) -> None:
    rows, keys, dim = (70, 90, 32) if arch == "sm_80" else (150, 300, 64)
    arrays = operands(ml_dtypes.bfloat16, rows, keys, dim)
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        kernels = {check(ctx, *arrays, **OPTIONS[name], **places) for places in PLACES.values()}
    assert kernels == {"backward_mma" if arch == "sm_80" else "backward_sm90"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_steps_of_rows_and_a_window_take_no_turns(arch: str) -> None:
    """A tile of rows may list a tile of keys that none of its rows sees, and would wait for it forever."""
    fields: dict[str, Any] = {"direction": "backward", "deterministic": True, "window_size": (8, 8)}
    with pytest.raises(ga.Unsupported) as caught:
        dispatch_key(example_problem("bfloat16", 64, q_positions=2, k_positions=2, **fields), arch)
    assert (caught.value.field, caught.value.nearest) == ("deterministic", False)
    assert dispatch_key(example_problem("bfloat16", 64, q_positions=1, k_positions=2, **fields), arch).deterministic
    without_window = fields | {"window_size": (-1, -1), "causal": True}
    assert dispatch_key(example_problem("bfloat16", 64, q_positions=2, **without_window), arch).deterministic


@pytest.mark.timeout(600)
def test_blocks_take_turns_over_keys_that_stand_apart() -> None:
    places = {"q_positions": np.array([100, 300], np.int32), "k_positions": np.array([[0, 5], [1, 3]], np.int32)}
    options = {"window_size": (3, 2), "sink_tokens": 30, **places}
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        check(ctx, *operands(ml_dtypes.bfloat16, 150, 200), deterministic=True, **options)


@pytest.mark.timeout(600)
def test_packed_sequences_of_which_one_has_no_rows() -> None:
    ends = {"cu_seqlens_q": np.array([0, 30, 30, 70], np.int32), "cu_seqlens_k": np.array([0, 50, 60, 90], np.int32)}
    at = {name: np.array([[3, 2], [0, 1], [40, 1]], np.int32) for name in ("q_positions", "k_positions")}
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        check(ctx, *(x[0] for x in operands(np.float16)), causal=True, window_size=(30, 0), **ends, **at)
