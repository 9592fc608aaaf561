"""A KvCache on a GPU: rows are appended and attended to step by step; pages are shared and copied on write.

GPU_ACTORS_TEST_DEVICE=mock or =emulated rehearses these tests where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inside.testing import cast

import gpu_actors as ga
from gpu_actors.testing import check_output

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 8, 2, 128
LENGTHS = (1, 70, 200)


class Rows:
    """Random rows, and the rows that each sequence has so far."""

    def __init__(self, dtype: str) -> None:
        self._rng = np.random.default_rng(0)
        self._dtype = dtype
        self.k: dict[Any, list[Any]] = {}
        self.v: dict[Any, list[Any]] = {}

    def q(self, count: int, rows: int) -> Any:
        return cast(self._rng.standard_normal((count, rows, HEADS, DIM)), self._dtype)

    def new(self, *lengths: int) -> list[tuple[Any, Any]]:
        shapes = [(rows, KV_HEADS, DIM) for rows in lengths]
        return [tuple(cast(self._rng.standard_normal(shape), self._dtype) for _ in "kv") for shape in shapes]  # type: ignore[misc]

    def give(self, seq: Any, k: Any, v: Any) -> None:
        self.k.setdefault(seq, []).append(k)
        self.v.setdefault(seq, []).append(v)

    def fork(self, seq: Any, fork: Any) -> None:
        self.k[fork], self.v[fork] = list(self.k[seq]), list(self.v[seq])

    def check(self, q: Any, seqs: list[Any], out: Any) -> None:
        for index, seq in enumerate(seqs):
            k, v = (np.concatenate(side[seq])[None] for side in (self.k, self.v))
            part = slice(index, index + 1)
            check_output(np.asarray(out[part]), None, q[part], k, v, causal=True, repro=f"sequence {index}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_sequences_grow_fork_and_are_attended_to(context: Any, dtype: str, page_size: int) -> None:
    rows = Rows(dtype)
    shape = {"num_blocks": 64, "page_size": page_size, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": dtype}
    with context.kv_cache(**shape) as cache:
        seqs = [cache.create().result(60) for _ in LENGTHS]
        for seq, (k, v) in zip(seqs, rows.new(*LENGTHS), strict=True):
            assert cache.append(seq, k, v).result(120) == len(k)
            rows.give(seq, k, v)
        for step, count in enumerate((1, 1, 4, 1)):
            if step == 2:
                fork = cache.fork(seqs[-1]).result(60)
                rows.fork(seqs[-1], fork)
                seqs.append(fork)
                assert cache.stats().shared_blocks > 0
            q = rows.q(len(seqs), count)
            new = rows.new(*[count] * len(seqs))
            k, v = (np.stack(side) for side in zip(*new, strict=True))
            for seq, pair in zip(seqs, new, strict=True):
                rows.give(seq, *pair)
            rows.check(q, seqs, cache.attend(q, seqs, k=k, v=v).result(120).out)
        for seq in seqs:
            cache.free(seq).result(60)
        assert cache.stats().free_blocks == 64


def test_a_full_cache_refuses_and_goes_on(context: Any) -> None:
    rows = Rows("bfloat16")
    with context.kv_cache(num_blocks=4, page_size=16, kv_heads=KV_HEADS, head_dim=DIM, dtype="bfloat16") as cache:
        seq = cache.create().result(60)
        (k, v), (more_k, more_v) = rows.new(60, 5)
        cache.append(seq, k, v).result(120)
        rows.give(seq, k, v)
        with pytest.raises(ga.CacheFull):
            cache.append(seq, more_k, more_v).result(120)
        assert cache.length(seq) == 60
        q = rows.q(1, 1)
        rows.check(q, [seq], cache.attend(q, [seq]).result(120).out)
