"""The forward kernel of wide heads on the CPU against the oracle: dims to 512, options, edges, dispatch, defects."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases.forward_edges import BatchInvariance, Edges
from cases.steady_scores import check_steady
from emulated.far_tensors import check_far
from emulated.forward import OPERANDS, Strided, check_case, gaussian, problem_of, run
from emulated.sweeps import LAUNCHES, Sweep, assert_same_bits, case_of, launch_of
from inside.emulation import EmulationFault
from inside.package import ScoreMod
from inside.testing import SEQLENS, poison_unseen
from mutation import forward_wide as mutation
from mutation.forward_wide_mutants import DEFECTS
from test_positioned_kernels import KERNEL_OPTIONS, run_kernel

from gpu_actors.kernels.dispatch import dispatch_key, explain
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.testing import check_output

KERNEL = "forward_wide"

# Every row of the tile table, head dims in chunks of every spread, halves that are not alike, every option; the first
# ones are the default run's.
SWEEPS = (
    Sweep("bfloat16", 512, None, "causal", arch="sm_80", usual=True),
    Sweep("float16", 264, 512, "window sinks bias", arch="sm_86", varlen=True, usual=True),
    Sweep("bfloat16", 512, 256, "causal softcap alibi", arch="sm_86", usual=True),
    Sweep("float16", 320, None, "", arch="sm_90a", usual=True),
    Sweep("bfloat16", 512, None, "", arch="sm_86"),
    Sweep("bfloat16", 288, 272, "window sink_tokens dropout", arch="sm_80", top_left=True),
    Sweep("float16", 448, None, "causal sinks", arch="sm_86", varlen=True),
    Sweep("bfloat16", 376, 504, "causal window sink_tokens alibi", arch="sm_90a", varlen=True, top_left=True),
    Sweep("float16", 128, 392, "causal dropout bias softcap", arch="sm_80"),
    Sweep("bfloat16", 512, 8, "window alibi scale", arch="sm_90a"),
    Sweep("float16", 8, 512, "causal window sinks dropout", arch="sm_80", varlen=True),
    Sweep("bfloat16", 512, None, "window dropout sinks alibi softcap bias", arch="sm_80", varlen=True),
)
USUAL = tuple(sweep for sweep in SWEEPS if sweep.usual)
SHAPES = ((1, 1), (33, 95), (70, 31))


def check_sweep(sweep: Sweep, shapes: tuple[tuple[int, int], ...]) -> None:
    for index, seqlens in enumerate(shapes):
        number = SWEEPS.index(sweep)
        # Keys and values that no row of their sequence sees hold NaN.
        case = poison_unseen(case_of(sweep, 70 + number, index, seqlens))
        check_case(
            case, kernel=KERNEL, arch=sweep.arch, seed=index, limit_seconds=600.0, **launch_of(5 * index + number)
        )


@pytest.mark.parametrize("sweep", USUAL, ids=str)
def test_it_agrees_with_the_oracle_whatever_the_schedule_and_the_delivery(sweep: Sweep) -> None:
    check_sweep(sweep, SHAPES)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_it_agrees_with_the_oracle_on_the_whole_grid(sweep: Sweep) -> None:
    check_sweep(sweep, tuple(shape for shape in SEQLENS if shape[0] * shape[1] <= 300 * 300) + SHAPES)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dim", range(264, 513, 8))
def test_every_head_dim_agrees_with_the_oracle(dim: int) -> None:
    other = 512 + 264 - dim
    for number, arch in enumerate(("sm_80", "sm_86", "sm_90a")):
        sweep = Sweep(("float16", "bfloat16")[number % 2], dim, other, ("", "causal", "window")[number], arch=arch)
        case = poison_unseen(case_of(sweep, dim, number, ((40, 70), (17, 130), (65, 50))[number]))
        check_case(case, kernel=KERNEL, arch=arch, seed=number, **launch_of(dim // 8 + number))


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.sweep), "sm_86"])
def test_every_delivery_and_schedule_gives_the_same_bits(arch: str) -> None:
    """90 keys are more tiles than the rings have stages, so that every stage is refilled.

    With the errors of hardware, which a sweep has, bits would differ with the seed as well.
    """
    case = case_of(Sweep("float16", 512, 272, "causal"), 0, 2, (20, 90))
    problem = problem_of(*case.inputs, **case.options)
    operands = dict(zip("qkv", case.inputs, strict=True))
    assert_same_bits(
        [
            run(problem, operands, kernel=KERNEL, arch=arch, seed=seed, arithmetic="nearest", **launch_of(seed))
            for seed in range(len(LAUNCHES))
        ]
    )


def answer(q: Any, k: Any, v: Any, *, dropout_seed: int = 0, **options: Any) -> tuple[Any, Any]:
    arrays = {name: options[name] for name in OPERANDS if name in options}
    operands = {"q": q, "k": k, "v": v, **arrays}
    return run(problem_of(q, k, v, **options), operands, kernel=KERNEL, arch="sm_86", dropout_seed=dropout_seed)


def check(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = answer(q, k, v, **options)
    check_output(out, lse, q, k, v, **options)
    return out, lse


class Asked:
    """Heads of 40 columns, of which one warp multiplies two pairs of chunks and the other one."""

    DIM = 40
    answer = staticmethod(answer)
    check = staticmethod(check)


class TestEdges(Asked, Edges):
    def test_a_sequence_longer_than_its_maximum_is_still_computed_whole(self) -> None:
        q, k, v = self.packed(300, 300)
        ends = {name: np.array([0, 10, 300], np.int32) for name in self.ENDS}
        problem = problem_of(q, k, v, causal=True, **ends)
        operands = {"q": q, "k": k, "v": v, **ends}
        assert_same_bits(
            [
                run(dataclasses.replace(problem, seqlen_q=rows), operands, kernel=KERNEL, arch="sm_86")
                for rows in (1, 300)
            ]
        )

    @pytest.mark.parametrize("special", [np.nan, np.inf])
    def test_special_values_reach_the_rows_that_see_them_and_no_others(self, special: float) -> None:
        """Rows and keys of one tile: the weight 0 of a hidden key, times NaN, would be NaN."""
        for index in range(3):
            operands = self.dense(90, 90)
            operands[index][0, 40, :, 35] = special
            out, _ = check(*operands, causal=True)
            assert not np.isfinite(out).all()
            assert np.isfinite(out[:, :40]).all()

    def test_a_dropped_infinity_is_nan(self) -> None:
        q, k, v = self.dense(40, 40)
        v[0, 3, :, 5] = np.inf
        out, _ = check(q, k, v, causal=True, dropout_p=0.5, dropout_seed=3)
        assert np.isnan(out).any()
        assert np.isinf(out).any()


class TestBatchInvariance(Asked, BatchInvariance):
    pass


@pytest.mark.parametrize("padding", [8, 3])
def test_rows_between_multiples_of_16_bytes_are_read_and_written_in_place(padding: int) -> None:
    base = gaussian(1, (3, 40, 2, 264 + padding), "float16")
    q, k, v = (base[n : n + 1, :, :, padding:] for n in range(3))
    operands = dict(zip("qkv", map(np.ascontiguousarray, (q, k, v)), strict=True))
    whole = run(problem_of(q, k, v, causal=True), operands, kernel=KERNEL, arch="sm_80")
    strided = {name: Strided(given, base) for name, given in zip("qkv", (q, k, v), strict=True)}
    assert_same_bits([whole, run(problem_of(q, k, v, causal=True), strided, kernel=KERNEL, arch="sm_80")])
    check_output(*whole, q, k, v, causal=True)


@pytest.mark.sweep
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_past_32_bits_are_followed(axis: int) -> None:
    check_far(KERNEL, axis)


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_corrections_where_a_maximum_stays_are_one() -> None:
    check_steady(KERNEL)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", KERNEL_OPTIONS)
def test_rows_and_keys_of_a_larger_problem(options: str) -> None:
    run_kernel("sm_80", np.dtype("float16"), KERNEL_OPTIONS[options], KERNEL, dim=264)


class TestDispatch:
    BASE = example_problem("bfloat16", 512)

    @pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
    def test_it_takes_wide_heads_of_16_bits(self, arch: str) -> None:
        for dtype in ("float16", "bfloat16"):
            for dims in ((264, 264), (512, 512), (512, 256), (64, 512)):
                problem = example_problem(dtype, dims[0], head_dim_v=dims[1])
                assert dispatch_key(problem, arch).kernel == KERNEL
        assert dispatch_key(example_problem("bfloat16", 256), arch).kernel in ("forward_mma", "forward_sm90")

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"head_dim": 500}, "multiples of 8 from 8 to 512"),
            ({"head_dim_v": 300}, "multiples of 8"),
            ({"softmax_scale": -1.0}, "positive scale"),
            (
                {"dtype": "float32", "kv_dtype": "float32", "out_dtype": "float32", "compute": "tf32"},
                "float16, bfloat16",
            ),
        ],
    )
    def test_what_it_refuses_goes_to_the_plain_kernel_and_explain_says_why(
        self, changes: dict[str, Any], reason: str
    ) -> None:
        problem = dataclasses.replace(self.BASE, **changes)
        assert dispatch_key(problem, "sm_80").kernel == "forward_simple"
        verdict = next(v for v in explain(problem, "sm_80") if v.family == KERNEL)
        assert not verdict.taken
        assert reason in verdict.reason

    def test_tiles_of_block_masks_divide_blocks(self) -> None:
        mod = example_problem("bfloat16", 512, score_mod=ScoreMod("", block_size=(128, 128)))
        for arch in ("sm_80", "sm_86", "sm_90a"):
            macros = kernel_source(dispatch_key(mod, arch)).macros
            assert 128 % int(macros["BLOCK_M"]) == 128 % int(macros["BLOCK_N"]) == 0


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_each_defect_of_halves_is_caught(mutant: Any, tmp_path: Any) -> None:
    with pytest.raises((AssertionError, EmulationFault)):
        mutation.run_probes(mutant, tmp_path)
