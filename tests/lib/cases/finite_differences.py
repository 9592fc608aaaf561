"""Gradients by central differences, which share nothing with the formulas that they check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_STEP = 1e-3
# Of a five-point difference: the error of the formula is of order step^4, that of rounding of order 1e-16 / step.
_WEIGHTS = ((1, 8 / 12), (-1, -8 / 12), (2, -1 / 12), (-2, 1 / 12))


def differences(loss: Callable[[Mapping[str, Array]], float], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """d loss / d element for every element of every float64 array, by name."""
    work = {name: array.copy() for name, array in arrays.items()}
    gradients = {name: np.zeros_like(array) for name, array in arrays.items()}
    for name, array in work.items():
        for index in np.ndindex(array.shape):
            kept = array[index]
            for offset, weight in _WEIGHTS:
                array[index] = kept + offset * _STEP
                gradients[name][index] += weight * loss(work) / _STEP
            array[index] = kept
    return gradients


def disagreement(actual: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """The largest |actual - expected|, in units of that array's largest expected element or of 1, if it is less."""
    assert actual.keys() == expected.keys()
    worst = 0.0
    for name, wanted in expected.items():
        assert actual[name].shape == wanted.shape, name
        error = np.abs(actual[name] - wanted).max(initial=0.0)
        worst = max(worst, float(error) / max(1.0, float(np.abs(wanted).max(initial=0.0))))
    return worst
