"""Which kernel a request over a cache has, and why. `tests/properties` checks its answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from cases.cached_batches import Batch, random_batch
from inside.kernels import check_key, decode_keys, dispatch_key, usual_decode_problems

import gpu_actors as ga

LENGTHS = (300, 9, 0, 70)


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock", ga.ContextOptions(arch="sm_80")) as ctx:
        yield ctx


def request_over(batch: Batch, **options: Any) -> ga.PagedForward:
    pages = batch.pages(16)
    tables = {"block_table": pages.block_table, "cache_seqlens": pages.cache_seqlens}
    return ga.PagedForward(q=batch.q, k_cache=pages.k, v_cache=pages.v, **tables, **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float32"}, "16-bit queries"),
        ({"dtype": "float64"}, "16-bit queries"),
        ({"scale": -1.0}, "positive scale"),
        ({"dim": 20}, "nearest supported: 24"),
        ({"dim": 72, "kv_dtype": "float8_e4m3fn"}, "multiples of 16 from 16 to 512 (nearest supported: 80)"),
    ],
)
def test_what_tensor_cores_do_not_take_goes_to_cuda_cores_with_the_reason(
    mock: ga.GpuContext, changes: dict[str, Any], words: str
) -> None:
    given: dict[str, Any] = {"dim": 64, "dtype": "float16", **changes}
    scale = given.pop("scale", None)
    found = mock.flash_attn.explain(request_over(random_batch(0, LENGTHS, **given), softmax_scale=scale))
    assert found.key is not None
    assert found.key.kernel == "decode_simple"
    assert words in next(verdict.reason for verdict in found.verdicts if verdict.family == "decode_mma")


def test_the_key_names_the_kernel_and_its_rows(mock: ga.GpuContext) -> None:
    batch = random_batch(0, LENGTHS, rows=3, heads=(6, 2), dim=64, dtype="float16")
    key = mock.flash_attn.inspect_key(request_over(batch))
    assert (key.kernel, key.layout, key.row_tile) == ("decode_mma", "paged", 16)


def test_the_keys_of_a_launch_pass_the_checks_of_warm():
    for problem in usual_decode_problems("sm_90a"):
        for key in decode_keys(problem, dispatch_key(problem, "sm_90a"), planned=False):
            assert check_key(key) is key
            with pytest.raises(ga.Unsupported, match="rows a block"):
                check_key(dataclasses.replace(key, row_tile=48))
