"""KeyMask: its options are checked wherever one is made, and its two implementations of them agree."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from inside.attention import MASK_OPTIONS, KeyMask, MaskOptions
from inside.reference import Arguments, pose

import gpu_actors as ga
from gpu_actors.reference import ForwardOptions, attention_backward, attention_forward

ODD: list[tuple[str, Any]] = [
    ("causal", 1),
    ("alignment", "left"),
    ("alignment", np.array(["top_left"])),
    ("window_size", (1, 2, 3)),
    ("window_size", (-2, 0)),
    ("window_size", (1.0, 0)),
    ("sink_tokens", -1),
    ("sink_tokens", True),
    ("sink_tokens", 1.5),
]


@pytest.mark.parametrize(("name", "value"), ODD, ids=str)
def test_an_odd_option_is_refused_by_name_in_masks_and_by_the_oracle(name: str, value: Any) -> None:
    options: Any = {name: value}
    q = np.zeros((1, 2, 1, 4))
    for make in (lambda: KeyMask(**options), lambda: attention_forward(q, q, q, **options)):
        with pytest.raises(ga.InvalidRequest) as caught:
            make()
        assert caught.value.field == name


def test_the_keyword_arguments_of_the_oracle_are_its_arrays_and_the_numbers_of_its_problem() -> None:
    arrays = {field.name for field in dataclasses.fields(Arguments)} - {"problem", "q", "k", "v"}
    numbers = set(ForwardOptions.__annotations__) - arrays
    assert arrays < set(ForwardOptions.__annotations__)
    assert numbers < {field.name for field in dataclasses.fields(ga.AttentionProblem)}
    assert set(MaskOptions.__annotations__) == set(MASK_OPTIONS) < numbers
    posed = pose(*(np.zeros((1, 1, 1, 1)) for _ in range(3)), **dict.fromkeys(arrays - {"dropout_seed"}))
    assert posed.problem == pose(posed.q, posed.k, posed.v).problem


@pytest.mark.parametrize("name", ["q_descale", "tree_mask"])
def test_the_oracle_has_no_gradients_through_forward_options(name: str) -> None:
    q = np.zeros((1, 2, 1, 4))
    given: Any = {name: np.ones((1, 1), np.float32) if name == "q_descale" else np.ones((1, 2), np.uint64)}
    with pytest.raises(ga.InvalidRequest) as caught:
        attention_backward(q, q, q, q, **given)
    assert caught.value.field == name


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sinks", [0, 3, 99])
def test_the_ranges_of_a_tile_of_rows_hold_the_keys_that_its_rows_see(causal: bool, sinks: int) -> None:
    for left, right, rows, keys in itertools.product((-1, 0, 4), (-1, 0, 2), (1, 6), (1, 5, 17)):
        mask = KeyMask(causal=causal, window_size=(left, right), sink_tokens=sinks)
        for begin, end in itertools.combinations(range(rows + 1), 2):
            visible = mask.visible_keys(np.arange(begin, end), rows, keys)
            seen = np.ones(keys, bool) if visible is None else visible.any(axis=0)
            edges = (np.array([[number]]) for number in (begin, end, keys - rows, keys))
            found = (int(edge.item()) for edge in mask.key_ranges(*edges))
            exempt, first, last = found
            assert np.flatnonzero(seen).tolist() == sorted({*range(exempt), *range(first, last)}), (mask, begin, end)
