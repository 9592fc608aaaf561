"""Kernels whose rows and keys stand in a larger problem: the mask function by function, then whole kernels."""

from __future__ import annotations

import dataclasses
import functools
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated.forward import key_of, problem_of
from support.gate import code_faults, code_of, register_limit, with_bug

import gpu_actors as ga
from gpu_actors.compiling.source import KernelSource
from gpu_actors.devices.emulation import EmulatedBuffer, EmulatedModule, EmulationFault, build_module
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.variants import block_threads, kernel_source
from gpu_actors.testing.gradients import check_gradients
from gpu_actors.testing.tolerance import check_output

PROBE = """
#include "common/mask.cuh"
#include "common/philox.cuh"
#include "common/score.cuh"
struct Case { Mask mask; int row_begin, row_end, key_begin, key_end, seqlen_q; };
struct Answer { SeenColumns columns; KeyTiles tiles; SeenRows rows; SeenKeys keys; int all; uint32_t visible[24]; };
struct Arguments { const Case* in; Answer* out; int count; };
extern "C" __global__ void examine(const __grid_constant__ Arguments a) {
  for (int n = threadIdx.x; n < a.count; n += blockDim.x) {
    const Case& c = a.in[n];
    Answer& answer = a.out[n];
    answer.columns = c.mask.columns(c.row_begin, 2);
    answer.tiles = c.mask.tiles<8>(c.row_begin, c.row_end);
    answer.rows = c.mask.rows(c.seqlen_q, c.key_begin, c.key_end);
    answer.keys = seen_keys(c.mask, c.row_begin, c.row_end);
    answer.all = c.mask.all_visible(c.row_begin, c.row_end, c.key_begin, c.key_end);
    for (int row = 0; row < c.seqlen_q; row++) {
      answer.visible[row] = 0;
      for (int key = 0; key < 32; key++) answer.visible[row] |= uint32_t(c.mask.visible(row, key)) << key;
    }
  }
}
"""
UNBOUNDED = 1 << 30
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (6, 4)},
    "causal window": {"causal": True, "window_size": (6, -1)},
    "sink tokens": {"window_size": (6, 4), "sink_tokens": 9},
    "causal sink tokens": {"causal": True, "window_size": (6, -1), "sink_tokens": 9},
}


def probe_source(mask: str) -> KernelSource:
    q = np.zeros((1, 2, 1, 8), np.float32)
    problem = dataclasses.replace(problem_of(q, q, q, **MASKS[mask]), q_positions=2)
    source = kernel_source(key_of(problem, "sm_80"))
    assert source.macros["POSITIONS"] == "1"
    return KernelSource("probe.cu", PROBE, ("examine",), source.headers, source.macros)


@functools.cache
def module_of(source: KernelSource) -> EmulatedModule:
    return build_module(source.source, dict(source.macros), dict(source.headers), entries=source.entry_points)


def random_case(rng: np.random.Generator, mask: str) -> list[int]:
    left, right = MASKS[mask].get("window_size", (-1, -1))
    left, right = (UNBOUNDED if bound < 0 else bound for bound in (left, right))
    seqlen_q, seqlen_k = int(rng.integers(1, 25)), int(rng.integers(1, 33))
    steps = [int(rng.integers(0, 20)), int(rng.integers(1, 5)), int(rng.integers(0, 20)), int(rng.integers(1, 5))]
    row_begin, key_begin = int(rng.integers(0, seqlen_q)), int(rng.integers(0, seqlen_k))
    row_end = int(rng.integers(row_begin + 1, seqlen_q + 1))
    key_end = int(rng.choice([key_begin + 1, rng.integers(key_begin + 1, 33)]))
    tokens = MASKS[mask].get("sink_tokens", 0)
    return [seqlen_k, left, right, tokens, *steps, row_begin, row_end, key_begin, key_end, seqlen_q]


def examine(mask: str, build: Any = module_of, cases: int = 400) -> None:
    """Raise AssertionError where an answer of the mask contradicts what the rows see, pair by pair."""
    rng = np.random.default_rng(len(mask))
    given = np.array([random_case(rng, mask) for _ in range(cases)], np.int32)
    source, result = EmulatedBuffer.of(given, "in"), EmulatedBuffer((3 + 3 + 2 + 3 + 1 + 24) * 4 * cases, "out")
    params = struct.pack("<QQi4x", source.address, result.address, cases)
    build(probe_source(mask)).launch("examine", 1, 32, 0, params, [source, result])
    for case, answer in zip(given.tolist(), result.view(np.int32, (cases, -1)).tolist(), strict=True):
        check_case(mask, case, answer)


