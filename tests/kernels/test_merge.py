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
from gpu_actors.kernels.merge import MergeKey, merge_variants
from gpu_actors.kernels.merge_gradients import MergeGradientKey, merge_gradient_keys
from gpu_actors.partial import Partial, merge

FIELDS = ("arch", "dtype", "lse_dtype", "out_dtype", "sinks")


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
    assert np.isnan(got.partials[0].lse[0, 0, 1])
    assert np.isfinite(got.partials[0].out[0, 1, 0].astype(float)).all()
    assert not np.isfinite(got.partials[0].lse[1, 0, 0])
    seen = np.isfinite(got.partials[0].lse)
    assert np.count_nonzero(~seen) == 2


MERGE = merge_variants("sm_80")[0]
GRADIENT = merge_gradient_keys(merge_problem(partials_of(4, "float32"), np.zeros(4, np.float32)), "sm_80")[0]


@pytest.mark.parametrize(("key", "flag"), [(MERGE, "sinks"), (GRADIENT, "sum_sinks")], ids=["merge", "gradient"])
def test_a_key_is_checked(key: MergeKey | MergeGradientKey, flag: str) -> None:
    assert isinstance(key, StableText)
    wrong = {"dtype": "int8", "lse_dtype": "float16", flag: 1, "arch": "sm_75"}
    for field, value in wrong.items():
        with pytest.raises(ga.Unsupported if field == "arch" else ga.InvalidRequest) as caught:
            check_key(with_(key, **{field: value}))
        assert caught.value.field == field


def test_a_key_of_dtypes_that_do_not_go_together_is_refused() -> None:
    with pytest.raises(ga.Unsupported) as refused:
        check_key(with_(MERGE, dtype="float64", lse_dtype="float32", out_dtype="float16", sinks=False))
    assert (refused.value.field, refused.value.nearest) == ("out_dtype", "float32")
    options: dict[str, Any] = {"lse_dtype": "float32", "sinks": False}
    with pytest.raises(ga.Unsupported) as refused:
        check_key(with_(GRADIENT, dtype="float16", out_dtype="float64", sum_sinks=False, **options))
    assert (refused.value.field, refused.value.nearest) == ("dout", "float32")
    with pytest.raises(ga.InvalidRequest) as caught:
        check_key(with_(GRADIENT, dtype="float32", out_dtype="float32", sum_sinks=True, **options))
    assert caught.value.field == "sum_sinks"


def with_(key: MergeKey | MergeGradientKey, **changes: Any) -> MergeKey | MergeGradientKey:
    names = FIELDS if isinstance(key, MergeKey) else (*FIELDS, "sum_sinks")
    return type(key)(**{**{name: getattr(key, name) for name in names}, **changes})
