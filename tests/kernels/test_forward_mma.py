"""The tensor-core forward kernel on the CPU against the float64 oracle: options, edges, addressing, defects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.forward_edges import BatchInvariance, Edges
from emulated import forward as emulated_forward
from emulated.far_tensors import check_far
from emulated.forward import OPERANDS, Strided, check_case, gaussian, problem_of, run
from emulated.sweeps import LAUNCHES, Sweep, assert_same_bits, case_of, launch_of
from inside.emulation import EmulationFault
from inside.testing import SEQLENS, poison_unseen
from mutation import forward as mutation
from mutation.forward_mutants import DEFECTS

from gpu_actors.kernels.dispatch import dispatch_key, explain
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.testing import ForwardCase, check_output, random_forward

KERNEL = "forward_mma"

# Every option alone or in company, every row of the tile table, both layouts, both alignments; shapes vary below.
SWEEPS = (
    Sweep("float16", 64, None, "", arch="sm_80"),
    Sweep("float16", 64, 96, "causal alibi sinks", arch="sm_86", varlen=True),
    Sweep("bfloat16", 128, None, "causal window sink_tokens", arch="sm_90a", varlen=True, top_left=True),
    Sweep("bfloat16", 40, None, "causal dropout", arch="sm_80"),
    Sweep("float16", 80, None, "window sink_tokens bias scale", arch="sm_86"),
    Sweep("bfloat16", 32, 200, "window dropout sinks alibi softcap", arch="sm_80", varlen=True, top_left=True),
    Sweep("float16", 256, 72, "causal sinks", arch="sm_86"),
    Sweep("float32", 40, 72, "window sink_tokens softcap", compute="tf32", arch="sm_80", varlen=True),
    Sweep("float32", 96, None, "causal bias dropout sinks", compute="bf16", arch="sm_86", top_left=True),
    Sweep("float32", 256, None, "causal", compute="f16", arch="sm_86", varlen=True),
)
SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (31, 300), (130, 7), (200, 260))


def check_sweep(sweep: Sweep, shapes: tuple[tuple[int, int], ...]) -> None:
    for index, seqlens in enumerate(shapes):
        number = SWEEPS.index(sweep)
        # Keys and values that no row of their sequence sees hold NaN.
        case = poison_unseen(case_of(sweep, number, index, seqlens))
        launch = launch_of(5 * index + number)
        check_case(case, compute=sweep.compute, kernel=KERNEL, arch=sweep.arch, seed=index, **launch)


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_it_agrees_with_the_oracle_whatever_the_schedule_and_the_delivery(sweep):
    check_sweep(sweep, SHAPES)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_it_agrees_with_the_oracle_on_the_whole_grid(sweep):
    check_sweep(sweep, SEQLENS)


def test_every_delivery_and_schedule_gives_the_same_bits():
    """300 keys are more tiles than the ring has stages, so that every stage is refilled."""
    case = case_of(SWEEPS[0], 0, 0, (70, 300))
    problem = problem_of(*case.inputs, **case.options)
    stages = int(kernel_source(emulated_forward.key_of(problem, "sm_80", KERNEL)).macros["STAGES"])
    assert stages * 64 < 300
    operands = dict(zip("qkv", case.inputs, strict=True))
    assert_same_bits(
        [
            run(problem, operands, kernel=KERNEL, arch="sm_80", seed=seed, **launch_of(seed))
            for seed in range(len(LAUNCHES))
        ]
    )


def random_cases(seeds: range) -> Iterator[tuple[ForwardCase, str | None]]:
    for seed in seeds:
        case = random_forward(seed)
        yield case, "tf32" if case.q.dtype == np.float32 else None


@pytest.mark.parametrize("seed", [3, 8])
def test_random_problems_agree_with_the_oracle(seed):
    case, compute = next(random_cases(range(seed, seed + 1)))
    check_case(poison_unseen(case), compute=compute, kernel=KERNEL, arch="sm_80")


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_problems_agree_with_the_oracle(seed):
    case, compute = next(random_cases(range(seed, seed + 1)))
    check_case(poison_unseen(case), compute=compute, kernel=KERNEL, arch=("sm_80", "sm_86", "sm_90a")[seed % 3])


def answer(q: Any, k: Any, v: Any, *, compute: str | None = None, dropout_seed: int = 0, **options: Any):
    arrays = {name: options[name] for name in OPERANDS if name in options}
    problem = problem_of(q, k, v, compute=compute, **options)
    operands = {"q": q, "k": k, "v": v, **arrays}
    return run(problem, operands, kernel=KERNEL, arch="sm_86", dropout_seed=dropout_seed)


def check(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = answer(q, k, v, **options)
    check_output(out, lse, q, k, v, **options)
    return out, lse


def qkv(rows: int, keys: int, *, batch: int = 1, heads: int = 2, heads_kv: int = 2, dtype: str = "float16"):
    shapes = ((batch, rows, heads, 32), (batch, keys, heads_kv, 32), (batch, keys, heads_kv, 32))
    return [gaussian(n, shape, dtype) for n, shape in enumerate(shapes)]


class Asked:
    DIM = 32
    answer = staticmethod(answer)
    check = staticmethod(check)


class TestEdges(Asked, Edges):
    def test_a_sequence_longer_than_its_maximum_is_still_computed_whole(self):
        q, k, v = self.packed(41, 12)
        problem = problem_of(q, k, v, causal=True, **self.ENDS)
        operands = {"q": q, "k": k, "v": v, **self.ENDS}
        short = dataclasses.replace(problem, seqlen_q=1, seqlen_k=1)
        long_q, long_k = gaussian(7, (300, 2, 32), "float16"), gaussian(8, (300, 2, 32), "float16")
        ends = {name: np.array([0, 10, 300], np.int32) for name in self.ENDS}
        whole = problem_of(long_q, long_k, long_k, causal=True, **ends)
        for given, arrays in ((short, operands), (whole, {"q": long_q, "k": long_k, "v": long_k, **ends})):
            results = [
                run(dataclasses.replace(given, seqlen_q=rows), arrays, kernel=KERNEL, arch="sm_86") for rows in (1, 300)
            ]
            for one, other in zip(*results, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_a_bias_of_minus_infinity_hides_and_its_rows_may_be_empty(self):
        q, k, v = qkv(5, 40)
        bias = np.zeros((1, 1, 5, 40), np.float32)
        bias[..., 1, :] = bias[..., :, 33:] = -np.inf
        out, lse = check(q, k, v, bias=bias)
        assert (out[:, 1] == 0).all()
        assert np.isneginf(lse[..., 1]).all()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("special", [np.nan, np.inf])
    def test_special_values_reach_the_rows_that_see_them_and_no_others(self, dtype, special):
        """Rows and keys of one tile: the weight 0 of a hidden key, times NaN, would be NaN."""
        for index in range(3):
            operands = qkv(150, 150, dtype=dtype)
            operands[index][0, 40, :, 3] = special
            out, _ = check(*operands, causal=True, compute="tf32" if dtype == "float32" else None)
            assert not np.isfinite(out).all()
            assert np.isfinite(out[:, :40]).all()

    def test_a_dropped_infinity_is_nan(self):
        q, k, v = qkv(40, 40)
        v[0, 3, :, 5] = np.inf
        out, _ = check(q, k, v, causal=True, dropout_p=0.5, dropout_seed=3)
        assert np.isnan(out).any()
        assert np.isinf(out).any()


class TestPrecision:
    @pytest.mark.parametrize("compute", ["tf32", "f16", "bf16"])
    def test_float32_inputs_compute_in_less_where_asked(self, compute):
        q, k, v = qkv(40, 100, dtype="float32")
        out, _ = check(q, k, v, compute=compute, causal=True)
        exact, _ = run(problem_of(q, k, v, causal=True), {"q": q, "k": k, "v": v})
        assert np.abs(out - exact).max() > 1e-5, "nothing was rounded"

    def test_f16_keeps_the_range_of_float32(self):
        q, k, v = qkv(4, 40, dtype="float32")
        v *= 1e6
        out, lse = answer(q, k, v, compute="f16", causal=True)
        assert np.isfinite(out).all()
        check_output(out, lse, q, k, v, compute="tf32", causal=True)


class TestAddressing:
    @staticmethod
    def view(seed: int, length: int, heads: int, padding: int, dtype: str) -> Strided:
        """(batch, heads, rows, dim) storage with NaN between rows, heads and sequences."""
        base = np.full((2, heads + 1, length + 2, 32 + 2 * padding), np.nan, dtype)
        array = base[:, 1:, 1 : length + 1, padding : padding + 32].transpose(0, 2, 1, 3)
        array[...] = gaussian(seed, array.shape)
        return Strided(array, base)

    @pytest.mark.parametrize("padding", [8, 1, 2, 3])
    @pytest.mark.parametrize("compute", [None, "tf32"])
    def test_a_transposed_padded_view_is_read_and_written_in_place(self, padding, compute):
        """8 keeps rows on 16 bytes, what cp.async needs; 3 keeps them on nothing."""
        dtype = "float32" if compute else "float16"
        q, out = (self.view(seed, 137, 4, padding, dtype) for seed in (0, 3))
        k, v = (self.view(seed, 170, 2, padding, dtype) for seed in (1, 2))
        out.array[...] = np.nan
        problem = problem_of(q.array, k.array, v.array, causal=True, compute=compute)
        written, lse = run(problem, {"q": q, "k": k, "v": v, "out": out}, kernel=KERNEL, arch="sm_86")
        check_output(written, lse, q.array, k.array, v.array, causal=True, compute=compute)
        assert np.isfinite(out.base).sum() == written.size, "only the view was written"

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_offsets_past_32_bits_are_followed(self, axis):
        check_far(KERNEL, axis)


class TestBatchInvariance(Asked, BatchInvariance):
    pass


class TestDispatch:
    Q = np.zeros((1, 64, 2, 64), np.float16)
    BASE = problem_of(Q, Q, Q)
    FLOAT = dataclasses.replace(BASE, dtype="float32", kv_dtype="float32", out_dtype="float32", compute="f32")

    def test_it_takes_what_tensor_cores_can_multiply(self):
        reduced = dataclasses.replace(self.FLOAT, compute="tf32")
        for problem in (self.BASE, reduced, dataclasses.replace(self.BASE, head_dim=32, head_dim_v=256)):
            assert dispatch_key(problem, "sm_80").kernel == KERNEL

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"head_dim": 36}, "multiples of 8"),
            ({"head_dim_v": 4}, "from 8 to 256"),
            ({"softmax_scale": 0.0}, "positive scale"),
            ({"softmax_scale": -1.0}, "positive scale"),
        ],
    )
    def test_what_it_refuses_goes_to_the_plain_kernel_and_explain_says_why(self, changes, reason):
        problem = dataclasses.replace(self.BASE, **changes)
        assert dispatch_key(problem, "sm_80").kernel == "forward_simple"
        verdict = next(v for v in explain(problem, "sm_80") if v.family == KERNEL)
        assert not verdict.taken
        assert reason in verdict.reason

    def test_float32_and_float64_stay_on_the_plain_kernel(self):
        doubles = dataclasses.replace(
            self.BASE, dtype="float64", kv_dtype="float64", out_dtype="float64", compute="f64"
        )
        for problem in (self.FLOAT, doubles):
            assert dispatch_key(problem, "sm_90a").kernel == "forward_simple"


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_each_defect_that_attention_kernels_have_had_is_caught(mutant, tmp_path):
    with pytest.raises((AssertionError, EmulationFault)):
        mutation.run_probes(mutant, tmp_path)
