"""Requests of many new rows over pages and caches, which forward_sm90 answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from cases.cached_batches import Batch, random_batch, with_arrays

import gpu_actors as ga
from gpu_actors.testing import check_output

KERNEL = "forward_sm90"


class Case(NamedTuple):
    """page_size: 0 for a dense cache. packed: the sequences' rows are packed, and their numbers differ."""

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
