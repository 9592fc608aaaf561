"""Mask and AttentionParams: what they refuse, and that they name it as the user does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_actors import AttentionParams, InvalidRequest, Mask

SIZES = {"batch": 1, "seq_q": 4, "seq_kv": 4, "heads_q": 2, "heads_kv": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("foo",), "mask"),
        ((None,), "mask"),
        ((1,), "mask"),
        ((["causal"],), "mask"),
        ((np.zeros(3),), "mask"),
        (("sliding_window",), "window"),
        (("sliding_window", 0), "window"),
        (("sliding_window", True), "window"),
        (("sliding_window", 2.0), "window"),
        (("sliding_window", "4"), "window"),
        (("causal_sliding_window",), "window"),
        (("causal_sliding_window", -5), "window"),
        (("none", 1), "window"),
        (("causal", 4), "window"),
        (("causal", None), "window"),
    ],
)
def test_a_mask_that_is_none_is_refused(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Mask(*arguments)
    assert caught.value.field == field


@pytest.mark.parametrize("make", [Mask.sliding_window, Mask.causal_sliding_window])
@pytest.mark.parametrize("width", [0, -1, True, 1.5, "2", None])
def test_a_window_of_no_width_is_refused(make: Any, width: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make(width)
    assert caught.value.field == "window"


def test_masks_made_directly_are_those_of_the_constructors() -> None:
    assert Mask() == Mask.none() == Mask("none", 0)
    assert Mask("causal") == Mask.causal()
    wide = Mask("sliding_window", np.int64(3))  # type: ignore[arg-type]
    assert wide == Mask.sliding_window(3)
    assert type(wide.width) is int
    assert wide.window == (2, 2)
    assert Mask("causal_sliding_window", 3).window == (2, -1)
    assert Mask.causal().window == Mask.none().window == (-1, -1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", "x"),
        ("scale", True),
        ("scale", 1j),
        ("scale", float("nan")),
        ("scale", 10**400),
        ("scale", np.ones(3)),
        ("dropout_p", "x"),
        ("dropout_p", None),
        ("dropout_p", True),
        ("dropout_p", 1.0),
        ("dropout_p", -0.1),
        ("dropout_p", float("nan")),
        ("dropout_p", np.zeros(2)),
        ("dropout_seed", "x"),
        ("dropout_seed", 1.5),
        ("dropout_seed", True),
        ("dropout_seed", None),
        ("dropout_seed", -1),
        ("dropout_seed", 1 << 64),
        ("alignment", np.zeros(3)),
        ("alignment", "left"),
        ("alignment", None),
        ("alignment", ["top_left"]),
        ("mask", "causal"),
        ("mask", None),
        ("batch", True),
        ("seq_q", -1),
        ("seq_kv", 1.0),
        ("heads_kv", 3),
        ("heads_kv", 4),
        ("heads_q", "2"),
        ("head_dim", np.ones(1)),
    ],
)
def test_params_name_the_field_at_fault(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AttentionParams(**{**SIZES, field: value})
    assert caught.value.field == field


def test_numbers_of_numpy_are_numbers() -> None:
    params = AttentionParams(**SIZES, scale=np.float32(0.5), dropout_p=np.float64(0.25), dropout_seed=np.uint64(7))  # type: ignore[arg-type]
    assert (params.scale, params.dropout_p, params.dropout_seed) == (0.5, 0.25, 7)
    with pytest.raises(InvalidRequest) as caught:
        params.with_dropout("x")  # type: ignore[arg-type]
    assert caught.value.field == "dropout_p"
