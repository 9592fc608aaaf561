"""The merge of partials on the device: NaN that stays visible, the order of its sums, and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from emulated.merge import merge_problem, run_merge, run_merge_gradients
from matrix.merge import check_merge, gradients_of, partials_of

import gpu_actors as ga
from gpu_actors.kernels.merge import MergeProblem, merge_gradient_geometries, merge_gradient_variants, merge_variant
from gpu_actors.partial import Partial, merge


def test_what_a_partial_saw_stays_nan_or_infinite_however_small_its_weight() -> None:
    partials = partials_of(2)
    partials[0].lse[...] = 0.0
    partials[1].lse[...] = -90.0
    partials[0].out[0, 0, 0, 0] = np.inf
    partials[1].out[0, 1, 0, 3] = np.nan
    partials[1].out[1, 0, 0, 5] = -np.inf
    got, wanted = run_merge(partials), merge(partials)
    for index in ((0, 0, 0, 0), (0, 1, 0, 3), (1, 0, 0, 5)):
        assert str(got.out[index]) == str(wanted.out[index])
        assert not np.isfinite(float(got.out[index]))
    check_merge(partials)


def test_the_order_of_the_list_is_the_order_of_the_sums() -> None:
    """The sum of three terms of weight 1 depends on their order."""
    big = [np.full((1, 1, 1, 8), x, np.float32) for x in (2.0**24, 1.0, 1.0)]
    terms = [Partial(x, np.zeros((1, 1, 1), np.float32)) for x in big]
    first = run_merge(terms).out[0, 0, 0, 0]
    last = run_merge(terms[::-1]).out[0, 0, 0, 0]
    assert first == np.float32(2.0**24) / np.float32(3)
    assert last == np.float32(2.0**24 + 2) / np.float32(3)
    assert first != last


def test_what_a_partial_saw_stays_nan_in_gradients_however_small_its_weight() -> None:
    partials = partials_of(2)
    partials[0].lse[...] = 0.0
    partials[1].lse[...] = -90.0
    partials[1].out[0, 1, 0, 3] = np.nan
    partials[1].out[1, 0, 0, 5] = -np.inf
    dout, _ = gradients_of(partials, None, False)
    got = run_merge_gradients(partials, dout)
    assert np.isnan(got.partials[0].lse[0, 0, 1])
    assert np.isfinite(got.partials[0].out[0, 1, 0].astype(float)).all()
    assert not np.isfinite(got.partials[0].lse[1, 0, 0])
    seen = np.isfinite(got.partials[0].lse)
    assert np.count_nonzero(~seen) == 2


PROBLEM = merge_problem(partials_of(4, "float32"), np.zeros(4, np.float32))


@pytest.mark.parametrize("variants", [merge_variant, merge_gradient_variants], ids=["merge", "gradient"])
def test_a_problem_is_checked(variants: Callable[[MergeProblem, str], object]) -> None:
    for field, wrong in {"dtype": "int8", "lse_dtype": "float16", "out_dtype": "int8"}.items():
        with pytest.raises(ga.InvalidRequest) as caught:
            variants(dataclasses.replace(PROBLEM, **{field: wrong}), "sm_80")
        assert caught.value.field == field
    with pytest.raises(ga.Unsupported) as refused:
        variants(PROBLEM, "sm_75")
    assert refused.value.field == "arch"


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ga.Unsupported) as refused:
        merge_variant(dataclasses.replace(PROBLEM, dtype="float64", out_dtype="float16"), "sm_80")
    assert (refused.value.field, refused.value.nearest) == ("out_dtype", "float32")
    with pytest.raises(ga.Unsupported) as refused:
        merge_gradient_variants(dataclasses.replace(PROBLEM, dtype="float16", out_dtype="float64"), "sm_80")
    assert (refused.value.field, refused.value.nearest) == ("dout", "float32")


def test_sinks_are_summed_by_a_launch_of_their_own() -> None:
    plain = dataclasses.replace(PROBLEM, sinks=None)
    for problem, sums in ((PROBLEM, [False, True]), (plain, [False])):
        variants = merge_gradient_variants(problem, "sm_80")
        assert ["SUM_SINKS" in variant.macros for variant in variants] == sums
        assert len(merge_gradient_geometries(problem)) == len(sums)
