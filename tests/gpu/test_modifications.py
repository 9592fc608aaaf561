"""Ten score modifications as graphs on a GPU, forward and backward, against their formulas.

GPU_ACTORS_TEST_DEVICE=emulated rehearses these tests where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
from cases.score_mod_gradients import backward_arrays, backward_graph, check_forward, check_gradients
from cases.score_mods import MODIFICATIONS, case_of, forward_graph

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODIFICATIONS)
def test_modifications_are_compiled_into_forward(context: Any, name: str, dtype: str) -> None:
    for seed, std in enumerate((1.0, 4.0)):
        case = case_of(name, dtype, seed, std=std)
        check_forward(case, context.cudnn.execute(forward_graph(case), case.arrays).result(120.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", MODIFICATIONS)
def test_their_derivatives_are_compiled_into_backward(context: Any, name: str, dtype: str) -> None:
    for seed in range(2):
        case = case_of(name, dtype, seed)
        arrays = backward_arrays(case, seed)
        check_gradients(case, arrays, context.cudnn.execute(backward_graph(case), arrays).result(120.0))
