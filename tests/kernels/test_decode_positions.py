"""Decode kernels whose rows and keys have positions in a larger problem: how they are launched and compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch
from emulated.decode import DecodeCase, check_results, key_of, problem_of
from support.gate import code_faults, code_of, kernel_source, register_limit

import gpu_actors as ga
from gpu_actors.kernels.decode_mma import decode_keys
from gpu_actors.kernels.dispatch import program_of
from gpu_actors.kernels.key_checks import check_key
from gpu_actors.kernels.program import Target
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.variants import block_threads


def placed() -> DecodeCase:
    options = {
        "causal": True,
        "window_size": (90, 0),
        "sink_tokens": 200,
        "alibi_slopes": np.array([0.03, 0.1, 0.01, 0.0], np.float32),
        "q_positions": np.array([[500, 3], [9, 1], [7, 2], [1400, 1]], np.int32),
        "k_positions": np.array([[1, 4], [0, 1], [3, 2], [0, 2]], np.int32),
    }
    return DecodeCase(random_batch(4, (300, 0, 5, 700), rows=5, heads=(4, 2), dim=32, dtype="float16"), options=options)


def test_the_device_splits_the_work_of_rows_with_positions() -> None:
    """The host counts visible tiles by row index, which ignores positions."""
    problem = problem_of(placed(), placed().operands())
    program = program_of(problem, key_of(problem, "sm_80"), Target(3, lengths_on_host=True))
    assert program.split is None
    assert [key.kernel for key in program.keys] == ["decode_plan", "decode_mma", "decode_combine"]
    assert all(key.positions for key in program.keys)


@pytest.mark.timeout(180)
def test_a_service_request_reaches_the_kernels() -> None:
    """The request goes through the actor, with several sequences."""
    case = placed()
    pages = case.batch.pages(16, 4)
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        request = {**case.options, "cache_seqlens": case.batch.lengths, "block_table": pages.block_table}
        answer = ctx.flash_attn.paged_forward(case.q, pages.k, pages.v, **request, return_lse=True).result(300)
    check_results(case, answer.out, answer.lse)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_kernel_of_a_launch_is_compiled_for_positions(arch: str) -> None:
    problem = example_problem("bfloat16", 64, layout="cache", k_positions=2, causal=True)
    key = key_of(problem, arch)
    check_key(key)
    for part in decode_keys(problem, key, planned=False):
        assert kernel_source(part).macros["POSITIONS"] == "1"
        plain = dataclasses.replace(part, positions=False)
        assert "POSITIONS" not in kernel_source(plain).macros


@pytest.mark.timeout(120)
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.sweep)])
def test_ptxas_spills_nothing(arch: str) -> None:
    fields: dict[str, Any] = {"layout": "paged", "page_size": 64, "seqlen_q": 4, "total_q": 4, "heads_q": 4}
    fields |= {"causal": True, "window_size": (90, 0), "sink_tokens": 4, "alibi": "heads"}
    problem = example_problem("bfloat16", 128, q_positions=2, k_positions=2, **fields)
    key = key_of(problem, arch)
    code = code_of(kernel_source(key), key.kernel)
    assert code_faults(code, register_limit(block_threads(key), 1)) == []
