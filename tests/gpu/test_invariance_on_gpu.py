"""On a GPU, a row of an invariant context has the same bits in every request.

GPU_ACTORS_TEST_DEVICE=emulated rehearses these tests where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from properties.texts import CACHED, CACHES, FORMS, FORWARD, SERVINGS, SPEC, differing, hold

import gpu_actors as ga

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def invariant(device: str) -> Iterator[Any]:
    with ga.open_context(device, ga.ContextOptions(qualify="off", invariant=True)) as ctx:
        yield ctx


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_wherever_it_is_asked_for(invariant: Any, form: str) -> None:
    hold(invariant, 20, FORMS[form], (*FORWARD, *CACHED))


@pytest.mark.parametrize("form", CACHES)
def test_a_row_has_the_same_bits_over_any_cache(invariant: Any, form: str) -> None:
    hold(invariant, 20, CACHES[form], ("paged", "cache"))


def test_without_the_option_rows_have_other_bits(context: Any) -> None:
    assert differing(context, SPEC, SERVINGS)
