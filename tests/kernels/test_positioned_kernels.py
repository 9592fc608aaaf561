"""Kernels whose rows and keys stand in a larger problem: the mask function by function, then whole kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated.mask_probe import MASKS, built_with_bug, examine
from inside.emulation import EmulationFault
from support.gate import code_faults, code_of, register_limit

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.variants import block_threads, kernel_source
from gpu_actors.testing import check_gradients, check_output


@pytest.mark.parametrize("mask", [mask for mask in MASKS if "chunk" not in mask])
def test_the_mask_agrees_with_itself_pair_by_pair(mask: str) -> None:
    examine(mask)


# Whole kernels


SLOPES = np.array([0.03, 0.1, 0.01, 0.0], np.float32)
ALL: dict[str, Any] = {
    "causal": True, "window_size": (90, 0), "sink_tokens": 20, "alibi_slopes": SLOPES, "dropout_p": 0.25,
    "dropout_seed": 5, "dropout_first_head": 4, "dropout_heads": 12,
}  # fmt: skip
KERNEL_OPTIONS = {"all": ALL, "window": {"window_size": (40, 25)}, "causal": {"causal": True}}
HOPPER_OPTIONS = {
    **KERNEL_OPTIONS,
    "no dropout": {name: value for name, value in ALL.items() if not name.startswith("dropout")},
    "softcap": {"causal": True, "softcap": 3.0, "alibi_slopes": SLOPES},
}
PLACES: dict[str, dict[str, Any]] = {
    "steps": {
        "q_positions": np.array([[130, 3], [20, 1]], np.int32),
        "k_positions": np.array([[1, 4], [30, 2]], np.int32),
    },
    "one side": {"q_positions": np.array([70, 20], np.int32)},
    "apart": {"q_positions": np.array([500, 0], np.int32), "k_positions": np.array([0, 500], np.int32)},
}


def operands(dtype: Any, rows: int = 70, keys: int = 90, heads: int = 4, dim: int = 32) -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(0)
    shapes = [(2, rows, heads), (2, keys, heads // 2), (2, keys, heads // 2), (2, rows, heads)]
    return [rng.standard_normal((*shape, dim)).astype(dtype) for shape in shapes]


def run_kernel(
    arch: str, dtype: Any, options: dict[str, Any], kernel: str, backward: bool = False, dim: int = 32
) -> None:
    rows, keys = (70, 90) if arch == "sm_80" else (150, 300)
    q, k, v, dout = operands(dtype, rows, keys, dim=dim)
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        for places in PLACES.values():
            given = {**options, **places}
            assert ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, return_lse=True, **given)).kernel == kernel
            answer = ctx.flash_attn.forward(q, k, v, return_lse=True, **given).result(300)
            check_output(answer.out, answer.lse, q, k, v, **given)
            if backward:
                key = ctx.flash_attn.inspect_key(
                    ga.FlashBackward(q=q, k=k, v=v, dout=dout, out=answer.out, lse=answer.lse, **given)
                )
                assert key.kernel == ("backward_sm90" if arch == "sm_90a" else "backward_mma")
                reply = ctx.flash_attn.backward(dout, q, k, v, answer.out, answer.lse, **given)
                check_gradients(reply.result(300), dout, q, k, v, out=answer.out, lse=answer.lse, **given)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=() if name == "all" else pytest.mark.sweep) for name in KERNEL_OPTIONS]
)
def test_forward_and_its_gradients_on_tensor_cores(options: str) -> None:
    run_kernel("sm_80", ml_dtypes.bfloat16, KERNEL_OPTIONS[options], "forward_mma", backward=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=() if name == "no dropout" else pytest.mark.sweep) for name in HOPPER_OPTIONS]
)
def test_forward_and_its_gradients_on_hopper(options: str) -> None:
    run_kernel("sm_90a", ml_dtypes.bfloat16, HOPPER_OPTIONS[options], "forward_sm90", backward=True, dim=64)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", KERNEL_OPTIONS)
def test_forward_on_cuda_cores(options: str) -> None:
    run_kernel("sm_80", np.float32, KERNEL_OPTIONS[options], "forward_simple")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_steps_of_rows_and_a_window_take_no_turns(arch: str) -> None:
    """A row tile may list a tile of keys that none of its rows sees, and would wait for its turn for ever."""
    fields: dict[str, Any] = {"direction": "backward", "deterministic": True, "window_size": (8, 8)}
    with pytest.raises(ga.Unsupported) as caught:
        dispatch_key(example_problem("bfloat16", 64, q_positions=2, k_positions=2, **fields), arch)
    assert (caught.value.field, caught.value.nearest) == ("deterministic", False)
    assert dispatch_key(example_problem("bfloat16", 64, q_positions=1, k_positions=2, **fields), arch).deterministic
    without_window = fields | {"window_size": (-1, -1), "causal": True}
    assert dispatch_key(example_problem("bfloat16", 64, q_positions=2, **without_window), arch).deterministic


@pytest.mark.timeout(600)
def test_blocks_take_turns_over_keys_that_stand_apart() -> None:
    q, k, v, dout = operands(ml_dtypes.bfloat16, 150, 200)
    places = {"q_positions": np.array([100, 300], np.int32), "k_positions": np.array([[0, 5], [1, 3]], np.int32)}
    options = {"window_size": (3, 2), "sink_tokens": 30, **places}
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        answer = ctx.flash_attn.forward(q, k, v, return_lse=True, **options).result(300)
        reply = ctx.flash_attn.backward(dout, q, k, v, answer.out, answer.lse, deterministic=True, **options)
        check_gradients(reply.result(300), dout, q, k, v, out=answer.out, lse=answer.lse, **options)


@pytest.mark.timeout(600)
def test_packed_sequences_of_which_one_has_no_rows() -> None:
    q, k, v, dout = (x[0] for x in operands(np.float16))
    ends = {"cu_seqlens_q": np.array([0, 30, 30, 70], np.int32), "cu_seqlens_k": np.array([0, 50, 60, 90], np.int32)}
    at = {name: np.array([[3, 2], [0, 1], [40, 1]], np.int32) for name in ("q_positions", "k_positions")}
    options = {"causal": True, "window_size": (30, 0), **ends, **at}
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        answer = ctx.flash_attn.forward(q, k, v, return_lse=True, **options).result(300)
        check_output(answer.out, answer.lse, q, k, v, **options)
        reply = ctx.flash_attn.backward(dout, q, k, v, answer.out, answer.lse, **options)
        check_gradients(reply.result(300), dout, q, k, v, out=answer.out, lse=answer.lse, **options)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("direction", "arch"),
    [
        ("forward", "sm_80"),
        ("backward", "sm_90a"),
        pytest.param("forward", "sm_90a", marks=pytest.mark.sweep),
        pytest.param("backward", "sm_80", marks=pytest.mark.sweep),
    ],
)
def test_the_variants_pass_the_gate(arch: str, direction: Any) -> None:
    for features in ({}, {"dropout_p": 0.5, "alibi": "heads", "window_size": (64, 0)}):
        fields: dict[str, Any] = {
            "causal": True,
            "q_positions": 2,
            "k_positions": 2,
            "return_lse": direction == "forward",
        }
        problem = example_problem("bfloat16", 64, direction=direction, **fields, **features)
        for key in program_of(problem, dispatch_key(problem, arch)).keys:
            code = code_of(kernel_source(key), key.kernel)
            assert code_faults(code, register_limit(block_threads(key))) == [], key
        assert check_key(dispatch_key(problem, arch)).positions


# Seeded bugs


MASK_FILE, STEPS_FILE = "common/mask.cuh", "common/positions.cuh"
MASK_MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "a step is 1": (STEPS_FILE, "uint32_t(index) * uint32_t(step)", "uint32_t(index)", "causal"),
    "a first position is 0": (STEPS_FILE, "uint32_t(first) + ", "", "causal"),
    "counts leave out the position itself": (
        STEPS_FILE,
        "(position - first) / step + 1",
        "(position - first) / step",
        "causal",
    ),
    "counts round up": (
        STEPS_FILE,
        "(position - first) / step + 1",
        "(position - first + step - 1) / step + 1",
        "window",
    ),
    "counts before the first are negative": (STEPS_FILE, "if (position < first) return 0;", "", "window"),
    "counts pass the end": (STEPS_FILE, "return found > count ? count : found;", "return found;", "causal"),
    "causal hides the row's own key": (
        MASK_FILE,
        "if (CAUSAL && position > own)",
        "if (CAUSAL && position >= own)",
        "causal",
    ),
    "sink tokens are indices": (
        MASK_FILE,
        "SINK_TOKENS && position < sink_tokens",
        "SINK_TOKENS && key < sink_tokens",
        "sink tokens",
    ),
    "the last row speaks for all": (
        MASK_FILE,
        "first_row = positions.row(row_begin)",
        "first_row = positions.row(row_end - 1)",
        "causal",
    ),
    "the first row speaks for all": (
        MASK_FILE,
        "reach.first(positions.row(row_end - 1))",
        "reach.first(positions.row(row_begin))",
        "window",
    ),
    "tiles end with the first row": (
        MASK_FILE,
        "last_row = positions.row(row_end - 1)",
        "last_row = positions.row(row_begin)",
        "causal",
    ),
    "tiles leave out the window's last key": (
        MASK_FILE,
        "keys_up_to(reach.first(positions.row(row_begin)) - 1)",
        "keys_up_to(reach.first(positions.row(row_begin)))",
        "window",
    ),
    "sink tokens have one key less": (
        MASK_FILE,
        "keys_up_to(sink_tokens - 1)",
        "keys_up_to(sink_tokens - 2)",
        "sink tokens",
    ),
    "rows begin one late": (MASK_FILE, "up_to(first_key - 1, seqlen_q)", "up_to(first_key, seqlen_q)", "causal"),
    "rows end one early": (
        MASK_FILE,
        "up_to(reach.end_own(last_key + 1) - 1, seqlen_q)",
        "up_to(reach.end_own(last_key + 1) - 2, seqlen_q)",
        "window",
    ),
    "rows ignore the right bound": (
        MASK_FILE,
        "up_to(reach.first_own(first_key) - 1, seqlen_q)",
        "up_to(first_key - 1, seqlen_q)",
        "window",
    ),
    "rows of sink tokens are bounded": (
        MASK_FILE,
        "if (WINDOW && !sinks) seen.end",
        "if (WINDOW) seen.end",
        "sink tokens",
    ),
}
SAMPLED = ("a step is 1", "rows end one early")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.sweep) for name in MASK_MUTANTS]
)
def test_a_bug_seeded_into_the_mask_is_caught(name: str, tmp_path: Path) -> None:
    file, old, new, mask = MASK_MUTANTS[name]
    with pytest.raises((AssertionError, EmulationFault)):
        examine(mask, built_with_bug(file, old, new, tmp_path))
