"""fp8 caches, rotated rows and tree masks over several workers: attention equals that over one cache."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_sharded_cache import SLOPES, SPEC, bits, equal, near, rows, tree

import gpu_actors as ga
from gpu_actors import Rope
from gpu_actors.distributed import ContextPool, KeySplit, ShardedKvCache

DESCALES = {"k_descale": np.array([0.02, 0.7], np.float32), "v_descale": np.array([0.3, 0.011], np.float32)}
_ANGLES = np.random.default_rng(5).uniform(-3, 3, (64, 4)).astype(np.float32)
TABLES = {"rope_cos": np.cos(_ANGLES), "rope_sin": np.sin(_ANGLES)}

CASES: dict[str, dict[str, Any]] = {
    "rope": {"rope": Rope(dim=16)},
    "rope of some columns, in pairs": {"rope": Rope(dim=6, interleaved=True, base=100.0), "window_size": (9, 0)},
    "tables": {"rope": Rope(dim=8, table_rows=64), **TABLES, "sink_tokens": 3, "window_size": (6, -1)},
    "tree": {"tree": True},
    "tree and window": {"tree": True, "window_size": (11, 2), "sink_tokens": 4},
    "tree and slopes": {"tree": True, "alibi_slopes": SLOPES, "interleave": 1},
    "tree and sinks": {"tree": True, "sinks": rows(1, 4, seed=7)[0, :, 0].copy(), "softcap": 3.0},
    "rope and tree": {"rope": Rope(dim=16), "tree": True},
}
FP8: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope": {"rope": Rope(dim=16)},
    "window": {"window_size": (9, 0), "sink_tokens": 2, "softcap": 4.0},
    "slopes": {"alibi_slopes": SLOPES, "interleave": 1},
    "tree and rope": {"tree": True, "rope": Rope(dim=8, interleaved=True)},
    "chunks": {"attention_chunk": 12},
}


def sampled(names: Any, sample: set[str]) -> list[Any]:
    """All names, of which the default run tries a sample."""
    return [pytest.param(name, marks=() if name in sample else pytest.mark.sweep) for name in names]


@pytest.mark.parametrize("name", sampled(CASES, {"rope", "tables", "tree and window", "tree and slopes"}))
async def test_it_equals_one_cache(pool: ContextPool, whole: ga.GpuContext, name: str) -> None:
    await equal(pool, whole, CASES[name])


async def test_it_equals_one_cache_of_halves(pool: ContextPool, whole: ga.GpuContext) -> None:
    await equal(pool, whole, CASES["rope and tree"], {"dtype": "bfloat16"}, ml_dtypes.bfloat16, scale=2.0)


@pytest.mark.parametrize("dtype", sampled(["float8_e4m3fn", "float8_e5m2"], {"float8_e4m3fn"}))
@pytest.mark.parametrize("name", sampled(FP8, {"tree and rope", "slopes"}))
async def test_an_fp8_cache_equals_one_of_its_own(
    pool: ContextPool, whole: ga.GpuContext, name: str, dtype: str
) -> None:
    element = np.float16 if dtype.endswith("fn") else ml_dtypes.bfloat16
    await equal(pool, whole, FP8[name], {"dtype": dtype, **DESCALES}, element, scale=2.0)


@pytest.mark.parametrize(("dtype", "interleave"), [(ml_dtypes.float8_e4m3fn, 1), (ml_dtypes.float8_e5m2, 5)])
async def test_fp8_queries_have_factors_of_their_own(
    pool: ContextPool, whole: ga.GpuContext, interleave: int, dtype: Any
) -> None:
    spec = {**SPEC, "dtype": dtype.__name__, **DESCALES}
    factors = np.array([0.25, 3.0], np.float32)
    async with whole.kv_cache(**spec) as own, ShardedKvCache(pool, **spec, interleave=interleave) as cache:
        seq, mine = await cache.create(), await own.create()
        for count, q_descale, new_dtype in (
            (9, factors, dtype), (1, factors, np.float16), (6, None, np.float16), (4, factors, np.float16),
        ):  # fmt: skip
            q, k, v = (rows(count, heads, count + heads, kind) for heads, kind in ((4, dtype), *[(2, new_dtype)] * 2))
            options = {"window_size": (7, 0), "sink_tokens": 3, "return_lse": True}
            result = await cache.attend(q, seq, k=k, v=v, q_descale=q_descale, **options)
            theirs = None if q_descale is None else q_descale[None]
            near(result, await own.attend(q[None], mine, k=k[None], v=v[None], q_descale=theirs, **options), 2.0)
            result = await cache.attend(q[:1], seq, q_descale=q_descale, return_lse=True)
            near(result, await own.attend(q[None, :1], mine, q_descale=theirs, return_lse=True), 2.0)


async def test_rows_lie_in_the_cache_as_one_cache_has_them(pool: ContextPool, whole: ga.GpuContext) -> None:
    """The bits of rotated and quantised rows agree, also of rows that are fp8 already."""
    spec = {**SPEC, "dtype": "float8_e4m3fn", **DESCALES}
    k, v = rows(13, 2, 1, np.float16), rows(13, 2, 2, np.float16)
    fp8 = [rows(5, 2, seed, ml_dtypes.float8_e4m3fn) for seed in (3, 4)]
    async with whole.kv_cache(**spec) as own, ShardedKvCache(pool, **spec, interleave=3) as cache:
        seq, mine = await cache.create(), await own.create()
        await cache.append(seq, k, v, rope=Rope(dim=12))
        await own.append(mine, k, v, rope=Rope(dim=12))
        assert await cache.append(seq, *fp8) == await own.append(mine, *fp8) == 18
        expected = await own.export_pages(mine)
        for rank, (one, handle) in enumerate(zip(cache._caches, seq._handles, strict=True)):
            result = await one.export_pages(handle)
            mine_here = np.flatnonzero(cache.split.owners(0, 18) == rank)
            for side in ("k", "v"):
                flat = [getattr(pages, side).reshape(-1, 2, 16).view(np.uint8) for pages in (result, expected)]
                np.testing.assert_array_equal(flat[0][: len(mine_here)], flat[1][mine_here])


def test_a_tree_of_a_workers_own_keys() -> None:
    split = KeySplit(2, 2)
    sees = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], np.bool_)
    # Keys 3, 4 and 5: worker 1 has the first, worker 0 the others. Bits below those are of keys before the tree.
    assert split.tree(1, 3, sees).tolist() == [0b111, 0b111, 0b011]
    assert split.tree(0, 3, sees).tolist() == [0b001, 0b011, 0b111]
    assert KeySplit(1, 8).tree(0, 0, np.tri(64, dtype=np.bool_))[-1] == 2**64 - 1
    assert KeySplit(2, 64).tree(1, 0, np.eye(64, dtype=np.bool_)).tolist() == [2**64 - 1] * 64


def test_double_precision_that_a_merge_would_lose_is_refused(pool: ContextPool) -> None:
    with pytest.raises(ga.Unsupported, match="fp32: use a PooledKvCache") as refused:
        ShardedKvCache(pool, **{**SPEC, "dtype": "float64"})
    assert refused.value.field == "dtype"


async def test_what_is_refused(pool: ContextPool) -> None:
    fp8 = {**SPEC, "dtype": "float8_e5m2"}
    halves = rows(3, 2, dtype=np.float16)
    q, k = rows(3, 4), rows(3)
    rope = Rope(dim=16)
    e5m2, one = rows(3, 4, dtype=ml_dtypes.float8_e5m2), np.ones(2, np.float32)
    async with ShardedKvCache(pool, **SPEC) as cache, ShardedKvCache(pool, **fp8) as small:
        seq, other = await cache.create(), await small.create()
        empty = await cache.create()
        await cache.append(seq, k, k)
        seen = tree(3)
        for field, error, ask in (
            ("tree_mask", ga.Unsupported, cache.attend(q, seq, tree_mask=seen, window_size=(4, 0))),
            ("tree_mask", ga.Unsupported, cache.attend(q, seq, tree_mask=seen, alibi_slopes=SLOPES)),
            ("tree_mask", ga.Unsupported, cache.attend(q, seq, tree_mask=seen, attention_chunk=4)),
            ("tree_mask", ga.Unsupported, cache.attend(rows(65, 4), seq, tree_mask=tree(65))),
            ("tree_mask", ga.InvalidRequest, cache.attend(q, seq, k=k, v=k, tree_mask=seen[None])),
            ("tree_mask", ga.InvalidRequest, cache.attend(q, seq, k=k, v=k, tree_mask=bits(seen)[:2])),
            ("tree_mask", ga.InvalidRequest, cache.attend(q, seq, k=k, v=k, tree_mask=bits(seen).astype(np.int32))),
            ("rope", ga.InvalidRequest, cache.attend(q, seq, rope=rope)),
            ("positions", ga.InvalidRequest, cache.attend(q, seq, positions=np.zeros(3, np.int32))),
            ("positions", ga.InvalidRequest, cache.append(seq, k, k, positions=np.zeros(3, np.int32))),
            ("positions", ga.InvalidRequest, cache.append(seq, k, k, rope=rope, positions=np.zeros(2, np.int32))),
            ("rope", ga.InvalidRequest, cache.append(seq, k, k, rope=3)),  # type: ignore[arg-type]
            ("q_descale", ga.InvalidRequest, cache.attend(q, seq, q_descale=one)),
            ("q_descale", ga.InvalidRequest, cache.attend(q, empty, k=k, v=k, q_descale=one)),
            ("q_descale", ga.InvalidRequest, small.attend(e5m2, other, q_descale=one[None])),
            ("q_descale", ga.InvalidRequest, small.attend(e5m2, other, q_descale=one.astype(np.float16))),
            ("q", ga.InvalidRequest, small.attend(rows(3, 4, dtype=ml_dtypes.float8_e4m3fn), other)),
            ("q", ga.InvalidRequest, small.attend(e5m2, other, k=halves, v=halves, rope=rope)),
            ("q", ga.InvalidRequest, small.attend(e5m2[:, :3], other, k=e5m2[:, :2], v=e5m2[:, :2], q_descale=one)),
            ("q", ga.InvalidRequest, small.attend(e5m2[:, :0], other, q_descale=one)),
            ("rope.dim", ga.InvalidRequest, cache.append(seq, k, k, rope=Rope(dim=18))),
            ("rope_cos", ga.InvalidRequest, cache.append(seq, k, k, rope=Rope(dim=8, table_rows=64))),
            (
                "rope.table_rows",
                ga.InvalidRequest,
                cache.append(
                    seq, k, k, rope=Rope(dim=8, table_rows=4), **{name: one[:4] for name, one in TABLES.items()}
                ),
            ),
            ("k", ga.InvalidRequest, small.append(other, k, k)),
            ("q", ga.InvalidRequest, small.attend(q, other, k=halves, v=halves)),
            (
                "dtype",
                ga.Unsupported,
                small.append(other, *[halves.astype(ml_dtypes.float8_e5m2)] * 2, rope=rope),
            ),
        ):
            with pytest.raises(error) as refused:
                await ask
            assert refused.value.field == field, (field, str(refused.value))
        assert (seq.length, other.length) == (3, 0)
    with pytest.raises(ga.InvalidRequest):
        await ShardedKvCache(pool, **fp8, k_descale=np.zeros(2, np.float32)).__aenter__()
    with pytest.raises(ga.InvalidRequest, match="name of a dtype"):
        ShardedKvCache(pool, **{**SPEC, "dtype": np.float32})
    for dtype in ("int8", "float64"):
        with pytest.raises(ga.Unsupported):
            await ShardedKvCache(pool, **{**SPEC, "dtype": dtype}).__aenter__()
