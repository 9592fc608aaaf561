"""The Hopper backward kernels on the CPU against the float64 oracle: options, edges, addressing, repeats, dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulated.backward import backward_problem_of, check_case, run, run_case
from emulated.forward import gaussian, key_of, problem_of
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
    problem_and_operands,
)
from emulated.sweeps import LAUNCHES, Sweep, assert_same_bits, launch_of
from inside.emulation import EmulationFault
from inside.testing import SEQLENS, poison_unseen_backward
from mutation import backward_sm90 as sm90_mutation
from mutation.backward_sm90_mutants import DEFECTS

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key, explain
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.testing import check_gradients

KERNEL = "backward_sm90"

# Every option alone or in company, every row of the tile table, both layouts, both alignments; shapes vary below.
SWEEPS = (
    Sweep("bfloat16", 128, None, "causal", usual=True),
    Sweep("float16", 64, None, "", usual=True),
    Sweep("bfloat16", 64, None, "causal window sink_tokens sinks", varlen=True, top_left=True, usual=True),
    Sweep("bfloat16", 128, None, ""),
    Sweep("float16", 128, None, "causal", varlen=True, deterministic=True),
    Sweep("bfloat16", 40, 64, "window", top_left=True),
    Sweep("float16", 96, None, "causal sinks", deterministic=True),
    Sweep("bfloat16", 64, 104, "scale", varlen=True),
    Sweep("float16", 80, None, "window sink_tokens", deterministic=True),
    Sweep("float16", 64, None, "dropout bias alibi sinks", deterministic=True),
    Sweep("bfloat16", 128, None, "causal softcap", top_left=True, usual=True),
    Sweep("bfloat16", 128, None, "causal bias"),
    Sweep("float16", 128, 72, "softcap alibi", varlen=True),
    Sweep("bfloat16", 64, None, "causal window sink_tokens softcap alibi dropout sinks", varlen=True, top_left=True),
    Sweep("float16", 96, None, "window dropout", deterministic=True),
    Sweep("bfloat16", 128, None, "bias dropout window sink_tokens", deterministic=True),
    Sweep("bfloat16", 128, None, "causal bias softcap", deterministic=True),
    Sweep("float16", 72, None, "window bias softcap alibi dropout"),
    Sweep("bfloat16", 256, None, "causal", deterministic=True),
    Sweep("float16", 256, 200, ""),
    Sweep("float16", 192, 128, "causal window sink_tokens sinks", varlen=True, top_left=True),
    Sweep("bfloat16", 192, 128, "softcap alibi", deterministic=True),
    Sweep("bfloat16", 160, 192, "scale", varlen=True),
    Sweep("float16", 192, None, "bias dropout causal", deterministic=True),
    Sweep("bfloat16", 256, None, "causal window sink_tokens softcap alibi dropout sinks", varlen=True, top_left=True),
    Sweep("float16", 256, None, "bias alibi window", deterministic=True),
    Sweep("bfloat16", 64, 136, "dropout causal"),
)
USUAL = [sweep for sweep in SWEEPS if sweep.usual]
WIDE = next(sweep for sweep in SWEEPS if sweep.head_dim == 256)
SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (130, 7), (400, 300))


def check_sweep(sweep: Sweep, shapes: tuple[tuple[int, int], ...]) -> None:
    for index, seqlens in enumerate(shapes):
        number = SWEEPS.index(sweep)
        large = max(seqlens) > 300
        heads = (2, 1) if large else ((6, 2), (3, 1), (2, 2))[index % 3]
        case = case_of(sweep, 1000 * number + index, seqlens, batch=1 if large else 1 + index % 3, heads=heads)
        launch = {"kernel": KERNEL, "seed": index, "limit_seconds": 600.0, **launch_of(5 * index + number)}
        check_case(case, deterministic=sweep.deterministic, **launch)


@pytest.mark.timeout(180)  # three kernels are built for each, where no cache holds them
@pytest.mark.parametrize("sweep", USUAL, ids=str)
def test_it_agrees_with_the_oracle_whatever_the_schedule_and_the_delivery(sweep):
    check_sweep(sweep, SHAPES)


@pytest.mark.timeout(180)
def test_consumers_that_share_keys_agree_with_the_oracle():
    check_sweep(WIDE, ((200, 100),))


@pytest.mark.timeout(180)
def test_keys_and_values_of_two_widths_agree_with_the_oracle():
    """A tile of keys waits for the bytes of both."""
    check_sweep(next(sweep for sweep in SWEEPS if (sweep.head_dim, sweep.head_dim_v) == (192, 128)), SHAPES[2:4])


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("fused")
def test_it_agrees_with_the_oracle_with_fused_products():
    check_sweep(SWEEPS[0], SHAPES[3:])


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_it_agrees_with_the_oracle_on_the_whole_grid(sweep):
    check_sweep(sweep, (*SHAPES, *SEQLENS))


def check_modes(sweep: Sweep, seqlens: tuple[int, int]) -> None:
    """More tiles of queries than stages. dK and dV have the same bits in every mode, and dQ where deterministic."""
    case = poison_unseen_backward(case_of(sweep, 5, seqlens, batch=1, heads=(2, 1)))
    problem = backward_problem_of(*case.forward.inputs, **case.options)
    macros = kernel_source(key_of(problem, "sm_90a", KERNEL)).macros
    assert int(macros["STAGES"]) * int(macros["BLOCK_M"]) < seqlens[0]
    # Like the hardware, functions would err by other amounts with each seed.
    same = {"kernel": KERNEL, "deterministic": sweep.deterministic, "arithmetic": "nearest"}
    results = [run_case(case, seed=seed, **same, **launch_of(seed)) for seed in range(len(LAUNCHES))]
    for result in results:
        given = {"out": case.out, "lse": case.lse}
        check_gradients(result, *case.arguments, repro=case.repro, **given, **case.options)
    names = ("dq", "dk", "dv") if sweep.deterministic else ("dk", "dv")
    assert_same_bits([[getattr(result, name) for name in names] for result in results])


def test_every_delivery_and_schedule_gives_the_same_bits_of_dk_and_dv():
    check_modes(SWEEPS[0], (300, 200))


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_every_mode_gives_right_gradients(sweep):
    check_modes(sweep, (420, 300))


class TestDeterministic:
    @pytest.mark.parametrize(("sweep", "count"), [(SWEEPS[4], 20), (WIDE, 6), (SWEEPS[9], 6)], ids=str)
    def test_repeats_have_the_same_bits(self, sweep, count):
        """Several key tiles add to dQ, or heads to the one dbias, from blocks that run at the same time."""
        self.check_repeats(sweep, count)

    @pytest.mark.sweep
    @pytest.mark.timeout(600)
    @pytest.mark.parametrize("sweep", [sweep for sweep in SWEEPS if sweep.deterministic], ids=str)
    def test_twenty_repeats_of_every_variant_have_the_same_bits(self, sweep):
        self.check_repeats(sweep, 20)

    @staticmethod
    def check_repeats(sweep: Sweep, count: int) -> None:
        biased = "bias" in sweep.options
        shape = {"seqlens": (40, 150), "heads": (4, 2)} if biased else {"seqlens": (90, 500), "heads": (1, 1)}
        case = case_of(sweep, 4, batch=1, **shape)
        if biased:  # of all heads, and of floats, which show the last bits
            bias = np.ascontiguousarray(case.options["bias"][:1, :1]).astype(np.float32)
            case.options["bias"] = bias
        # What a row gives to all keys adds up to 0: parts of dQ grow and still cancel, and 16 bits show their order.
        case.forward.k[...] += 64
        case = answered(case, case.options)
        same = {"kernel": KERNEL, "deterministic": True, "threads": 3, "arithmetic": "nearest"}
        results = [run_case(case, seed=seed, **same, **launch_of(seed)) for seed in range(count)]
        names = ("dq", "dk", "dv", *(["dbias"] if biased else []))
        assert_same_bits([[getattr(result, name) for name in names] for result in results])

    @pytest.mark.parametrize("seed", [1, 6, 7], ids=["downwards", "from the third on", "every other"])
    def test_blocks_that_start_in_another_order_wait_for_none_that_has_not_started(self, seed):
        # Packed sequences of several lengths, whose tiles of keys start by how many come after them.
        case = case_of(SWEEPS[4], 3, (40, 600), batch=3, heads=(1, 1))
        launch = {"kernel": KERNEL, "deterministic": True, "limit_seconds": 20.0}
        first, again = run_case(case, **launch), run_case(case, seed=seed, **launch)
        np.testing.assert_array_equal(again.dq, first.dq)


LAUNCH: dict[str, Any] = {"kernel": KERNEL}


class TestEdges:
    def test_rows_that_see_no_key_and_keys_that_no_row_sees_have_gradients_of_zero(self):
        gradients = check(LAUNCH, *operands_of(190, 20), causal=True)
        assert (gradients.dq[:, :170] == 0).all()
        gradients = check(LAUNCH, *operands_of(20, 290), causal=True, alignment="top_left")
        assert (gradients.dk[:, 20:] == 0).all()
        assert (gradients.dv[:, 20:] == 0).all()

    def test_keys_that_no_row_sees_may_hold_anything(self):
        """Rows past the last one share a tile with the last ones, and are hidden from no key by the diagonal."""
        sweep = Sweep("float16", 64, None, "causal", top_left=True)
        check_case(case_of(sweep, 1, (100, 400), batch=1, heads=(1, 1)), kernel=KERNEL)

    def test_empty_sequences_give_zeros(self):
        check_empty_sequences(LAUNCH)

    def test_sequences_longer_than_the_caller_said_are_answered_whole(self):
        """A block then takes several tiles of keys, and some of none that a row sees."""
        check_sequences_longer_than_said(LAUNCH, 500)

    @pytest.mark.parametrize("special", [np.nan, np.inf])
    def test_special_values_reach_what_their_row_or_key_reaches_and_no_more(self, special):
        """A hidden pair is a 0 in a product, and 0 * NaN is NaN."""
        for index in range(4):
            arrays = operands_of(300, 300)
            arrays[index][0, 140, :, 3] = special
            problem, operands = problem_and_operands(*arrays, causal=True)
            gradients = run(problem, operands, kernel=KERNEL)
            assert not np.isfinite(gradients.dk).all()
            assert np.isfinite(gradients.dq[:, :140]).all()
            if special != special:
                check_gradients(gradients, *arrays, out=operands["out"], lse=operands["lse"], causal=True)

    def test_special_values_of_another_sequence_change_no_bits(self):
        ends = {name: np.array([0, 70, 170], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        arrays = [gaussian(n, (170, 2, 64), "float16") for n in range(4)]
        problem, operands = problem_and_operands(*arrays, **ends)
        clean = run(problem, operands, kernel=KERNEL)
        for name in ("dout", "q", "k", "v", "out"):
            operands[name] = operands[name].copy()
            operands[name][70:] = np.nan
        operands["lse"][:, 70:] = np.nan
        found = run(problem, operands, kernel=KERNEL)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(found, name)[:70], getattr(clean, name)[:70])

    def test_the_gradient_of_the_lse_is_taken_off_delta(self):
        check_lse_gradient(LAUNCH)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("of_dout", "of_v"), [(3000.0, 20.0), (1e-4, 1.0)])
def test_float16_scores_keep_gradients_beyond_and_below_their_range(of_dout, of_v, causal):
    """dS reaches 10^5, where float16 ends at 65,504; or 10^-6, where it keeps few bits."""
    check_float16_range(LAUNCH, of_dout, of_v, causal=causal)


def test_all_kernels_of_a_request_scale_float16_scores_alike_where_dropout_raises_their_bound():
    """What is kept counts fourfold here, which is two powers of two of the factor that dQ is divided by at the end."""
    check(LAUNCH, *operands_of(150, 150), dropout_p=0.75)


class TestAddressing:
    @pytest.mark.parametrize("padding", [8, 4, 3])
    def test_transposed_padded_views_are_read_and_written_in_place(self, padding):
        """Operands lie where TMA can follow them; gradients may lie anywhere: on 16, 8 or 2 bytes."""
        check_padded_views(LAUNCH, 8, padding)


class TestBatchInvariance:
    def test_a_dense_sequence_has_the_same_bits_alone_and_in_a_batch(self):
        def answer(*arrays: Any) -> Any:
            problem, operands = problem_and_operands(*arrays, causal=True)
            return run(dataclasses.replace(problem, deterministic=True), operands, kernel=KERNEL)

        arrays = operands_of(150, 213, batch=3, heads=4)
        whole = answer(*arrays)
        for index in range(3):
            alone = answer(*(x[index : index + 1] for x in arrays))
            for name in ("dq", "dk", "dv"):
                np.testing.assert_array_equal(getattr(alone, name)[0], getattr(whole, name)[index])


Q = np.zeros((2, 200, 4, 64), np.float16)
KV = np.zeros((2, 300, 2, 64), np.float16)
BASE = dataclasses.replace(problem_of(Q, KV, KV), direction="backward")


class TestDispatch:
    @pytest.mark.parametrize(
        "dims", [(32, 32), (40, 40), (64, 64), (96, 128), (128, 128), (192, 128), (136, 192), (256, 256)]
    )
    @pytest.mark.parametrize("layout", ["dense", "varlen"])
    def test_it_takes_16_bit_gradients_on_hopper(self, dims, layout):
        problem = dataclasses.replace(BASE, head_dim=dims[0], head_dim_v=dims[1], layout=layout)
        assert dispatch_key(problem, "sm_90a").kernel == KERNEL

    @pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_120a"])
    def test_other_architectures_take_mma_sync(self, arch):
        assert dispatch_key(BASE, arch).kernel == "backward_mma"

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"bias": ("float16", False, False), "softcap": 20.0, "head_dim": 136}, "beside a derivative"),
            ({"head_dim": 36}, "multiples of 8"),
            ({"softmax_scale": 2.0**-40}, "in fp32"),
        ],
    )
    def test_what_it_refuses_goes_to_mma_sync_and_explain_says_why(self, changes, reason):
        problem = dataclasses.replace(BASE, **changes)
        if "head_dim" not in changes or changes["head_dim"] != 36:
            assert dispatch_key(problem, "sm_90a").kernel == "backward_mma"
        verdict = next(verdict for verdict in explain(problem, "sm_90a") if verdict.family == KERNEL)
        assert not verdict.taken
        assert reason in verdict.reason

    @pytest.mark.parametrize(
        "changes",
        [{"bias": ("float16", False, False)}, {"dropout_p": 0.1}, {"softcap": 20.0}, {"alibi": "heads"}],
        ids=lambda changes: next(iter(changes)),
    )
    def test_it_takes_every_option(self, changes):
        assert dispatch_key(dataclasses.replace(BASE, **changes), "sm_90a").kernel == KERNEL

    def test_a_request_on_the_emulated_device_is_answered_by_it(self):
        case = case_of(SWEEPS[0], 3, (90, 90), batch=1, heads=(2, 1))
        with ga.open_context("emulated", ga.ContextOptions(arch="sm_90a")) as ctx:
            dout, q, k, v, out, lse = case.inputs
            request = ga.FlashBackward(q=q, k=k, v=v, out=out, dout=dout, lse=lse, **case.options)
            assert ctx.flash_attn.inspect_key(request).kernel == KERNEL
            gradients = ctx.flash_attn.submit(request).result(60.0)
        check_gradients(gradients, *case.arguments, out=out, lse=lse, **case.options)


@pytest.mark.parametrize("mutant", DEFECTS[:3], ids=lambda mutant: mutant.name)
def test_a_missing_wait_or_fence_is_caught(mutant, tmp_path):
    """Some of them; `scripts/mutants backward_sm90` seeds all."""
    with pytest.raises((AssertionError, EmulationFault)):
        sm90_mutation.run_probes(mutant, mutant.probes, tmp_path)
