"""The merge of partials on the device: what stays visible, the order of its sums, and its keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated.merge import merge_problem, run_merge, run_merge_gradients
from inside.package import StableText
from matrix.merge import check_merge, gradients_of, partials_of

import gpu_actors as ga
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.merge.gradients import MergeGradientKey, merge_gradient_keys
from gpu_actors.kernels.merge.merge import MergeKey, merge_variants
from gpu_actors.partial import Partial, merge

FIELDS = ("arch", "dtype", "lse_dtype", "out_dtype", "sinks")
GRADIENT_FIELDS = (*FIELDS, "sum_sinks")


def test_a_wide_lse_stays_wide() -> None:
    partials = [Partial(p.out, p.lse.astype(np.float64)) for p in partials_of(3, "float32")]
    assert run_merge(partials).lse.dtype == np.float64


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
    """Three terms of weight 1 whose sum depends on its order."""
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
    for row, head in ((1, 0),):
        assert np.isnan(got.partials[0].lse[0, head, row])
        assert np.isfinite(got.partials[0].out[0, row, head].astype(float)).all()
    assert not np.isfinite(got.partials[0].lse[1, 0, 0])
    seen = np.isfinite(got.partials[0].lse)
    assert np.count_nonzero(~seen) == 2


def test_a_key_is_checked() -> None:
    key = merge_variants("sm_80")[0]
    assert isinstance(key, StableText)
    for field, value, kind in (
        ("dtype", "int8", ga.InvalidRequest),
        ("lse_dtype", "float16", ga.InvalidRequest),
        ("sinks", 1, ga.InvalidRequest),
        ("arch", "sm_75", ga.Unsupported),
    ):
        wrong = MergeKey(**{**{name: getattr(key, name) for name in FIELDS}, field: value})
        with pytest.raises(kind) as caught:
            check_key(wrong)
        assert caught.value.field == field
    with pytest.raises(ga.Unsupported) as caught:
        check_key(MergeKey(arch="sm_80", dtype="float64", lse_dtype="float32", out_dtype="float16", sinks=False))
    assert (caught.value.field, caught.value.nearest) == ("out_dtype", "float32")


def test_a_key_of_the_gradient_is_checked() -> None:
    key = merge_gradient_keys(merge_problem(partials_of(4, "float32"), np.zeros(4, np.float32)), "sm_80")[0]
    assert isinstance(key, StableText)
    for field, value, kind, named in (
        ("dtype", "int8", ga.InvalidRequest, "dtype"),
        ("lse_dtype", "float16", ga.InvalidRequest, "lse_dtype"),
        ("sum_sinks", 1, ga.InvalidRequest, "sum_sinks"),
        ("arch", "sm_75", ga.Unsupported, "arch"),
    ):
        wrong = MergeGradientKey(**{**{name: getattr(key, name) for name in GRADIENT_FIELDS}, field: value})
        with pytest.raises(kind) as caught:
            check_key(wrong)
        assert caught.value.field == named
    options: dict[str, Any] = {"arch": "sm_80", "lse_dtype": "float32", "sinks": False}
    with pytest.raises(ga.InvalidRequest) as caught:
        check_key(MergeGradientKey(dtype="float32", out_dtype="float32", sum_sinks=True, **options))
    assert caught.value.field == "sum_sinks"
    with pytest.raises(ga.Unsupported) as refused:
        check_key(MergeGradientKey(dtype="float16", out_dtype="float64", **options))
    assert (refused.value.field, refused.value.nearest) == ("dout", "float32")
