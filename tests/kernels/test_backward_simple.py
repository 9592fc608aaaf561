"""The plain backward kernel on the CPU against the float64 oracle: every option, precision and head dim, the edges."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulated.backward import backward_problem_of, check_case, run_case
from emulated.forward import key_of
from emulated.gradients import (
    answered,
    case_of,
    check,
    check_empty_sequences,
    check_float16_range,
    check_lse_gradient,
    check_padded_views,
    check_sequences_longer_than_said,
    operands_of,
)
from emulated.sweeps import LAUNCHES, Sweep, assert_same_bits, launch_of
from support.gate import code_faults, code_of, register_limit

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.testing import check_gradients

# Every option alone or in company, every row of the tile table, both layouts and alignments, every dtype.
SWEEPS = (
    Sweep("float32", 20, None, "causal sinks bias dropout softcap alibi", arch="sm_80", usual=True),
    Sweep("float64", 64, 33, "window sink_tokens sinks", arch="sm_80", varlen=True, top_left=True, usual=True),
    Sweep("float64", 136, None, "causal bias", arch="sm_86"),
    Sweep("float64", 256, None, "", arch="sm_86"),
    Sweep("float64", 5, 65, "causal window sink_tokens softcap dropout", arch="sm_90a", varlen=True),
    Sweep("float32", 128, None, "window alibi dropout sinks", arch="sm_80", varlen=True, top_left=True),
    Sweep("float32", 160, None, "causal window sink_tokens bias scale", arch="sm_86"),
    Sweep("float32", 256, 3, "causal sinks alibi", arch="sm_90a"),
    Sweep("float32", 64, None, "causal", compute="tf32", arch="sm_80"),
    Sweep("bfloat16", 17, None, "causal dropout bias", arch="sm_80"),
    Sweep("float16", 100, 36, "window softcap sinks", arch="sm_86", varlen=True),
)
SHAPES = ((1, 1), (33, 95), (70, 31))
LARGER = ((113, 203), (31, 300), (130, 7))
LAUNCH: dict[str, Any] = {"arch": "sm_80", "kernel": "backward_simple"}


def check_sweep(sweep: Sweep, shapes: tuple[tuple[int, int], ...]) -> None:
    number = SWEEPS.index(sweep)
    for index, seqlens in enumerate(shapes):
        heads = ((6, 2), (3, 1), (2, 2))[index % 3]
        case = case_of(sweep, 3000 + 100 * number + index, seqlens, batch=1 + index % 3, heads=heads)
        given: dict[str, Any] = {"compute": sweep.compute, "arch": sweep.arch, "kernel": "backward_simple"}
        check_case(case, seed=index, limit_seconds=600.0, **given, **launch_of(5 * index + number))


@pytest.mark.parametrize("sweep", [sweep for sweep in SWEEPS if sweep.usual], ids=str)
def test_it_agrees_with_the_oracle_whatever_the_schedule(sweep: Sweep) -> None:
    check_sweep(sweep, SHAPES)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_it_agrees_with_the_oracle_on_the_whole_grid(sweep: Sweep) -> None:
    check_sweep(sweep, (*SHAPES, *LARGER))


def test_a_bias_that_sequences_heads_or_rows_share_gets_the_sum_of_theirs() -> None:
    case = case_of(SWEEPS[0], 9, (40, 50), batch=2, heads=(2, 1))
    whole = np.broadcast_to(case.options["bias"], (2, 2, 40, 50))
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        for shape in ((1, 2, 40, 50), (2, 1, 40, 50), (1, 1, 1, 50), (2, 2, 1, 50)):
            shared = np.ascontiguousarray(whole[tuple(slice(extent) for extent in shape)])
            each = answered(case, case.options | {"bias": shared})
            gradients = ctx.flash_attn.backward(*each.inputs, **each.options).result(60.0)
            assert gradients.dbias.shape == shape
            check_gradients(gradients, *each.arguments, out=each.out, lse=each.lse, **each.options)


def test_a_mask_hides_keys_and_has_no_gradient() -> None:
    case = case_of(SWEEPS[0], 9, (40, 50), batch=2, heads=(2, 1))
    mask = np.random.default_rng(0).random((2, 1, 40, 50)) > 0.4
    each = answered(case, {"causal": True, "bias": mask})
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        gradients = ctx.flash_attn.backward(*each.inputs, **each.options).result(60.0)
    assert gradients.dbias is None
    check_gradients(gradients, *each.arguments, out=each.out, lse=each.lse, **each.options)


def test_positions_chunks_signed_slopes_and_dropout_mean_the_same_pairs_as_in_the_oracle() -> None:
    options: dict[str, Any] = {
        "attention_chunk": 16,
        "alibi_slopes": np.array([-0.2, 0.1, 0.3, 0.05], np.float32),
        "alibi_signed": True,
        "dropout_p": 0.3,
        "dropout_seed": 5,
        "q_positions": np.array([[3, 2], [20, 3]], np.int32),
        "k_positions": np.array([[0, 2], [2, 1]], np.int32),
    }
    case = answered(case_of(SWEEPS[0], 9, (37, 45), batch=2, heads=(4, 2)), options)
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        gradients = ctx.flash_attn.backward(*case.inputs, **case.options).result(60.0)
    check_gradients(gradients, *case.arguments, out=case.out, lse=case.lse, **case.options)


def test_every_schedule_gives_the_same_bits() -> None:
    case = case_of(SWEEPS[0], 5, (70, 90), batch=2, heads=(4, 2))
    given: dict[str, Any] = {"arch": SWEEPS[0].arch, "kernel": "backward_simple", "arithmetic": "nearest"}
    results = [run_case(case, seed=seed, **launch_of(seed), **given) for seed in range(len(LAUNCHES))]
    assert_same_bits([(each.dq, each.dk, each.dv, each.dbias, each.dsinks) for each in results])


class TestEdges:
    def test_rows_that_see_no_key_and_keys_that_no_row_sees_have_gradients_of_zero(self) -> None:
        gradients = check(LAUNCH, *operands_of(90, 20), causal=True)
        assert (gradients.dq[:, :70] == 0).all()

    def test_empty_sequences_give_zeros(self) -> None:
        check_empty_sequences(LAUNCH)

    def test_sequences_longer_than_the_caller_said_are_answered_whole(self) -> None:
        check_sequences_longer_than_said(LAUNCH, 100)

    def test_a_nan_reaches_what_its_row_or_key_reaches_and_no_more(self) -> None:
        for index in range(4):
            arrays = operands_of(70, 70)
            arrays[index][0, 40, :, 3] = np.nan
            gradients = check(LAUNCH, *arrays, causal=True)
            assert not np.isfinite(gradients.dk).all()
            assert np.isfinite(gradients.dq[:, :40]).all()

    def test_the_gradient_of_the_lse_is_taken_off_delta(self) -> None:
        check_lse_gradient(LAUNCH)

    def test_float16_scores_keep_gradients_beyond_their_range(self) -> None:
        check_float16_range(LAUNCH, 3000.0, 20.0, causal=True)

    def test_padded_views_are_read_and_written_in_place(self) -> None:
        check_padded_views(LAUNCH, 3, 1)


class TestVariants:
    Q = np.zeros((1, 64, 2, 64), np.float32)
    BASE = backward_problem_of(Q, Q, Q)

    def test_it_takes_what_tensor_cores_cannot_multiply(self) -> None:
        double = dict.fromkeys(("dtype", "kv_dtype", "out_dtype"), "float64") | {"compute": "f64"}
        for changes in ({}, double, {"head_dim": 36}, {"head_dim": 1, "head_dim_v": 255}):
            for arch in ("sm_80", "sm_86", "sm_90a", "sm_120a"):
                problem = dataclasses.replace(self.BASE, **changes)
                assert dispatch_key(problem, arch).kernel == "backward_simple"

    @pytest.mark.parametrize("sweep", SWEEPS[::3], ids=str)
    def test_machine_code_has_no_faults(self, sweep: Sweep) -> None:
        case = case_of(sweep, 1, (40, 40), batch=1, heads=(2, 1))
        problem = backward_problem_of(*case.forward.inputs, compute=sweep.compute, **case.options)
        key = key_of(problem, sweep.arch, "backward_simple")
        code = code_of(kernel_source(key), key.kernel)
        assert code_faults(code, register_limit(128)) == []
