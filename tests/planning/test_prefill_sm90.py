"""Many new rows over pages and caches on the Hopper kernel, through the service on the emulated device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.prefill import CASES, KERNEL, Case, check_on
from emulated.contraction import arithmetic
from emulated.forward import problem_of
from inside.kernels import dispatch_key, explain

import gpu_actors as ga

MODES = (("late", "greedy"), ("eager", "lane"), ("random", "random"), ("late", "round_robin"))


def check(case: Case, mode: tuple[str, str]) -> None:
    emulation = ga.EmulationOptions(delivery=mode[0], schedule=mode[1], seed=3, arithmetic=arithmetic())  # type: ignore[arg-type]
    with ga.open_context("emulated", ga.ContextOptions(emulation=emulation)) as ctx:
        check_on(ctx, case)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_new_rows_agree_with_the_oracle(case: Case) -> None:
    check(case, MODES[len(str(case)) % 4])


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_new_rows_agree_with_the_oracle_in_all_modes(case: Case, mode: tuple[str, str]) -> None:
    check(case, mode)


class TestDispatch:
    Q = np.zeros((2, 100, 4, 64), np.float16)
    BASE = dataclasses.replace(
        problem_of(Q, Q[:, :, :2], Q[:, :, :2], causal=True),
        layout="paged",
        page_size=16,
        seqlen_k=1000,
        total_k=4096,
    )

    @pytest.mark.parametrize("page_size", [8, 16, 64, 128, 256, 1024])
    def test_it_takes_many_rows_over_pages_that_fit_its_tiles(self, page_size: int) -> None:
        problem = dataclasses.replace(self.BASE, page_size=page_size)
        assert dispatch_key(problem, "sm_90a").kernel == KERNEL
        assert dispatch_key(problem, "sm_80").kernel == "decode_mma"

    @pytest.mark.parametrize(
        ("changes", "kernel", "reason"),
        [
            ({"seqlen_q": 63}, "decode_sm90", "64 rows at a time"),
            ({"page_size": 48}, "decode_sm90", "divide"),
            ({"page_size": 4}, "decode_mma", "multiple of 8 keys"),
            ({"page_size": 1}, "decode_mma", "multiple of 8 keys"),
            ({"page_size": 96, "head_dim": 256, "head_dim_v": 256}, "decode_mma", "64 keys at a time"),
            ({"tree_mask": True, "causal": False}, "decode_sm90", "tree"),
            ({"num_splits": 4}, "decode_mma", "split"),
            ({"num_splits": 1, "varlen_q": True}, "decode_mma", "same bits"),
            ({"kv_dtype": "float8_e4m3fn"}, "decode_sm90", "one type"),
        ],
    )
    def test_others_go_to_the_kernels_that_decode(self, changes: dict[str, Any], kernel: str, reason: str) -> None:
        problem = dataclasses.replace(self.BASE, **changes)
        assert dispatch_key(problem, "sm_90a").kernel == kernel
        verdict = explain(problem, "sm_90a")[0]
        assert (verdict.family, verdict.taken) == (KERNEL, False)
        assert reason in verdict.reason


@pytest.fixture
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def test_a_key_for_pages_can_be_compiled_ahead(mock: ga.GpuContext) -> None:
    key = dispatch_key(TestDispatch.BASE, "sm_90a")
    (warmed,) = mock.nvrtc.warm([key]).result(100)
    assert warmed.cubin.resources[KERNEL].spill_bytes == 0
