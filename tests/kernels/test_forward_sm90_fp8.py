"""The Hopper forward kernel on 8-bit floats, with V transposed in shared memory, on the CPU against the float64 oracle.

The bound is the tolerance rule's for kernels that round the weights to 8 bits (`weights_dtype`): pt has that rounding
too, and what it may cost, taken weight by weight, is below 2.5 * 2^-4 sqrt(sum P^2 V^2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases.many_keys import check_many_keys, loss, many_keys
from emulated.forward import OPERANDS, gaussian, key_of, problem_of, run, run_case
from emulated.sweeps import LAUNCHES, Sweep, assert_same_bits, case_of, launch_of
from inside.emulation import EmulationFault
from inside.testing import SEQLENS, poison_unseen
from mutation import hopper_fp8 as sm90_fp8_mutation
from mutation.forward import seeded
from mutation.hopper_fp8_mutants import DEFECTS, SUMMED_IN_TENSOR_CORES

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.tiles import TILES, tile_of
from gpu_actors.testing import ForwardCase, check_output

KERNEL = "forward_sm90"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
OPTIONS = ("causal", "window", "sink_tokens", "sinks", "alibi", "softcap")


# Every row of the tile table, both layouts, all options, and the head dims that are filled up.
SWEEPS = (
    Sweep(E4M3, 64, 64, "causal descales"),
    Sweep(E4M3, 128, 128, "causal window sink_tokens sinks descales", varlen=True, top_left=True),
    Sweep(E4M3, 128, 128, "descales"),
    Sweep(E4M3, 64, 64, "", varlen=True),
    Sweep(E4M3, 96, 48, "window softcap descales"),
    Sweep(E4M3, 128, 128, "causal alibi descales"),
    Sweep(E4M3, 192, 128, "causal descales", varlen=True),
    Sweep(E4M3, 256, 256, "causal"),
    Sweep(E4M3, 256, 176, "window sink_tokens sinks alibi softcap descales", varlen=True),
    Sweep(E4M3, 32, 208, "causal window alibi descales", varlen=True),
    # Of these the weights are e4m3, too.
    Sweep(E5M2, 64, 64, "causal descales"),
    Sweep(E5M2, 128, 128, "descales", varlen=True),
    Sweep(E5M2, 96, 128, "causal window sinks softcap descales"),
    Sweep(E5M2, 192, 256, "causal alibi descales", varlen=True),
    Sweep(E5M2, 256, 256, ""),
)
SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (130, 7), (200, 450))


def poisoned(sweep: Sweep, index: int, seqlens: tuple[int, int], **given: Any) -> ForwardCase:
    return poison_unseen(case_of(sweep, SWEEPS.index(sweep), index, seqlens, **given))


def check_case(case: ForwardCase, **launch: Any) -> tuple[Any, Any]:
    out, lse = run_case(case, kernel=KERNEL, **launch)
    check_output(out, lse, *case.inputs, repro=case.repro, weights_dtype=E4M3, **case.options)
    return out, lse


def check_sweep(sweep: Sweep, shapes: tuple[tuple[int, int], ...], launches: int = 1) -> None:
    for index, seqlens in enumerate(shapes):
        case = poisoned(sweep, index, seqlens)
        for n in range(launches):
            launch = launch_of(5 * index + SWEEPS.index(sweep) + 7 * n)
            check_case(case, multiprocessors=(1, 3, None)[(index + n) % 3], seed=index, **launch)


def check_modes(sweep: Sweep, launches: tuple[tuple[Any, Any], ...] = LAUNCHES) -> None:
    """More tiles of keys than stages, more tiles of rows than blocks: the same bits, and right ones."""
    case = poisoned(sweep, 1, (300, 700))
    tile = tile_of(key_of(problem_of(*case.inputs, **case.options), "sm_90a", KERNEL))
    assert tile.stages * tile.block_n < 700
    results = [
        check_case(case, multiprocessors=2, delivery=delivery, schedule=schedule, seed=seed, arithmetic="nearest")
        for seed, (delivery, schedule) in enumerate(launches)
    ]
    assert_same_bits(results)


@pytest.mark.parametrize("sweep", SWEEPS[:2], ids=str)
def test_it_agrees_with_the_oracle_whatever_the_schedule_and_the_delivery(sweep):
    check_sweep(sweep, SHAPES)


@pytest.mark.parametrize("sweep", [SWEEPS[1], *(pytest.param(one, marks=pytest.mark.sweep) for one in SWEEPS)], ids=str)
def test_no_row_of_finite_values_has_to_be_computed_again(sweep):
    """A unit of V that no warp transposes may be NaN, and a row that is not finite is computed again from V itself."""
    with sm90_fp8_mutation.unmended():
        for index, seqlens in enumerate(SHAPES[-2:]):
            check_case(case_of(sweep, SWEEPS.index(sweep), index, seqlens), multiprocessors=3)


def test_e5m2_agrees_with_the_oracle():
    check_sweep(SWEEPS[-5], SHAPES[1::3])


def test_a_sample_of_the_modes_gives_the_same_right_bits():
    check_modes(SWEEPS[0], LAUNCHES[::5])


@pytest.mark.usefixtures("fused")
def test_it_agrees_with_the_oracle_with_fused_products():
    check_sweep(SWEEPS[0], SHAPES)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_it_agrees_with_the_oracle_on_the_whole_grid(sweep):
    check_sweep(sweep, SHAPES + SEQLENS, launches=2)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_every_mode_gives_the_same_right_bits(sweep):
    check_modes(sweep)


def test_every_row_of_the_tile_table_is_swept():
    tiles = set()
    for sweep in SWEEPS:
        case = poisoned(sweep, 0, (1, 1))
        tiles.add(tile_of(key_of(problem_of(*case.inputs, **case.options), "sm_90a", KERNEL)))
    assert tiles == {row.tile for row in TILES if row.kernel == KERNEL and E4M3 in (row.dtypes or ())}
    assert {option for sweep in SWEEPS for option in sweep.options} == {*OPTIONS, "descales"}


def qkv(rows: int, keys: int, *, batch: int = 1, heads: int = 4, heads_kv: int = 2) -> list[Any]:
    shapes = ((batch, rows, heads, 64), (batch, keys, heads_kv, 64), (batch, keys, heads_kv, 64))
    return [gaussian(n, shape, E4M3) for n, shape in enumerate(shapes)]


# What the tests below are compiled for: a causal mask and descales.
ONE = {"k_descale": np.array([[0.5, 2.0]], np.float32)}


def answer(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    options = {"causal": True, **options}
    arrays = {name: options[name] for name in OPERANDS if name in options}
    return run(problem_of(q, k, v, **options), {"q": q, "k": k, "v": v, **arrays}, kernel=KERNEL, multiprocessors=2)


def check(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = answer(q, k, v, **options)
    check_output(out, lse, q, k, v, weights_dtype=E4M3, **{"causal": True, **options})
    return out, lse


def factors(*values: float) -> Any:
    return np.array([values], np.float32)


class TestDescales:
    @pytest.mark.parametrize("value", [-1.5, 0.0, -0.0, 1e-30, -1e-30])
    def test_products_may_be_turned_over_or_vanish(self, value):
        """The kernel takes maxima of plain products, which a factor that is not positive would turn into minima."""
        check(*qkv(150, 200), q_descale=factors(1.25, value), **ONE)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_rows_of_a_factor_that_is_not_finite_are_nan_and_those_without_keys_zero(self, value):
        out, lse = check(*qkv(150, 100), q_descale=factors(1.25, value), **ONE)
        assert np.isnan(out[0, 50:, 2:]).all()
        assert np.isfinite(out[0, :, :2]).all()
        assert (out[0, :50] == 0).all(), "50 rows end before key 0"
        assert np.isneginf(lse[0, :, :50]).all()

    def test_v_has_its_own_and_the_lse_none_of_it(self):
        operands = qkv(150, 200)
        out, lse = check(*operands, **ONE)
        scaled, scaled_lse = check(*operands, v_descale=factors(-4.0, 0.0), **ONE)
        np.testing.assert_array_equal(scaled[:, :, :2], -4 * out[:, :, :2])
        assert (scaled[:, :, 2:] == 0).all()
        np.testing.assert_array_equal(scaled_lse, lse)


class TestSpecialValues:
    def test_small_weights_count_together(self):
        """600 weights of 2^-10.2, which e4m3 would round to 0: they hold more than a third of the row."""
        q, k = np.zeros((1, 2, 1, 64)), np.zeros((1, 602, 1, 64))
        q[..., 0], k[:, 0, :, 0] = 8.0, 7.0
        v = np.ones((1, 602, 1, 64))
        v[:, 0] = 0.0
        out, _ = check(*(array.astype(ml_dtypes.float8_e4m3fn) for array in (q, k, v)), q_descale=factors(1.0))
        assert (out.astype(np.float64) > 0.3).all()

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_a_nan_reaches_the_rows_that_see_it_and_no_others(self, index):
        operands = qkv(200, 200)
        operands[index][0, 40, :, 3] = np.nan
        out, _ = check(*operands, **ONE)
        assert not np.isfinite(out).all()
        assert np.isfinite(out[:, :40]).all()

    def test_every_e5m2_number_of_v_is_one_of_the_output(self):
        """A row that sees one key has its value, but for NaN, infinities and what bfloat16 rounds."""
        q, k, v = (array.astype(ml_dtypes.float8_e5m2) for array in qkv(150, 150))
        v[:, 0] = np.arange(128, dtype=np.uint8).view(v.dtype).reshape(1, 2, 64)  # infinity and NaN among them
        out, _ = check(q, k, v, **ONE)
        np.testing.assert_array_equal(out[0, 0, ::2].astype(np.float64), v[0, 0].astype(np.float64))

    def test_those_of_another_sequence_change_no_bits(self):
        ends = {name: np.array([0, 70, 170], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        arrays = [gaussian(n, (170, 2, 64), E4M3) for n in range(3)]
        clean, clean_lse = answer(*arrays, **ends, k_descale=np.full((2, 2), 0.5, np.float32))
        for array in arrays:
            array[70:] = np.nan
        out, lse = answer(*arrays, **ends, k_descale=np.full((2, 2), 0.5, np.float32))
        np.testing.assert_array_equal(out[:70], clean[:70])
        np.testing.assert_array_equal(lse[:, :70], clean_lse[:, :70])
        assert np.isnan(out[70:]).all()


class TestBatchInvariance:
    def test_a_dense_sequence_has_the_same_bits_alone_and_in_a_batch(self):
        q, k, v = qkv(150, 213, batch=3)
        descales = gaussian(5, (3, 2))
        out, lse = check(q, k, v, q_descale=descales)
        for n in range(3):
            alone, alone_lse = answer(*(x[n : n + 1] for x in (q, k, v)), q_descale=descales[n : n + 1])
            np.testing.assert_array_equal(alone[0], out[n])
            np.testing.assert_array_equal(alone_lse[0], lse[n])

    def test_packed_sequences_empty_ones_among_them_have_the_bits_that_they_have_alone(self):
        ends_q, ends_k = np.array([0, 3, 3, 170, 180, 211], np.int32), np.array([0, 90, 130, 258, 258, 308], np.int32)
        q, k, v = (gaussian(n, (rows, 2, 64), E4M3) for n, rows in enumerate((211, 308, 308)))
        descales = gaussian(5, (5, 2))
        out, lse = check(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, v_descale=descales)
        without_keys = slice(*ends_q[3:5])  # the kernel does not take such a sequence alone
        assert (out[without_keys] == 0).all()
        assert (lse[:, without_keys] == -np.inf).all()
        for n in (0, 2, 4):
            rows, keys = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
            ends = {"cu_seqlens_q": ends_q[n : n + 2] - ends_q[n], "cu_seqlens_k": ends_k[n : n + 2] - ends_k[n]}
            alone, alone_lse = answer(q[rows], k[keys], v[keys], **ends, v_descale=descales[n : n + 1])
            np.testing.assert_array_equal(alone, out[rows])
            np.testing.assert_array_equal(alone_lse, lse[:, rows])


class TestManyKeys:
    """Tensor cores keep 13 fraction bits of a sum, emulated ones too: a sum over all keys would stand still."""

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_their_values_are_not_lost(self, head_dim):
        sm90_fp8_mutation.check_sums(head_dim=head_dim)

    def test_summed_in_the_tensor_cores_they_are(self, tmp_path):
        """What the kernel did before: a third of 32,768 values of mean 0.5 is missing."""
        inputs = many_keys(32768, 64)
        with seeded(SUMMED_IN_TENSOR_CORES, tmp_path):
            out, lse = sm90_fp8_mutation.answer_many_keys(32768, 64)
        assert loss(out, *inputs) > 1 / 4
        with pytest.raises(AssertionError, match="out is wrong"):
            check_many_keys(out, lse, *inputs)


class TestDispatch:
    BASE = problem_of(*qkv(200, 300))

    @pytest.mark.parametrize(
        "changes",
        [
            {"head_dim": 40},
            {"head_dim_v": 72},
        ],
        ids=str,
    )
    def test_what_it_refuses_goes_to_the_kernel_for_everything(self, changes):
        assert dispatch_key(self.BASE, "sm_90a").kernel == KERNEL
        assert dispatch_key(dataclasses.replace(self.BASE, **changes), "sm_90a").kernel == "forward_simple"


def test_the_service_answers_with_it_on_the_emulated_device():
    q, k, v = qkv(150, 200, batch=2)
    descales = {f"{name}_descale": np.full((2, 2), 0.5 + n, np.float32) for n, name in enumerate("qkv")}
    with ga.open_context("emulated") as ctx:
        assert ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, **descales)).kernel == KERNEL
        # Rows and heads that lie apart.
        padded = np.full((2, 200, 3, 80), np.nan, ml_dtypes.float8_e4m3fn)
        padded[:, :, :2, 16:] = v
        for values in (v, padded[:, :, :2, 16:]):
            result = ctx.flash_attn.forward(q, k, values, causal=True, return_lse=True, **descales).result(60)
            check_output(result.out, result.lse, q, k, v, causal=True, weights_dtype=E4M3, **descales)
        ends = {"cu_seqlens_q": np.array([0, 150], np.int32), "cu_seqlens_k": np.array([0, 0], np.int32)}
        empty = np.zeros((0, 2, 64), ml_dtypes.float8_e4m3fn)
        one = {name: factors[:1] for name, factors in descales.items()}
        request = {**ends, **one, "causal": True, "return_lse": True}
        assert (ctx.flash_attn.forward(q[0], empty, empty, **request).result(60).out == 0).all()


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_a_seeded_bug_is_caught(mutant, tmp_path):
    """Two of them; `scripts/mutants hopper_fp8` seeds all."""
    with pytest.raises((AssertionError, EmulationFault)):
        sm90_fp8_mutation.run_probes(mutant, tmp_path)