def check_case(mask: str, case: list[int], answer: list[int]) -> None:
    seqlen_k, left, right, tokens, q_first, q_step, k_first, k_step, *ranges = case
    row_begin, row_end, key_begin, key_end, seqlen_q = ranges
    rows, keys = q_first + q_step * np.arange(seqlen_q)[:, None], k_first + k_step * np.arange(seqlen_k)
    options = MASKS[mask]
    inside = (keys >= rows - left) & (keys <= rows + right)
    if options.get("causal"):
        inside &= keys <= rows
    sinks = (keys < tokens) & ((keys <= rows) if options.get("causal") else True)
    seen = inside | (sinks if "window_size" in options else False)
    sinks_from_2, begin_from_2, end_from_2, *answer = answer
    columns = np.arange(seqlen_k) - 2
    found = columns < end_from_2
    if "window_size" in options:
        found &= columns >= begin_from_2
        found |= (columns < sinks_from_2) & ("sink_tokens" in options)
    np.testing.assert_array_equal(found, seen[row_begin], f"columns {case}")
    sink_tiles, begin, end, first_row, last_row, sink_keys, first_key, last_key, all_seen = answer[:9]
    visible = np.array([[word >> key & 1 for key in range(32)] for word in answer[9 : 9 + seqlen_q]], bool)
    np.testing.assert_array_equal(visible[:, :seqlen_k], seen, f"visible {case}")
    assert not visible[:, seqlen_k:].any(), f"visible past the end {case}"
    of_rows = seen[row_begin:row_end].any(axis=0)
    listed = np.zeros(40, bool)
    for tile in (*range(sink_tiles), *range(begin, end)):
        listed[8 * tile : 8 * tile + 8] = True
    assert not (of_rows & ~listed[:seqlen_k]).any(), f"tiles leave a seen key out {case}"
    held = np.array(
        [first_key <= key < last_key or ("sink_tokens" in options and key < sink_keys) for key in range(40)]
    )
    assert not (of_rows & ~held[:seqlen_k]).any(), f"keys leave a seen one out {case}"
    assert not held[seqlen_k:].any(), f"keys past the end {case}"
    if q_step == k_step == 1:
        np.testing.assert_array_equal(of_rows, held[:seqlen_k], f"keys hold an unseen one {case}")
    whole = key_end <= seqlen_k and bool(inside[row_begin:row_end, key_begin:key_end].all())
    assert all_seen == whole, f"all_visible {case}"
    of_keys = seen[:, key_begin:key_end].any(axis=1)
    found = np.array([first_row <= row < last_row for row in range(seqlen_q)])
    assert not (of_keys & ~found).any(), f"rows leave one out {case}"
    if key_end == key_begin + 1:
        np.testing.assert_array_equal(of_keys, found, f"rows hold one that sees nothing {case}")


@pytest.mark.parametrize("mask", MASKS)
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
    kernel = "forward_mma" if "dropout_p" in HOPPER_OPTIONS[options] else "forward_sm90"
    run_kernel("sm_90a", ml_dtypes.bfloat16, HOPPER_OPTIONS[options], kernel, backward=True, dim=64)


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
        ">= positions.row(row_end - 1) - left",
        ">= positions.row(row_begin) - left",
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
        "keys_up_to(positions.row(row_begin) - left - 1)",
        "keys_up_to(positions.row(row_begin) - left)",
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
        "up_to(last_key + left, seqlen_q)",
        "up_to(last_key + left - 1, seqlen_q)",
        "window",
    ),
    "rows ignore the right bound": (
        MASK_FILE,
        "up_to(first_key - right - 1, seqlen_q)",
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


def built(file: str, old: str, new: str, cache: Path) -> Any:
    def build(source: KernelSource) -> EmulatedModule:
        bad = with_bug(source, file, old, new)
        return build_module(bad.source, dict(bad.macros), dict(bad.headers), cache_dir=cache, entries=bad.entry_points)

    return build


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.sweep) for name in MASK_MUTANTS]
)
def test_a_bug_seeded_into_the_mask_is_caught(name: str, tmp_path: Path) -> None:
    file, old, new, mask = MASK_MUTANTS[name]
    with pytest.raises((AssertionError, EmulationFault)):
        examine(mask, built(file, old, new, tmp_path))
