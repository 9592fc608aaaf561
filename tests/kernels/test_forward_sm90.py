"""The Hopper forward kernel on the CPU against the float64 oracle: options, edges, schedule, addressing."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest
from cases.forward_edges import BatchInvariance, Edges
from emulated.far_tensors import check_far
from emulated.forward import OPERANDS, Strided, check_case, gaussian, key_of, problem_of, run, run_case
from emulated.sweeps import LAUNCHES, Sweep, assert_same_bits, case_of, launch_of
from inside.emulation import EmulationFault
from inside.testing import SEQLENS, poison_unseen
from mutation import hopper as sm90_mutation
from mutation.hopper_mutants import DEFECTS

from gpu_actors.kernels.variants import kernel_source
from gpu_actors.testing import check_output

KERNEL = "forward_sm90"

# Every option alone or in company, every row of the tile table, both layouts, both alignments; shapes vary below.
SWEEPS = (
    Sweep("float16", 64, None, ""),
    Sweep("bfloat16", 128, None, "causal"),
    Sweep("bfloat16", 128, None, "causal window sink_tokens sinks", varlen=True, top_left=True),
    Sweep("float16", 256, None, "causal", varlen=True),
    Sweep("bfloat16", 80, 72, "window"),
    Sweep("float16", 128, None, ""),
    Sweep("bfloat16", 64, None, "causal sinks", varlen=True),
    Sweep("float16", 40, None, "window softcap scale", top_left=True),
    Sweep("float16", 96, None, "causal alibi"),
    Sweep("bfloat16", 192, None, "causal"),
    Sweep("float16", 192, 128, "softcap", varlen=True),
    Sweep("float16", 192, None, "causal alibi sinks", varlen=True, top_left=True),
    Sweep("bfloat16", 256, None, ""),
    Sweep("float16", 256, 72, "window sink_tokens sinks alibi softcap", varlen=True),
    Sweep("bfloat16", 32, 200, "causal window alibi"),
    Sweep("float16", 64, None, "causal dropout bias"),
    Sweep("bfloat16", 128, None, "dropout alibi", varlen=True),
    Sweep("bfloat16", 96, None, "bias softcap window"),
    Sweep("float16", 192, None, "bias alibi dropout causal"),
    Sweep("bfloat16", 256, None, "dropout window sinks scale", top_left=True),
    Sweep("float16", 256, None, "bias sink_tokens window softcap sinks"),
    Sweep("float16", 40, None, "bias"),
)
SAMPLE = SWEEPS[1:4]
BOTH = SWEEPS[15]
SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (130, 7), (200, 600))


def check_sweep(sweep: Sweep, shapes: tuple[tuple[int, int], ...], launches: int = 1) -> None:
    for index, seqlens in enumerate(shapes):
        # Keys and values that no row of their sequence sees hold NaN.
        number = SWEEPS.index(sweep) if sweep in SWEEPS else len(SWEEPS)
        case = poison_unseen(case_of(sweep, number, index, seqlens))
        for n in range(launches):
            # From one block that does everything to a block a tile.
            blocks = (1, 3, None)[(index + n) % 3]
            launch = launch_of(5 * index + number + 7 * n)
            check_case(case, kernel=KERNEL, multiprocessors=blocks, seed=index + n, **launch)


@pytest.mark.parametrize("sweep", SAMPLE, ids=str)
def test_it_agrees_with_the_oracle_whatever_the_schedule_and_the_delivery(sweep):
    check_sweep(sweep, SHAPES)


def test_it_drops_and_adds_a_bias():
    check_sweep(BOTH, SHAPES[3:4])


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("sweep", SAMPLE[:2], ids=str)
def test_it_agrees_with_the_oracle_with_fused_products(sweep):
    check_sweep(sweep, SHAPES)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_it_agrees_with_the_oracle_on_the_whole_grid(sweep):
    check_sweep(sweep, SHAPES + SEQLENS, launches=3)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_every_mode_gives_the_same_right_bits(sweep):
    """More tiles of keys than stages, more tiles of rows than blocks."""
    check_modes(sweep, (300, 700))


def test_every_delivery_and_schedule_gives_the_same_bits():
    check_modes(SWEEPS[1], (200, 600))


def check_modes(sweep: Sweep, seqlens: tuple[int, int]) -> None:
    case = poison_unseen(case_of(sweep, SWEEPS.index(sweep), 1, seqlens))
    problem = problem_of(*case.inputs, **case.options)
    stages, keys = (
        int(kernel_source(key_of(problem, "sm_90a", KERNEL)).macros[name]) for name in ("STAGES", "BLOCK_N")
    )
    assert stages * keys < seqlens[1]
    results = [
        run_case(case, kernel=KERNEL, seed=seed, arithmetic="nearest", multiprocessors=2, **launch_of(seed))
        for seed in range(len(LAUNCHES))
    ]
    assert_same_bits(results)
    check_output(*results[0], *case.inputs, repro=case.repro, **case.options)


@pytest.mark.parametrize("dims", [(96, 64), (64, 96)], ids=str)
def test_keys_and_values_have_boxes_of_their_own(dims: tuple[int, int]) -> None:
    """Rows of 96 columns come in boxes of 64 bytes, those of 64 and 128 in boxes of 128."""
    check_sweep(Sweep("float16", *dims, "causal"), SHAPES[3:4])


def answer(q: Any, k: Any, v: Any, *, blocks: int | None = None, **options: Any):
    arrays = {name: options[name] for name in OPERANDS if name in options}
    problem = problem_of(q, k, v, **options)
    return run(problem, {"q": q, "k": k, "v": v, **arrays}, kernel=KERNEL, multiprocessors=blocks)


def check(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    out, lse = answer(q, k, v, **options)
    options.pop("blocks", None)
    check_output(out, lse, q, k, v, **options)
    return out, lse


def qkv(rows: int, keys: int, *, batch: int = 1, heads: int = 2, heads_kv: int = 2, dtype: str = "float16"):
    shapes = ((batch, rows, heads, 64), (batch, keys, heads_kv, 64), (batch, keys, heads_kv, 64))
    return [gaussian(n, shape, dtype) for n, shape in enumerate(shapes)]


class TestSchedule:
    @pytest.mark.parametrize("causal", [False, True])
    def test_the_number_of_blocks_does_not_matter(self, causal):
        """Nor does what a section holds: with 2^20 keys L2 has room for few heads, with 300 for all."""
        q, k, v = qkv(500, 300, batch=3, heads=4)
        first = check(q, k, v, causal=causal)
        for blocks in (1, 2, 7):
            for one, other in zip(answer(q, k, v, causal=causal, blocks=blocks), first, strict=True):
                np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("section", [1, 2, 5, 11])
    def test_the_last_section_may_be_short(self, section, monkeypatch):
        q, k, v = qkv(200, 70, batch=1, heads=11)
        first = answer(q, k, v, causal=True, blocks=2)
        heads = section * 70 * 256
        monkeypatch.setattr("gpu_actors.kernels.hopper.variant._L2_BYTES", heads)
        from gpu_actors.kernels.hopper.variant import sections_of

        sections_of.cache_clear()
        try:
            for one, other in zip(answer(q, k, v, causal=True, blocks=2), first, strict=True):
                np.testing.assert_array_equal(one, other)
        finally:
            sections_of.cache_clear()

    def test_tiles_of_rows_that_see_no_key_follow_each_other(self):
        """The producer does not wait for any load then: it hands tiles on as fast as their places are given back."""
        case = case_of(SWEEPS[1], 1, 0, (1500, 20))
        for number in (1, 6):  # schedules that run a warp far ahead of others
            check_case(case, kernel=KERNEL, multiprocessors=1, seed=number, **launch_of(number))

    def test_a_sequence_longer_than_its_maximum_is_still_computed_whole(self):
        q, k = gaussian(7, (700, 2, 64), "float16"), gaussian(8, (700, 2, 64), "float16")
        ends = {name: np.array([0, 10, 700], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        problem = problem_of(q, k, k, causal=True, **ends)
        results = [
            run(dataclasses.replace(problem, seqlen_q=rows), {"q": q, "k": k, "v": k, **ends}, kernel=KERNEL)
            for rows in (1, 700)
        ]
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)


class Asked:
    DIM = 64
    BATCHED: ClassVar = {"blocks": 2}
    answer = staticmethod(answer)
    check = staticmethod(check)


class TestEdges(Asked, Edges):
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("special", [np.nan, np.inf])
    def test_special_values_reach_the_rows_that_see_them_and_no_others(self, dtype, special):
        """Rows and keys of one tile: the weight 0 of a hidden key, times NaN, would be NaN."""
        for index in range(3):
            operands = qkv(200, 200, dtype=dtype)
            operands[index][0, 40, :, 3::59] = special
            out, _ = check(*operands, causal=True)
            assert not np.isfinite(out).all()
            assert np.isfinite(out[:, :40]).all()

    def test_special_values_of_another_sequence_change_no_bits(self):
        ends = {name: np.array([0, 70, 170], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        arrays = [gaussian(n, (170, 2, 64), "float16") for n in range(3)]
        clean, clean_lse = answer(*arrays, causal=True, **ends)
        for array in arrays:
            array[70:] = np.nan
        out, lse = answer(*arrays, causal=True, **ends)
        np.testing.assert_array_equal(out[:70], clean[:70])
        np.testing.assert_array_equal(lse[:, :70], clean_lse[:, :70])
        assert np.isnan(out[70:]).all()


class TestAddressing:
    @staticmethod
    def view(seed: int, length: int, heads: int) -> Strided:
        """(batch, heads, rows, dim) storage with NaN between rows, heads and sequences."""
        base = np.full((2, heads + 1, length + 2, 64 + 16), np.nan, np.float16)
        array = base[:, 1:, 1 : length + 1, 8:72].transpose(0, 2, 1, 3)
        array[...] = gaussian(seed, array.shape)
        return Strided(array, base)

    def test_a_transposed_padded_view_is_read_and_written_in_place(self):
        q, out = (self.view(seed, 137, 4) for seed in (0, 3))
        k, v = (self.view(seed, 170, 2) for seed in (1, 2))
        out.array[...] = np.nan
        problem = problem_of(q.array, k.array, v.array, causal=True)
        written, lse = run(problem, {"q": q, "k": k, "v": v, "out": out}, kernel=KERNEL)
        check_output(written, lse, q.array, k.array, v.array, causal=True)
        assert np.isfinite(out.base).sum() == written.size, "only the view was written"

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_offsets_past_32_bits_are_followed(self, axis):
        check_far(KERNEL, axis)


class TestBatchInvariance(Asked, BatchInvariance):
    pass


@pytest.mark.parametrize("mutant", DEFECTS[:3], ids=lambda mutant: mutant.name)
def test_a_missing_wait_or_fence_is_caught(mutant, tmp_path):
    """One of a kind; `scripts/mutants hopper` seeds them all."""
    with pytest.raises((AssertionError, EmulationFault)):
        sm90_mutation.run_probes(mutant, tmp_path)
