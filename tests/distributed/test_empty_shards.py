"""What a shard without keys, rows or sequences answers: out 0 and lse -inf, wherever its keys would lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.partial import Partial, merge

Ask = Callable[[ga.FlashAttnHandle], ga.Reply[Any]]


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def array(*shape: int) -> Any:
    return np.ones(shape, np.float16)


def table(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


POOL = array(2, 8, 2, 64)
NONE = array(0, 8, 2, 64)


def paged(q: Any, *lengths: int, pool: Any = POOL, columns: int = 1, **options: Any) -> Ask:
    where = {"block_table": table(len(lengths), columns), "cache_seqlens": ints(*lengths)}
    return lambda flash: flash.paged_forward(q, pool, pool, **where, **options, return_lse=True)


def dense(q: Any, k: Any, **options: Any) -> Ask:
    return lambda flash: flash.forward(q, k, k, **options, return_lse=True)


def cached(q: Any, k: Any, *lengths: int) -> Ask:
    return lambda flash: flash.paged_forward(q, k, k, cache_seqlens=ints(*lengths), return_lse=True)


def pointers(q: Any, k: Any, *lengths: int, **options: Any) -> Ask:
    return lambda flash: flash.decode(q, k, k, ints(*lengths), **options, return_lse=True)


def merged(*shape: int) -> Ask:
    *outer, rows, heads, _ = shape
    nothing = Partial(np.full(shape, np.nan, np.float16), np.full((*outer, heads, rows), -np.inf, np.float32))
    return lambda flash: flash.merge([nothing, nothing])


STEPS = np.zeros((0, 2), np.int32)
# tests/planning/test_empty_requests.py has those without positions, pages and room.
SHARDS: dict[str, Ask] = {
    "forward, no keys, positions": dense(array(2, 3, 4, 64), array(2, 0, 2, 64), q_positions=ints(3, 4), causal=True),
    "forward, no sequences, positions": dense(array(0, 3, 4, 64), array(0, 5, 2, 64), k_positions=STEPS),
    "pages, no sequences, positions": paged(array(0, 1, 4, 64), k_positions=STEPS),
    "pages, packed rows of no sequences": paged(array(0, 4, 64), cu_seqlens_q=ints(0)),
    "pages, no keys, positions": paged(array(2, 3, 4, 64), 0, 0, k_positions=ints(7, 0)),
    "pages, no columns": paged(array(2, 1, 4, 64), 0, 0, columns=0),
    "pages, none": paged(array(2, 1, 4, 64), 0, 0, pool=NONE),
    "pages, none, splits": paged(array(2, 1, 4, 64), 0, 0, pool=NONE, columns=0, num_splits=3),
    "cache, no sequences": cached(array(0, 1, 4, 64), array(0, 8, 2, 64)),
    "cache, no room": cached(array(2, 1, 4, 64), array(2, 0, 2, 64), 0, 0),
    "pointers, none in one array": pointers(array(0, 4, 64), array(0, 2, 8, 64)),
    "pointers, no keys, positions": pointers(array(2, 4, 64), array(2, 2, 8, 64), 0, 0, k_positions=ints(7, 0)),
    "pointers, no room": pointers(array(2, 4, 64), array(2, 2, 0, 64), 0, 0),
    "merge, no sequences": merged(0, 3, 4, 64),
    "merge, no rows": merged(2, 0, 4, 64),
    "merge, no heads": merged(2, 3, 0, 64),
    "merge, nothing": merged(2, 3, 4, 64),
}


@pytest.fixture(scope="module", params=["mock", pytest.param("emulated", marks=pytest.mark.sweep)])
def ctx(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    with ga.open_context(request.param) as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


def check_nothing(answer: Any) -> None:
    assert not answer.out.any()
    assert np.isneginf(answer.lse).all()
    assert answer.lse.size * 64 == answer.out.size


@pytest.mark.parametrize("name", SHARDS)
def test_an_empty_shard_answers_the_empty_partial(ctx: ga.GpuContext, name: str) -> None:
    check_nothing(SHARDS[name](ctx.flash_attn).result(120))


def test_an_empty_shard_changes_no_merge(ctx: ga.GpuContext) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 3, 4, 64), (2, 9, 2, 64)))
    whole = ctx.flash_attn.forward(q, k, k, return_lse=True).result(120)
    parts = [ctx.flash_attn.forward(q, one, one, return_lse=True).result(120) for one in (k[:, :0], k, k[:, 9:])]
    for result in (merge(parts), ctx.flash_attn.merge(parts).result(120)):
        np.testing.assert_array_equal(result.out, whole.out)
        np.testing.assert_allclose(result.lse, whole.lse, rtol=1e-6)


def test_a_sequence_without_rows_answers_the_empty_partial(ctx: ga.GpuContext) -> None:
    with ctx.kv_cache(num_blocks=2, page_size=8, kv_heads=2, head_dim=64, dtype="float16") as cache:
        seq = cache.create().result(60)
        for seqs, options in (
            ([], {}),
            ([seq], {}),
            ([seq], {"k_positions": ints(3)}),
            ([], {"k": array(0, 1, 2, 64), "v": array(0, 1, 2, 64)}),
        ):
            check_nothing(cache.attend(array(len(seqs), 1, 4, 64), seqs, return_lse=True, **options).result(120))
