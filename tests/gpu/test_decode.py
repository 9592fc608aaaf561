"""Requests over caches on a GPU through the public entrance, on the problems that the emulated kernels are tested on.

GPU_ACTORS_TEST_DEVICE=emulated rehearses these tests where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.decode import VARIANTS, Variant, draw
from cases.decode_requests import result_of
from emulated.decode import DecodeCase, check_results

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_decoding_agrees_with_the_oracle_over_the_grid(context: Any, variant: Variant) -> None:
    for seed in range(200, 206):
        case = draw(variant, seed)
        check_results(case, *result_of(context, case))


@pytest.mark.parametrize("variant", VARIANTS[:3], ids=str)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(context: Any, variant: Variant) -> None:
    case = draw(variant, 300)
    case.rows, case.options["num_splits"] = None, 3
    out, lse = result_of(context, case)
    for index in range(len(case.batch.k)):
        alone = result_of(context, case.alone(index))
        np.testing.assert_array_equal(alone[0][0], out[index])
        np.testing.assert_array_equal(alone[1][0], lse[index])


@pytest.mark.parametrize("variant", VARIANTS[:5], ids=str)
def test_lengths_on_the_device_are_split_there(context: Any, variant: Variant) -> None:
    """The answer has the same bits as with lengths on the host."""
    if context.info.kind != "cuda":
        pytest.skip("only a GPU has arrays of its own")
    cupy: Any = pytest.importorskip("cupy")
    for seed in range(400, 403):
        case: DecodeCase = draw(variant, seed)
        host = result_of(context, case)
        device = result_of(context, case, lambda array: cupy.asarray(array) if array.dtype == np.int32 else array)
        for one, other in zip(host, device, strict=True):
            np.testing.assert_array_equal(one, other)
