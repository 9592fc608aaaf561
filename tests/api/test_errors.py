"""How errors show the values that they name: enough to find them, never too long, and showing them cannot fail."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from gpu_actors.errors import InvalidRequest, Unsupported


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


class Endless:
    def __repr__(self) -> str:
        return "x" * 10**6


class Blob:
    """An array whose contents an error must not read."""

    dtype = "float32"
    shape = (2, 3)

    def __repr__(self) -> str:
        raise AssertionError("read back from the device")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.5, "0.5"),
        ("gpu", "'gpu'"),
        ((1, -2), "(1, -2)"),
        (np.float64, "<class 'numpy.float64'>"),
        (np.ones((4, 5), np.float16), "ndarray float16[4, 5]"),
        (np.zeros(()), "ndarray float64[]"),
        (ml_dtypes.bfloat16(2), "2"),
        (Blob(), "Blob float32[2, 3]"),
        ((np.ones(3), Blob()), "(ndarray float64[3], Blob float32[2, 3])"),
        (10**5000, "an int of 16610 bits"),
        (Unprintable(), "an Unprintable whose repr raises"),
        ([Unprintable()], "[an Unprintable whose repr raises]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_shown_or_described(value: object, shown: str) -> None:
    assert str(InvalidRequest("field", value, "no")) == f"field={shown}: no"
    assert str(Unsupported("field", value, "no", value)) == f"field={shown}: no (nearest supported: {shown})"


@pytest.mark.parametrize("value", ["x" * 10**6, b"x" * 10**6, list(range(10**6)), Endless(), {1: "x" * 10**6}])
def test_a_long_value_is_cut(value: object) -> None:
    assert len(str(InvalidRequest("field", value, "no"))) < 400
