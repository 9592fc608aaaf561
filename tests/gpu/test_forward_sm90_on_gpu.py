"""The Hopper kernel on a whole GPU: more tiles than blocks, repeated launches, pages.

GPU_ACTORS_TEST_DEVICE=emulated rehearses these tests where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.many_keys import check_many_keys, many_keys
from cases.prefill import CASES, Case, check_on
from emulated.forward import gaussian

import gpu_actors as ga
from gpu_actors.testing import check_output

pytestmark = pytest.mark.gpu

KERNEL = "forward_sm90"


@pytest.fixture(autouse=True)
def _hopper(context: Any) -> None:
    if not context.info.arch.startswith("sm_90"):
        pytest.skip("forward_sm90 is for sm_90a")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_more_tiles_than_blocks_and_launch_after_launch(context, head_dim, causal):
    """A head's bits depend on that head alone, so a few heads are checked for all."""
    rows, heads = (4096, 24) if (context.info.multiprocessors or 0) > 16 else (256, 4)
    q, k, v = (gaussian(n, (2, rows, heads, head_dim), "bfloat16") for n in range(3))
    assert context.flash_attn.inspect_key(ga.FlashForward(q, k, v, causal=causal)).kernel == KERNEL
    results = [context.flash_attn.forward(q, k, v, causal=causal, return_lse=True).result(120) for _ in range(3)]
    for result in results[1:]:
        np.testing.assert_array_equal(result.out, results[0].out)
        np.testing.assert_array_equal(result.lse, results[0].lse)
    for batch, head in ((0, 0), (1, heads - 1)):
        alone = [array[batch : batch + 1, :, head : head + 1] for array in (q, k, v)]
        result = context.flash_attn.forward(*alone, causal=causal, return_lse=True).result(120)
        np.testing.assert_array_equal(result.out[0, :, 0], results[0].out[batch, :, head])
        check_output(result.out, result.lse, *alone, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_8_bit_values_of_many_keys_are_not_lost(context, head_dim):
    """The tensor cores keep some 14 bits of a sum: one sum over all 32,768 keys would lose a third of it."""
    q, k, v = many_keys(32768, head_dim, rows=64)  # the rows of a tile: fewer rows are packed for decode_mma
    assert context.flash_attn.inspect_key(ga.FlashForward(q, k, v)).kernel == KERNEL
    result = context.flash_attn.forward(q, k, v, return_lse=True).result(120)
    check_many_keys(result.out, result.lse, q, k, v)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_new_rows_over_pages_and_caches(context, case: Case):
    check_on(context, case)
