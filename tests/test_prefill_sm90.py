"""Many new rows over pages and caches on the Hopper kernel, through the service on the emulated device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from decoding_support import Batch, random_batch, with_arrays
from emulated_forward import problem_of

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key, explain
from gpu_actors.testing.tolerance import check_output

KERNEL = "forward_sm90"
MODES = (("late", "greedy"), ("eager", "lane"), ("random", "random"), ("late", "round_robin"))


class Case(NamedTuple):
    """page_size 0: a dense cache. packed: rows of the sequences follow each other, and their numbers differ."""

    page_size: int
    dim: int
    dtype: str
    packed: bool
    options: dict[str, Any]

    def __str__(self) -> str:
        layout = f"pages-of-{self.page_size}" if self.page_size else "cache"
        return "-".join([layout, str(self.dim), self.dtype, *["packed"] * self.packed, *self.options])


CASES = (
    Case(16, 64, "float16", False, {}),
    Case(0, 128, "bfloat16", True, {"window_size": (90, 0), "sink_tokens": 4, "sinks": True}),
    Case(64, 128, "bfloat16", True, {}),
    Case(256, 64, "float16", False, {"causal": False}),
    Case(8, 96, "float16", False, {"alibi_slopes": True}),
    Case(64, 192, "bfloat16", False, {"window_size": (50, -1)}),
    Case(16, 256, "float16", True, {"softcap": 5.0, "softmax_scale": 0.1}),
    Case(0, 256, "bfloat16", False, {}),
)
LENGTHS = (300, 80, 515)


def request_of(case: Case, batch: Batch, options: dict[str, Any]) -> tuple[ga.PagedForward, np.ndarray]:
    """The request, and where the rows of each sequence end in packed order."""
    if case.page_size:
        pages = batch.pages(case.page_size)
        cache: dict[str, Any] = {"k_cache": pages.k, "v_cache": pages.v, "block_table": pages.block_table}
    else:
        k, v = batch.dense()
        cache = {"k_cache": k, "v_cache": v}
    rows = batch.q.shape[1]
    counts = [rows, 1, rows // 2] if case.packed else [rows] * len(batch.k)
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q, more = batch.q, {}
    if case.packed:
        q = np.concatenate([sequence[rows - count :] for sequence, count in zip(batch.q, counts, strict=True)])
        more = {"cu_seqlens_q": ends}
    request = ga.PagedForward(q=q, cache_seqlens=batch.lengths, **cache, **more, return_lse=True, **options)
    return request, ends


def check(case: Case, mode: tuple[str, str]) -> None:
    emulation = ga.EmulationOptions(delivery=mode[0], schedule=mode[1], seed=3)  # type: ignore[arg-type]
    with ga.open_context("emulated", ga.ContextOptions(emulation=emulation)) as ctx:
        check_on(ctx, case)


def check_on(ctx: ga.GpuContext, case: Case) -> None:
    batch = random_batch(len(str(case)), LENGTHS, rows=150, dim=case.dim, dtype=case.dtype)
    options = with_arrays(case.options, batch)
    request, ends = request_of(case, batch, options)
    assert ctx.flash_attn.inspect_key(request).kernel == KERNEL
    result = ctx.flash_attn.submit(request).result(100)
    k, v, ends_k = batch.packed
    q = request.q.reshape(-1, *batch.q.shape[2:])
    lse = result.lse if case.packed else np.moveaxis(result.lse, 0, 1).reshape(q.shape[1], -1)
    causal = {"causal": True, **options}
    check_output(result.out.reshape(q.shape), lse, q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends_k, **causal)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_new_rows_agree_with_the_oracle(case: Case) -> None:
    check(case, MODES[len(str(case)) % 4])


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_new_rows_agree_with_the_oracle_in_all_modes(case: Case, mode: tuple[str, str]) -> None:
    check(case, mode)


class TestDispatch:
    Q = np.zeros((2, 100, 4, 64), np.float16)
    BASE = dataclasses.replace(
        problem_of(Q, Q[:, :, :2], Q[:, :, :2], causal=True),
        layout="paged",
        page_size=16,
        seqlen_k=1000,
        total_k=4096,
    )

    @pytest.mark.parametrize("page_size", [8, 16, 64, 128, 256, 1024])
    def test_it_takes_many_rows_over_pages_that_fit_its_tiles(self, page_size: int) -> None:
        problem = dataclasses.replace(self.BASE, page_size=page_size)
        assert dispatch_key(problem, "sm_90a").kernel == KERNEL
        assert dispatch_key(problem, "sm_80").kernel == "decode_mma"

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"seqlen_q": 63}, "64 rows at a time"),
            ({"page_size": 48}, "divide"),
            ({"page_size": 96, "head_dim": 256, "head_dim_v": 256}, "64 keys at a time"),
            ({"tree_mask": True, "causal": False}, "tree"),
            ({"num_splits": 4}, "split"),
            ({"num_splits": 1, "varlen_q": True}, "same bits"),
            ({"kv_dtype": "float8_e4m3fn"}, "one type"),
        ],
    )
    def test_others_go_to_the_kernel_that_decodes(self, changes: dict[str, Any], reason: str) -> None:
        problem = dataclasses.replace(self.BASE, **changes)
        assert dispatch_key(problem, "sm_90a").kernel == "decode_mma"
        verdict = explain(problem, "sm_90a")[0]
        assert (verdict.family, verdict.taken) == (KERNEL, False)
        assert reason in verdict.reason


@pytest.fixture
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def test_a_key_for_pages_can_be_compiled_ahead(mock: ga.GpuContext) -> None:
    key = dispatch_key(TestDispatch.BASE, "sm_90a")
    (warmed,) = mock.nvrtc.warm([key]).result(100)
    assert warmed.cubin.resources[KERNEL].spill_bytes == 0
