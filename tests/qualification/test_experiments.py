"""The small problems that prove a kernel: each variant has some, and they pass on the emulated device."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.matrix_variants import first_variant
from cases.proofs import MERGES, ORDERS, device_of, prove, proved_alone
from inside.attention import ScoreMod
from inside.compiling import Variant
from inside.kernels import (
    PLAN,
    AppendProblem,
    append_variant,
    family_of,
    kv_variants,
    merge_gradient_variants,
    merge_variant,
    standard_variants,
    tile_of,
    usual_backward_keys,
    variant_of,
)
from matrix.table import FAMILIES as MATRIX
from support.cubins import run_child

import gpu_actors as ga
from gpu_actors.qualification.experiments import experiments_of, is_proved

# Rows of the matrix whose kernels differ in options and not only in sizes. Each family adds two usual rows.
SAMPLE = {
    "append": ("copy", "interleaved to e5m2", "tables and positions"),
    "decode": ("tree", "fp8 q", "cache"),
    "decode_simple": ("pinned",),
    "forward": ("window", "options", "float", "simple chunks"),
}


def _rows() -> Iterator[Any]:
    for family, module in MATRIX.items():
        if family == "merge":
            continue
        sample = (*SAMPLE.get(family, ()), *list(module.USUAL)[:2])
        for row, grid in [*((row, False) for row in module.ROWS), *((row, True) for row in module.GRID)]:
            marks = () if row in sample else (pytest.mark.sweep,)
            yield pytest.param(family, row, grid, id=f"{family}-{row}", marks=marks)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("family", "row", "grid"), list(_rows()))
def test_the_kernel_of_a_hard_problem_proves_itself(family: str, row: str, grid: bool) -> None:
    variant = first_variant(family, row, grid)
    if variant is None:
        return  # the row launches no kernel of the package
    alone = proved_alone(variant)
    assert prove(alone) > 0 or not is_proved(alone), "those of score modifications are not proved"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", MERGES)
def test_merges_prove_themselves(name: str) -> None:
    for variant in (merge_variant(MERGES[name], "sm_90a"), *merge_gradient_variants(MERGES[name], "sm_90a")):
        assert prove(variant) == 2 * len(ORDERS)


@pytest.mark.timeout(180)
def test_caches_of_each_layout_and_copies_prove_themselves() -> None:
    plain = AppendProblem(
        layout="paged", batch=1, total=1, heads_kv=1, head_dim=64, head_dim_v=64, dtype="float16",
        cache_dtype="float16", page_size=16, num_blocks=1, max_blocks=1,
    )  # fmt: skip
    latent = {"latent": True, "head_dim_v": 128, "cache_dtype": "float8_e4m3fn", "descales": True}
    for changes in ({"layout": "pointers"}, {"layout": "dense"}, latent):
        problem: Any = dataclasses.replace(plain, **changes)
        assert prove(append_variant(problem, "sm_90a")) == 2 * len(ORDERS)
    (copy,) = [variant for variant in kv_variants("sm_90a") if variant.kernel == "copy_pages"]
    assert prove(copy) == len(ORDERS)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_kernel_that_is_usual_is_proved_alone_or_beside_another(arch: str) -> None:
    keys = [*standard_variants(arch), *usual_backward_keys(arch)]
    variants = [variant_of(key) for key in keys]
    for key, variant in zip(keys, variants, strict=True):
        alone = key.kernel == family_of(key).name or key.kernel == PLAN
        assert is_proved(variant) == alone, key
        if not alone:
            continue
        experiments = list(experiments_of(variant, device_of(arch)))
        assert experiments, key
        for experiment in experiments:
            assert variant in experiment.variants, "the small problem is for this very cubin"
            launched = sum(array.nbytes for array in experiment.inputs.values())
            assert launched < 16 << 20, "it is small"
    beside = {variant for key, variant in zip(keys, variants, strict=True) if not is_proved(variant)}
    proving = [variant for variant in variants if is_proved(variant)]
    covered = {
        each for one in proving for experiment in experiments_of(one, device_of(arch)) for each in experiment.variants
    }
    assert beside <= covered


def test_a_kernel_with_a_graphs_modification_and_one_of_a_users_are_not_proved() -> None:
    key = standard_variants("sm_80")[0]
    scored = variant_of(dataclasses.replace(key, score_mod=ScoreMod("")))
    own = Variant.of(ga.KernelSource("f.cu", 'extern "C" __global__ void f() {}', ("f",)), "sm_80")
    assert not is_proved(own)
    assert not is_proved(scored)


def test_a_length_that_contradicts_the_cache_is_answered_with_nan_that_is_written() -> None:
    key = next(key for key in standard_variants("sm_80") if key.kernel == "decode_mma")
    for experiment in experiments_of(variant_of(dataclasses.replace(key, lse=True)), device_of("sm_80")):
        lengths = experiment.inputs["cache_seqlens"]
        assert sum((lengths < 0) | (lengths > experiment.problem.seqlen_k)) == 1
        answer = {name: experiment.answer()[name].astype(array.dtype) for name, array in experiment.written.items()}
        experiment.check(answer)
        for name, array in answer.items():
            left = np.where(np.isnan(array), experiment.written[name], array)
            with pytest.raises(AssertionError, match=f"{name} was not written"):
                experiment.check({**answer, name: left})


def test_what_splits_work_on_the_device_has_more_sequences_than_threads() -> None:
    splits = [variant_of(key) for key in standard_variants("sm_80") if key.kernel == PLAN and key.row_tile == 16]
    assert splits
    for variant in splits:
        assert any(one.problem.batch > 256 for one in experiments_of(variant, device_of("sm_80")))


def test_gradients_of_float16_have_products_beyond_it() -> None:
    keys = [key for key in usual_backward_keys("sm_80") if key.kernel == "backward_mma"]
    assert {key.dtype for key in keys} == {"float16", "bfloat16"}
    for key in keys:
        for experiment in experiments_of(variant_of(key), device_of("sm_80")):
            dout, v = (experiment.inputs[name].astype(float) for name in ("dout", "v"))
            largest = np.nanmax(np.abs(dout)) * np.nanmax(np.abs(v)) / experiment.problem.seqlen_k
            assert (largest > np.finfo(np.float16).max / 16) == (key.dtype == "float16"), largest


def test_slopes_are_too_steep_to_be_divided_by_a_scale() -> None:
    """Otherwise a kernel that divides slopes by the scale would not show an overflow."""
    plain = next(key for key in standard_variants("sm_90a") if key.kernel == "forward_sm90" and not key.causal)
    most = float(np.finfo(np.float32).max)
    for causal in (False, True):
        key = dataclasses.replace(plain, alibi=True, lse=True, mask="causal" if causal else "full")
        beyond = 0
        for experiment in experiments_of(variant_of(key), device_of("sm_90a")):
            steepest = float(experiment.inputs["alibi_slopes"].max()) / experiment.problem.softmax_scale
            lse = experiment.answer()["lse"]
            assert np.abs(lse[np.isfinite(lse)]).max() < most, "float32 holds what is right"
            distance = 1 if causal else max(0, experiment.problem.seqlen_q - experiment.problem.seqlen_k)
            beyond += steepest * distance > most
        assert beyond


def test_an_infinite_value_has_a_weight_that_float32_rounds_to_0() -> None:
    """The output is infinite all the same, in forward_sm90 as in the oracle."""
    plain = next(key for key in standard_variants("sm_90a") if key.kernel == "forward_sm90")
    variant = variant_of(dataclasses.replace(plain, bias="float32"))
    for experiment in experiments_of(variant, device_of("sm_90a")):
        key = np.flatnonzero(np.isinf(experiment.inputs["v"]).any(axis=(0, 2, 3)))
        assert len(key) == 1
        least = experiment.inputs["bias"][..., key].max() - experiment.inputs["bias"].max()
        assert np.exp(np.float32(least)) == 0
        assert np.isinf(experiment.answer()["out"]).any()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_edges_of_masks_lie_beside_those_of_tiles(arch: str) -> None:
    """An edge that is off by one shows there."""
    keys = [key for key in standard_variants(arch) if key.kernel.startswith("forward") and key.causal]
    assert keys
    for key in keys:
        for mask in ("causal", "causal_window"):
            masked: Any = dataclasses.replace(key, mask=mask)
            tile = tile_of(masked)
            right, left = set[int](), set[int]()
            for problem, lengths, _ in family_of(masked).trials(masked):
                for rows, seen in lengths:
                    right.add((seen - rows + 1) % tile.block_n)
                    last = min(rows, tile.block_m) - 1 + seen - rows
                    left.add((last - problem.window_size[0]) % tile.block_n)
            assert tile.block_n - 1 in right
            assert {0, 1} <= left if mask == "causal_window" else 0 in right


def test_data_are_the_same_in_every_process(tmp_path: Path) -> None:
    """A replay needs the arrays of the evidence."""
    child = """
        import sys
        import numpy as np
        from cases.proofs import device_of
        from inside.kernels import standard_variants, variant_of
        from inside.qualification import experiments_of
        experiment = next(experiments_of(variant_of(standard_variants("sm_80")[0]), device_of("sm_80")))
        np.savez(sys.argv[1], **experiment.inputs, **experiment.written)
    """
    run_child(textwrap.dedent(child), tmp_path / "arrays.npz")
    experiment = next(experiments_of(variant_of(standard_variants("sm_80")[0]), device_of("sm_80")))
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert experiment.takes(arrays)
        assert not experiment.takes({**arrays, "q": 0 * experiment.inputs["q"]})
