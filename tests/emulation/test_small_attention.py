"""Attention end to end: cp.async and mma on sm_80, TMA, mbarriers and wgmma on sm_90a, right in every order."""

from __future__ import annotations

import dataclasses
import itertools
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kernel_runs import (
    KernelRun,
    Order,
    Place,
    TensorMapArgument,
    cuda_runner,
    emulated_module,
    launch_emulated,
    pointer,
)
from support.timing import below, median_seconds, yardsticks

from gpu_actors.devices.emulation import EmulatedModule, EmulationFault, Toolchain

Array = npt.NDArray[Any]
HEAD_DIM, TILE = 64, 64
GEOMETRY = {"attention_sm80": (128, 5 * 8192), "attention_sm90": (160, 5 * 8192 + 64)}  # threads, shared bytes
ORDERS = list(itertools.product(("late", "eager", "random"), ("round_robin", "greedy", "random", "lane"), (1, 2)))
SHAPES = [  # heads, seqlen_q, seqlen_k: whole tiles and not, one row, more key tiles than stages, rows without keys
    (2, 128, 128),
    (1, 70, 333),
    (3, 1, 65),
    (1, 200, 130),
]


@pytest.fixture(scope="module", params=list(GEOMETRY))
def kernel(request: pytest.FixtureRequest, module_cache: Path) -> tuple[str, EmulatedModule]:
    return request.param, emulated_module(f"{request.param}.cu", {}, module_cache)


class Problem:
    """Random operands, and what the oracle makes of them."""

    def __init__(self, heads: int, seqlen_q: int, seqlen_k: int, causal: bool = False) -> None:
        rng = np.random.default_rng(heads * 1000 + seqlen_q)
        self.shape, self.causal, self.scale = (heads, seqlen_q, seqlen_k), causal, 0.125
        self.q = rng.standard_normal((heads, seqlen_q, HEAD_DIM)).astype(np.float16)
        self.k, self.v = (rng.standard_normal((heads, seqlen_k, HEAD_DIM)).astype(np.float16) for _ in range(2))

    def run(self, name: str, bug: int = 0) -> KernelRun:
        heads, seqlen_q, seqlen_k = self.shape
        arrays = {"q": self.q, "k": self.k, "v": self.v}
        arrays["out"] = np.full_like(self.q, np.nan)
        arrays["lse"] = np.full((heads, seqlen_q), np.nan, np.float32)

        def tensor_map(place: Place, array: str, seqlen: int) -> bytes:
            shape, strides, box = (HEAD_DIM, seqlen, heads), (128, 128 * seqlen), (HEAD_DIM, TILE, 1)
            return place.tensor_map(TensorMapArgument(array, "float16", shape, strides, box, "128B"))

        def params(place: Place) -> list[bytes]:
            lengths = {"q": seqlen_q, "k": seqlen_k, "v": seqlen_k, "out": seqlen_q}
            maps = b"".join(tensor_map(place, array, seqlen) for array, seqlen in lengths.items())
            addresses = b"".join(pointer(place, array) for array in arrays)
            numbers = struct.pack("<4if", seqlen_q, seqlen_k, self.causal, bug, self.scale)
            return [(maps + addresses + numbers).ljust(576, b"\0")]

        threads, shared = GEOMETRY[name]
        grid = (-(-seqlen_q // TILE), heads)
        return KernelRun(f"{name}.cu", "attention", arrays, params, threads, grid, shared)

    def launch(self, name: str, module: EmulatedModule, order: Order, bug: int = 0) -> tuple[Array, Array]:
        result = launch_emulated(module, self.run(name, bug), order)
        return result["out"], result["lse"]

    def expected(self) -> tuple[Array, Array]:
        """float64; rows without a key give zeros and -inf."""
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        s = q @ k.swapaxes(1, 2) * self.scale
        if self.causal:
            s = np.where(np.tri(s.shape[1], s.shape[2], s.shape[2] - s.shape[1], dtype=bool), s, -np.inf)
        m = s.max(2, keepdims=True, initial=-np.inf)
        m = np.where(np.isinf(m), 0, m)
        p = np.exp(s - m)
        total = p.sum(2, keepdims=True)
        with np.errstate(divide="ignore"):
            return p @ v / np.where(total, total, 1), (m + np.log(total))[..., 0]

    def is_right(self, out: Array, lse: Array) -> bool:
        """Within 2 fp16 roundings of the output's size, and 1e-4 of the log-sum-exp."""
        want_out, want_lse = self.expected()
        bound = 2.0**-10 * (np.abs(self.v.astype(np.float64)).max() * 0.5 + np.abs(want_out))
        close = np.abs(out.astype(np.float64) - want_out) <= bound
        with np.errstate(invalid="ignore"):
            same = (np.abs(lse - want_lse) <= 1e-4) | (lse == want_lse)
        return bool(close.all() and same.all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_right_in_every_order(
    kernel: tuple[str, EmulatedModule], shape: tuple[int, int, int], causal: bool
) -> None:
    problem = Problem(*shape, causal)
    for order in ORDERS[causal::2]:
        assert problem.is_right(*problem.launch(*kernel, order)), order


BUGS = [("attention_sm80", bug) for bug in range(1, 5)] + [("attention_sm90", bug) for bug in range(1, 13)]


@pytest.mark.parametrize(("name", "bug"), BUGS)
def test_every_missing_piece_of_synchronisation_is_found(module_cache: Path, name: str, bug: int) -> None:
    module, problem = emulated_module(f"{name}.cu", {}, module_cache), Problem(1, 70, 333)
    assert any(is_found(problem, name, module, order, bug) for order in ORDERS)


def is_found(problem: Problem, name: str, module: EmulatedModule, order: Order, bug: int) -> bool:
    try:
        return not problem.is_right(*problem.launch(name, module, order, bug))
    except EmulationFault:
        return True


@pytest.mark.perf
def test_a_small_forward_takes_a_few_milliseconds(kernel: tuple[str, EmulatedModule]) -> None:
    """batch 1, 2 heads, 128 x 128, dim 64 within 90 yardsticks of processor time, which are 20 ms."""
    problem, clock = Problem(2, 128, 128), time.process_time

    def taken() -> float:
        return median_seconds(lambda: problem.launch(*kernel, ("late", "greedy", 0)), 11, clock)

    below(90, lambda: yardsticks(taken(), clock))


def test_zig_builds_the_same_kernel(module_cache: Path) -> None:
    module = emulated_module("attention_sm90.cu", {}, module_cache, Toolchain.find("zig"))
    problem = Problem(1, 70, 333, causal=True)
    for order in ORDERS[::5]:
        assert problem.is_right(*problem.launch("attention_sm90", module, order))
    with pytest.raises(EmulationFault, match="unfenced"):
        problem.launch("attention_sm90", module, ("late", "greedy", 0), bug=4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(GEOMETRY))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_right_on_a_gpu(name: str, shape: tuple[int, int, int], causal: bool) -> None:
    problem = Problem(*shape, causal)
    run = dataclasses.replace(problem.run(name), macros={"BUG": "0"})
    for result in cuda_runner()(run):
        assert problem.is_right(result["out"], result["lse"])
