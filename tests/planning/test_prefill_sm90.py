"""Many new rows over pages and caches on the Hopper kernel, through the service on the emulated device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases.prefill import CASES, KERNEL, Case, check_on
from emulated.contraction import arithmetic
from emulated.forward import problem_of
from inside.kernels import dispatch_key, explain

import gpu_actors as ga

MODES = (("late", "greedy"), ("eager", "lane"), ("random", "random"), ("late", "round_robin"))


RUNS = [
    pytest.param(case, mode, marks=[] if (case, mode) == (CASES[1], MODES[0]) else pytest.mark.sweep)
    for case in CASES
    for mode in MODES
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("case", "mode"), RUNS, ids=str)
def test_new_rows_agree_with_the_oracle(case: Case, mode: tuple[str, str]) -> None:
    emulation = ga.EmulationOptions(delivery=mode[0], schedule=mode[1], seed=3, arithmetic=arithmetic())  # type: ignore[arg-type]
    with ga.open_context("emulated", ga.ContextOptions(emulation=emulation)) as ctx:
        check_on(ctx, case)


Q = np.zeros((2, 100, 4, 64), np.float16)
BASE = dataclasses.replace(
    problem_of(Q, Q[:, :, :2], Q[:, :, :2], causal=True), layout="paged", page_size=16, seqlen_k=1000, total_k=4096
)


def test_it_takes_many_rows_over_pages_that_fit_its_tiles() -> None:
    for page_size in (8, 16, 64, 128, 256, 1024):
        problem = dataclasses.replace(BASE, page_size=page_size)
        assert dispatch_key(problem, "sm_90a").kernel == KERNEL, page_size
        assert dispatch_key(problem, "sm_80").kernel == "decode_mma"


@pytest.mark.parametrize(
    ("changes", "kernel", "reason"),
    [
        ({"seqlen_q": 63}, "decode_sm90", "64 rows at a time"),
        ({"page_size": 48}, "decode_sm90", "divide"),
        ({"page_size": 4}, "decode_mma", "multiple of 8 keys"),
        ({"page_size": 96, "head_dim": 256, "head_dim_v": 256}, "decode_mma", "64 keys at a time"),
        ({"tree_mask": True, "causal": False}, "decode_sm90", "tree"),
        ({"num_splits": 4}, "decode_mma", "split"),
        ({"num_splits": 1, "varlen_q": True}, "decode_mma", "same bits"),
        ({"kv_dtype": "float8_e4m3fn"}, "decode_sm90", "one type"),
    ],
)
def test_others_go_to_the_kernels_that_decode(changes: dict[str, Any], kernel: str, reason: str) -> None:
    problem = dataclasses.replace(BASE, **changes)
    assert dispatch_key(problem, "sm_90a").kernel == kernel
    verdict = explain(problem, "sm_90a")[0]
    assert (verdict.family, verdict.taken) == (KERNEL, False)
    assert reason in verdict.reason
