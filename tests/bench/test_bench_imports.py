"""``gpu-actors bench imports``: what importing the package costs beside NumPy, and its budget."""

from __future__ import annotations

import pytest
from support.timing import below

from gpu_actors.bench.imports import import_times


@pytest.mark.perf
@pytest.mark.timeout(300)  # up to three measurements, each of 52 interpreters
def test_importing_the_package_takes_less_than_three_times_as_long_as_numpy() -> None:
    below(3.0, lambda: import_times()["ratio"]["median_s"])
