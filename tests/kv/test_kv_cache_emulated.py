"""A KvCache over the project's kernels on the CPU: copies of shared pages, append and attention in one launch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.kv_cache import contents, wait
from support.service import eventually

import gpu_actors as ga
from gpu_actors.testing import forward_bounds

HEADS, DIM = 2, 64
DESCALES = {"k_descale": np.array([0.05, 0.02], np.float32), "v_descale": np.array([0.03, 0.1], np.float32)}
# Dtypes of the new rows and of the cache, keys a page, rotation.
CASES: dict[str, tuple[str, str, int, ga.Rope | None]] = {
    "float16": ("float16", "float16", 3, None),
    "rotated": ("float16", "float16", 8, ga.Rope(dim=32)),
    "quantised": ("bfloat16", "float8_e4m3fn", 8, ga.Rope(dim=64, interleaved=True)),
    "single": ("float16", "float16", 1, None),
    "double": ("float64", "float64", 5, None),
    "eight": ("float8_e4m3fn", "float8_e4m3fn", 8, None),
}


def steps(device: str, dtype: str, kv_dtype: str, page: int, rope: ga.Rope | None) -> list[tuple[Any, Any, list[Any]]]:
    """(q, result, the sequences' rows then) of a prefill of three sequences and of a step, with a fork between."""
    rng = np.random.default_rng(1)

    def rows(*shape: int) -> np.ndarray:
        return rng.standard_normal((*shape, DIM)).astype(getattr(ml_dtypes, dtype, dtype))

    done = []
    scales = DESCALES if kv_dtype.startswith("float8") else {}
    with (
        ga.open_context(device) as ctx,
        ctx.kv_cache(
            num_blocks=128 // page, page_size=page, kv_heads=HEADS, head_dim=DIM, dtype=kv_dtype, **scales
        ) as cache,
    ):
        seqs = wait(cache.create(), cache.create(), cache.create())
        counts = (13, 0, 3)
        ends = np.cumsum([0, *counts]).astype(np.int32)
        wait(cache.append(seqs, rows(16, HEADS), rows(16, HEADS), cu_seqlens=ends, rope=rope))
        seqs.append(wait(cache.fork(seqs[0])))
        for count in (3, 1):
            q = rows(4, count, 2 * HEADS)
            new = rows(4, count, HEADS), rows(4, count, HEADS)
            result = wait(cache.attend(q, seqs, k=new[0], v=new[1], return_lse=True, rope=rope))
            done.append((q, result, [contents(cache, seq) for seq in seqs]))
        assert cache.stats().shared_blocks == 13 // page
        wait(cache.append(seqs[:1], rows(1, 2, HEADS), rows(1, 2, HEADS), rope=rope))
        pages = wait(cache.export_pages(seqs[0]))
        seqs += [wait(cache.import_pages(pages)), pages.lease]
        for here, there in zip(contents(cache, seqs[0]), contents(cache, seqs[-2]), strict=True):
            np.testing.assert_array_equal(here.view(np.uint8), there.view(np.uint8))
        for seq in seqs:
            wait(cache.free(seq))
        eventually(lambda: cache.stats().free_blocks == 128 // page)
        assert ctx.stats()["kv_cache"].failed == 0
    return done


@pytest.mark.parametrize("name", [n if n == "rotated" else pytest.param(n, marks=pytest.mark.sweep) for n in CASES])
def test_kernels_and_oracle_keep_the_same_cache_and_give_the_same_answers(name: str) -> None:
    dtype, kv_dtype = CASES[name][:2]
    rope = CASES[name][3]
    for one, other in zip(steps("emulated", *CASES[name]), steps("mock", *CASES[name]), strict=True):
        (q, result, contents_of_pages), (_, reference, expected) = one, other
        for index, (held, right) in enumerate(zip(contents_of_pages, expected, strict=True)):
            for side, actual in zip(right, held, strict=True):
                # The last bit of rotated keys may be rounded differently.
                error = np.abs(side.astype(np.float64) - actual.astype(np.float64))
                unit = {"float16": 2.0**-10, "float8_e4m3fn": 2.0**-3, "float64": 0.0}[kv_dtype]
                assert (error <= (unit if rope else 0) * np.abs(side.astype(np.float64))).all()
            k, v = (side.astype(np.float64) for side in right)
            if kv_dtype != dtype:
                k, v = k * DESCALES["k_descale"][:, None], v * DESCALES["v_descale"][:, None]
            k, v = (side.astype(q.dtype)[None] for side in (k, v))
            bounds = forward_bounds(q[index : index + 1], k, v, causal=True)
            error = np.abs(result.out[index].astype(np.float64) - reference.out[index].astype(np.float64))
            # Both are rounded to the output's dtype.
            assert (error <= 2 * bounds.out[0]).all(), (name, index, error.max())
            np.testing.assert_allclose(result.lse[index], reference.lse[index], atol=2e-3)
