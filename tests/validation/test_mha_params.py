"""Mask and AttentionParams: what they refuse, by the user's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_actors import AttentionParams, InvalidRequest, Mask

SIZES = {"batch": 1, "seq_q": 4, "seq_kv": 4, "heads_q": 2, "heads_kv": 1, "head_dim": 8}


MASKS: list[tuple[tuple[Any, ...], str]] = [
    *(((kind,), "mask") for kind in ("foo", None, 1, ["causal"], np.zeros(3))),
    *((("sliding_window", width), "window") for width in (0, True, 2.0, "4", None)),
    *((given, "window") for given in (("sliding_window",), ("causal_sliding_window",), ("causal_sliding_window", -5))),
    *((given, "window") for given in (("none", 1), ("causal", 4), ("causal", None))),
]


def test_a_mask_that_is_none_is_refused() -> None:
    for arguments, field in MASKS:
        with pytest.raises(InvalidRequest) as caught:
            Mask(*arguments)
        assert caught.value.field == field, arguments
    for make in (Mask.sliding_window, Mask.causal_sliding_window):
        for width in (0, True, "2"):
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


WRONG: dict[str, tuple[Any, ...]] = {
    "scale": ("x", True, 1j, float("nan"), 10**400, np.ones(3)),
    "dropout_p": ("x", None, True, 1.0, -0.1, float("nan"), np.zeros(2)),
    "dropout_seed": ("x", 1.5, True, None, -1, 1 << 64),
    "alignment": (np.zeros(3), "left", None, ["top_left"]),
    "mask": ("causal", None),
    "batch": (True,),
    "seq_q": (-1,),
    "seq_kv": (1.0,),
    "heads_kv": (3, 4),
    "heads_q": ("2",),
    "head_dim": (np.ones(1),),
}


@pytest.mark.parametrize("field", WRONG)
def test_params_name_the_field_at_fault(field: str) -> None:
    for value in WRONG[field]:
        with pytest.raises(InvalidRequest) as caught:
            AttentionParams(**{**SIZES, field: value})
        assert caught.value.field == field, value


def test_numbers_of_numpy_are_numbers() -> None:
    params = AttentionParams(**SIZES, scale=np.float32(0.5), dropout_p=np.float64(0.25), dropout_seed=np.uint64(7))  # type: ignore[arg-type]
    assert (params.scale, params.dropout_p, params.dropout_seed) == (0.5, 0.25, 7)
    with pytest.raises(InvalidRequest) as caught:
        params.with_dropout("x")  # type: ignore[arg-type]
    assert caught.value.field == "dropout_p"
