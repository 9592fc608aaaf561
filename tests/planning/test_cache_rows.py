"""Caches on the device are read in place: which kernel can read their rows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from fakes.known_device import known_device
from inside.arrays import DeviceArray
from inside.kernels import explain_problem

import gpu_actors as ga
from gpu_actors import DeviceInfo
from gpu_actors.planning.cached import pose_cached, signature

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS, DIM, ROW = 2, 64, 2 * 64 * 2  # bytes of a row of all heads


def request_of(address: int = 1 << 20, row: int = ROW, dim: int = DIM) -> ga.PagedForward:
    cache = DeviceArray(address, (1, 128, HEADS, dim), (128 * row, row, 128, 2), BF16, 0)
    q = np.zeros((1, 1, HEADS, dim), BF16)
    return ga.PagedForward(q=q, k_cache=cache, v_cache=cache, cache_seqlens=np.array([100], np.int32))


def decode_of(offset: int = 0, head: int = 128 * 128, arrays: int = 3) -> ga.BatchedDecode:
    """offset: of the last array's address. head: stride of its heads in bytes."""

    def cache(index: int) -> DeviceArray:
        last = index == arrays - 1
        strides = (head if last else 128 * 128, 128, 2)
        return DeviceArray((1 << 20) + (index << 16) + (offset if last else 0), (HEADS, 128, DIM), strides, BF16, 0)

    caches = [cache(index) for index in range(arrays)]
    lengths = np.full(arrays, 100, np.int32)
    return ga.BatchedDecode(q=np.zeros((arrays, HEADS, DIM), BF16), k_caches=caches, v_caches=caches, seq_lens=lengths)


def info_of(arch: str) -> DeviceInfo:
    with ga.open_context("mock", ga.ContextOptions(arch=arch)) as ctx:
        return ctx.info


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rows_between_chunks_go_to_the_kernel_that_loads_elements(arch: str) -> None:
    info = info_of(arch)
    for request, kernel in (
        (request_of(), "decode_mma"),
        (request_of(row=ROW + 16), "decode_mma"),
        (request_of(row=ROW + 6), "decode_simple"),
        (request_of((1 << 20) + 2), "decode_simple"),
        (request_of((1 << 20) + 16), "decode_mma"),
    ):
        problem, key = pose_cached(request, known_device(info))
        assert key.kernel == kernel, request.k_cache
        found = explain_problem(problem, arch, key)
        assert [verdict.family for verdict in found.verdicts if verdict.taken] == [kernel]
        if kernel == "decode_simple":
            reasons = {verdict.family: verdict.reason for verdict in found.verdicts}
            assert reasons["decode_mma"] == "rows of the cache begin between its chunks"


def test_requests_whose_rows_begin_elsewhere_share_no_plan() -> None:
    assert signature(request_of()) != signature(request_of((1 << 20) + 2))
    assert signature(request_of()) == signature(request_of(1 << 21))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_one_array_between_chunks_sends_the_whole_list_elsewhere(arch: str) -> None:
    info = info_of(arch)
    for request, kernel in (
        (decode_of(), "decode_mma"),
        (decode_of(16), "decode_mma"),
        (decode_of(2), "decode_simple"),
        (decode_of(head=128 * 128 + 6), "decode_simple"),
        (decode_of(head=128 * 128 + 16), "decode_mma"),
    ):
        assert pose_cached(request, known_device(info))[1].kernel == kernel, request.k_caches[-1]


def test_lists_whose_last_array_begins_elsewhere_share_no_plan() -> None:
    assert signature(decode_of()) != signature(decode_of(2))
    assert signature(decode_of()) == signature(decode_of(1 << 14))
