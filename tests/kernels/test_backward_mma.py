"""The tensor-core backward kernels on the CPU against the float64 oracle: options, edges, addressing, repeats."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulated.backward import KERNEL, backward_problem_of, check_case, run, run_case
from emulated.gradients import (
    case_of,
    check,
    check_empty_sequences,
    check_float16_range,
    check_lse_gradient,
    check_padded_views,
    check_sequences_longer_than_said,
    operands_of,
    problem_and_operands,
)
from emulated.sweeps import LAUNCHES, Sweep, assert_same_bits, launch_of
from inside.testing import SEQLENS

from gpu_actors import AttentionGradients
from gpu_actors.kernels.dispatch import FAMILIES, dispatch_key
from gpu_actors.testing import BackwardCase, check_gradients

# Every option alone or in company, every row of the tile table, both layouts, both alignments, both ways to reduce.
SWEEPS = (
    Sweep("float16", 64, None, "causal", arch="sm_80", usual=True),
    Sweep(
        "bfloat16",
        128,
        None,
        "causal window sink_tokens",
        arch="sm_90a",
        varlen=True,
        top_left=True,
        deterministic=True,
        usual=True,
    ),
    Sweep("float16", 40, None, "dropout sinks bias alibi softcap", arch="sm_86", usual=True),
    Sweep("bfloat16", 256, 72, "causal sinks", arch="sm_86", usual=True),
    Sweep("float32", 96, None, "window", compute="tf32", arch="sm_80", varlen=True, deterministic=True, usual=True),
    Sweep("float16", 64, 96, "causal alibi sinks", arch="sm_86", varlen=True, top_left=True),
    Sweep("bfloat16", 40, None, "causal dropout", arch="sm_80", deterministic=True),
    Sweep("float16", 80, None, "window sink_tokens bias scale", arch="sm_90a", deterministic=True),
    Sweep("bfloat16", 32, 200, "window dropout sinks alibi softcap", arch="sm_80", varlen=True, top_left=True),
    Sweep("bfloat16", 128, None, "bias scale", arch="sm_86"),
    Sweep("bfloat16", 128, 104, "dropout", arch="sm_80", varlen=True),
    Sweep("float16", 192, None, "causal", arch="sm_86", varlen=True),
    Sweep("bfloat16", 256, None, "causal softcap", arch="sm_90a", deterministic=True),
    Sweep("bfloat16", 192, 128, "", arch="sm_80", varlen=True),
    Sweep("bfloat16", 256, None, "causal softcap", arch="sm_86", varlen=True),
    Sweep(
        "float32", 40, 72, "causal bias dropout sinks", compute="bf16", arch="sm_86", top_left=True, deterministic=True
    ),
    Sweep("float32", 64, None, "window sink_tokens softcap", compute="tf32", arch="sm_90a", varlen=True),
    Sweep("float32", 128, None, "causal bias", compute="f16", arch="sm_86"),
    Sweep("float32", 256, None, "causal", compute="tf32", arch="sm_86", varlen=True),
    Sweep("float32", 256, 200, "dropout alibi", compute="tf32", arch="sm_80"),
    Sweep("float32", 224, None, "window bias", compute="bf16", arch="sm_90a", deterministic=True),
)
SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (31, 300), (130, 7), (200, 260))


def check_sweep(sweep: Sweep, shapes: tuple[tuple[int, int], ...]) -> None:
    for index, seqlens in enumerate(shapes):
        number = SWEEPS.index(sweep)
        large = max(seqlens) > 300  # which the emulation takes its time for
        heads = (2, 1) if large else ((6, 2), (3, 1), (2, 2))[index % 3]
        case = case_of(sweep, 1000 * number + index, seqlens, batch=1 if large else 1 + index % 3, heads=heads)
        check_case(
            case,
            compute=sweep.compute,
            deterministic=sweep.deterministic,
            arch=sweep.arch,
            seed=index,
            limit_seconds=600.0,
            **launch_of(5 * index + number),
        )


@pytest.mark.timeout(180)  # three kernels are built for each, where no cache holds them
@pytest.mark.parametrize("sweep", [sweep for sweep in SWEEPS if sweep.usual], ids=str)
def test_it_agrees_with_the_oracle_whatever_the_schedule_and_the_delivery(sweep):
    check_sweep(sweep, SHAPES)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_it_agrees_with_the_oracle_on_the_whole_grid(sweep):
    check_sweep(sweep, (*SHAPES, *SEQLENS))


def usual_case(seqlens: tuple[int, int], **choices: Any) -> BackwardCase:
    """Of the first sweep, whose kernels other tests compile as well."""
    return case_of(SWEEPS[0], 5, seqlens, **{"heads": (4, 2), "batch": 1, **choices})


def test_every_delivery_and_schedule_gives_the_same_bits_of_dk_and_dv():
    """200 rows are more tiles than the ring has stages, so that every stage is refilled."""
    case = usual_case((200, 150))
    results = [run_case(case, arch="sm_80", seed=seed, **launch_of(seed)) for seed in range(len(LAUNCHES))]
    assert_same_bits([(result.dk, result.dv) for result in results])


def check_a_hundred_repeats(sweep: Sweep, case: BackwardCase) -> AttentionGradients:
    """The gradients, whose bits are the same in every repeat."""
    # Like the hardware, functions would err by other amounts with each seed.
    given = {"compute": sweep.compute, "deterministic": True, "arch": sweep.arch, "arithmetic": "nearest"}
    first = run_case(case, **given)
    names = [name for name in ("dq", "dk", "dv", "dbias", "dsinks") if getattr(first, name) is not None]
    for seed in range(100):
        again = run_case(case, seed=seed, threads=3, **launch_of(seed), **given)
        assert_same_bits([[getattr(result, name) for name in names] for result in (first, again)])
    return first


class TestDeterministic:
    def test_a_hundred_repeats_have_the_same_bits(self):
        """Of floats, which show the last bits: seven key tiles add to dQ, from blocks that run at the same time."""
        sweep = SWEEPS[4]
        case = case_of(sweep, 3, (40, 410), batch=1, heads=(1, 1))
        check_a_hundred_repeats(sweep, case)

    @pytest.mark.parametrize("seed", [1, 6, 7], ids=["downwards", "from the third on", "every other"])
    def test_blocks_that_start_in_another_order_wait_for_none_that_has_not_started(self, seed):
        """Each tile of keys adds to all of dQ, and each sequence and head to the one dbias; two run at a time."""
        sweep = Sweep("float32", 96, None, "causal bias", compute="tf32", arch="sm_80", deterministic=True)
        case = case_of(sweep, 3, (40, 200), batch=2, heads=(4, 2))
        case.options["bias"] = np.ascontiguousarray(case.options["bias"][:1, :1])
        launch = {"compute": sweep.compute, "deterministic": True, "arch": sweep.arch, "limit_seconds": 20.0}
        first = run_case(case, **launch)
        again = run_case(case, seed=seed, **launch)
        for name in ("dq", "dk", "dv", "dbias"):
            np.testing.assert_array_equal(getattr(again, name), getattr(first, name))

    @pytest.mark.sweep
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("sweep", [sweep for sweep in SWEEPS if sweep.deterministic], ids=str)
    def test_a_hundred_repeats_of_every_variant_have_the_same_bits(self, sweep):
        case = case_of(sweep, 3, (90, 410), batch=2, heads=(2, 1))
        first = check_a_hundred_repeats(sweep, case)
        check_gradients(first, *case.arguments, out=case.out, lse=case.lse, compute=sweep.compute, **case.options)


LAUNCH: dict[str, Any] = {"arch": "sm_80"}


def answer(*arrays: Any, **options: Any) -> Any:
    problem, operands = problem_and_operands(*arrays, **options)
    return run(problem, operands, **LAUNCH)


class TestEdges:
    def test_rows_that_see_no_key_and_keys_that_no_row_sees_have_gradients_of_zero(self):
        gradients = check(LAUNCH, *operands_of(90, 20), causal=True)
        assert (gradients.dq[:, :70] == 0).all()
        gradients = check(LAUNCH, *operands_of(20, 290), causal=True, alignment="top_left")
        assert (gradients.dk[:, 20:] == 0).all()
        assert (gradients.dv[:, 20:] == 0).all()

    def test_empty_sequences_give_zeros(self):
        check_empty_sequences(LAUNCH)

    def test_sequences_longer_than_the_caller_said_are_answered_whole(self):
        check_sequences_longer_than_said(LAUNCH, 300)

    def test_a_nan_reaches_what_its_row_or_key_reaches_and_no_more(self):
        """A hidden pair is a 0 in a product, and 0 * NaN is NaN."""
        for index in range(4):
            arrays = operands_of(150, 150)
            arrays[index][0, 40, :, 3] = np.nan
            gradients = check(LAUNCH, *arrays, causal=True)
            assert not np.isfinite(gradients.dk).all()
            assert np.isfinite(gradients.dq[:, :40]).all()
            assert np.isfinite(gradients.dk[:, 150:]).all()

    def test_the_gradient_of_the_lse_is_taken_off_delta(self):
        check_lse_gradient(LAUNCH)


@pytest.mark.parametrize(("of_dout", "of_v"), [(3000.0, 20.0), (1e-4, 1.0)])
def test_float16_scores_keep_gradients_beyond_and_below_their_range(of_dout, of_v):
    """dS reaches 10^5, where float16 ends at 65,504; or 10^-6, where it keeps few bits."""
    check_float16_range(LAUNCH, of_dout, of_v, causal=True)


class TestAddressing:
    @pytest.mark.parametrize("padding", [8, 1, 2, 3])
    def test_transposed_padded_views_are_read_and_written_in_place(self, padding):
        """8 keeps rows on 16 bytes, what cp.async needs; 3 keeps them on nothing."""
        check_padded_views(LAUNCH, padding, padding)


class TestBatchInvariance:
    def test_a_dense_sequence_has_the_same_bits_alone_and_in_a_batch(self):
        arrays = operands_of(150, 113, batch=3, heads=4)
        whole = answer(*arrays, causal=True)
        for index in range(3):
            alone = answer(*(x[index : index + 1] for x in arrays), causal=True)
            np.testing.assert_array_equal(alone.dk[0], whole.dk[index])
            np.testing.assert_array_equal(alone.dv[0], whole.dv[index])

    def test_a_packed_sequence_has_the_same_bits_of_every_gradient_where_deterministic(self):
        sweep = SWEEPS[4]
        case = case_of(sweep, 11, (100, 200), batch=3, heads=(2, 1))
        options = dict(case.options)
        ends_q, ends_k = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
        whole = run_case(case, compute=sweep.compute, deterministic=True, arch=sweep.arch)
        dout, q, k, v, out, lse = case.inputs
        for index, lengths in enumerate(case.forward.seqlens):
            if not all(lengths):
                continue
            rows, keys = (slice(*ends[index : index + 2]) for ends in (ends_q, ends_k))
            ends = {
                "cu_seqlens_q": np.array([0, rows.stop - rows.start], np.int32),
                "cu_seqlens_k": np.array([0, keys.stop - keys.start], np.int32),
            }
            inputs = q[rows], k[keys], v[keys]
            problem = backward_problem_of(*inputs, compute=sweep.compute, deterministic=True, **options, **ends)
            operands = {"dout": dout[rows], "q": q[rows], "k": k[keys], "v": v[keys], "out": out[rows], **ends}
            alone = run(problem, {**operands, "lse": np.ascontiguousarray(lse[:, rows])}, arch=sweep.arch)
            np.testing.assert_array_equal(alone.dq, whole.dq[rows])
            np.testing.assert_array_equal(alone.dk, whole.dk[keys])
            np.testing.assert_array_equal(alone.dv, whole.dv[keys])


def all_of(dtype: str, compute: str) -> dict[str, str]:
    return {"dtype": dtype, "kv_dtype": dtype, "out_dtype": dtype, "compute": compute}


class TestDispatch:
    Q = np.zeros((1, 64, 2, 64), np.float16)
    BASE = backward_problem_of(Q, Q, Q)

    def test_it_takes_what_tensor_cores_can_multiply(self):
        reduced = dataclasses.replace(self.BASE, **all_of("float32", "tf32"))
        unscaled = dataclasses.replace(self.BASE, softmax_scale=-0.5)
        for problem in (self.BASE, reduced, unscaled, dataclasses.replace(self.BASE, head_dim=32, head_dim_v=256)):
            assert dispatch_key(problem, "sm_80").kernel == KERNEL

    @pytest.mark.parametrize(
        ("changes", "field", "nearest", "reason"),
        [
            ({"head_dim": 36}, "head_dim", 40, "multiples of 8"),
            ({"head_dim_v": 4}, "head_dim_v", 8, "from 8 to 256"),
            (all_of("float32", "f32"), "compute", "tf32", "no float32"),
            (all_of("float64", "f64"), "dtype", "bfloat16", "float16, float32, bfloat16"),
        ],
    )
    def test_what_it_refuses_names_the_nearest_that_it_takes(self, changes, field, nearest, reason):
        problem = dataclasses.replace(self.BASE, **changes)
        refusal = next(family for family in FAMILIES if family.name == KERNEL).refusal(problem, "sm_80")
        assert (refusal.field, refusal.nearest) == (field, nearest)
        assert reason in refusal.reason
